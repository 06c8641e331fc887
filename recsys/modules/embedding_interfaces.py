"""Interfaces of collections, sharded or not."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Sequence

from torch import nn

from recsys.base.checked import checked
from recsys.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "EmbeddingBagCollectionInterface",
    "EmbeddingCollectionInterface",
    "get_embedding_names_by_table",
]


class EmbeddingBagCollectionInterface(abc.ABC, nn.Module):
    """Pooled embeddings of several tables."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool a batch."""

    @abc.abstractmethod
    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables."""

    @abc.abstractmethod
    def is_weighted(self) -> bool:
        """Return whether ids have weights."""


class EmbeddingCollectionInterface(abc.ABC, nn.Module):
    """One embedding per id, of several tables."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up a batch."""

    @abc.abstractmethod
    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables."""

    @abc.abstractmethod
    def need_indices(self) -> bool:
        """Return whether the output includes the ids."""

    @abc.abstractmethod
    def embedding_dim(self) -> int:
        """Return the number of columns of every table."""

    @abc.abstractmethod
    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs of each table."""


@checked
def get_embedding_names_by_table(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """Return the names of the outputs of each table.

    The name is the feature, or "feature@table" if several tables read the feature.

    Args:
        tables: The tables of one collection.

    Returns:
        One list per table, in the order of its features.

    Example:
        >>> get_embedding_names_by_table([
        ...     EmbeddingConfig(9, 4, "users", feature_names=["user", "friend"]),
        ...     EmbeddingConfig(9, 4, "bias", feature_names=["user"]),
        ... ])
        [['user@users', 'friend'], ['user@bias']]
    """
    readers = Counter(feature for table in tables for feature in table.feature_names)
    return [
        [f if readers[f] == 1 else f"{f}@{table.name}" for f in table.feature_names]
        for table in tables
    ]
