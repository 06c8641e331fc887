"""A case in TorchRec, as its user would write it, and held against ours on the same ranks."""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from recsys.distributed.types import ShardingType
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import get_embedding_names_by_table
from recsys.optim import Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, Case
from tests.ranks import RankPool

Slices = tuple[slice, ...]


class ParityCase(Case):
    """Three tables, two with the same feature; batches of one size, as the peer needs."""

    sizes = (4,)

    def configs(self) -> list[Any]:
        shapes = [(12, 8, ["f0", "f1"]), (20, 16, ["f2", "f0"]), (8, 8, ["f3"])]
        if not self.pooled:
            shapes = [(rows, 8, names) for rows, _, names in shapes]
        kind, fields = EmbeddingConfig, {}
        if self.pooled:
            kind, fields = EmbeddingBagConfig, {"pooling": self.pooling or PoolingType.SUM}
        return [
            kind(
                name=f"t{i}",
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=names,
                **fields,
            )
            for i, (rows, dim, names) in enumerate(shapes)
        ]

    def ranks_of(self, kind: ShardingType, rng: Any) -> list[int]:
        """Whole ranks and nodes: the peer takes no others."""
        world = list(range(self.world_size))
        if kind is ShardingType.COLUMN_WISE:  # two halves, of 4 columns or more
            return [world[-1], world[0]][: min(2, len(world))]
        if kind is ShardingType.ROW_WISE:
            return world
        return super().ranks_of(kind, rng)

    def batches(self, step: int) -> list[KeyedJaggedTensor]:
        """With ids of one type on all ranks."""
        return [
            KeyedJaggedTensor(
                batch.keys(),
                batch.values().long(),
                batch.weights_or_none(),
                batch.lengths(),
                stride_per_key_per_rank=batch.stride_per_key_per_rank(),
                inverse_indices=batch.inverse_indices(),
            )
            if batch.variable_stride_per_key()
            else KeyedJaggedTensor(
                batch.keys(),
                batch.values().long(),
                batch.weights_or_none(),
                lengths=batch.lengths(),
                stride=batch.stride(),
            )
            for batch in super().batches(step)
        ]


@contextmanager
def peer_mood() -> Iterator[None]:
    """Let TorchRec warn, which is an error in our ranks, and forget earlier process groups.

    It keeps the groups of a node for the life of the process; our ranks serve several jobs.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrec.distributed import comm

        comm._INTRA_PG = comm._CROSS_PG = None
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


class PeerPool:
    """Ranks for TorchRec, other ones for each number of ranks.

    It does some exchanges once in the life of a process: one that did has none with one that did
    not.
    """

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int, fn: Any, *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call a function on ranks, like :class:`~tests.ranks.RankPool`."""
        pool = self._pools.setdefault(world_size, RankPool())
        return pool(world_size, fn, *args, timeout=timeout)

    def close(self) -> None:
        """Ends the processes."""
        for pool in self._pools.values():
            pool.close()


class PeerModel(nn.Module):
    """The counterpart of :class:`~tests.distributed.cases.Model`, with its weights."""

    def __init__(self, case: Case) -> None:
        import torchrec

        super().__init__()
        ours = case.model()
        self.pooled = case.pooled
        poolings = {p: torchrec.PoolingType[p.name] for p in PoolingType if p.name != "NONE"}
        configs = [
            (torchrec.EmbeddingBagConfig if case.pooled else torchrec.EmbeddingConfig)(
                name=config.name,
                num_embeddings=config.num_embeddings,
                embedding_dim=config.embedding_dim,
                feature_names=list(config.feature_names),
                **({"pooling": poolings[config.pooling]} if case.pooled else {}),
            )
            for config in case.configs()
        ]
        if case.pooled:
            self.ebc: nn.Module = torchrec.EmbeddingBagCollection(
                tables=configs, is_weighted=case.is_weighted, device=CPU
            )
        else:
            self.ebc = torchrec.EmbeddingCollection(tables=configs, device=CPU)
        self.over = nn.Linear(ours.over.in_features, 3)
        self.load_state_dict(ours.state_dict())
        self.keys = list(itertools.chain(*get_embedding_names_by_table(case.configs())))

    def forward(self, features: Any) -> tuple[Tensor, Tensor]:
        found = self.ebc(features)
        if self.pooled:
            values = torch.cat([found[key] for key in self.keys], dim=1)
        else:
            values = torch.cat([found[key].values() for key in self.keys])
        return values, self.over(values.detach())


