"""Random models, plans and batches, and the checks that sharding must pass on them."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.ranks.wire import CommType, QCommsConfig, get_qcomm_codecs_registry
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor

FEATURES = ["f0", "f1", "f2", "f3"]
CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
DIMS = (1, 2, 3, 4, 8, 16)
OPTIMIZERS = (
    SGD,
    Adagrad,
    RowWiseAdagrad,
    Adam,
    PartialRowWiseAdam,
    LAMB,
    LarsSGD,
    PartialRowWiseLAMB,
)
NEED_WHOLE_ROWS = (LAMB, LarsSGD, PartialRowWiseLAMB)
"""Optimizers of tables whose columns must not be split."""


class Model(nn.Module):
    """A collection under a dense layer; returns the outputs of both.

    `keys` contains the keys of the last output.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        configs = case.configs()
        if case.pooled:
            self.ebc: nn.Module = EmbeddingBagCollection(
                tables=configs, is_weighted=case.is_weighted, device=CPU
            )
            width = sum(c.embedding_dim * len(c.feature_names) for c in configs)
        else:
            self.ebc = EmbeddingCollection(tables=configs, device=CPU)
            width = configs[0].embedding_dim
        self.over = nn.Linear(width, 3)
        self.feeds_back = case.feeds_back

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        found = self.ebc(features)
        self.keys = list(found.keys())
        if isinstance(self.ebc, EmbeddingBagCollection | ShardedEmbeddingBagCollection):
            values = found.values()
        else:
            values = torch.cat([jagged.values() for jagged in dict(found.items()).values()])
        return values, self.over(values if self.feeds_back else values.detach())


