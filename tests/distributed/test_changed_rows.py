"""Every row that changes is taken once by each consumer, under any plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.changed_rows import ChangedRows
from recsys.optim import Adam, RowWiseAdagrad
from tests.distributed.cases import Case, concat_batches, shard, train, whole
from tests.distributed.test_hashed_ids import HashedCase, state_of
from tests.ranks import RankPool


def values_of(model: Any) -> dict[str, dict[str, Tensor]]:
    """Copies of all values per row, by the name of the table's weight."""
    state = {
        n: v for n, v in state_of(model).items() if n.endswith((".weight", "ids", "used", "seen"))
    }
    if hasattr(model, "fused_optimizer"):
        for name, states in model.fused_optimizer.state_dict()["state"].items():
            state |= {f"{name}/{key}": whole(value) for key, value in states.items()}
    tables = [name for name in state if name.endswith(".weight")]
    return {
        name: {
            key: value
            for key, value in state.items()
            if key.startswith(name.removesuffix("weight")) and value.dim()
        }
        for name in tables
    }


def changed_between(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[int]:
    found: set[int] = set()
    for name, value in after.items():
        differs = (value != before[name]).view(len(value), -1).any(1)
        found |= set(differs.nonzero().flatten().tolist())
    return found


def gathered(taken: dict[str, Tensor]) -> dict[str, set[int]]:
    """The rows of all ranks by table."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: rows.tolist() for name, rows in taken.items()})
    found: dict[str, set[int]] = {}
    for part in parts:
        for name, rows in part.items():
            assert sorted(set(rows)) == rows
            found.setdefault(name, set()).update(rows)
    return found


def used_rows(case: Case, steps: range) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for step in steps:
        batch = concat_batches(case.batches(step)).to_dict()
        for config in case.configs():
            rows = found.setdefault(f"ebc.{_tables(case)}.{config.name}.weight", set())
            for feature in config.feature_names:
                rows |= set(batch[feature].values().tolist())
    return found


def _tables(case: Case) -> str:
    return "embedding_bags" if case.pooled else "embeddings"


def _mark(case: Case, is_exact: bool, moves: bool) -> None:
    rank = dist.get_rank()
    model = shard(case)
    seldom, often = ChangedRows(model), ChangedRows(model)
    start = values_of(model)
    total: dict[str, set[int]] = {name: set() for name in start}
    for first in range(0, 9, 3):
        before = values_of(model)
        train(case, model, range(first, first + 3), rank=rank, with_dense=False)
        taken, after = gathered(often.take()), values_of(model)
        assert taken.keys() == before.keys()
        used = used_rows(case, range(first, first + 3))
        for name, rows in taken.items():
            assert changed_between(before[name], after[name]) <= rows
            if is_exact:
                assert rows == used[name]
            total[name] |= rows
        if moves:
            plan = case.plan(first + 1)
            model.reshard(plan)
            whole_tables = {n for n, r in gathered(often.take()).items() if r}
            assert whole_tables <= total.keys()
    end = values_of(model)
    for name, rows in gathered(seldom.take()).items():
        assert changed_between(start[name], end[name]) <= rows
        assert moves or rows == total[name]
    assert not any(gathered(often.take()).values())
    often.mark_all()
    for name, rows in gathered(often.take()).items():
        assert len(rows) == len(end[name][name])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad, Adam])
@pytest.mark.parametrize("seed", range(6))
def test_used_rows_of_static_tables(ranks: RankPool, seed: int, optimizer: Any) -> None:
    case = Case(seed, 2, optimizer=optimizer, pooled=seed % 2 == 0, variable_batch=seed == 4)
    # of replicated tables, rows are marked whose summed gradient is not 0
    types = case.types[:3]
    ranks(2, _mark, replace(case, types=types), True, False)


def test_replicated_tables(ranks: RankPool) -> None:
    case = Case(1, 2, optimizer=Adam)
    ranks(2, _mark, replace(case, types=case.types[3:]), False, False)


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_hashed_tables(ranks: RankPool, seed: int) -> None:
    case = HashedCase(seed, 2, optimizer=RowWiseAdagrad, pooled=seed % 2 == 0)
    ranks(2, _mark, case, False, False)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_tables_that_move(ranks: RankPool, seed: int) -> None:
    ranks(3, _mark, HashedCase(seed, 3, optimizer=RowWiseAdagrad), False, True)
    ranks(3, _mark, Case(seed, 3, optimizer=Adam), False, True)


def test_unsharded_tables() -> None:
    case = HashedCase(3, 1, optimizer=RowWiseAdagrad)
    model = case.model()
    changed = ChangedRows(model)
    for first in range(0, 9, 3):
        before = values_of(model)
        train(case, model, range(first, first + 3), rank=None, with_dense=False)
        after, taken = values_of(model), changed.take()
        for name, rows in taken.items():
            assert changed_between(before[name], after[name]) <= set(rows.tolist())
            assert len(rows) < len(after[name][name])
    model.load_state_dict(model.state_dict())
    for name, rows in changed.take().items():
        assert len(rows) == len(after[name][name])
    changed.close()
    train(case, model, range(2), rank=None, with_dense=False)


def test_a_forward_pass_without_backward_changes_hashed_rows() -> None:
    case = HashedCase(0, 1, optimizer=RowWiseAdagrad)
    model = case.model()
    changed, before = ChangedRows(model), values_of(model)
    model(case.batches(1)[0])
    after, taken = values_of(model), changed.take()
    assert any(changed_between(before[name], after[name]) for name in after)
    for name, rows in taken.items():
        assert changed_between(before[name], after[name]) <= set(rows.tolist())
    model.eval()
    model(case.batches(1)[0])
    for rows in changed.take().values():  # zero rows of unknown ids may have been reset
        assert not (rows % 64).any()


def test_a_torch_optimizer_changes_all_rows() -> None:
    case = Case(0, 1, optimizer=None)
    model = case.model()
    changed = ChangedRows(model)
    optimizer = torch.optim.Adam(model.parameters())
    train(case, model, range(3), rank=None, with_dense=False)
    optimizer.step()
    for name, rows in changed.take().items():
        assert len(rows) == len(model.state_dict()[name])


def test_new_lookups_count_as_changed() -> None:
    case = Case(0, 1)
    model = case.model()
    changed = ChangedRows(model)
    model.double()
    for name, rows in changed.take().items():
        assert len(rows) == len(model.state_dict()[name])
    assert not any(map(len, changed.take().values()))
