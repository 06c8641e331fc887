"""EmbeddingBagCollection sharded over ranks."""

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
    """Pending pooled embeddings of a batch."""


class ShardedEmbeddingBagCollection(ShardedCollection):
    """`EmbeddingBagCollection` that is sharded over ranks.

    Its output, gradients, weights and state dict equal the unsharded collection's under any plan.
    The output is a pending `KeyedTensor` `[B, sum of dims]` of the plan's `output_dtype` (default:
    fp32). Every rank calls it with its own batch, even if that batch is empty. Arguments and errors
    as in `ShardedCollection`.
    """

    unsharded_module_type: ClassVar[type[nn.Module]] = EmbeddingBagCollection
    tables_name: ClassVar[str] = "embedding_bags"
    output_type = EmbeddingBagCollectionAwaitable
    output_stage = OutputDist
    output_ops = POOLED_OPS

    def _adopt(self, module: Any) -> None:
        self._is_weighted = module.is_weighted()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables, in order."""
        return self.configs()

    def is_weighted(self) -> bool:
        """Return whether ids have weights."""
        return self._is_weighted


class EmbeddingBagCollectionSharder(
    CollectionSharder[EmbeddingBagCollection, ShardedEmbeddingBagCollection]
):
    """Sharder of `EmbeddingBagCollection`.

    Args:
        fused_params: Optimizer settings for tables without an attached optimizer.
        qcomm_codecs_registry: Wire formats of embeddings and gradients, from
            `get_qcomm_codecs_registry`; None for the dtype of the values.

    Example:
        >>> sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
        >>> sharder.module_type.__name__
        'EmbeddingBagCollection'
    """

    replaces: ClassVar[type[Any]] = EmbeddingBagCollection
    makes = ShardedEmbeddingBagCollection
