"""Sharders of fused collections, which have the same sharded modules as unfused ones."""

from __future__ import annotations

from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)


class FusedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Sharder of `FusedEmbeddingBagCollection`; its tables keep their optimizer.

    Arguments as in `EmbeddingBagCollectionSharder`.

    Example:
        >>> FusedEmbeddingBagCollectionSharder().module_type.__name__
        'FusedEmbeddingBagCollection'
    """

    replaces = FusedEmbeddingBagCollection


class FusedEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Sharder of `FusedEmbeddingCollection`; its tables keep their optimizer.

    Arguments as in `EmbeddingCollectionSharder`.

    Example:
        >>> FusedEmbeddingCollectionSharder().module_type.__name__
        'FusedEmbeddingCollection'
    """

    replaces = FusedEmbeddingCollection
