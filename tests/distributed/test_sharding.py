"""Sharding is invisible: any plan on any number of ranks trains as the unsharded model does."""

from __future__ import annotations

import pytest
import torch

from recsys.distributed.types import ShardingType
from recsys.optim import Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from tests.distributed.cases import Case, shard, train
from tests.ranks import RankPool

STEPS = range(3)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
EXACT = {"rtol": 0, "atol": 0}


def _train_both(case: Case, tolerance: dict[str, float]) -> None:
    rank = torch.distributed.get_rank()
    with_dense = tolerance is not EXACT and tolerance != EXACT
    reference, sharded = case.model(), shard(case)
    keys = sharded.module.ebc(case.batches(0)[rank]).keys()
    assert keys == reference.ebc.embedding_names
    expected = train(case, reference, STEPS, rank=None, with_dense=with_dense)
    received = train(case, sharded, STEPS, rank=rank, with_dense=with_dense)
    for step, (whole, own) in enumerate(zip(expected, received, strict=True)):
        sizes = [batch.stride() for batch in case.batches(step)]
        torch.testing.assert_close(own, whole.split(sizes)[rank], **tolerance)
    state = sharded.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        own = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
        torch.testing.assert_close(own, value, **tolerance)
    optimizer = sharded.fused_optimizer.state_dict()["state"]
    for table, states in reference.ebc.optimizer_states().items():
        for name, value in states.items():
            own = optimizer[f"ebc.embedding_bags.{table}.weight"][name]
            own = own.full_tensor() if hasattr(own, "full_tensor") else own
            torch.testing.assert_close(own, value, **tolerance)


@pytest.mark.parametrize("seed", range(24))
def test_trains_as_the_unsharded_model(ranks: RankPool, seed: int) -> None:
    optimizer = RowWiseAdagrad if seed % 2 else torch.optim.SGD
    case = Case(seed, world_size=1 + seed % 4, optimizer=optimizer)
    ranks(case.world_size, _train_both, case, CLOSE)


@pytest.mark.parametrize("optimizer", [Adagrad, Adam, PartialRowWiseAdam])
@pytest.mark.parametrize("seed", [100, 101])
def test_other_optimizers_train_as_the_unsharded_model(
    ranks: RankPool, seed: int, optimizer: type[torch.optim.Optimizer]
) -> None:
    case = Case(seed, world_size=2 + seed % 2, optimizer=optimizer)
    ranks(case.world_size, _train_both, case, CLOSE)


@pytest.mark.parametrize("seed", range(200, 208))
def test_whole_tables_are_equal_bit_for_bit(ranks: RankPool, seed: int) -> None:
    optimizer = RowWiseAdagrad if seed % 2 else torch.optim.SGD
    case = Case(
        seed, world_size=1 + seed % 4, types=(ShardingType.TABLE_WISE,), optimizer=optimizer
    )
    ranks(case.world_size, _train_both, case, EXACT)


@pytest.mark.parametrize("seed", range(300, 306))
def test_columns_are_equal_bit_for_bit_under_elementwise_optimizers(
    ranks: RankPool, seed: int
) -> None:
    optimizer = Adagrad if seed % 2 else torch.optim.SGD
    types = (ShardingType.COLUMN_WISE, ShardingType.TABLE_WISE)
    case = Case(seed, world_size=2 + seed % 3, types=types, optimizer=optimizer)
    ranks(case.world_size, _train_both, case, EXACT)
