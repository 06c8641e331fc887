"""DLRM with other interactions between its features than dot products of every two.

Shapes: `B` samples, `F` sparse features, `D` embedding dim.
"""

import torch
from torch import nn

from recsys.kernels.arguments import check_input
from recsys.kernels.checked import checked
from recsys.modules.crossnet import LowRankCrossNet
from recsys.modules.dlrm import DLRM, DenseArch, check_num_sparse
from recsys.modules.embedding_modules import EmbeddingBagCollection


def _flatten(dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
    """Put a sample's vectors beside each other: `[B, (F + 1) * D]`."""
    return torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1).flatten(1)


class InteractionDCNArch(nn.Module):
    """Cross all features, laid beside each other, by a cross network.

    From Wang et al., "DCN V2: Improved Deep & Cross Network" (WWW 2021, arXiv:2008.13535).

    Args:
        num_sparse_features: `F`; with 0 the dense feature is given back.
        crossnet: maps `[B, (F + 1) * D]` to the interactions.

    Raises:
        ValueError: the number is negative.

    Example:
        >>> arch = InteractionDCNArch(2, LowRankCrossNet(in_features=12, num_layers=2))
        >>> arch(torch.ones(5, 4), torch.ones(5, 2, 4)).shape
        torch.Size([5, 12])
    """

    @checked
    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        check_num_sparse(num_sparse_features)
        self.F: int = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Cross.

        Args:
            dense_features: `[B, D]`.
            sparse_features: `[B, F, D]`.

        Returns:
            What the cross network gives, `[B, (F + 1) * D]` for those of this package.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_input(f"{type(self).__name__}.dense_features", dense_features, torch.Tensor)
            check_input(f"{type(self).__name__}.sparse_features", sparse_features, torch.Tensor)
        if self.F == 0:
            return dense_features
        crossed: torch.Tensor = self.crossnet(_flatten(dense_features, sparse_features))
        return crossed


class InteractionProjectionArch(nn.Module):
    """Dot products between two sets of vectors, each a learned projection of all features.

    With `F_1` and `F_2` vectors the products are `F_1 * F_2` columns, however many features
    there are: a product of two projections in place of the `F^2 / 2` pairs of Naumov et al.
    (2019, arXiv:1906.00091).

    Args:
        num_sparse_features: `F`; with 0 the dense feature is given back.
        interaction_branch1: maps `[B, (F + 1) * D]` to `[B, F_1 * D]`.
        interaction_branch2: maps `[B, (F + 1) * D]` to `[B, D * F_2]`.

    Raises:
        ValueError: the number is negative.

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
        super().__init__()
        check_num_sparse(num_sparse_features)
        self.F: int = num_sparse_features
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Project and multiply.

        Args:
            dense_features: `[B, D]`.
            sparse_features: `[B, F, D]`.

        Returns:
            `[B, D + F_1 * F_2]`, the dense feature first.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_input(f"{type(self).__name__}.dense_features", dense_features, torch.Tensor)
            check_input(f"{type(self).__name__}.sparse_features", sparse_features, torch.Tensor)
        if self.F == 0:
            return dense_features
        size, dim = dense_features.size(0), dense_features.size(1)
        flat = _flatten(dense_features, sparse_features)
        first, second = self.interaction_branch1(flat), self.interaction_branch2(flat)
        # Named sizes: an empty batch leaves -1 undefined.
        first_BVD = first.reshape(size, first.size(1) // dim, dim)
        second_BDV = second.reshape(size, dim, second.size(1) // dim)
        return torch.cat([dense_features, torch.bmm(first_BVD, second_BDV).flatten(1)], dim=1)


class InteractionTransformerArch(nn.Module):
    """Let all features attend to each other, by transformer encoder layers.

    The layers are torch's, of Vaswani et al., "Attention Is All You Need" (NeurIPS 2017,
    arXiv:1706.03762). As in TorchRec, they see a batch as one sequence of samples for each
    feature: samples attend to each other, which makes an output depend on the rest of its batch.

    Args:
        num_sparse_features: `F`; with 0 the dense feature is given back.
        embedding_dim: `D`, divisible by `nhead`.
        nhead: attention heads.
        ntransformer_layers: encoder layers.

    Raises:
        ValueError: the number of features is negative.

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
        super().__init__()
        check_num_sparse(num_sparse_features)
        self.F: int = num_sparse_features
        layer = nn.TransformerEncoderLayer(embedding_dim, nhead)
        self.interarch_TE = nn.TransformerEncoder(
            layer, ntransformer_layers, enable_nested_tensor=False
        )

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            dense_features: `[B, D]`.
            sparse_features: `[B, F, D]`.

        Returns:
            `[B, (F + 1) * D]`.
        """
        if self.F == 0:
            return dense_features
        features = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        attended: torch.Tensor = self.interarch_TE(features)
        return attended.flatten(1)


class DLRM_DCN(DLRM):
    """DLRM whose features are crossed by a low-rank cross network.

    Args:
        embedding_bag_collection: tables of one embedding dim `D`; None for a model without sparse
            features.
        dense_in_features: columns of the dense features; see `DLRM`.
        dense_arch_layer_sizes: of the first MLP; the last must be `D`.
        over_arch_layer_sizes: of the second MLP; the last is 1 for a logit.
        dcn_num_layers: layers of the cross network.
        dcn_low_rank_dim: rank of its matrices.
        dense_device: where the MLPs' and the cross network's parameters are.
        batch_norm: as in `DLRM`.
        dropout: as in `DLRM`.

    Raises:
        ValueError: as in `DLRM`, or a size of the cross network is below 1.

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
        nn.Module.__init__(self)  # DLRM's own would make an interaction that nobody needs

        def crosses(num_sparse: int, dim: int) -> tuple[nn.Module, int]:
            in_features = (num_sparse + 1) * dim
            crossnet = LowRankCrossNet(in_features, dcn_num_layers, dcn_low_rank_dim)
            return InteractionDCNArch(num_sparse, crossnet.to(dense_device)), in_features

        self._build(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes,
            over_arch_layer_sizes, crosses,
            device=dense_device, batch_norm=batch_norm, dropout=dropout,
        )  # fmt: skip


