"""The gradient of a batch's weights is equal with and without sharding."""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.stages import input_dist
from recsys.distributed.types import ShardingType
from recsys.modules.position_weights import with_weights
from recsys.optim import RowWiseAdagrad
from tests.distributed.cases import FEATURES, Case, concat_batches, shard
from tests.ranks import RankPool


def _case(seed: int) -> Case:
    rng = random.Random(seed)
    seed *= 100
    while not Case(seed, 1).is_weighted:
        seed += 1
    world_size = rng.choice([1, 2, 3, 4])
    return Case(
        seed,
        world_size,
        types=tuple(ShardingType),
        optimizer=rng.choice([RowWiseAdagrad, torch.optim.SGD, None]),
        variable_batch=rng.random() < 0.4,
        node_size=2 if world_size == 4 else None,
    )


def _gradients(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Per step this rank's weight gradient, and the unsharded one."""
    rank, sharded, unsharded = dist.get_rank(), shard(case), case.model()
    found = []
    for step in range(3):
        batches = case.batches(step)
        weights = batches[rank].weights().clone()
        weights.requires_grad_(step != 1 or rank == 0)  # in step 1 only one rank asks
        pooled, _ = sharded(with_weights(batches[rank], weights))
        (pooled * pooled.detach().sin()).sum().backward()
        joined = concat_batches(batches)
        all_weights = joined.weights().clone().requires_grad_()
        pooled, _ = unsharded(with_weights(joined, all_weights))
        (pooled * pooled.detach().sin()).sum().div(case.world_size).backward()
        assert all_weights.grad is not None
        own_loss = all_weights.grad * case.world_size
        sizes = [batch.length_per_key()[k] for k in range(len(FEATURES)) for batch in batches]
        mine = torch.cat(own_loss.split(sizes)[rank :: case.world_size])
        if weights.requires_grad:
            assert weights.grad is not None
            found.append((weights.grad, mine))
    return found


def _gradients_by_id(case: Case) -> list[tuple[Tensor, Tensor]]:
    with mock.patch.multiple(input_dist, _MAX_IDS=1e9, _MIN_VALUES=0):
        return _gradients(case)


@pytest.mark.parametrize("by_id", [False, True], ids=["by_bag", "by_id"])
@pytest.mark.parametrize("seed", range(12))
def test_weight_gradients_equal_the_unsharded_ones(ranks: RankPool, seed: int, by_id: bool) -> None:
    case = _case(seed)
    if by_id:
        case = dataclasses.replace(case, types=(ShardingType.ROW_WISE, ShardingType.TABLE_WISE))
    results = ranks(case.world_size, _gradients_by_id if by_id else _gradients, case)
    assert len(results[0]) == 3
    for found in results:
        for sharded, unsharded in found:
            torch.testing.assert_close(sharded, unsharded, rtol=1e-5, atol=1e-5)
