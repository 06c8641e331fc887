"""Sharders of the fused collections, which become the same sharded modules as the others."""

from __future__ import annotations

from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)


class FusedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards `FusedEmbeddingBagCollection`; its tables keep their optimizer.

    Arguments are those of `EmbeddingBagCollectionSharder`.

    Example:
        >>> FusedEmbeddingBagCollectionSharder().module_type.__name__
        'FusedEmbeddingBagCollection'
    """

    replaces = FusedEmbeddingBagCollection


class FusedEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards `FusedEmbeddingCollection`; its tables keep their optimizer.

    Arguments are those of `EmbeddingCollectionSharder`.

    Example:
        >>> FusedEmbeddingCollectionSharder().module_type.__name__
        'FusedEmbeddingCollection'
    """

    replaces = FusedEmbeddingCollection