@dataclass(frozen=True)
class Case:
    """Settings of one comparison, equal on every rank; a setting of None is drawn at random."""

    sizes: ClassVar[tuple[int, ...]] = (0, 1, 3, 6)
    """Batch sizes to draw from."""
    seed: int
    world_size: int
    types: tuple[ShardingType, ...] = (
        ShardingType.TABLE_WISE,
        ShardingType.ROW_WISE,
        ShardingType.COLUMN_WISE,
        ShardingType.DATA_PARALLEL,
    )
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.SGD
    pooled: bool = True
    variable_batch: bool = False
    node_size: int | None = None
    use_index_dedup: bool = False
    pooling: PoolingType | None = None
    weighted: bool | None = None
    wire: CommType = CommType.FP32
    loss_scale: float | None = None
    hyperparameters: tuple[tuple[str, float], ...] = (("lr", 0.1),)
    feeds_back: bool = True
    """True if the dense layer's gradient reaches the tables."""

    def configs(self) -> list[Any]:
        rng = random.Random(self.seed)
        dim = random.Random(self.seed + 2).choice(DIMS)
        return [
            self._config(
                i,
                num_embeddings=rng.randint(1, 30),
                embedding_dim=rng.choice(DIMS) if self.pooled else dim,
                feature_names=rng.sample(FEATURES, rng.randint(1, 2)),
                pooling=rng.choice([PoolingType.SUM, PoolingType.MEAN]),
            )
            for i in range(rng.randint(1, 4))
        ]

    def _config(self, i: int, *, pooling: PoolingType, **fields: Any) -> Any:
        if self.pooled:
            return EmbeddingBagConfig(name=f"t{i}", pooling=self.pooling or pooling, **fields)
        return EmbeddingConfig(name=f"t{i}", **fields)

    @property
    def is_weighted(self) -> bool:
        chosen = random.Random(self.seed + 1).random() < 0.5
        return self.pooled and (chosen if self.weighted is None else self.weighted)

    def model(self) -> Model:
        torch.manual_seed(self.seed)
        model = Model(self)
        if self.optimizer is not None:
            apply_optimizer_in_backward(
                self.optimizer, model.ebc.parameters(), dict(self.hyperparameters)
            )
        return model

    def plan(self, seed: int = 0) -> ShardingPlan:
        rng = random.Random(self.seed * 1000 + seed + 2)
        tables = EmbeddingModuleShardingPlan()
        for config in self.configs():
            kind = rng.choice(self.types)
            tables[config.name] = parameter_sharding(
                kind,
                config.num_embeddings,
                config.embedding_dim,
                self.ranks_of(kind, rng),
                local_size=self.node_size,
            )
        return ShardingPlan({"ebc": tables})

    def ranks_of(self, kind: ShardingType, rng: random.Random) -> list[int]:
        """Owners that a table of this type may have."""
        world = list(range(self.world_size))
        size = self.node_size or self.world_size
        first = rng.choice(world[::size])
        if kind is ShardingType.TABLE_WISE:
            return [rng.choice(world)]
        if kind is ShardingType.COLUMN_WISE:  # also several, apart or adjoining, on one rank
            return [rng.choice(world) for _ in world]
        if kind in (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE):
            return world[first : first + size]
        if kind is ShardingType.ROW_WISE:
            return sorted(rng.sample(world, rng.randint(min(2, len(world)), len(world))))
        return world

    def batches(self, step: int) -> list[KeyedJaggedTensor]:
        """One batch per rank, of uneven sizes, some of them empty."""
        rng = random.Random(self.seed * 77 + step)
        generator = torch.Generator().manual_seed(self.seed * 91 + step)
        limits = {
            f: min([c.num_embeddings for c in self.configs() if f in c.feature_names] + [30])
            for f in FEATURES
        }
        batches = []
        for _ in range(self.world_size):
            size = rng.choice(self.sizes)
            bags = [size] * len(FEATURES)
            if self.variable_batch:  # samples share bags
                bags = [rng.randint(min(size, 1), size) for _ in FEATURES]
            lengths = [torch.randint(0, 4, (n,), generator=generator) for n in bags]
            ids = [
                torch.randint(0, limits[f], (int(n.sum()),), generator=generator)
                for f, n in zip(FEATURES, lengths, strict=True)
            ]
            values = torch.cat(ids).to(rng.choice([torch.int32, torch.int64]))
            weights = torch.rand(values.numel(), generator=generator) if self.is_weighted else None
            batch = {"values": values, "weights": weights, "lengths": torch.cat(lengths)}
            if self.variable_batch:
                inverse = [torch.randint(0, max(n, 1), (size,), generator=generator) for n in bags]
                batch["stride_per_key_per_rank"] = [[n] for n in bags]
                batch["inverse_indices"] = (list(FEATURES), torch.stack(inverse))
            else:
                batch["stride"] = size
            batches.append(KeyedJaggedTensor(list(FEATURES), **batch))
        return batches

    def parts(self, values: Tensor, step: int) -> list[Tensor]:
        """Split the unsharded model's values for all ranks' batches into each rank's values."""
        batches = self.batches(step)
        if self.pooled:
            return list(values.split([samples_of(batch) for batch in batches]))
        sizes = self._ids_of_outputs(step)
        pieces = values.split([size for of_ranks in sizes for size in of_ranks])
        return [torch.cat(pieces[rank :: len(batches)]) for rank in range(len(batches))]

    def join(self, parts: list[Tensor], step: int) -> Tensor:
        """Undoes :meth:`parts`."""
        if self.pooled:
            return torch.cat(parts)
        by_rank = zip(*self._ids_of_outputs(step), strict=True)
        pieces = [part.split(sizes) for part, sizes in zip(parts, by_rank, strict=True)]
        return torch.cat([piece for of_ranks in zip(*pieces, strict=True) for piece in of_ranks])

    def _ids_of_outputs(self, step: int) -> list[list[int]]:
        """For each feature of each table the ids that each rank has."""
        found = [batch.to_dict() for batch in self.batches(step)]
        return [
            [int(features[name].values().numel()) for features in found]
            for config in self.configs()
            for name in config.feature_names
        ]


def samples_of(batch: KeyedJaggedTensor) -> int:
    inverse = batch.inverse_indices_or_none()
    return batch.stride() if inverse is None else inverse[1].shape[1]


class EachType(Case):
    """One table of each sharding type, named by it, on all ranks that the type allows."""

    is_weighted = False

    def configs(self) -> list[Any]:
        config = EmbeddingBagConfig if self.pooled else EmbeddingConfig
        return [
            config(name=kind.value, num_embeddings=12, embedding_dim=8, feature_names=[feature])
            for kind, feature in zip(self.types, FEATURES, strict=False)
        ]

    def plan(self, seed: int = 0) -> ShardingPlan:
        world = list(range(self.world_size))
        tables = EmbeddingModuleShardingPlan()
        for kind in self.types:
            ranks = world[-1:] if kind is ShardingType.TABLE_WISE else world
            tables[kind.value] = parameter_sharding(kind, 12, 8, ranks)
        return ShardingPlan({"ebc": tables})


