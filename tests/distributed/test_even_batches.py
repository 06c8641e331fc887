"""Ranks with different numbers of batches end an epoch together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.even_batches import EvenBatches, UnevenPolicy, empty_batch
from recsys.distributed.types import ShardingType
from recsys.optim import RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import (
    FEATURES,
    Case,
    concat_batches,
    counted_collectives,
    shard,
    whole_state,
)
from tests.ranks import RankPool

NUM_BATCHES = (2, 4, 1)


def _batches(case: Case, rank: int) -> list[KeyedJaggedTensor]:
    return [case.batches(step)[rank] for step in range(NUM_BATCHES[rank])]


def _loss(pooled: Tensor) -> Tensor:
    return (pooled * pooled.detach().sin()).sum()


def _run(case: Case, policy: str) -> tuple[list[bool], int, list[Tensor]]:
    """Which steps were made up; collectives of the epoch; the tables after it."""
    rank = dist.get_rank()
    model = shard(case)
    fillers = []
    epoch = EvenBatches(iter(_batches(case, rank)), model, policy)
    with counted_collectives() as calls:
        for batch in epoch:
            pooled, _ = model(batch)
            _loss(pooled).backward()
            fillers.append(epoch.is_filler)
    assert model.module.get_submodule("ebc").input_stage.last_batches is None
    state = whole_state(model)
    tables = [state[name] for name in sorted(state) if name.startswith("ebc")]
    return fillers, calls.total(), tables


def _steps(policy: str) -> int:
    return {"drop": min(NUM_BATCHES), "pad": max(NUM_BATCHES), "join": max(NUM_BATCHES)}[policy]


@pytest.mark.parametrize("policy", [p.value for p in UnevenPolicy])
@pytest.mark.parametrize("variable_batch", [False, True])
def test_all_ranks_take_the_same_steps(ranks: RankPool, policy: str, variable_batch: bool) -> None:
    kinds = tuple(ShardingType)[:4]
    case = Case(4, 3, types=kinds, optimizer=RowWiseAdagrad, variable_batch=variable_batch)
    results = ranks(3, _run, case, policy)
    steps = _steps(policy)
    for (fillers, *_), count in zip(results, NUM_BATCHES, strict=True):
        assert fillers == [step >= count for step in range(steps)]
    (calls,) = {calls for _, calls, _ in results}
    assert calls % steps == 0, "a collective beside those of the steps"
    expected = _expected(case, policy)
    for _, _, tables in results:
        torch.testing.assert_close(tables, expected, rtol=1e-5, atol=1e-5)


def _expected(case: Case, policy: str) -> list[Tensor]:
    """The tables of an unsharded model that saw the same samples."""
    model = case.model()
    for step in range(_steps(policy)):
        batches = []
        for rank, count in enumerate(NUM_BATCHES):
            batch = _batches(case, rank)[min(step, count - 1)]
            is_filler = step >= count
            batches.append(empty_batch(batch) if is_filler and policy == "join" else batch)
        pooled, _ = model(concat_batches(batches))
        _loss(pooled).div(3).backward()
    state = model.state_dict()
    return [state[name] for name in sorted(state) if name.startswith("ebc")]


def test_what_is_wrong_is_said() -> None:
    model = shard(Case(0, 1))
    batch = Case(0, 1).batches(1)[0]
    with pytest.raises(ValueError, match="policy must be one of drop, pad, join; received 'stop'"):
        EvenBatches([batch], model, "stop")
    with pytest.raises(ValueError, match=r"received a Linear without\. Wrap the model"):
        EvenBatches([batch], nn.Linear(1, 1))
    with pytest.raises(ValueError, match="at least one batch on every rank; received none"):
        next(iter(EvenBatches([], model)))

    def steps() -> Iterator[KeyedJaggedTensor]:
        yield from EvenBatches([batch] * 3, model)

    loop = steps()
    next(loop)
    with pytest.raises(ValueError, match="received a step without a call"):
        next(loop)


def test_leaving_the_loop_early_leaves_nothing_behind() -> None:
    model = shard(Case(0, 1))
    batch = Case(0, 1).batches(1)[0]
    for features in EvenBatches([batch] * 3, model):
        model(features)
        break
    assert model.module.get_submodule("ebc").input_stage.last_batches is None


@dataclass
class _Samples:
    dense: Tensor
    sparse: KeyedJaggedTensor
    extra: dict[str, Any]


def test_empty_batch_keeps_the_kind() -> None:
    ids = Case(0, 1, variable_batch=True).batches(0)[0]
    empty = empty_batch(_Samples(torch.ones(3, 2), ids, {"name": "x", "scale": torch.tensor(2.0)}))
    assert empty.dense.shape == (0, 2)
    assert empty.sparse.keys() == FEATURES
    assert empty.sparse.stride_per_key() == [0] * 4
    assert empty.sparse.inverse_indices()[1].shape == (4, 0)
    assert empty.extra["name"] == "x"
    assert empty.extra["scale"] == 2
