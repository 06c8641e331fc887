"""EmbeddingBagCollection placed on many ranks."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from recsys.distributed.ranks.comm import LazyAwaitable
from recsys.distributed.ranks.wire import POOLED_OPS
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.sharded.sharder import CollectionSharder
from recsys.distributed.stages.output_dist import OutputDist
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedTensor


class EmbeddingBagCollectionAwaitable(LazyAwaitable[KeyedTensor]):
    """The pooled embeddings of a batch, on their way back from the ranks that own the tables."""


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An `EmbeddingBagCollection` placed on many ranks.

    Its output, gradients, weights and state dict are those of the unsharded collection, whatever
    the plan: a pending `KeyedTensor` `[B, sum of dims]` of the plan's
    `output_dtype`, fp32 if it names none. Every rank calls it with its own batch, also when that
    batch is empty. Arguments and errors are those of
    `ShardedCollection`.
    """

    unsharded_module_type: ClassVar[type[nn.Module]] = EmbeddingBagCollection
    tables_name: ClassVar[str] = "embedding_bags"
    output_type = EmbeddingBagCollectionAwaitable
    output_stage = OutputDist
    output_ops = POOLED_OPS

    def _adopt(self, module: Any) -> None:
        self._is_weighted = module.is_weighted()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configuration of each table."""
        return self.configs()

    def is_weighted(self) -> bool:
        """Return whether features carry weights."""
        return self._is_weighted


class EmbeddingBagCollectionSharder(
    CollectionSharder[EmbeddingBagCollection, ShardedEmbeddingBagCollection]
):
    """Shards `EmbeddingBagCollection`.

    Args:
        fused_params: optimizer settings for tables that have no optimizer attached; see
            `ShardedEmbeddingBagCollection`.
        qcomm_codecs_registry: what embeddings and gradients look like while they travel, from
            `get_qcomm_codecs_registry`; None: as they are.

    Example:
        >>> sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
        >>> sharder.module_type.__name__
        'EmbeddingBagCollection'
    """

    replaces: ClassVar[type[Any]] = EmbeddingBagCollection
    makes = ShardedEmbeddingBagCollection