@dataclass(frozen=True)
class SizedType(EachType):
    """One table of each type, with `rows` rows; others change places with the plan's seed."""

    rows: int = 12

    def configs(self) -> list[Any]:
        return [replace(config, num_embeddings=self.rows) for config in super().configs()]

    def plan(self, seed: int = 0) -> ShardingPlan:
        world = list(range(self.world_size))
        tables = EmbeddingModuleShardingPlan()
        kinds = self.types[seed:] + self.types[:seed]
        for name, kind in zip(self.types, kinds, strict=True):
            ranks = world[-1:] if kind is ShardingType.TABLE_WISE else world
            tables[name.value] = parameter_sharding(kind, self.rows, 8, ranks)
        return ShardingPlan({"ebc": tables})


@dataclass(frozen=True)
class Narrow(Case):
    """Three tables of ``width`` columns, or of 1, 2 and 3 for None, each read by two features."""

    width: int | None = None

    def configs(self) -> list[Any]:
        dims = (1, 2, 3) if self.width is None else (self.width,) * 3
        return [
            self._config(
                i,
                num_embeddings=5 + 6 * i,
                embedding_dim=dim,
                feature_names=[FEATURES[i], FEATURES[i + 1]],
                pooling=(PoolingType.SUM, PoolingType.MEAN)[i % 2],
            )
            for i, dim in enumerate(dims)
        ]


def concat_batches(batches: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Joins batches along samples."""
    parts = [b.to_dict() for b in batches]
    values = [torch.cat([p[f].values().long() for p in parts]) for f in FEATURES]
    lengths = [torch.cat([p[f].lengths() for p in parts]) for f in FEATURES]
    weights = None
    if batches[0].weights_or_none() is not None:
        weights = torch.cat([torch.cat([p[f].weights() for p in parts]) for f in FEATURES])
    if not batches[0].variable_stride_per_key():
        return KeyedJaggedTensor(
            list(FEATURES),
            torch.cat(values),
            weights,
            torch.cat(lengths),
            stride=sum(b.stride() for b in batches),
        )
    inverse = []
    for i in range(len(FEATURES)):
        shift, rows = 0, []
        for batch in batches:
            rows.append(batch.inverse_indices()[1][i] + shift)
            shift += batch.stride_per_key()[i]
        inverse.append(torch.cat(rows))
    return KeyedJaggedTensor(
        list(FEATURES),
        torch.cat(values),
        weights,
        torch.cat(lengths),
        stride_per_key_per_rank=[[n.numel()] for n in lengths],
        inverse_indices=(list(FEATURES), torch.stack(inverse)),
    )


def shard(
    case: Case,
    plan: ShardingPlan | None = None,
    sharders: list[Any] | None = None,
    device: torch.device = CPU,
) -> DistributedModelParallel:
    registry = None
    if case.wire is not CommType.FP32:
        config = QCommsConfig(case.wire, case.wire, backward_loss_scale=case.loss_scale)
        registry = get_qcomm_codecs_registry(config)
    bags = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    sequences = EmbeddingCollectionSharder(
        qcomm_codecs_registry=registry, use_index_dedup=case.use_index_dedup
    )
    # the process serves other tests after this one
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(case.node_size or case.world_size)):
        return DistributedModelParallel(
            case.model(),
            env=ShardingEnv.default(),
            device=device,
            plan=plan or case.plan(),
            sharders=sharders or [bags, sequences],
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


def whole(value: Any) -> Tensor:
    """A copy of a tensor, put together if it is sharded; then every rank must call it."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the whole state by name; every rank must call it."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def whole_state_and_optimizer(model: Any) -> dict[str, Tensor]:
    """A copy of the whole state and of the fused optimizer's; every rank must call it."""
    values = whole_state(model)
    for param, states in model.fused_optimizer.state_dict()["state"].items():
        values |= {f"{param}/{name}": whole(value) for name, value in states.items()}
    return values


def trained(case: Case, seed: int, steps: int) -> Any:
    """A model under the plan of a seed, after some steps."""
    model = shard(case, case.plan(seed))
    train(case, model, range(steps), rank=dist.get_rank())
    return model


def assert_same(received: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: Any) -> None:
    """Compare tensors by name, to 1e-5 unless `tolerance` differs."""
    assert received.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            received[name], value, **(CLOSE | tolerance), msg=lambda m, n=name: f"{n}: {m}"
        )


class Collectives(Counter[str]):
    """Number of calls of each collective by name, and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, list[tuple[Any, ...]]] = {}


@contextmanager
def counted_collectives() -> Iterator[Collectives]:
    """Counts the collectives that this rank calls meanwhile."""
    counts = Collectives()

    def counting(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            counts.arguments.setdefault(name, []).append(args)
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with ExitStack() as patches:
        for name in ("all_to_all_single", "all_reduce", "all_gather_object", "broadcast"):
            patches.enter_context(counting(name))
        yield counts
