"""Ranks with different numbers of batches end an epoch together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.train_pipeline.even_batches import EvenBatches, UnevenPolicy, empty_batch
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
    """Return the flags of filler steps, the epoch's number of collectives, and the final tables."""
    rank = dist.get_rank()
    model = shard(case)
    fillers = []
    epoch = EvenBatches(iter(_batches(case, rank)), model, policy)
    with counted_collectives() as calls:
        for batch in epoch:
            pooled, _ = model(batch)
            _loss(pooled).backward()
            fillers.append(epoch.is_filler)
    assert not model.module.get_submodule("ebc").input_stage.end_of_data.is_last
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
    assert (calls - 1) % steps == 0, "a collective beside those of the steps and the first"
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
    with pytest.raises(ValueError, match=r"policy must be .*drop, pad, join.*'stop'"):
        EvenBatches([batch], model, "stop")
    with pytest.raises(ValueError, match=r"received a Linear"):
        EvenBatches([batch], nn.Linear(1, 1))
    with pytest.raises(ValueError, match="at least one batch; received none"):
        next(iter(EvenBatches([], model)))

    def steps() -> Iterator[KeyedJaggedTensor]:
        yield from EvenBatches([batch] * 3, model)

    loop = steps()
    next(loop)
    with pytest.raises(ValueError, match="received a step without a call"):
        next(loop)


def _without_data(case: Case, policy: str, without: tuple[int, ...]) -> list[bool] | str:
    """Return the flags of filler steps, or this rank's error."""
    rank = dist.get_rank()
    model = shard(case)
    fillers = []
    epoch = EvenBatches([] if rank in without else [case.batches(0)[rank]] * 2, model, policy)
    try:
        for batch in epoch:
            pooled, _ = model(batch)
            _loss(pooled).backward()
            fillers.append(epoch.is_filler)
    except ValueError as error:
        return str(error)
    return fillers


@pytest.mark.parametrize("policy", ["pad", "join"])
@pytest.mark.parametrize("variable_batch", [False, True])
def test_a_rank_without_data_takes_part(ranks: RankPool, policy: str, variable_batch: bool) -> None:
    case = Case(4, 3, optimizer=RowWiseAdagrad, variable_batch=variable_batch)
    first, second, third = ranks(3, _without_data, case, policy, (0, 2))
    assert second == [False, False]
    assert first == third == [True, True]


@pytest.mark.parametrize(
    ("policy", "without", "text"),
    [
        ("drop", (1,), r"received none on ranks \[1\]"),
        ("join", (0, 1, 2), "at least one batch; received none on any rank"),
    ],
)
def test_an_epoch_of_nothing_is_refused_on_all(
    ranks: RankPool, policy: str, without: tuple[int, ...], text: str
) -> None:
    errors = ranks(3, _without_data, Case(4, 3), policy, without)
    assert len(set(errors)) == 1
    assert re.search(text, errors[0])


def _with_failing_data(case: Case) -> str:
    def batches() -> Iterator[KeyedJaggedTensor]:
        if dist.get_rank() == 1:
            raise OSError("no such shard")
        yield case.batches(0)[dist.get_rank()]

    try:
        list(EvenBatches(batches(), shard(case), "join"))
    except OSError as error:
        return str(error)
    return "no error"


def test_data_that_fail_at_once_fail_on_all(ranks: RankPool) -> None:
    assert ranks(2, _with_failing_data, Case(4, 2)) == ["On rank 1: no such shard"] * 2


def _with_data_that_fail_late(case: Case, policy: str) -> list[str]:
    rank = dist.get_rank()

    def batches() -> Iterator[KeyedJaggedTensor]:
        yield case.batches(0)[rank]
        if rank == 1:
            raise OSError("a torn file")
        yield case.batches(1)[rank]

    model, said = shard(case), []
    try:
        for batch in EvenBatches(batches(), model, policy):
            said.append("a step")
            pooled, _ = model(batch)
            _loss(pooled).backward()
    except OSError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("policy", ["drop", "join"])
def test_data_that_fail_late_fail_on_all(ranks: RankPool, policy: str) -> None:
    said = ["a step", "a step", "On rank 1: a torn file"]
    assert ranks(3, _with_data_that_fail_late, Case(4, 3), policy) == [said] * 3


class _Unsendable:
    """Rides along in a batch, and cannot be sent."""

    def __reduce__(self) -> Any:
        raise TypeError("a lock cannot be sent")


def _with_a_batch_that_cannot_be_sent(case: Case) -> str:
    batches = [] if dist.get_rank() else [(case.batches(0)[0], _Unsendable())]
    try:
        list(EvenBatches(batches, shard(case), "join"))
    except TypeError as error:
        return str(error)
    return "no error"


def test_a_batch_that_cannot_be_sent_fails_on_all(ranks: RankPool) -> None:
    found = ranks(2, _with_a_batch_that_cannot_be_sent, Case(4, 2))
    assert found == ["On rank 0: a lock cannot be sent"] * 2


def test_leaving_the_loop_early_leaves_nothing_behind() -> None:
    model = shard(Case(0, 1))
    batch = Case(0, 1).batches(1)[0]
    stage = model.module.get_submodule("ebc").input_stage
    before = stage.end_of_data
    for features in EvenBatches([batch] * 3, model):
        assert stage.end_of_data is not before
        model(features)
        break
    assert stage.end_of_data is before


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
