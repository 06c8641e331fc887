"""`map_ids` by either implementation: splits into shards, orders of a batch, pins, and errors."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest
import torch

from recsys.kernels.hashed import build, twin
from recsys.kernels.hashed.index import IdIndex, IndexSettings, Mapped, geometry, map_ids
from tests.kernels.hashed.cases import (
    EXTREMES,
    SETTINGS,
    assert_same,
    assert_same_state,
    batch_of,
    ids_of_line,
    index_of,
    settings_of,
    state_of,
)


@pytest.fixture(params=["C", "torch"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(build, "library", lambda: None)
    elif build.library() is None:
        pytest.skip("needs a C compiler")


def map_one(index: IdIndex, ids: list[int], step: int, pin: int, train: bool = True) -> Mapped:
    return map_ids([index], torch.tensor(ids, dtype=torch.int64), [len(ids)], step, pin, train)


# -- equal results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_equal_the_whole_table(name: str, num_shards: int) -> None:
    draw, size = random.Random(3), 4 * 2 * 64 // num_shards
    whole = index_of(SETTINGS[name], lines=2, num_regions=4)
    per_shard = 4 // num_shards
    shards = [
        IdIndex.empty(SETTINGS[name], 512, 4, first, first + per_shard, 7)
        for first in range(0, 4, per_shard)
    ]
    for step in range(1, 20):
        ids = torch.tensor(batch_of(draw, 500, 1500), dtype=torch.int64)
        rows = map_ids([whole], ids, [ids.numel()], step, step, step % 5 != 0).rows
        owners = twin.locate(whole, ids).regions // per_shard
        order = owners.argsort(stable=True)
        sizes = owners.bincount(minlength=num_shards).tolist()
        found = map_ids(shards, ids[order], sizes, step, step, step % 5 != 0).rows
        found += torch.where(found >= 0, owners[order] * size, 0)
        assert torch.equal(rows[order], found)
    for array, value in state_of(whole).items():
        assert torch.equal(value, torch.cat([state_of(shard)[array] for shard in shards])), array


@pytest.mark.parametrize("name", SETTINGS)
def test_order_and_repeats_change_nothing(name: str) -> None:
    draw = random.Random(4)
    index, other = index_of(SETTINGS[name]), index_of(SETTINGS[name])
    for step in range(1, 20):
        ids = batch_of(draw, 300, 500) + ids_of_line(20, 7)
        found = map_one(index, ids, step, step)
        more = ids + draw.choices(ids, k=50)
        draw.shuffle(more)
        again = map_one(other, more, step, step)
        assert dict(zip(ids, found.rows.tolist(), strict=True)) == dict(
            zip(more, again.rows.tolist(), strict=True)
        )
        assert_same(found[1:4], again[1:4])
        assert torch.equal(found.counts[:, 1:4], again.counts[:, 1:4])
    assert_same_state(index, other)


def test_tables_of_a_group_equal_each_alone() -> None:
    draw, names = random.Random(5), [*SETTINGS]
    together = [index_of(SETTINGS[name], seed=i) for i, name in enumerate(names)]
    alone = [index_of(SETTINGS[name], seed=i) for i, name in enumerate(names)]
    for step in range(1, 10):
        parts = [batch_of(draw, 200, 400) for _ in names]
        ids, sizes = torch.tensor([*chain(*parts)]), [len(part) for part in parts]
        found = map_ids(together, ids, sizes, step, step, True)
        each = [map_one(index, part, step, step) for index, part in zip(alone, parts, strict=True)]
        assert torch.equal(found.rows, torch.cat([one.rows for one in each]))
        assert torch.equal(found.new_rows, torch.cat([one.new_rows for one in each]))
        assert torch.equal(found.new_ids, torch.cat([one.new_ids for one in each]))
        assert found.new_sizes == [one.new_rows.numel() for one in each]
        assert torch.equal(found.counts, torch.cat([one.counts for one in each]))


# -- rules -----------------------------------------------------------------------------------------


def test_evaluation_writes_nothing() -> None:
    for name, settings in SETTINGS.items():
        index = index_of(settings)
        map_one(index, list(range(50)), 1, 1)
        before = {key: value.clone() for key, value in state_of(index).items()}
        found = map_one(index, list(range(25, 100)), 3, 3, train=False)
        assert all(torch.equal(value, before[key]) for key, value in state_of(index).items()), name
        assert found.new_sizes == [0]
        assert found.counts[0, 1:4].sum() == 0


def test_unknown_ids_read_the_shared_row_or_none() -> None:
    index = IdIndex.empty(settings_of(), 4 * 64, 4, 2, 4, seed=0)
    ids = [id_ for id_ in range(100) if twin.locate(index, torch.tensor(id_)).regions >= 2]
    rows = map_one(index, ids, 1, 1, train=False).rows
    assert set(rows.tolist()) == {0, 64}
    map_one(index, ids, 1, 1)
    assert index.last_used[[0, 64]].tolist() == [0, 0]
    apart = index_of(settings_of(is_shared=False))
    assert map_one(apart, EXTREMES, 1, 1, train=False).rows.tolist() == [-1] * 5


def test_pinned_rows_keep_their_ids() -> None:
    index = index_of(SETTINGS["lru"], num_regions=1)
    crowd = ids_of_line(400, 7)
    first = map_one(index, crowd[:63], 1, 1)
    assert first.counts.tolist() == [[0, 63, 0, 0, 0]]
    refused = map_one(index, crowd[100:200], 2, 1)
    assert refused.counts.tolist() == [[0, 0, 0, 100, 100]]
    assert torch.equal(map_one(index, crowd[:63], 3, 3, train=False).rows, first.rows)
    evicted = map_one(index, crowd[100:200], 3, 2)
    assert evicted.counts[0, 2] == evicted.counts[0, 1] == 63


def test_a_pinned_row_does_not_expire() -> None:
    index = index_of(settings_of(ttl=1))
    row = map_one(index, [5], 1, 1).rows
    assert map_one(index, [5], 9, 1, train=False).counts[0, 0] == 1
    assert map_one(index, [5], 9, 9, train=False).counts[0, 0] == 0
    again = map_one(index, [5], 9, 9)
    assert again.new_rows.tolist() == row.tolist()
    assert again.counts.tolist() == [[0, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "kept"),
    [("lru", 1), ("lfu", 8), ("lfu without decay", 8), ("distance", 8), ("distance, 4", 1)],
)
def test_the_row_of_the_lowest_score_is_evicted(name: str, kept: int) -> None:
    """In a home bucket, 8 ids are used in 8 steps, 8 others once and later; 7 ids are new."""
    index = index_of(SETTINGS[name], num_regions=1)
    crowd = ids_of_line(800, 7)
    homes = twin.locate(index, torch.tensor(crowd)).homes.tolist()
    crowd = [id_ for id_, home in zip(crowd, homes, strict=True) if home == 1]
    often, late, others, new = crowd[:8], crowd[8:16], crowd[16:63], crowd[63:70]
    for step in range(1, 9):
        map_one(index, often, step, step)
    for ids in (late, others):
        map_one(index, ids, 9, 9)
    assert map_one(index, new, 10, 10).counts.tolist() == [[0, 7, 7, 0, 0]]
    assert map_one(index, often, 10, 10, train=False).counts[0, 0] == kept


def test_the_share_of_admitted_ids_is_the_probability() -> None:
    settings = settings_of(admission="probability", admission_value=(1 << 32) // 4)
    index = IdIndex.empty(settings, *geometry(40_000)[:1], 64, 0, 64, seed=1)
    ids = torch.arange(10_000)
    first = map_ids([index], ids, [10_000], 1, 1, True)
    assert 0.23 < first.counts[0, 1] / 10_000 < 0.27
    second = map_ids([index], ids, [10_000], 2, 2, True)
    assert 0.23 < second.counts[0, 1] / second.counts[0, 4].add(second.counts[0, 1]) < 0.27


def test_a_full_table_keeps_most_ids() -> None:
    """At 80% load, 99.7% of ids have a row without any eviction."""
    rows, num_regions = geometry(100_000)
    index = IdIndex.empty(SETTINGS["none"], rows, num_regions, 0, num_regions, seed=9)
    ids = torch.arange(rows * 8 // 10) * 3
    counts = map_ids([index], ids, [ids.numel()], 1, 1, True).counts[0]
    assert counts[1] >= 0.997 * ids.numel()


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_embeddings", "max_regions", "expected"),
    [
        (1, 64, (64, 1)),
        (64, 64, (64, 1)),
        (65, 64, (128, 2)),
        (4096, 64, (4096, 64)),
        (100_000, 64, (102_400, 64)),
        (100_000, 1, (100_032, 1)),
        (10**9, 16384, (1_000_341_504, 16384)),
    ],
)
def test_geometry(num_embeddings: int, max_regions: int, expected: tuple[int, int]) -> None:
    assert geometry(num_embeddings, max_regions) == expected


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"eviction": "random"}, "eviction must be .*none, lru"),
        ({"admission": "never"}, "admission must be one of always"),
        ({"exponent": 5}, "exponent must be at most 4"),
        ({"ttl": -1}, "ttl must not be negative"),
        ({"half_life": -1}, "half_life must not be negative"),
        ({"admission": "at_least", "admission_value": 1}, "must be at least 2"),
        ({"admission": "at_least", "admission_value": 256}, "must be at most 255"),
        ({"admission_value": 3}, "must be at most 0"),
    ],
)
def test_settings_are_validated(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings_of(**changes)


def test_sizes_of_tables_are_validated() -> None:
    settings: IndexSettings = settings_of()
    with pytest.raises(ValueError, match=r"rows must be .*of 64"):
        IdIndex.empty(settings, 100, 1, 0, 1, seed=0)
    with pytest.raises(ValueError, match=r"^num_regions must .*of two; .*3"):
        IdIndex.empty(settings, 192, 3, 0, 3, seed=0)
    with pytest.raises(ValueError, match="last_region must be at most 2"):
        IdIndex.empty(settings, 128, 2, 0, 3, seed=0)
    with pytest.raises(ValueError, match=r"^max_regions must .*of two; .*3"):
        geometry(100, 3)
    empty = IdIndex.empty(settings, 128, 2, 1, 1, seed=0)
    assert map_one(empty, [], 1, 1).new_sizes == [0]


@pytest.mark.parametrize(
    ("ids", "sizes", "step", "pin", "text"),
    [
        (torch.arange(3), [2], 1, 1, "of 1 tables and 3 ids"),
        (torch.arange(3), [1, 2], 1, 1, "sizes must have one number"),
        (torch.arange(3).int(), [3], 1, 1, "ids must be int64"),
        (torch.arange(3), [3], 0, 0, "step must be from 1"),
        (torch.arange(3), [3], 1 << 31, 1, "step must be from 1"),
        (torch.arange(3), [3], 1, 2, "pin at most step"),
    ],
)
def test_batches_are_validated(
    ids: torch.Tensor, sizes: list[int], step: int, pin: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        map_ids([index_of(settings_of())], ids, sizes, step, pin, True)


def test_an_id_of_another_shard_is_named_and_changes_nothing() -> None:
    shards = [IdIndex.empty(settings_of(), 256, 4, 2 * i, 2 * i + 2, seed=0) for i in range(2)]
    regions = twin.locate(shards[0], torch.arange(100)).regions
    low, high = (regions < 2).nonzero()[:, 0], (regions >= 2).nonzero()[:, 0]
    ids = torch.cat([low[:9], high[:3], low[9:10], high[3:5]])
    text = f"2 to 3.*{int(low[9])} of region {int(regions[low[9]])}"
    with pytest.raises(ValueError, match=text):
        map_ids(shards, ids, [9, 6], 1, 1, True)
    assert not any(shard.last_used.any() for shard in shards)


def test_ids_that_are_not_contiguous() -> None:
    index, ids = index_of(settings_of()), torch.arange(40).view(20, 2)[:, 1]
    rows = map_ids([index], ids, [20], 1, 1, True).rows
    assert index.ids[rows].tolist() == ids.tolist()
