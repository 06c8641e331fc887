"""EmbeddingBagCollection placed on many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from recsys.distributed.ranks.wire import POOLED_OPS, codecs_for
from recsys.distributed.sharded_collection import ShardedCollection
from recsys.distributed.sharder import CollectionSharder
from recsys.distributed.stages.awaitable import LazyAwaitable
from recsys.distributed.stages.batch_segments import BatchCutter
from recsys.distributed.stages.input_dist import Trip
from recsys.distributed.stages.output_dist import OutputDist
from recsys.kernels.types import PoolingMode
from recsys.modules.eager import eager_under_compile
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_inputs import expand_bags
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor, KeyedTensor


class EmbeddingBagCollectionAwaitable(LazyAwaitable[KeyedTensor]):
    """The pooled embeddings of a batch, on their way back from the ranks that own the tables."""


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An :class:`~recsys.modules.embedding_modules.EmbeddingBagCollection` placed on many ranks.

    Its output, gradients, weights and state dict are those of the unsharded collection, whatever
    the plan. Every rank calls it with its own batch, also when that batch is empty. Arguments and
    errors are those of :class:`~recsys.distributed.sharded_collection.ShardedCollection`.
    """

    tables_name: ClassVar[str] = "embedding_bags"

    def _adopt(self, module: Any) -> None:
        self._is_weighted: bool = module.is_weighted()

    def _new_cutter(self, features: Sequence[str]) -> BatchCutter:
        return BatchCutter(
            self._layout,
            features,
            self._is_weighted,
            self._device,
            self._bounds_check_mode,
            owner=type(self).__name__,
        )

    def _new_output_dist(self) -> OutputDist:
        layout = self._layout
        mean_slots = tuple(
            place
            for place, slot in enumerate(layout.split_slots)
            if self._poolings[layout.slots[slot].table] is PoolingMode.MEAN
        )
        self._dims = [slot.dim for slot in layout.slots]
        self._bag_dims = tuple(self._dims)
        self._bag_features = tuple(f for c in self._configs for f in c.feature_names)
        return OutputDist(
            layout,
            mean_slots,
            self._env,
            self._device,
            self._finisher.schedule,
            codecs_for(self._qcomm_codecs_registry, *POOLED_OPS),
            self._finisher.table_updates,
        )

    def compute_and_output_dist(self, trip: Trip) -> LazyAwaitable[KeyedTensor]:
        """Looks up the ids and starts sending the embeddings back."""
        self._finisher.forget_failed_backward()
        trains = self._trains and torch.is_grad_enabled()
        wait = self._output_dist.start(
            self._lookups.forward(trip.lookups),
            self._replicas.forward(trip.replicas),
            trip,
            trains,
        )
        features = trip.features

        def finish() -> KeyedTensor:
            pooled_BD = wait()
            if features.variable_stride_per_key():
                pooled_BD = expand_bags(pooled_BD, self._bag_dims, self._bag_features, features)
            if pooled_BD.dtype is not self._output_dtype:
                pooled_BD = pooled_BD.to(self._output_dtype)
            return KeyedTensor.from_parts(self._names, self._dims, pooled_BD)

        return EmbeddingBagCollectionAwaitable(finish)

    @eager_under_compile
    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Looks up this rank's batch.

        Args:
            features: int32 or int64 ids of this rank's samples, with every feature the tables read.

        Returns:
            A pending :class:`~recsys.sparse.KeyedTensor` ``[B, sum of dims]`` in the unsharded
            order, of the plan's ``output_dtype``, fp32 if it names none.

        Raises:
            IndexError: on every rank, if an id on any rank lies outside its table.
            KeyError: on every rank, if a batch lacks a feature.
            TypeError: on every rank, if a rank's features are no KeyedJaggedTensor or ids are not
                integers.
            ValueError: on every rank, if lengths, offsets, weights or inverse indices of a rank
                do not fit.
        """
        return self.compute_and_output_dist(self._trip(features))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the configuration of each table."""
        return self._configs

    def is_weighted(self) -> bool:
        """Returns whether features carry weights."""
        return self._is_weighted


class EmbeddingBagCollectionSharder(
    CollectionSharder[EmbeddingBagCollection, ShardedEmbeddingBagCollection]
):
    """Shards :class:`~recsys.modules.embedding_modules.EmbeddingBagCollection`.

    Args:
        fused_params: optimizer settings for tables that have no optimizer attached; see
            :class:`ShardedEmbeddingBagCollection`.
        qcomm_codecs_registry: what embeddings and gradients look like while they travel, from
            :func:`~recsys.distributed.ranks.wire.get_qcomm_codecs_registry`; None: as they are.

    Example:
        >>> sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
        >>> sharder.module_type.__name__
        'EmbeddingBagCollection'
    """

    replaces: ClassVar[type[Any]] = EmbeddingBagCollection
    makes = ShardedEmbeddingBagCollection