class DLRM_Projection(DLRM):
    """DLRM whose features meet as products of two learned projections.

    Args:
        embedding_bag_collection: tables of one embedding dim `D`; None for a model without sparse
            features.
        dense_in_features: columns of the dense features; see `DLRM`.
        dense_arch_layer_sizes: of the first MLP; the last must be `D`.
        over_arch_layer_sizes: of the last MLP; the last is 1 for a logit.
        interaction_branch1_layer_sizes: of one projection; the last is a multiple of `D`.
        interaction_branch2_layer_sizes: of the other; the last is a multiple of `D`.
        dense_device: where the MLPs' parameters are.
        batch_norm: as in `DLRM`, for the projections too.
        dropout: as in `DLRM`, for the projections too.

    Raises:
        ValueError: as in `DLRM`, or the last layer of a projection is no multiple of `D`.

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
        nn.Module.__init__(self)  # DLRM's own would make an interaction that nobody needs
        branches = (interaction_branch1_layer_sizes, interaction_branch2_layer_sizes)

        def products(num_sparse: int, dim: int) -> tuple[nn.Module, int]:
            for number, sizes in enumerate(branches, 1):
                if not sizes or sizes[-1] % dim:
                    raise ValueError(
                        f"the last of interaction_branch{number}_layer_sizes must be a multiple of "
                        f"the embedding_dim {dim}; received {sizes}. It is that many vectors."
                    )
            arch = InteractionProjectionArch(
                num_sparse,
                *(
                    DenseArch(
                        (num_sparse + 1) * dim, sizes, dense_device,
                        batch_norm=batch_norm, dropout=dropout,
                    )
                    for sizes in branches
                ),
            )  # fmt: skip
            num_products = branches[0][-1] // dim * (branches[1][-1] // dim)
            return arch, dim + num_products if num_sparse else dim

        self._build(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes,
            over_arch_layer_sizes, products,
            device=dense_device, batch_norm=batch_norm, dropout=dropout,
        )  # fmt: skip


class DLRM_Transformer(DLRM):
    """DLRM whose features attend to each other.

    Args:
        embedding_bag_collection: tables of one embedding dim `D`.
        dense_in_features: columns of the dense features; see `DLRM`.
        dense_arch_layer_sizes: of the first MLP; the last must be `D`.
        over_arch_layer_sizes: of the second MLP; the last is 1 for a logit.
        nhead: attention heads.
        ntransformer_layers: encoder layers.
        dense_device: where the dense parameters are.

    Raises:
        ValueError: as in `DLRM`.

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
        nn.Module.__init__(self)  # DLRM's own would make an interaction that nobody needs

        def attends(num_sparse: int, dim: int) -> tuple[nn.Module, int]:
            arch = InteractionTransformerArch(num_sparse, dim, nhead, ntransformer_layers)
            return arch.to(dense_device), (num_sparse + 1) * dim

        self._build(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes,
            over_arch_layer_sizes, attends,
            device=dense_device, batch_norm=False, dropout=0.0,
        )  # fmt: skip
