"""A bag's greatest values, against `torch.nn.EmbeddingBag(mode="max")`, unsharded and sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.planner import Topology
from recsys.distributed.planner.enumerators import EmbeddingEnumerator
from recsys.distributed.types import ShardingType
from recsys.kernels.types import EmbOptimType, OptimizerSpec, PoolingType, UpdateMode
from tests.distributed.cases import OPTIMIZERS, shard
from tests.distributed.cases import Case as Model
from tests.distributed.test_sharding import _train_both
from tests.kernels.lookup_cases import Case
from tests.ranks import RankPool

PLACES = (ShardingType.DATA_PARALLEL, ShardingType.TABLE_WISE)
SPLIT = (*PLACES, ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE)
ROWS = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_equals_torch(seed: int, dtype: torch.dtype) -> None:
    case = Case((7, 3), (4, 8), (0, 1, 0), PoolingType.MAX, False, torch.int64, 5, seed)
    spec = OptimizerSpec(algorithm=EmbOptimType.SGD, learning_rate=0.5)
    tbe = case.build(spec, UpdateMode.FUSED, weights_dtype=dtype)
    bags = [
        nn.EmbeddingBag.from_pretrained(
            w.to(dtype).float(), freeze=False, mode="max", include_last_offset=True
        )
        for w in case.init()
    ]
    indices, offsets, _ = case.batch(0)
    out = tbe.forward(indices, offsets)
    parts = [
        bags[t](
            indices[offsets[5 * f] : offsets[5 * f + 5]],
            offsets[5 * f : 5 * f + 6] - offsets[5 * f],
        )
        for f, t in enumerate(case.feature_table_map)
    ]
    torch.testing.assert_close(out, torch.cat(parts, 1))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    (out * weight).sum().backward()
    (torch.cat(parts, 1) * weight).sum().backward()
    for bag, ours in zip(bags, tbe.weights, strict=True):
        expected = (bag.weight - 0.5 * bag.weight.grad).detach().to(dtype)
        torch.testing.assert_close(ours.detach(), expected)


@pytest.mark.parametrize("seed", range(16))
def test_trains_as_the_unsharded_model(ranks: RankPool, seed: int) -> None:
    optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)]
    kinds = PLACES if "LA" in optimizer.__name__ else SPLIT
    ranks(2, _train_both, _case(seed, kinds, optimizer))


def _case(
    seed: int, kinds: tuple[ShardingType, ...], optimizer: type[torch.optim.Optimizer]
) -> Model:
    return Model(
        seed,
        2,
        types=kinds,
        optimizer=optimizer,
        pooling=PoolingType.MAX,
        weighted=False,
        variable_batch=seed % 3 == 0,
    )


def _is_refused() -> None:
    with pytest.raises(ValueError, match="Tables split by rows are pooled as one of"):
        shard(_case(1, (ShardingType.ROW_WISE,), torch.optim.SGD))


def test_row_shards_are_refused(ranks: RankPool) -> None:
    ranks(2, _is_refused)


def test_the_planner_proposes_no_row_shards() -> None:
    model = _case(1, PLACES, torch.optim.SGD).model()
    topology = Topology(4, "cpu", local_world_size=2)
    listed = EmbeddingEnumerator(topology, 8).enumerate(model, [EmbeddingBagCollectionSharder()])
    kinds = {option.sharding_type for _, options in listed for option in options}
    assert kinds == {kind.value for kind in SPLIT}