def peer_batch(batch: KeyedJaggedTensor) -> Any:
    """The same batch for TorchRec."""
    import torchrec

    fields: dict[str, Any] = {"stride": batch.stride()}
    if batch.variable_stride_per_key():
        fields = {
            "stride_per_key_per_rank": batch.stride_per_key_per_rank(),
            "inverse_indices": batch.inverse_indices(),
        }
    return torchrec.KeyedJaggedTensor(
        keys=batch.keys(),
        values=batch.values(),
        weights=batch.weights_or_none(),
        lengths=batch.lengths(),
        **fields,
    )


def _optimizer_class(ours: type[torch.optim.Optimizer] | None) -> Any:
    import torchrec.optim

    return {
        torch.optim.SGD: torch.optim.SGD,
        Adagrad: torch.optim.Adagrad,
        RowWiseAdagrad: torchrec.optim.RowWiseAdagrad,
        Adam: torch.optim.Adam,
        PartialRowWiseAdam: torchrec.optim.PartialRowWiseAdam,
    }[ours]


def shard_peer(case: Case, seed: int = 0) -> tuple[nn.Module, Any, Any]:
    """Returns the sharded model, all optimizers of its tables, and the one to step by hand.

    The latter trains the data-parallel tables, which TorchRec leaves to the user.
    """
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    model = PeerModel(case)
    kind = _optimizer_class(case.optimizer)
    settings = dict(case.hyperparameters)
    apply_optimizer_in_backward(kind, model.ebc.parameters(), dict(settings))  # it adds to them
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(case.node_size or case.world_size)):
        sharded = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(torch.distributed.group.WORLD),
            device=CPU,
            plan=_plan(case, seed),
            sharders=[
                EmbeddingBagCollectionSharder(),
                EmbeddingCollectionSharder(use_index_dedup=case.use_index_dedup),
            ],
        )
    _load(sharded.state_dict(), case.model().state_dict())  # sharding has made new weights
    replicas = {
        config.name
        for config in case.configs()
        if case.plan(seed).plan["ebc"][config.name].sharding_type == "data_parallel"
    }
    by_hand = {
        name: parameter
        for name, parameter in sharded.named_parameters()
        if name.startswith("ebc.") and name.split(".")[2] in replicas
    }
    if not by_hand:
        return sharded, sharded.fused_optimizer, None
    dense = KeyedOptimizerWrapper(by_hand, lambda parameters: kind(parameters, **settings))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense]), dense


@torch.no_grad()
def _load(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> None:
    for name, value in theirs.items():
        for place, part in parts_of(value):
            part.copy_(ours[name][place])


def _plan(case: Case, seed: int) -> Any:
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
    from torchrec.distributed.types import (
        EmbeddingModuleShardingPlan,
        ParameterSharding,
        ShardingPlan,
    )

    tables = EmbeddingModuleShardingPlan()
    for name, ours in case.plan(seed).plan["ebc"].items():
        spec = None
        if ours.sharding_spec is not None:
            spec = EnumerableShardingSpec(
                [
                    ShardMetadata(
                        shard_offsets=list(shard.shard_offsets),
                        shard_sizes=list(shard.shard_sizes),
                        placement=f"rank:{shard.rank}/cpu",
                    )
                    for shard in ours.sharding_spec.shards
                ]
            )
        kernel = "dense" if ours.sharding_type == "data_parallel" else "fused"
        tables[name] = ParameterSharding(
            sharding_type=ours.sharding_type,
            compute_kernel=kernel,
            ranks=list(ours.ranks),
            sharding_spec=spec,
        )
    return ShardingPlan(plan={"ebc": tables})


def parts_of(value: Tensor) -> Iterator[tuple[Slices, Tensor]]:
    """Yield this rank's parts of a value of the peer's state dict, with their positions."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        value = value.to_local()
        if hasattr(value, "local_shards"):
            offsets = value.local_offsets()
            for offset, part in zip(offsets, value.local_shards(), strict=True):
                yield tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True)), part
            return
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            meta = shard.metadata
            place = zip(meta.shard_offsets, meta.shard_sizes, strict=True)
            yield tuple(slice(o, o + n) for o, n in place), shard.tensor
    else:
        yield (), value
