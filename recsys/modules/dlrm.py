"""The deep learning recommendation model of Naumov et al. (2019, arXiv:1906.00091).

Dense features go through an MLP, sparse ones through embedding tables of the same width; the dot
products of every two of them, beside the dense one, go through a second MLP to one logit.

Shapes: `B` samples, `F` sparse features, `D` embedding dim, `P = (F + 1) * F / 2` pairs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recsys.kernels.arguments import check_input
from recsys.kernels.checked import checked
from recsys.modules.dense_inputs import check_dense_features
from recsys.modules.dot_interaction import dot_pairs, pair_of_position, pair_positions
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.mlp import MLP, check_sizes
from recsys.sparse import KeyedJaggedTensor, KeyedTensor
from recsys.sparse.value_checks import check_labels

if TYPE_CHECKING:
    from recsys.datasets.utils import Batch


class SparseArch(nn.Module):
    """Look up every sparse feature.

    Args:
        embedding_bag_collection: tables of one embedding dim. Sharding replaces it in this place.

    Raises:
        ValueError: there is no table, or tables differ in their dim.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> arch = SparseArch(EmbeddingBagCollection(tables=[films]))
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> arch(ids).shape
        torch.Size([2, 1, 4])
    """

    @checked
    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        dims = {
            config.name: config.embedding_dim
            for config in embedding_bag_collection.embedding_bag_configs()
        }
        if len(set(dims.values())) != 1:
            raise ValueError(
                "embedding_bag_collection must have tables, all of one embedding_dim; received "
                f"{dims}. Dot products need vectors of equal size."
            )
        self.embedding_bag_collection = embedding_bag_collection
        self.D: int = next(iter(dims.values()))
        self._sparse_feature_names = [
            name
            for config in embedding_bag_collection.embedding_bag_configs()
            for name in config.feature_names
        ]
        self.F: int = len(self._sparse_feature_names)

    @property
    def sparse_feature_names(self) -> list[str]:
        """Names of the features in the order of the output; one that two tables share is twice."""
        return self._sparse_feature_names

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look up ids.

        Args:
            features: the ids of all `F` features, stride `B`.

        Returns:
            `[B, F, D]`, pooled.
        """
        return self.stack(self.embedding_bag_collection(features))

    def stack(self, pooled: KeyedTensor) -> torch.Tensor:
        """Give each feature a row of its own.

        Args:
            pooled: what the collection returns; a sharded one answers later, when it is used here.

        Returns:
            `[B, F, D]`.
        """
        values: torch.Tensor = pooled.values()
        # Named sizes: an empty batch leaves -1 undefined.
        return values.reshape(values.size(0), self.F, self.D)


