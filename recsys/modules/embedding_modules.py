"""The collections under the module name users import them from."""

from recsys.modules.embedding_bag_collection import EmbeddingBagCollection
from recsys.modules.embedding_collection import EmbeddingCollection
from recsys.modules.embedding_interfaces import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "get_embedding_names_by_table",
]
