"""Random models, plans and batches, and the checks that sharding must pass on them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.sharding_plan import parameter_sharding
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor

FEATURES = ["f0", "f1", "f2", "f3"]
CPU = torch.device("cpu")


class Model(nn.Module):
    """A collection under a dense layer."""

    def __init__(self, configs: list[EmbeddingBagConfig], is_weighted: bool) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables=configs, is_weighted=is_weighted, device=CPU)
        width = sum(c.embedding_dim * len(c.feature_names) for c in configs)
        self.over = nn.Linear(width, 3)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(features)
        return pooled.values(), self.over(pooled.values())


@dataclass(frozen=True)
class Case:
    """Everything random about one comparison; the same on every rank."""

    seed: int
    world_size: int
    types: tuple[ShardingType, ...] = (
        ShardingType.TABLE_WISE,
        ShardingType.ROW_WISE,
        ShardingType.COLUMN_WISE,
        ShardingType.DATA_PARALLEL,
    )
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.SGD

    def configs(self) -> list[EmbeddingBagConfig]:
        rng = random.Random(self.seed)
        return [
            EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=rng.randint(1, 30),
                embedding_dim=rng.choice([4, 8, 16]),
                feature_names=rng.sample(FEATURES, rng.randint(1, 2)),
                pooling=rng.choice([PoolingType.SUM, PoolingType.MEAN]),
            )
            for i in range(rng.randint(1, 4))
        ]

    @property
    def is_weighted(self) -> bool:
        return random.Random(self.seed + 1).random() < 0.5

    def model(self) -> Model:
        torch.manual_seed(self.seed)
        model = Model(self.configs(), self.is_weighted)
        if self.optimizer is not None:
            apply_optimizer_in_backward(self.optimizer, model.ebc.parameters(), {"lr": 0.1})
        return model

    def plan(self, seed: int = 0) -> ShardingPlan:
        rng = random.Random(self.seed * 1000 + seed + 2)
        world = range(self.world_size)
        tables = EmbeddingModuleShardingPlan()
        for config in self.configs():
            kind = rng.choice(self.types)
            ranks = {
                ShardingType.TABLE_WISE: [rng.choice(world)],
                ShardingType.COLUMN_WISE: [rng.choice(world) for _ in world],
            }.get(kind, list(world))
            tables[config.name] = parameter_sharding(
                kind, config.num_embeddings, config.embedding_dim, ranks
            )
        return ShardingPlan({"ebc": tables})

    def batches(self, step: int) -> list[KeyedJaggedTensor]:
        """One batch per rank, of uneven sizes, some of them empty."""
        rng = random.Random(self.seed * 77 + step)
        generator = torch.Generator().manual_seed(self.seed * 91 + step)
        limits = {
            f: min([c.num_embeddings for c in self.configs() if f in c.feature_names] + [5])
            for f in FEATURES
        }
        batches = []
        for _ in range(self.world_size):
            size = rng.choice([0, 1, 3, 6])
            lengths = torch.randint(0, 4, (len(FEATURES), size), generator=generator)
            ids = [
                torch.randint(0, limits[f], (int(n.sum()),), generator=generator)
                for f, n in zip(FEATURES, lengths, strict=True)
            ]
            values = torch.cat(ids).to(rng.choice([torch.int32, torch.int64]))
            weights = torch.rand(values.numel(), generator=generator) if self.is_weighted else None
            batches.append(
                KeyedJaggedTensor(FEATURES, values, weights, lengths.flatten(), stride=size)
            )
        return batches


class EachType(Case):
    """One table of each sharding type, named by it, on all ranks that the type allows."""

    is_weighted = False

    def configs(self) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name=kind.value, num_embeddings=12, embedding_dim=8, feature_names=[feature]
            )
            for kind, feature in zip(self.types, FEATURES, strict=True)
        ]

    def plan(self, seed: int = 0) -> ShardingPlan:
        world = list(range(self.world_size))
        tables = EmbeddingModuleShardingPlan()
        for kind in self.types:
            ranks = world[-1:] if kind is ShardingType.TABLE_WISE else world
            tables[kind.value] = parameter_sharding(kind, 12, 8, ranks)
        return ShardingPlan({"ebc": tables})


def concat_batches(batches: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Joins batches along samples."""
    parts = [b.to_dict() for b in batches]
    lengths = [torch.cat([p[f].lengths() for p in parts]) for f in FEATURES]
    values = [torch.cat([p[f].values().long() for p in parts]) for f in FEATURES]
    weights = None
    if batches[0].weights_or_none() is not None:
        weights = torch.cat([torch.cat([p[f].weights() for p in parts]) for f in FEATURES])
    return KeyedJaggedTensor(
        FEATURES,
        torch.cat(values),
        weights,
        torch.cat(lengths),
        stride=sum(b.stride() for b in batches),
    )


def shard(case: Case, plan: ShardingPlan | None = None) -> DistributedModelParallel:
    return DistributedModelParallel(
        case.model(), env=ShardingEnv.default(), device=CPU, plan=plan or case.plan()
    )


def train(
    case: Case, model: nn.Module, steps: range, rank: int | None, *, with_dense: bool = True
) -> list[Tensor]:
    """Trains the unsharded model on all batches joined (rank None), or a sharded one on its own.

    Returns the collection's output of every step; the loss is the mean over ranks of a sum. A dense
    layer's gradient is summed in another order by DistributedDataParallel, so bit-for-bit
    comparisons leave it out.
    """
    bare = model.module if isinstance(model, DistributedModelParallel) else model
    dense = torch.optim.SGD(bare.over.parameters(), lr=0.1)
    outputs = []
    for step in steps:
        batches = case.batches(step)
        batch = concat_batches(batches) if rank is None else batches[rank]
        batch = batch.to(bare.over.weight.device)
        dense.zero_grad()
        pooled, logits = model(batch)
        outputs.append(pooled.detach().clone())
        scale = 1 / case.world_size if rank is None else 1.0
        loss = (pooled * pooled.detach().sin()).sum() * scale
        if with_dense:
            loss = loss + logits.pow(2).sum() * scale
        loss.backward()
        if with_dense:
            dense.step()
    return outputs
