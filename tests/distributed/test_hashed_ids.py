"""Sharded tables with hashed ids: same rows, ids and scores as the unsharded model, on any ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.types import ShardingType
from recsys.modules.hashed_ids import LFU, LRU, AtLeast, DistanceLFU, HashedIds, Probability
from recsys.optim import Adam, RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import FEATURES, Case, assert_same, shard, train, whole
from tests.ranks import RankPool

RULES = (
    HashedIds(),
    HashedIds(eviction=LFU(3), admission=AtLeast(2), unknown="zero"),
    HashedIds(eviction=DistanceLFU(), ttl=6, seed=5),
    HashedIds(eviction=LRU(), admission=Probability(0.5), unknown="zero", ttl=9),
    HashedIds(eviction=None),
)
TYPES = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.GRID_SHARD,
)


@dataclass(frozen=True)
class HashedCase(Case):
    """Tables with hashed ids, and some with row numbers, which share no feature with them."""

    sizes = (0, 3, 6, 12)
    num_ids: int = 300
    hyperparameters: tuple[tuple[str, float], ...] = (("lr", 0.01),)
    types: tuple[ShardingType, ...] = TYPES

    def configs(self) -> list[Any]:
        rng = random.Random(self.seed)
        configs = super().configs()
        for config in configs:
            config.ids = rng.choice(RULES)
            config.num_embeddings = rng.choice([256, 512])
            config.feature_names = rng.sample(FEATURES[:3], rng.randint(1, 2))
            config.__post_init__()
        static = replace(
            configs[0], name="rows", ids=None, num_embeddings=20, feature_names=[FEATURES[3]]
        )
        return [*configs, static]

    def batches(self, step: int) -> list[KeyedJaggedTensor]:
        generator = torch.Generator().manual_seed(self.seed * 17 + step)
        batches = []
        for batch in super().batches(step):
            parts = []
            for name, bags in batch.to_dict().items():
                ids = bags.values().long()
                if name != FEATURES[3]:
                    ids = torch.randint(0, self.num_ids, ids.shape, generator=generator)
                    ids = ids * 0x5851F42D4C957F2D - 2**63
                parts.append(ids)
            found = batch.parts()._replace(values=torch.cat(parts))
            batches.append(KeyedJaggedTensor.from_parts(**found._asdict()))
        return batches


def state_of(model: Any) -> dict[str, Tensor]:
    """The state of the tables; ids of free rows have no meaning."""
    state = {n: whole(v) for n, v in model.state_dict().items() if n.startswith("ebc.")}
    for name in [n for n in state if n.endswith("index.ids")]:
        used = state[name.replace("index.ids", "index.last_used")] > 0
        state[name] = state[name].masked_fill(~used, 0)
    return state


def assert_equal_index(received: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_same(received, expected, rtol=1e-4, atol=1e-5)
    for name, value in expected.items():
        if ".index." in name:
            assert torch.equal(received[name], value), name


def _train_both(case: HashedCase, folder: Path) -> None:
    rank = dist.get_rank()
    reference, sharded = case.model(), shard(case)
    expected = train(case, reference, range(12), rank=None, with_dense=False)
    received = train(case, sharded, range(12), rank=rank, with_dense=False)
    for step, (joined, own) in enumerate(zip(expected, received, strict=True)):
        torch.testing.assert_close(own, case.parts(joined, step)[rank], rtol=1e-4, atol=1e-5)
    assert_equal_index(state_of(sharded), state_of(reference))
    save_checkpoint(folder, sharded, sharded.fused_optimizer)
    other = shard(case, plan=case.plan(seed=1))
    load_checkpoint(folder, other, other.fused_optimizer)
    assert_equal_index(state_of(other), state_of(reference))
    expected = train(case, reference, range(12, 18), rank=None, with_dense=False)
    received = train(case, other, range(12, 18), rank=rank, with_dense=False)
    for step, (joined, own) in enumerate(zip(expected, received, strict=True), 12):
        torch.testing.assert_close(own, case.parts(joined, step)[rank], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad, Adam])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_they_train_as_the_unsharded_model(
    ranks: RankPool, seed: int, pooled: bool, optimizer: Any, tmp_path: Path
) -> None:
    case = HashedCase(seed, 2, pooled=pooled, optimizer=optimizer)
    ranks(2, _train_both, case, tmp_path / "c")
