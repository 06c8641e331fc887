"""Sharding is invisible: any plan on any number of ranks trains as the unsharded model does."""

from __future__ import annotations

import random

import pytest
import torch

from recsys.distributed.types import ShardingType
from recsys.optim import Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from tests.distributed.cases import Case, concat_batches, shard, train
from tests.ranks import RankPool

STEPS = range(3)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
EXACT = {"rtol": 0, "atol": 0}


def _train_both(case: Case, tolerance: dict[str, float]) -> None:
    rank = torch.distributed.get_rank()
    with_dense = tolerance is not EXACT and tolerance != EXACT
    reference, sharded = case.model(), shard(case)
    keys = list(sharded.module.ebc(case.batches(0)[rank]).keys())
    assert keys == list(reference.ebc(concat_batches(case.batches(0))).keys())
    expected = train(case, reference, STEPS, rank=None, with_dense=with_dense)
    received = train(case, sharded, STEPS, rank=rank, with_dense=with_dense)
    for step, (whole, own) in enumerate(zip(expected, received, strict=True)):
        torch.testing.assert_close(own, case.parts(whole, step)[rank], **tolerance)
    state = sharded.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        own = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
        torch.testing.assert_close(own, value, **tolerance)
    optimizer = sharded.fused_optimizer.state_dict()["state"]
    for table, states in reference.ebc.optimizer_states().items():
        for name, value in states.items():
            own = optimizer[f"ebc.{sharded.module.ebc.tables_name}.{table}.weight"][name]
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


def _sample(seed: int) -> Case:
    """A case of any strategy, pooled or not, of one or several nodes."""
    rng = random.Random(seed)
    world_size = rng.randint(1, 4)
    return Case(
        seed,
        world_size=world_size,
        node_size=rng.choice([size for size in (1, 2, 4) if world_size % size == 0]),
        types=tuple(ShardingType),
        pooled=rng.random() < 0.5,
        variable_batch=rng.random() < 0.3,
        use_index_dedup=rng.random() < 0.5,
        optimizer=rng.choice([torch.optim.SGD, RowWiseAdagrad, Adagrad, Adam, PartialRowWiseAdam]),
    )


@pytest.mark.parametrize("seed", range(400, 432))
def test_every_strategy_trains_as_the_unsharded_model(ranks: RankPool, seed: int) -> None:
    case = _sample(seed)
    ranks(case.world_size, _train_both, case, CLOSE)


@pytest.mark.parametrize("variable_batch", [False, True])
@pytest.mark.parametrize("seed", range(500, 504))
def test_sums_in_two_hops_train_as_the_unsharded_model(
    ranks: RankPool, seed: int, variable_batch: bool
) -> None:
    types = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD, ShardingType.TABLE_WISE)
    case = Case(
        seed,
        world_size=4,
        node_size=2,
        types=types,
        optimizer=RowWiseAdagrad,
        variable_batch=variable_batch,
    )
    ranks(4, _train_both, case, CLOSE)
