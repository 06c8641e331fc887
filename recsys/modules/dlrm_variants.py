"""DLRM with a cross network in place of dot products.

Shapes: `B` samples, `F` sparse features, `D` embedding dim.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recsys.base.checked import checked
from recsys.base.lazy import moved_names
from recsys.modules.crossnet import LowRankCrossNet
from recsys.modules.dlrm import DLRM, FeatureInteraction
from recsys.modules.embedding_modules import EmbeddingBagCollection


class InteractionDCNArch(FeatureInteraction):
    """Apply a cross network to the concatenated features.

    From Wang et al., "DCN V2: Improved Deep & Cross Network" (WWW 2021, arXiv:2008.13535). The
    output of this package's cross networks is `[B, (F + 1) * D]`.

    Args:
        num_sparse_features: `F`; with 0 the output is the dense vector.
        crossnet: Maps `[B, (F + 1) * D]` to the interactions.

    Raises:
        ValueError: The number is negative.

    Example:
        >>> arch = InteractionDCNArch(2, LowRankCrossNet(in_features=12, num_layers=2))
        >>> arch(torch.ones(5, 4), torch.ones(5, 2, 4)).shape
        torch.Size([5, 12])
    """

    @checked
    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__(num_sparse_features)
        self.crossnet = crossnet

    def _interact(self, dense_BD: torch.Tensor, vectors_BVD: torch.Tensor) -> torch.Tensor:
        crossed: torch.Tensor = self.crossnet(vectors_BVD.flatten(1))
        return crossed


class DLRM_DCN(DLRM):
    """DLRM with a low-rank cross network as interaction.

    Args:
        embedding_bag_collection: Tables of one embedding dim `D`; None for a model without sparse
            features.
        dense_in_features: Columns of the dense features; see `DLRM`.
        dense_arch_layer_sizes: Layers of the first MLP; the last must be `D`.
        over_arch_layer_sizes: Layers of the second MLP; the last is 1 for a logit.
        dcn_num_layers: Layers of the cross network.
        dcn_low_rank_dim: Rank of its matrices.
        dense_device: Device of the dense parameters.
        batch_norm: As in `DLRM`.
        dropout: As in `DLRM`.

    Raises:
        ValueError: As in `DLRM`, or a size of the cross network is below 1.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.sparse import KeyedJaggedTensor
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> tables = EmbeddingBagCollection(tables=[films])
        >>> model = DLRM_DCN(tables, 13, [8, 4], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=3)
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> model(torch.ones(2, 13), ids).shape
        torch.Size([2, 1])
    """

    @checked
    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection | None,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
        *,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        self._crossnet_sizes = dcn_num_layers, dcn_low_rank_dim
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes,
            over_arch_layer_sizes, dense_device, batch_norm=batch_norm, dropout=dropout,
        )  # fmt: skip

    def _interaction(
        self, num_sparse: int, dim: int, options: dict[str, Any]
    ) -> tuple[nn.Module, int]:
        in_features = (num_sparse + 1) * dim
        crossnet = LowRankCrossNet(in_features, *self._crossnet_sizes).to(options["device"])
        return InteractionDCNArch(num_sparse, crossnet), in_features


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
