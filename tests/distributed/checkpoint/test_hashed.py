"""A table with hashed ids of another size takes the best ids, with all that belongs to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recsys.distributed.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_checkpoint,
    read_hashed_table,
    save_checkpoint,
)
from recsys.modules.hashed_ids import LFU, LRU, AtLeast, DistanceLFU, HashedIds
from recsys.optim import Adam, RowWiseAdagrad
from tests.distributed.cases import assert_same, shard, train
from tests.distributed.checkpoint.test_delta import always_deltas, state_of
from tests.distributed.test_hashed_ids import HashedCase
from tests.ranks import RankPool

EVICTIONS = (LRU(), LFU(3), DistanceLFU(2), None)


@dataclass(frozen=True)
class Sized(HashedCase):
    """Tables of one size under each eviction rule."""

    sizes = (24, 48)
    num_rows: int = 512
    num_regions: int = 64
    hash_seed: int = 0
    num_ids: int = 900

    def configs(self) -> list[Any]:
        configs = super().configs()
        made = []
        for number, config in enumerate([*configs[:-1]] * 4):
            rules = HashedIds(
                eviction=EVICTIONS[number % 4],
                admission=AtLeast(2) if number == 1 else None,
                num_regions=self.num_regions,
                seed=self.hash_seed,
                unknown="shared" if number % 2 else "zero",
            )
            made.append(replace(config, name=f"h{number}", num_embeddings=self.num_rows, ids=rules))
        return [*made[:4], configs[-1]]


Row = tuple[list[float], dict[str, list[float]], int, int]


def rows_of(values: dict[str, Any], table: str) -> dict[int, Row]:
    """Weights, optimizer states, last use and count of each id."""
    prefix = f"ebc.embedding_bags.{table}."
    last_used, ids = values[f"{prefix}index.last_used"], values[f"{prefix}index.ids"]
    seen = values.get(f"{prefix}index.seen", torch.zeros(len(ids), dtype=torch.int32))
    states = {
        name: value
        for name, value in values.items()
        if f"{prefix}weight" in name and name != f"{prefix}weight" and value.dim()
    }
    return {
        int(ids[row]): (
            values[f"{prefix}weight"][row].tolist(),
            {name.split(".")[-1]: value[row].tolist() for name, value in states.items()},
            int(last_used[row]),
            int(seen[row]),
        )
        for row in (last_used > 0).nonzero().flatten().tolist()
    }


def _score(eviction: Any, step: int, last_used: int, seen: int) -> float:
    if isinstance(eviction, LFU):
        return (seen >> min((step - last_used) // 3, 31)) * 2**31 + last_used
    if isinstance(eviction, DistanceLFU):
        return seen / (step - last_used) ** 2
    return last_used


def _save(case: Sized, path: Path, is_delta: bool) -> None:
    model = shard(case)
    with always_deltas():
        for step in range(30):
            train(case, model, range(step, step + 1), rank=dist.get_rank(), with_dense=False)
            if is_delta and step > 24:
                save_checkpoint(path, model, model.fused_optimizer, delta=True, keep=None)
    if not is_delta:
        save_checkpoint(path, model, model.fused_optimizer)


def _load(case: Sized, path: Path, resized: Path) -> Any:
    model = shard(case)
    names = [config.name for config in case.configs() if config.ids is not None]
    load_checkpoint(path, model, model.fused_optimizer, resize=names)
    save_checkpoint(resized, model, model.fused_optimizer)
    found = state_of(model)
    train(case, model, range(30, 34), rank=dist.get_rank(), with_dense=False)
    return found


@pytest.mark.parametrize(
    ("change", "optimizer"),
    [
        ({"num_rows": 256}, RowWiseAdagrad),
        ({"num_rows": 2048}, Adam),
        ({"hash_seed": 9}, RowWiseAdagrad),
        ({"num_regions": 4}, Adam),
        ({"num_rows": 1024, "num_regions": 16, "hash_seed": 1}, RowWiseAdagrad),
    ],
)
def test_the_best_ids_stay(
    ranks: RankPool, tmp_path: Path, change: dict[str, int], optimizer: Any
) -> None:
    case = Sized(3, 2, optimizer=optimizer)
    ranks(2, _save, case, tmp_path / "c", change.get("num_rows") == 256)
    saved = read_checkpoint(tmp_path / "c", optimizer=True)
    states = []
    for world_size in (1, 2, 4):
        other = replace(case, world_size=world_size, **change)
        states += ranks(world_size, _load, other, tmp_path / "c", tmp_path / str(world_size))
    for state in states[1:]:
        assert_same(state, states[0], rtol=0, atol=0)
    loaded = read_checkpoint(tmp_path / "1", optimizer=True)
    for config in other.configs()[:4]:
        before, after = (rows_of(values, config.name) for values in (saved, loaded))
        assert len(before) > 200
        step = int(saved[f"ebc.embedding_bags.{config.name}.index.steps"]) + 1
        assert step > 20
        expected: set[int] = set()
        lines: dict[int, list[tuple[float, int]]] = {}
        index = other.model().ebc.embedding_bags[config.name].index.index
        for id_, (_, _, last_used, seen) in before.items():
            score = _score(config.ids.eviction, step, last_used, seen)
            lines.setdefault(line_of(id_, index), []).append((-score, id_))
        for line, members in lines.items():
            room = 64 - (line % index.lines == 0)
            expected |= {id_ for _, id_ in sorted(members)[:room]}
        assert after.keys() == expected
        assert len(expected) < len(before) or config.num_embeddings > 256
        assert all(after[id_] == before[id_] for id_ in expected)


def line_of(id_: int, index: Any) -> int:
    """The line of an id, in whole numbers of Python."""
    mask = 2**64 - 1
    mixed = (id_ ^ index.seed) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & mask
    bits = index.num_regions.bit_length() - 1
    region = mixed >> (64 - bits) if bits else 0
    return region * index.lines + ((((mixed << bits) & mask) >> 32) * index.lines >> 32)


def test_rows_of_unknown_ids_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    """With as many regions or more or fewer, each takes the shared row of its hashes."""
    case = Sized(3, 1, num_rows=256, optimizer=RowWiseAdagrad)
    ranks(1, _save, case, tmp_path / "c", False)
    name = "ebc.embedding_bags.h1.weight"
    saved = read_checkpoint(tmp_path / "c")[name]
    for rows, step in ((4096, 1024), (128, 64)):
        ranks(1, _load, replace(case, num_rows=rows), tmp_path / "c", tmp_path / str(rows))
        loaded = read_checkpoint(tmp_path / str(rows))[name]
        regions = np.arange(0, rows, 64) // (rows // 4) if rows > 256 else np.arange(2) * 2
        assert step
        assert torch.equal(loaded[::64], saved[::64][regions])


def test_ids_are_read_without_a_model(ranks: RankPool, tmp_path: Path) -> None:
    case = Sized(3, 2, optimizer=RowWiseAdagrad)
    ranks(2, _save, case, tmp_path, False)
    saved = read_checkpoint(tmp_path)
    for table in ("h0", "h1", "h2"):
        ids, values = read_hashed_table(tmp_path, table)
        assert ids.tolist() == sorted(ids.tolist())
        expected = rows_of(saved, table)
        found = dict(zip(ids.tolist(), values.tolist(), strict=True))
        assert found == {id_: row[0] for id_, row in expected.items()}
    with pytest.raises(CheckpointError, match=r"table must be .* of 'rows'"):
        read_hashed_table(tmp_path, "rows")
    with pytest.raises(CheckpointError, match=r"table must be .* of 'embedding_bags'"):
        read_hashed_table(tmp_path, "embedding_bags")


def _refuse(case: Sized, path: Path) -> list[str]:
    texts = []
    for change in ({"hash_seed": 4}, {"num_rows": 1024}):
        model = shard(replace(case, **change))  # type: ignore[arg-type]
        with pytest.raises((CheckpointError, RuntimeError, ValueError)) as raised:
            load_checkpoint(path, model, model.fused_optimizer)
        texts.append(str(raised.value))
    return texts


def test_without_resize_other_tables_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    case = Sized(3, 2, optimizer=RowWiseAdagrad)
    ranks(2, _save, case, tmp_path, False)
    seeds, sizes = ranks(2, _refuse, case, tmp_path)[0]
    assert "pass resize=['h" in seeds
    assert "pass resize=['h" in sizes
