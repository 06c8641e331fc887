"""Dense features and pooled embeddings, as one row or as fields.

Shapes: `B` samples, `F` sparse features, `I` dense features, `D` embedding dim.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.modules.dense_inputs import check_dense_features, common_dim
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor

__all__ = ["FieldInput", "FlatInput"]


@final
class FlatInput(nn.Module):
    """Concatenate the dense features and all pooled embeddings.

    Args:
        embedding_bag_collection: Tables of any dims. Sharding replaces this submodule.
        in_features: `I`; 0 for a model without dense features.

    Attributes:
        out_features: Columns of the output.

    Raises:
        ValueError: `in_features` is negative.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> flat = FlatInput(EmbeddingBagCollection(tables=[films]), 3)
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> flat(torch.ones(2, 3), ids).shape
        torch.Size([2, 7])
    """

    @checked
    def __init__(self, embedding_bag_collection: EmbeddingBagCollection, in_features: int) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.in_features = whole("dense_in_features", in_features, 0)
        configs = embedding_bag_collection.embedding_bag_configs()
        dims = [config.embedding_dim for config in configs for _ in config.feature_names]
        self.out_features = in_features + sum(dims)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return `[B, out_features]`, dense features first.

        Args:
            dense_features: `[B, I]`.
            sparse_features: Ids of all features, batch size `B`.
        """
        dense_features = check_dense_features(dense_features, self, "dense_in_features")
        pooled: Tensor = self.embedding_bag_collection(sparse_features).values()
        return torch.cat([dense_features, pooled], 1)


@final
class FieldInput(nn.Module):
    """Return a vector per feature: pooled embeddings, and a learned vector per dense feature.

    Args:
        embedding_bag_collection: Tables of one dim. Sharding replaces this submodule.
        in_features: `I`; the vector of a dense feature is multiplied by its value.
        device: Device of the parameters.

    Attributes:
        dim: `D`.
        num_fields: `I + F`.

    Raises:
        ValueError: `in_features` is negative, or the tables have different dims.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> fields = FieldInput(EmbeddingBagCollection(tables=[films]), 3)
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> fields(torch.ones(2, 3), ids).shape
        torch.Size([2, 4, 4])
    """

    @checked
    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        in_features: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.in_features = whole("dense_in_features", in_features, 0)
        self.dim = common_dim(embedding_bag_collection, "Fields need vectors of one size.")
        configs = embedding_bag_collection.embedding_bag_configs()
        self.num_sparse = sum(len(config.feature_names) for config in configs)
        self.num_fields = in_features + self.num_sparse
        vectors = torch.empty(in_features, self.dim, device=device)
        self.vectors = nn.Parameter(nn.init.normal_(vectors, std=0.02))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return `[B, num_fields, D]`, dense features first.

        Args:
            dense_features: `[B, I]`.
            sparse_features: Ids of all features, batch size `B`.
        """
        dense_features = check_dense_features(dense_features, self, "dense_in_features")
        pooled: Tensor = self.embedding_bag_collection(sparse_features).values()
        # explicit sizes, as -1 is undefined for an empty batch
        fields = pooled.reshape(pooled.size(0), self.num_sparse, self.dim)
        return torch.cat([dense_features.unsqueeze(2) * self.vectors, fields], 1)
