"""The twin against plain Python (`oracle.py`), and its treatment of ids of one line."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from recsys.kernels.hashed import twin
from recsys.kernels.hashed.index import IdIndex, geometry, map_ids
from recsys.modules.hashed_ids import HashedIds
from tests.kernels.hashed.cases import (
    EXTREMES,
    SETTINGS,
    batch_of,
    ids_of_line,
    index_of,
    settings_of,
)
from tests.kernels.hashed.oracle import assert_equal_state, id_of_hash, mix, oracle_of

SEEDS = [0, 7, -1, 2**64 - 3]


def check_batch(index: Any, oracle: Any, ids: list[int], step: int, pin: int, train: bool) -> None:
    before = {row: entry.id for row, entry in oracle.entries.items()}
    found = twin.map_tables(
        [index], torch.tensor(ids, dtype=torch.int64), [len(ids)], step, pin, train, True
    )
    rows, new_rows, new_ids, new_sizes, counts, old = found
    expected_rows, new, expected_counts = oracle.map(ids, step, pin, train)
    assert rows.tolist() == expected_rows
    assert list(zip(new_rows.tolist(), new_ids.tolist(), strict=True)) == new
    assert new_sizes == [len(new)]
    assert counts.tolist() == [expected_counts]
    had = [(before[row], 1) if before.get(row, id_) != id_ else (0, 0) for row, id_ in new]
    assert old.tolist() == [list(pair) for pair in had]


class Machine(RuleBasedStateMachine):
    """Batches of training and evaluation on an index and on the oracle."""

    @initialize(
        name=st.sampled_from(sorted(SETTINGS)),
        lines=st.integers(1, 3),
        bits=st.integers(0, 2),
        seed=st.sampled_from(SEEDS),
    )
    def start(self, name: str, lines: int, bits: int, seed: int) -> None:
        self.index = index_of(SETTINGS[name], lines, 1 << bits, seed)
        self.oracle = oracle_of(self.index)
        self.step = 1
        self.crowd = ids_of_line(200, seed)

    @rule(
        seed=st.integers(0, 2**20),
        size=st.integers(0, 150),
        universe=st.sampled_from([5, 100, 2000]),
        depth=st.integers(0, 4),
        pause=st.sampled_from([0, 1, 1, 1, 6]),
        crowded=st.booleans(),
        train=st.sampled_from([True, True, True, False]),
    )
    def batch(
        self,
        seed: int,
        size: int,
        universe: int,
        depth: int,
        pause: int,
        crowded: bool,
        train: bool,
    ) -> None:
        draw = random.Random(seed)
        ids = batch_of(draw, size, universe)
        if crowded:
            ids += draw.choices(self.crowd, k=size)
        self.step += pause
        check_batch(self.index, self.oracle, ids, self.step, self.step - depth, train)

    @rule(ids=st.lists(st.sampled_from(EXTREMES)))
    def extremes(self, ids: list[int]) -> None:
        check_batch(self.index, self.oracle, ids, self.step, self.step, True)

    @rule()
    def rebuild(self) -> None:
        self.index.digests.fill_(3)
        self.index.rebuild()

    @invariant()
    def states_are_equal(self) -> None:
        if hasattr(self, "index"):
            assert_equal_state(self.index, self.oracle)


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis_settings(max_examples=40, stateful_step_count=15, deadline=None)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_long_stream_equals_plain_python(name: str) -> None:
    draw = random.Random(1)
    index = index_of(SETTINGS[name], lines=2)
    oracle = oracle_of(index)
    for step in range(1, 40):
        check_batch(index, oracle, batch_of(draw, 200, 600), step, step - step % 3, step % 7 != 0)
    assert_equal_state(index, oracle)
    assert oracle.entries


def test_the_hash_is_the_finalizer_of_splitmix64() -> None:
    values = [*EXTREMES, 12345]
    found = twin.mix64(torch.tensor(values)).tolist()
    assert [value % 2**64 for value in found] == [mix(value % 2**64) for value in values]


def test_bits_of_the_hash_do_not_overlap() -> None:
    """With the most regions: each field has its own bits, and the digest has the lowest 16."""
    index = index_of(settings_of(), lines=1, num_regions=1 << 14)
    places = twin.locate(index, torch.tensor([id_of_hash(2**64 - 1 - (3 << 16), 7)]))
    assert [int(value) for value in places[1:]] == [2**14 - 1, 2**14 - 1, 0, 255]


@pytest.mark.parametrize("name", ["lru", "at least 2", "none", "ttl"])
def test_ids_of_one_line_only_damage_this_line(name: str) -> None:
    index = index_of(SETTINGS[name], lines=4, num_regions=4)
    others = torch.arange(500) * 31
    lines = twin.locate(index, others).lines
    others = others[lines > 0]
    for step in (1, 2):
        twin.map_tables([index], others, [others.numel()], step, step, True)
    before = twin.map_tables([index], others, [others.numel()], 2, 2, False)[0]
    crowd = torch.tensor(ids_of_line(5_000, 7))
    rows, new_rows, _, _, counts, _ = twin.map_tables([index], crowd, [5_000], 3, 3, True)
    assert twin.locate(index, crowd).lines.max() == 0
    assert new_rows.numel() <= 63
    assert rows.max() < 64
    assert counts[0, 4] >= 5_000 - 63
    assert torch.equal(before, twin.map_tables([index], others, [others.numel()], 3, 3, False)[0])


def test_counts_age_so_that_rare_ids_are_not_admitted() -> None:
    """Few ids that occur once are admitted, even after many other ids."""
    index = index_of(settings_of(admission="at_least", admission_value=2), lines=1)
    admitted = 0
    for step in range(1, 101):
        ids = torch.arange(20) + 1000 * step
        admitted += twin.map_tables([index], ids, [20], step, step, True)[3][0]
    assert admitted < 0.15 * 2000


def test_rebuild_checks_rows_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary arrays do not grow with the index."""
    rows, regions = geometry(3 << 20)
    settings = HashedIds().settings()
    index = IdIndex.empty(settings, rows, regions, 0, regions, seed=1)
    assert index.rebuild()
    ids = torch.arange(1000)
    found = map_ids([index], ids, [1000], 1, 1, is_training=True).rows
    digests, locate, sizes = index.digests.clone(), twin.locate, list[int]()

    def count(index: IdIndex, ids: torch.Tensor) -> Any:
        sizes.append(ids.numel())
        return locate(index, ids)

    monkeypatch.setattr(twin, "locate", count)
    index.digests.zero_()
    assert index.rebuild()
    assert max(sizes) == 1 << 20
    assert torch.equal(index.digests, digests)
    for row in (found.min(), found.max()):  # an id of another line
        one, index.ids[row] = index.ids[row].clone(), ids[found != row][500]
        assert not index.rebuild()
        index.ids[row] = one
    assert index.rebuild()
