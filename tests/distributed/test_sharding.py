"""Sharding is invisible: any plan on any number of ranks trains as the unsharded model does."""

from __future__ import annotations

import pytest
import torch

from recsys.distributed.types import ShardingType
from recsys.optim.rowwise_adagrad import RowWiseAdagrad
from tests.distributed.cases import Case, shard, train
from tests.ranks import RankPool

STEPS = range(3)


def _train_both(case: Case, exact: bool) -> None:
    rank = torch.distributed.get_rank()
    reference, sharded = case.model(), shard(case)
    assert sharded.module.ebc(case.batches(0)[rank]).keys() == reference.ebc.embedding_names
    expected = train(case, reference, STEPS, rank=None)
    received = train(case, sharded, STEPS, rank=rank)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5}
    for step, (whole, own) in enumerate(zip(expected, received, strict=True)):
        sizes = [batch.stride() for batch in case.batches(step)]
        torch.testing.assert_close(own, whole.split(sizes)[rank], **tolerance)
    state = sharded.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        own = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
        exact_here = tolerance if name.startswith("ebc") else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(own, value, **exact_here)


@pytest.mark.parametrize("seed", range(24))
def test_trains_as_the_unsharded_model(ranks: RankPool, seed: int) -> None:
    optimizer = RowWiseAdagrad if seed % 2 else torch.optim.SGD
    case = Case(seed, world_size=1 + seed % 4, optimizer=optimizer)
    ranks(case.world_size, _train_both, case, False)
