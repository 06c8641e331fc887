"""FeatureProcessedEmbeddingBagCollection placed on many ranks: its tables are, its processors not.

A processor sees the bags of its own rank, before their ids travel, so that whatever it does is what
it does unsharded. The weights travel with the ids, and their gradients come back the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from recsys.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from recsys.distributed.placement.plan import ParameterSharding
from recsys.distributed.ranks.comm import Awaitable, LazyAwaitable
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import QuantizedCommCodecs
from recsys.distributed.sharded.sharder import ModuleSharder, ShardedModule
from recsys.distributed.stages.batch import BatchContext
from recsys.kernels.checked import checked
from recsys.modules.feature_processor import FeatureProcessorsCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.optim.keyed import CombinedOptimizer
from recsys.sparse import KeyedJaggedTensor, KeyedTensor


@final
class ShardedFeatureProcessedEmbeddingBagCollection(ShardedModule):
    """The processors of a collection on every rank, before its tables on many.

    The processors are dense parameters, which DistributedModelParallel replicates with those of the
    rest of the model. Names in the state dict are those of the unsharded collection.

    Args:
        feature_processors: the processors.
        embedding_bag_collection: the tables.
    """

    answers_for_all = False
    unsharded_module_type: ClassVar[type[nn.Module]] = FeatureProcessedEmbeddingBagCollection
    """What it takes the place of."""

    def __init__(
        self,
        feature_processors: FeatureProcessorsCollection,
        embedding_bag_collection: ShardedEmbeddingBagCollection,
    ) -> None:
        super().__init__()
        self._embedding_bag_collection = embedding_bag_collection
        self._feature_processors = feature_processors

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The keyed optimizer of the tables that update themselves; names as in the state dict."""
        tables = "_embedding_bag_collection"
        return CombinedOptimizer([(tables, self._embedding_bag_collection.fused_optimizer)])

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names of the tables; processors are the same on every rank.

        Args:
            prefix: the module's path, which leads every name.
        """
        path = f"{prefix}._embedding_bag_collection" if prefix else "_embedding_bag_collection"
        yield from self._embedding_bag_collection.sharded_parameter_names(path)

    def split(self) -> tuple[FeatureProcessorsCollection, ShardedEmbeddingBagCollection]:
        """Return the processors and the tables."""
        return self._feature_processors, self._embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Weigh and look up this rank's batch.

        Args:
            features: int32 or int64 ids of this rank's samples, with every feature the tables read.

        Returns:
            A pending `KeyedTensor` `[B, sum of dims]` in the unsharded
            order.

        Raises:
            ValueError: on every rank, as the processors do on any.
            IndexError: on every rank, if an id on any rank is outside its table; on a GPU without
                other ranks maybe later, as of `ShardedCollection`.
            KeyError: on every rank, if a batch lacks a feature.
            TypeError: on every rank, if ids are not integers.
        """
        pooled: LazyAwaitable[KeyedTensor] = self._embedding_bag_collection(self._weigh(features))
        return pooled

    def check_ids(self) -> None:
        """Raise now what is wrong with an earlier batch, as `ShardedCollection.check_ids` does."""
        self._embedding_bag_collection.check_ids()

    def _weigh(self, features: KeyedJaggedTensor) -> Any:
        try:
            return self._feature_processors(features)
        except Exception as error:  # the input stage raises it on every rank
            return error

    def create_context(self) -> BatchContext:
        """Return what goes with one batch through the stages; see `ShardedCollection`."""
        return self._embedding_bag_collection.create_context()

    def input_dist(
        self, ctx: BatchContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[BatchContext]]:
        """Weigh this rank's batch now, and start to tell the ranks how many ids come.

        A batch whose input stage runs before the step of another has the weights of before that
        step.

        Args:
            ctx: a new context.
            features: as for `forward`.

        Returns:
            As `ShardedCollection.input_dist`.
        """
        return self._embedding_bag_collection.input_dist(ctx, self._weigh(features))

    def compute(self, ctx: BatchContext, dist_input: BatchContext) -> list[Tensor]:
        """Look up what this rank has of a batch; see `ShardedCollection`."""
        return self._embedding_bag_collection.compute(ctx, dist_input)

    def output_dist(
        self, ctx: BatchContext, output: Iterable[Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Start sending embeddings to the samples' ranks; see `ShardedCollection`."""
        return self._embedding_bag_collection.output_dist(ctx, output)

    def compute_and_output_dist(
        self, ctx: BatchContext, input: BatchContext
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up what this rank has, and start sending it; see `ShardedCollection`."""
        return self._embedding_bag_collection.compute_and_output_dist(ctx, input)


class FeatureProcessedEmbeddingBagCollectionSharder(
    ModuleSharder[FeatureProcessedEmbeddingBagCollection]
):
    """Shards the tables of a `FeatureProcessedEmbeddingBagCollection`.

    Args:
        ebc_sharder: shards the tables; an `EmbeddingBagCollectionSharder` if None.
        qcomm_codecs_registry: what the latter is made with; an `ebc_sharder` brings its own.

    Raises:
        ValueError: if both are given.

    Example:
        >>> FeatureProcessedEmbeddingBagCollectionSharder().module_type.__name__
        'FeatureProcessedEmbeddingBagCollection'
    """

    @checked
    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        if ebc_sharder is not None and qcomm_codecs_registry is not None:
            raise ValueError(
                "FeatureProcessedEmbeddingBagCollectionSharder takes an ebc_sharder or a "
                "qcomm_codecs_registry; received both. Give the registry to the ebc_sharder."
            )
        self._ebc_sharder = ebc_sharder or EmbeddingBagCollectionSharder(
            qcomm_codecs_registry=qcomm_codecs_registry
        )
        self.fused_params = self._ebc_sharder.fused_params
        self.qcomm_codecs_registry = self._ebc_sharder.qcomm_codecs_registry

    @property
    def module_type(self) -> type[FeatureProcessedEmbeddingBagCollection]:
        """The module type this sharder replaces."""
        return FeatureProcessedEmbeddingBagCollection

    @checked
    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFeatureProcessedEmbeddingBagCollection:
        """Return the collection with sharded tables; their weights and the processors are kept."""
        processors, tables = module.split()
        sharded = self._ebc_sharder.shard(tables, params, env, device, module_fqn)
        return ShardedFeatureProcessedEmbeddingBagCollection(processors, sharded)

    @checked
    def shardable_parameters(
        self, module: FeatureProcessedEmbeddingBagCollection
    ) -> dict[str, nn.Parameter]:
        """Return table name to weight."""
        return self._ebc_sharder.shardable_parameters(module.split()[1])

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types that the sharder of the tables can execute."""
        return self._ebc_sharder.sharding_types(compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the compute kernels that the sharder of the tables can execute."""
        return self._ebc_sharder.compute_kernels(sharding_type, compute_device_type)
