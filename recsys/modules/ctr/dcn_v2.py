"""DCN-V2: a cross network and a deep network.

Wang et al., "DCN V2: improved deep & cross network and practical lessons for web-scale learning to
rank systems", WWW 2021, arXiv:2008.13535.

Shapes: `B` samples, `T` tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor, nn

from recsys.base.arguments import shown, whole
from recsys.base.checked import checked
from recsys.modules.crossnet import CrossNet, LowRankCrossNet
from recsys.modules.ctr.inputs import FlatInput
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.mlp import MLP
from recsys.sparse import KeyedJaggedTensor

__all__ = ["DCNV2"]


@final
class DCNV2(nn.Module):
    """Cross all features explicitly, beside or below a deep network.

    Args:
        embedding_bag_collection: Tables of any dims. Sharding replaces this submodule.
        dense_in_features: Columns of the dense features; 0 for none.
        num_cross_layers: Layers of the cross network.
        layer_sizes: Layers of the deep network; empty for the cross network alone.
        structure: "parallel": both networks read the features, and one layer their outputs.
            "stacked": the deep network reads the output of the cross network.
        low_rank: Rank of the matrices of the cross network; None for full matrices.
        num_tasks: `T`.
        batch_norm: As in `MLP`.
        dropout: As in `MLP`.
        device: Device of the dense parameters.

    Raises:
        ValueError: A size is out of its range, or there is no such structure.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> model = DCNV2(EmbeddingBagCollection(tables=[films]), 3, 2, [16, 8])
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> model(torch.ones(2, 3), ids).shape
        torch.Size([2, 1])
    """

    @checked
    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        num_cross_layers: int = 3,
        layer_sizes: Sequence[int] = (256, 256),
        *,
        structure: Literal["parallel", "stacked"] = "parallel",
        low_rank: int | None = None,
        num_tasks: int = 1,
        batch_norm: bool = False,
        dropout: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if structure not in ("parallel", "stacked"):
            raise ValueError(
                f"structure must be 'parallel' or 'stacked'; received {shown(structure)}."
            )
        self.is_parallel = structure == "parallel" and len(layer_sizes) > 0
        self.inputs = FlatInput(embedding_bag_collection, dense_in_features)
        columns = self.inputs.out_features
        cross: nn.Module
        if low_rank is None:
            cross = CrossNet(columns, num_cross_layers)
        else:
            cross = LowRankCrossNet(columns, num_cross_layers, low_rank)
        self.cross = cross if device is None else cross.to(device)
        self.deep = MLP(
            columns, [*layer_sizes], device=device, batch_norm=batch_norm, dropout=dropout
        )
        deep_columns = layer_sizes[-1] if layer_sizes else columns
        deep_columns += columns if self.is_parallel else 0
        self.out = nn.Linear(deep_columns, whole("num_tasks", num_tasks), device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits `[B, T]`.

        Args:
            dense_features: `[B, dense_in_features]`.
            sparse_features: Ids of all features, batch size `B`.
        """
        x = self.inputs(dense_features, sparse_features)
        crossed = self.cross(x)
        both = [crossed, self.deep(x)] if self.is_parallel else [self.deep(crossed)]
        logits: Tensor = self.out(torch.cat(both, 1))
        return logits