class DenseArch(nn.Module):
    """Bring the dense features to the embeddings' dim.

    Args:
        in_features: columns of the dense features.
        layer_sizes: of the MLP; the last is `D`.
        device: where the parameters are.
        batch_norm: as in `MLP`.
        dropout: as in `MLP`.

    Example:
        >>> DenseArch(13, [8, 4])(torch.ones(2, 13)).shape
        torch.Size([2, 4])
    """

    @checked
    def __init__(
        self,
        in_features: int,
        layer_sizes: list[int],
        device: torch.device | None = None,
        *,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.model = MLP(
            in_features, layer_sizes, device=device, batch_norm=batch_norm, dropout=dropout
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Apply the MLP.

        Args:
            features: `[B, in_features]`.

        Returns:
            `[B, D]`.
        """
        output: torch.Tensor = self.model(features)
        return output


class InteractionArch(nn.Module):
    """Put the dot products of every two features beside the dense feature.

    Args:
        num_sparse_features: `F`; with 0 the dense feature is given back.
        device: where the pairs' positions are; they move with the module.

    Raises:
        ValueError: the number is negative.

    Example:
        >>> InteractionArch(num_sparse_features=2)(torch.ones(5, 4), torch.ones(5, 2, 4)).shape
        torch.Size([5, 7])
    """

    positions_P: torch.Tensor
    pair_of_VV: torch.Tensor

    @checked
    def __init__(self, num_sparse_features: int, device: torch.device | None = None) -> None:
        super().__init__()
        check_num_sparse(num_sparse_features)
        self.F: int = num_sparse_features
        for name, table in self._tables(device).items():
            self.register_buffer(name, table, persistent=False)

    def _tables(self, device: torch.device | None) -> dict[str, torch.Tensor]:
        return {
            "positions_P": pair_positions(self.F + 1, device),
            "pair_of_VV": pair_of_position(self.F + 1, device),
        }

    @torch.jit.unused
    def reset_parameters(self) -> None:
        """Write the positions anew: `to_empty` after building on `meta` leaves them unset."""
        for name, table in self._tables(self.positions_P.device).items():
            getattr(self, name).copy_(table)

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Args:
            dense_features: `[B, D]`.
            sparse_features: `[B, F, D]`.

        Returns:
            `[B, D + P]`.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_input(f"{type(self).__name__}.dense_features", dense_features, torch.Tensor)
            check_input(f"{type(self).__name__}.sparse_features", sparse_features, torch.Tensor)
        if self.F == 0:
            return dense_features
        vectors_BVD = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        pairs_BP = dot_pairs(vectors_BVD, self.positions_P, self.pair_of_VV)
        return torch.cat([dense_features, pairs_BP], dim=1)


def check_num_sparse(num_sparse_features: int) -> None:
    """Refuse a negative number of sparse features.

    Args:
        num_sparse_features: `F`.

    Raises:
        ValueError: it is negative.
    """
    if num_sparse_features < 0:
        raise ValueError(
            f"num_sparse_features must not be negative; received {num_sparse_features}."
        )


class OverArch(nn.Module):
    """Turn the interactions into one logit.

    Args:
        in_features: columns of the interactions.
        layer_sizes: of the MLP, ending in 1; the last layer has no activation.
        device: where the parameters are.
        batch_norm: as in `MLP`, for all layers but the last.
        dropout: as in `MLP`, for all layers but the last.

    Raises:
        ValueError: there is no layer.

    Example:
        >>> OverArch(7, [8, 1])(torch.ones(5, 7)).shape
        torch.Size([5, 1])
    """

    @checked
    def __init__(
        self,
        in_features: int,
        layer_sizes: list[int],
        device: torch.device | None = None,
        *,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes("OverArch", in_features, layer_sizes)
        if not layer_sizes:
            raise ValueError(
                "over_arch_layer_sizes must have at least one layer; received []. "
                "The last one gives the logit: pass for example [64, 1]."
            )
        hidden_sizes = layer_sizes[:-1]
        self.model = nn.Sequential(
            MLP(in_features, hidden_sizes, device=device, batch_norm=batch_norm, dropout=dropout),
            nn.Linear([in_features, *hidden_sizes][-1], layer_sizes[-1], device=device),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Apply the MLP.

        Args:
            features: `[B, in_features]`.

        Returns:
            `[B, layer_sizes[-1]]` logits.
        """
        output: torch.Tensor = self.model(features)
        return output


class DLRM(nn.Module):
    """Predict a logit from dense and sparse features.

    Args:
        embedding_bag_collection: tables of one embedding dim `D`; None for a model without sparse
            features.
        dense_in_features: columns of the dense features; without any, 0, a learned vector takes
            their place.
        dense_arch_layer_sizes: of the first MLP; the last must be `D`.
        over_arch_layer_sizes: of the second MLP; the last is 1 for a logit.
        dense_device: where the MLPs' parameters are.
        batch_norm: whether the MLPs' layers, but for the logit's, have batch norm; see `MLP`.
        dropout: share of those layers' outputs that are set to 0 in training, in [0, 1).

    Raises:
        ValueError: a collection without tables, tables that differ in their dim, a last dense layer
            of another size than the embeddings, no layer, or a dropout out of its range.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> model = DLRM(EmbeddingBagCollection(tables=[films]), 13, [8, 4], [8, 1])
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> model(torch.ones(2, 13), ids).shape
        torch.Size([2, 1])
    """

    if TYPE_CHECKING:  # TorchScript would compile the classes of annotations
        sparse_arch: SparseArch | None
        inter_arch: nn.Module

    @checked
    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection | None,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dense_device: torch.device | None = None,
        *,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()

        def pairs(num_sparse: int, dim: int) -> tuple[nn.Module, int]:
            num_pairs = (num_sparse + 1) * num_sparse // 2
            return InteractionArch(num_sparse, dense_device), dim + num_pairs

        self._build(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes,
            over_arch_layer_sizes, pairs,
            device=dense_device, batch_norm=batch_norm, dropout=dropout,
        )  # fmt: skip

    def _build(
        self,
        embedding_bag_collection: EmbeddingBagCollection | None,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        interaction: Callable[[int, int], tuple[nn.Module, int]],
        **options: Any,
    ) -> None:
        """Make the parts.

        Args:
            embedding_bag_collection: as in `DLRM`, and so are the next three.
            dense_in_features: see there.
            dense_arch_layer_sizes: see there.
            over_arch_layer_sizes: see there.
            interaction: from the number of sparse features and their dim to what crosses them, and
                the number of its columns.
            options: of the MLPs.
        """
        check_sizes(type(self).__name__, dense_in_features, [], "dense_in_features")
        self.sparse_arch = None
        self._dim, self._num_sparse = [dense_in_features, *dense_arch_layer_sizes][-1], 0
        if embedding_bag_collection is not None:
            self.sparse_arch = SparseArch(embedding_bag_collection)
            self._dim, self._num_sparse = self.sparse_arch.D, self.sparse_arch.F
            if dense_arch_layer_sizes[-1:] != [self._dim]:
                raise ValueError(
                    "the last of dense_arch_layer_sizes must be the tables' embedding_dim "
                    f"{self._dim}; received {dense_arch_layer_sizes}. The interaction multiplies "
                    "the dense vector with the embeddings: make the two equal."
                )
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, **options)
        self.inter_arch, in_features = interaction(self._num_sparse, self._dim)
        self.over_arch = OverArch(in_features, over_arch_layer_sizes, **options)

    @checked
    def compile_dense_path(self, compile_mode: str = "reduce-overhead") -> None:
        """Compile all but the lookup, in place; names in the state dict stay.

        Args:
            compile_mode: of `torch.compile`.
        """
        for arch in (self.dense_arch, self.inter_arch, self.over_arch):
            try:
                arch.compile(mode=compile_mode)
            except RuntimeError as error:
                raise ValueError(
                    f"compile_mode must be a mode of torch.compile; received {compile_mode!r}: "
                    f"{error}"
                ) from error

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor | None
    ) -> torch.Tensor:
        """Predict.

        Args:
            dense_features: `[B, dense_in_features]`.
            sparse_features: the ids of all features, stride `B`; read only by a model with
                tables.

        Returns:
            `[B, over_arch_layer_sizes[-1]]` logits.

        Raises:
            TypeError: the dense features are no tensor of floats.
            ValueError: the dense features have another shape, or one of them is NaN or infinite; on
                CUDA, this is raised with a later batch: see `recsys.sparse.finish_value_checks`.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            dense_features = check_dense_features(
                dense_features, self.dense_arch, "dense_in_features"
            )
        if self.sparse_arch is None:
            dense = self.dense_arch(dense_features)
            embedded = dense.new_empty(dense.size(0), 0, dense.size(1))
        else:
            if sparse_features is None:
                raise ValueError(
                    "sparse_features must be a KeyedJaggedTensor: the model has tables; received "
                    "None."
                )
            # The lookup first: sharded, it is a message on its way while the dense MLP computes.
            pooled = self.sparse_arch.embedding_bag_collection(sparse_features)
            dense = self.dense_arch(dense_features)
            embedded = self.sparse_arch.stack(pooled)
        logits: torch.Tensor = self.over_arch(self.inter_arch(dense, embedded))
        return logits


class DLRMTrain(nn.Module):
    """Predict a batch and compare with its labels.

    Args:
        dlrm_module: gives one logit per sample.

    Example:
        >>> from recsys.datasets.random import RandomRecDataset
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=100, feature_names=["film"]
        ... )
        >>> dlrm = DLRM(EmbeddingBagCollection(tables=[films]), 50, [8, 4], [8, 1])
        >>> batch = next(iter(RandomRecDataset(["film"], batch_size=2)))
        >>> loss, (_, logits, labels) = DLRMTrain(dlrm)(batch)
        >>> loss.backward()
    """

    @checked
    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module

    def forward(
        self, batch: "Batch"
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Compute the loss.

        Args:
            batch: `B` samples.

        Returns:
            The mean binary cross entropy, to call `backward` on; and detached: loss, logits
            `[B]` and labels `[B]`. An empty batch has loss 0, so that its rank can still take
            part in the backward pass.

        Raises:
            ValueError: there are not as many labels as logits, or a label is NaN or not in [0, 1];
                also what the model raises.
        """
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = mean_loss(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


@torch.fx.wrap
def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the mean binary cross entropy, 0 for no samples.

    Args:
        logits: `[B]`.
        labels: `[B]`, from 0 to 1, any dtype.

    Returns:
        Scalar.

    Raises:
        ValueError: they differ in shape, or a label is NaN or not in [0, 1]; on CUDA, this is
            raised with a later batch: see `recsys.sparse.finish_value_checks`.
    """
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        check_input("mean_loss: logits", logits, torch.Tensor)
        check_input("mean_loss: labels", labels, torch.Tensor)
    if logits.shape != labels.shape:
        raise ValueError(
            "labels must be one per sample, as the logits; received labels "
            f"{list(labels.shape)} and logits {list(logits.shape)}."
        )
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        labels = check_labels(labels)
    loss = nn.functional.binary_cross_entropy_with_logits(
        logits, labels.to(logits.dtype), reduction="sum"
    )
    return loss / max(1, logits.numel())
