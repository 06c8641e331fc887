"""DLRM whose features interact by learned projections, or by attention.

Shapes: `B` samples, `F` sparse features, `D` embedding dim.
"""

from typing import Any

import torch
from torch import nn

from recsys.base.checked import checked
from recsys.modules.dlrm import DLRM, DenseArch, FeatureInteraction
from recsys.modules.embedding_modules import EmbeddingBagCollection


class InteractionProjectionArch(FeatureInteraction):
    """Dot products between two sets of vectors, each a learned projection of all features.

    The products of `F_1` and `F_2` vectors have `F_1 * F_2` columns for any number of features,
    instead of the `F^2 / 2` pairs of Naumov et al. (2019, arXiv:1906.00091). The output is the
    dense vector and the products: `[B, D + F_1 * F_2]`.

    Args:
        num_sparse_features: `F`; with 0 the output is the dense vector.
        interaction_branch1: Maps `[B, (F + 1) * D]` to `[B, F_1 * D]`.
        interaction_branch2: Maps `[B, (F + 1) * D]` to `[B, D * F_2]`.

    Raises:
        ValueError: The number is negative.

    Example:
        >>> arch = InteractionProjectionArch(2, nn.Linear(12, 8), nn.Linear(12, 4))
        >>> arch(torch.ones(5, 4), torch.ones(5, 2, 4)).shape
        torch.Size([5, 6])
    """

    @checked
    def __init__(
        self,
        num_sparse_features: int,
        interaction_branch1: nn.Module,
        interaction_branch2: nn.Module,
    ) -> None:
        super().__init__(num_sparse_features)
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def _interact(self, dense_BD: torch.Tensor, vectors_BVD: torch.Tensor) -> torch.Tensor:
        size, dim = dense_BD.size(0), dense_BD.size(1)
        flat = vectors_BVD.flatten(1)
        first, second = self.interaction_branch1(flat), self.interaction_branch2(flat)
        # explicit sizes, as -1 is undefined for an empty batch
        first_BVD = first.reshape(size, first.size(1) // dim, dim)
        second_BDV = second.reshape(size, dim, second.size(1) // dim)
        return torch.cat([dense_BD, torch.bmm(first_BVD, second_BDV).flatten(1)], dim=1)


class InteractionTransformerArch(FeatureInteraction):
    """Attention between all features, by the transformer encoder layers of torch.

    From Vaswani et al., "Attention Is All You Need" (NeurIPS 2017, arXiv:1706.03762). As in
    TorchRec, a batch is one sequence of samples per feature: samples attend to each other, so an
    output depends on the rest of its batch. The output is `[B, (F + 1) * D]`.

    Args:
        num_sparse_features: `F`; with 0 the output is the dense vector.
        embedding_dim: `D`, divisible by `nhead`.
        nhead: Attention heads.
        ntransformer_layers: Encoder layers.

    Raises:
        ValueError: The number of features is negative.

    Example:
        >>> arch = InteractionTransformerArch(2, 4, nhead=2, ntransformer_layers=1)
        >>> arch(torch.ones(5, 4), torch.ones(5, 2, 4)).shape
        torch.Size([5, 12])
    """

    @checked
    def __init__(
        self,
        num_sparse_features: int,
        embedding_dim: int,
        nhead: int = 8,
        ntransformer_layers: int = 4,
    ) -> None:
        super().__init__(num_sparse_features)
        layer = nn.TransformerEncoderLayer(embedding_dim, nhead)
        self.interarch_TE = nn.TransformerEncoder(
            layer, ntransformer_layers, enable_nested_tensor=False
        )

    def _interact(self, dense_BD: torch.Tensor, vectors_BVD: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.interarch_TE(vectors_BVD)
        return attended.flatten(1)


class DLRM_Projection(DLRM):
    """DLRM with products of two learned projections as interaction.

    Args:
        embedding_bag_collection: Tables of one embedding dim `D`; None for a model without sparse
            features.
        dense_in_features: Columns of the dense features; see `DLRM`.
        dense_arch_layer_sizes: Layers of the first MLP; the last must be `D`.
        over_arch_layer_sizes: Layers of the last MLP; the last is 1 for a logit.
        interaction_branch1_layer_sizes: Layers of one projection; the last is a multiple of `D`.
        interaction_branch2_layer_sizes: Layers of the other; the last is a multiple of `D`.
        dense_device: Device of the dense parameters.
        batch_norm: As in `DLRM`, for the projections too.
        dropout: As in `DLRM`, for the projections too.

    Raises:
        ValueError: As in `DLRM`, or the last layer of a projection is not a multiple of `D`.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.sparse import KeyedJaggedTensor
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> tables = EmbeddingBagCollection(tables=[films])
        >>> model = DLRM_Projection(tables, 13, [8, 4], [8, 1], [16, 8], [16, 4])
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
        interaction_branch1_layer_sizes: list[int],
        interaction_branch2_layer_sizes: list[int],
        dense_device: torch.device | None = None,
        *,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        self._branch_sizes = interaction_branch1_layer_sizes, interaction_branch2_layer_sizes
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes,
            over_arch_layer_sizes, dense_device, batch_norm=batch_norm, dropout=dropout,
        )  # fmt: skip

    def _interaction(
        self, num_sparse: int, dim: int, options: dict[str, Any]
    ) -> tuple[nn.Module, int]:
        in_features, (first, second) = (num_sparse + 1) * dim, self._branch_sizes
        for number, sizes in enumerate(self._branch_sizes, 1):
            if not sizes or sizes[-1] % dim:
                raise ValueError(
                    f"the last of interaction_branch{number}_layer_sizes must be a multiple of the "
                    f"embedding_dim {dim}; received {sizes}. It is the size of whole vectors."
                )
        branches = [DenseArch(in_features, sizes, **options) for sizes in self._branch_sizes]
        num_products = first[-1] // dim * (second[-1] // dim)
        arch = InteractionProjectionArch(num_sparse, *branches)
        return arch, dim + num_products if num_sparse else dim


class DLRM_Transformer(DLRM):
    """DLRM with transformer layers as interaction.

    Args:
        embedding_bag_collection: Tables of one embedding dim `D`.
        dense_in_features: Columns of the dense features; see `DLRM`.
        dense_arch_layer_sizes: Layers of the first MLP; the last must be `D`.
        over_arch_layer_sizes: Layers of the second MLP; the last is 1 for a logit.
        nhead: Attention heads.
        ntransformer_layers: Encoder layers.
        dense_device: Device of the dense parameters.

    Raises:
        ValueError: As in `DLRM`.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.sparse import KeyedJaggedTensor
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> tables = EmbeddingBagCollection(tables=[films])
        >>> model = DLRM_Transformer(tables, 13, [8, 4], [8, 1], nhead=2, ntransformer_layers=1)
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
        nhead: int = 8,
        ntransformer_layers: int = 4,
        dense_device: torch.device | None = None,
    ) -> None:
        self._transformer_sizes = nhead, ntransformer_layers
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes,
            over_arch_layer_sizes, dense_device,
        )  # fmt: skip

    def _interaction(
        self, num_sparse: int, dim: int, options: dict[str, Any]
    ) -> tuple[nn.Module, int]:
        arch = InteractionTransformerArch(num_sparse, dim, *self._transformer_sizes)
        return arch.to(options["device"]), (num_sparse + 1) * dim
