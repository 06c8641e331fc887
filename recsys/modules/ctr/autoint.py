"""AutoInt: self-attention between the features of a sample.

Song et al., "AutoInt: automatic feature interaction learning via self-attentive neural networks",
CIKM 2019, arXiv:1810.11921.

Shapes: `B` samples, `F` fields, `D` columns of a field, `T` tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.modules.ctr.inputs import FieldInput
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.mlp import MLP
from recsys.sparse import KeyedJaggedTensor

__all__ = ["AutoInt", "InteractingLayer"]


@final
class InteractingLayer(nn.Module):
    """Attention between fields, and `relu(attention + W x)`.

    Args:
        in_features: `D`.
        num_heads: Number of heads.
        head_dim: Columns of a head.
        device: Device of the parameters.

    Raises:
        ValueError: A size is below 1.

    Example:
        >>> InteractingLayer(4, num_heads=2, head_dim=3)(torch.ones(5, 7, 4)).shape
        torch.Size([5, 7, 6])
    """

    @checked
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        head_dim: int,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = whole("InteractingLayer.num_heads", num_heads)
        columns = num_heads * whole("InteractingLayer.head_dim", head_dim)
        whole("InteractingLayer.in_features", in_features)
        self.attention_in = nn.Linear(in_features, 3 * columns, bias=False, device=device)
        self.residual = nn.Linear(in_features, columns, bias=False, device=device)

    def forward(self, fields: Tensor) -> Tensor:
        """Return `[B, F, num_heads * head_dim]`.

        Args:
            fields: `[B, F, D]`.
        """
        parts = self.attention_in(fields).chunk(3, 2)
        query, key, value = (part.unflatten(2, (self.num_heads, -1)) for part in parts)
        shares = torch.einsum("bfhd,bghd->bhfg", query, key).softmax(3)
        read = torch.einsum("bhfg,bghd->bfhd", shares, value).flatten(2)
        return torch.relu(read + self.residual(fields))


@final
class AutoInt(nn.Module):
    """Interacting layers over fields, with an optional deep network beside them (AutoInt+).

    Args:
        embedding_bag_collection: Tables of one dim. Sharding replaces this submodule.
        dense_in_features: Number of dense features; each is a field.
        num_layers: Interacting layers; the output has products of up to `2 ** num_layers` fields.
        num_heads: Heads of each layer.
        head_dim: Columns of each head.
        layer_sizes: Layers of the deep network; empty for none.
        num_tasks: `T`.
        dropout: As in `MLP`.
        device: Device of the dense parameters.

    Raises:
        ValueError: A size is out of its range, or the tables have different dims.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> model = AutoInt(EmbeddingBagCollection(tables=[films]), 3)
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> model(torch.ones(2, 3), ids).shape
        torch.Size([2, 1])
    """

    @checked
    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        num_layers: int = 3,
        num_heads: int = 2,
        head_dim: int = 32,
        layer_sizes: Sequence[int] = (),
        *,
        num_tasks: int = 1,
        dropout: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        whole("num_layers", num_layers)
        self.inputs = FieldInput(embedding_bag_collection, dense_in_features, device=device)
        num_fields, dim, columns = self.inputs.num_fields, self.inputs.dim, num_heads * head_dim
        sizes = [dim, *[columns] * (num_layers - 1)]
        self.layers = nn.Sequential(
            *(InteractingLayer(size, num_heads, head_dim, device=device) for size in sizes)
        )
        self.deep = MLP(num_fields * dim, [*layer_sizes], device=device, dropout=dropout)
        self.has_deep = len(layer_sizes) > 0
        of_deep = layer_sizes[-1] if layer_sizes else 0
        self.out = nn.Linear(
            num_fields * columns + of_deep, whole("num_tasks", num_tasks), device=device
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits `[B, T]`.

        Args:
            dense_features: `[B, dense_in_features]`.
            sparse_features: Ids of all features, batch size `B`.
        """
        fields = self.inputs(dense_features, sparse_features)
        x = self.layers(fields).flatten(1)
        if self.has_deep:
            x = torch.cat([x, self.deep(fields.flatten(1))], 1)
        logits: Tensor = self.out(x)
        return logits
