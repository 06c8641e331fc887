"""FeatureProcessedEmbeddingBagCollection with sharded tables and replicated processors.

Processors run on the bags of this rank, before ids are sent, as in the unsharded collection. The
weights are sent with the ids, and their gradients are sent back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from recsys.base.checked import checked
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
from recsys.modules.feature_processor import FeatureProcessorsCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.optim.keyed import CombinedOptimizer
from recsys.sparse import KeyedJaggedTensor, KeyedTensor


@final
class ShardedFeatureProcessedEmbeddingBagCollection(ShardedModule):
    """`FeatureProcessedEmbeddingBagCollection` with sharded tables.

    Processors are dense parameters; DistributedModelParallel replicates them like other dense
    parameters. The state dict has the names of the unsharded collection.

    Args:
        feature_processors: The processors.
        embedding_bag_collection: The tables.
    """

    answers_for_all = False
    unsharded_module_type: ClassVar[type[nn.Module]] = FeatureProcessedEmbeddingBagCollection
    """Type of the unsharded module."""

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
        """Keyed optimizer of the tables with fused updates; names as in the state dict."""
        tables = "_embedding_bag_collection"
        return CombinedOptimizer([(tables, self._embedding_bag_collection.fused_optimizer)])

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names of the tables; processors are the same on every rank.

        Args:
            prefix: Path of the module, which is prepended to each name.
        """
        path = f"{prefix}._embedding_bag_collection" if prefix else "_embedding_bag_collection"
        yield from self._embedding_bag_collection.sharded_parameter_names(path)

    def split(self) -> tuple[FeatureProcessorsCollection, ShardedEmbeddingBagCollection]:
        """Return the processors and the tables."""
        return self._feature_processors, self._embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Process and look up this rank's batch.

        Args:
            features: int32 or int64 ids of this rank's samples, with every feature of the tables.

        Returns:
            A pending `KeyedTensor` `[B, sum of dims]` in the unsharded order.

        Raises:
            ValueError: On every rank, an error of the processors of any rank.
            IndexError: On every rank, if an id on any rank is outside its table. On a GPU without
                other ranks it may be raised later, as in `ShardedCollection`.
            KeyError: On every rank, if a batch lacks a feature.
            TypeError: On every rank, if ids are not integers.
        """
        pooled: LazyAwaitable[KeyedTensor] = self._embedding_bag_collection(self._process(features))
        return pooled

    def check_ids(self) -> None:
        """Raise the pending errors of earlier batches, as `ShardedCollection.check_ids`."""
        self._embedding_bag_collection.check_ids()

    def _process(self, features: KeyedJaggedTensor) -> Any:
        try:
            return self._feature_processors(features)
        except Exception as error:  # the input stage raises it on every rank
            return error

    def create_context(self) -> BatchContext:
        """Return a context for one batch; see `ShardedCollection`."""
        return self._embedding_bag_collection.create_context()

    def input_dist(
        self, ctx: BatchContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[BatchContext]]:
        """Process this rank's batch and start its header exchange.

        Processors use their current weights, so a batch that starts before the step of another
        batch does not use the updated weights.

        Args:
            ctx: A new context.
            features: The batch, as for `forward`.

        Returns:
            As `ShardedCollection.input_dist`.
        """
        return self._embedding_bag_collection.input_dist(ctx, self._process(features))

    def compute(self, ctx: BatchContext, dist_input: BatchContext) -> list[Tensor]:
        """Look up the received ids of a batch; see `ShardedCollection`."""
        return self._embedding_bag_collection.compute(ctx, dist_input)

    def output_dist(
        self, ctx: BatchContext, output: Iterable[Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Start sending embeddings to the ranks of their samples; see `ShardedCollection`."""
        return self._embedding_bag_collection.output_dist(ctx, output)

    def compute_and_output_dist(
        self, ctx: BatchContext, input: BatchContext
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up the received ids and start sending embeddings; see `ShardedCollection`."""
        return self._embedding_bag_collection.compute_and_output_dist(ctx, input)


class FeatureProcessedEmbeddingBagCollectionSharder(
    ModuleSharder[FeatureProcessedEmbeddingBagCollection]
):
    """Sharder of `FeatureProcessedEmbeddingBagCollection`.

    Args:
        ebc_sharder: Sharder of the tables; None for an `EmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: Wire formats for that default sharder.

    Raises:
        ValueError: If both are given.

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
                "FeatureProcessedEmbeddingBagCollectionSharder needs an ebc_sharder or a "
                "qcomm_codecs_registry; received both. Pass the registry to the ebc_sharder."
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
        """Return the collection with sharded tables; weights and processors are kept."""
        processors, tables = module.split()
        sharded = self._ebc_sharder.shard(tables, params, env, device, module_fqn)
        return ShardedFeatureProcessedEmbeddingBagCollection(processors, sharded)

    @checked
    def shardable_parameters(
        self, module: FeatureProcessedEmbeddingBagCollection
    ) -> dict[str, nn.Parameter]:
        """Return the weight of each table by name."""
        return self._ebc_sharder.shardable_parameters(module.split()[1])

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types that the sharder of the tables supports."""
        return self._ebc_sharder.sharding_types(compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the compute kernels that the sharder of the tables supports."""
        return self._ebc_sharder.compute_kernels(sharding_type, compute_device_type)
