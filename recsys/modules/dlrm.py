"""The deep learning recommendation model of Naumov et al. (2019, arXiv:1906.00091).

An MLP maps the dense features to the embedding dim. A second MLP maps this dense vector and the dot
products of all pairs of vectors to one logit.

Shapes: `B` samples, `F` sparse features, `D` embedding dim, `P = (F + 1) * F / 2` pairs.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recsys.base.arguments import check_input, wrong_type
from recsys.base.checked import checked
from recsys.modules.dense_inputs import check_dense_features, common_dim
from recsys.modules.dot_interaction import dot_pairs, pair_of_position, pair_positions
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.losses import mean_loss
from recsys.modules.mlp import MLP, check_sizes
from recsys.sparse import KeyedJaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recsys.datasets.utils import Batch

torch.fx.wrap("mean_loss")


class SparseArch(nn.Module):
    """Look up every sparse feature.

    Args:
        embedding_bag_collection: Tables of one embedding dim. Sharding replaces this submodule.

    Raises:
        ValueError: There is no table, or the tables have different dims.

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
        self.embedding_bag_collection = embedding_bag_collection
        self.D: int = common_dim(embedding_bag_collection, "Dot products need vectors of one size.")
        configs = embedding_bag_collection.embedding_bag_configs()
        self._sparse_feature_names = [name for config in configs for name in config.feature_names]
        self.F: int = len(self._sparse_feature_names)

    @property
    def sparse_feature_names(self) -> list[str]:
        """The features in the order of the output; a feature of two tables occurs twice."""
        return self._sparse_feature_names

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look up ids.

        Args:
            features: Ids of all `F` features, batch size `B`.

        Returns:
            `[B, F, D]`, pooled.
        """
        return self.stack(self.embedding_bag_collection(features))

    def stack(self, pooled: KeyedTensor) -> torch.Tensor:
        """Reshape the embeddings to one row per feature.

        Args:
            pooled: Output of the collection. This waits for the output of a sharded collection.

        Returns:
            `[B, F, D]`.
        """
        values: torch.Tensor = pooled.values()
        # explicit sizes, as -1 is undefined for an empty batch
        return values.reshape(values.size(0), self.F, self.D)


class DenseArch(nn.Module):
    """Map the dense features to the embedding dim.

    Args:
        in_features: Columns of the dense features.
        layer_sizes: Layers of the MLP; the last is `D`.
        device: Device of the parameters.
        batch_norm: As in `MLP`.
        dropout: As in `MLP`.

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


class FeatureInteraction(nn.Module):
    """Base of interactions between the dense vector and the embeddings.

    Args:
        num_sparse_features: `F`; with 0 the output is the dense vector.

    Raises:
        ValueError: The number is negative.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        if num_sparse_features < 0:
            raise ValueError(
                f"num_sparse_features must not be negative; received {num_sparse_features}."
            )
        self.F: int = num_sparse_features

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Compute the interactions.

        Args:
            dense_features: `[B, D]`.
            sparse_features: `[B, F, D]`.

        Returns:
            `[B, columns]`; the class states the columns.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_input(f"{type(self).__name__}.dense_features", dense_features, torch.Tensor)
            check_input(f"{type(self).__name__}.sparse_features", sparse_features, torch.Tensor)
        if self.F == 0:
            return dense_features
        vectors_BVD = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        return self._interact(dense_features, vectors_BVD)

    def _interact(self, dense_BD: torch.Tensor, vectors_BVD: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class InteractionArch(FeatureInteraction):
    """Concatenate the dense vector and the dot products of all pairs of vectors.

    The output is `[B, D + P]`.

    Args:
        num_sparse_features: `F`; with 0 the output is the dense vector.
        device: Device of the pairs' positions, which are buffers.

    Raises:
        ValueError: The number is negative.

    Example:
        >>> InteractionArch(num_sparse_features=2)(torch.ones(5, 4), torch.ones(5, 2, 4)).shape
        torch.Size([5, 7])
    """

    positions_P: torch.Tensor
    pair_of_VV: torch.Tensor

    @checked
    def __init__(self, num_sparse_features: int, device: torch.device | None = None) -> None:
        super().__init__(num_sparse_features)
        for name, table in self._tables(device).items():
            self.register_buffer(name, table, persistent=False)

    def _tables(self, device: torch.device | None) -> dict[str, torch.Tensor]:
        return {
            "positions_P": pair_positions(self.F + 1, device),
            "pair_of_VV": pair_of_position(self.F + 1, device),
        }

    @torch.jit.unused
    def reset_parameters(self) -> None:
        """Write the positions again, after `to_empty` of a module built on `meta`."""
        for name, table in self._tables(self.positions_P.device).items():
            getattr(self, name).copy_(table)

    def _interact(self, dense_BD: torch.Tensor, vectors_BVD: torch.Tensor) -> torch.Tensor:
        pairs_BP = dot_pairs(vectors_BVD, self.positions_P, self.pair_of_VV)
        return torch.cat([dense_BD, pairs_BP], dim=1)


class OverArch(nn.Module):
    """Map the interactions to one logit.

    Args:
        in_features: Columns of the interactions.
        layer_sizes: Layers of the MLP; the last is 1 and has no activation.
        device: Device of the parameters.
        batch_norm: As in `MLP`, for all layers except the last.
        dropout: As in `MLP`, for all layers except the last.

    Raises:
        ValueError: There is no layer.

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
                "over_arch_layer_sizes must have at least one layer; received []. The last layer "
                "computes the logit: pass for example [64, 1]."
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
        embedding_bag_collection: Tables of one embedding dim `D`; None for a model without sparse
            features.
        dense_in_features: Columns of the dense features; with 0, a learned vector replaces them.
        dense_arch_layer_sizes: Layers of the first MLP; the last must be `D`.
        over_arch_layer_sizes: Layers of the second MLP; the last is 1 for a logit.
        dense_device: Device of the dense parameters.
        batch_norm: Use batch norm in all layers except the last; see `MLP`.
        dropout: Fraction of the outputs of these layers that is zeroed in training, in [0, 1).

    Raises:
        ValueError: The collection has no tables or tables of different dims, the last dense layer
            does not match the embedding dim, there is no layer, or `dropout` is out of range.

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
        check_sizes(type(self).__name__, dense_in_features, [], "dense_in_features")
        options: dict[str, Any] = {
            "device": dense_device,
            "batch_norm": batch_norm,
            "dropout": dropout,
        }
        self.sparse_arch = None
        dim, num_sparse = [dense_in_features, *dense_arch_layer_sizes][-1], 0
        if embedding_bag_collection is not None:
            self.sparse_arch = SparseArch(embedding_bag_collection)
            dim, num_sparse = self.sparse_arch.D, self.sparse_arch.F
            if dense_arch_layer_sizes[-1:] != [dim]:
                raise ValueError(
                    "the last of dense_arch_layer_sizes must be the tables' embedding_dim "
                    f"{dim}; received {dense_arch_layer_sizes}. The interaction multiplies "
                    "the dense vector with the embeddings: make the two equal."
                )
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, **options)
        self.inter_arch, in_features = self._interaction(num_sparse, dim, options)
        self.over_arch = OverArch(in_features, over_arch_layer_sizes, **options)

    def _interaction(
        self, num_sparse: int, dim: int, options: dict[str, Any]
    ) -> tuple[nn.Module, int]:
        """Return the interaction of `num_sparse` embeddings, and its number of columns."""
        num_pairs = (num_sparse + 1) * num_sparse // 2
        return InteractionArch(num_sparse, options["device"]), dim + num_pairs

    @checked
    def compile_dense_path(self, compile_mode: str = "reduce-overhead") -> None:
        """Compile the dense modules in place; the state dict keeps its names.

        Args:
            compile_mode: The mode of `torch.compile`.

        Raises:
            ValueError: `torch.compile` has no such mode.
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
            sparse_features: Ids of all features, batch size `B`; ignored by a model without
                tables.

        Returns:
            `[B, over_arch_layer_sizes[-1]]` logits.

        Raises:
            TypeError: The dense features are not a tensor of floats.
            ValueError: The dense features have another shape, or a value is NaN or infinite. On
                CUDA, the latter is raised with a later batch; see
                `recsys.sparse.finish_value_checks`.
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
                    "sparse_features must be a KeyedJaggedTensor for a model with tables; received "
                    "None."
                )
            # look up first: the exchange of a sharded lookup overlaps with the dense MLP
            pooled = self.sparse_arch.embedding_bag_collection(sparse_features)
            dense = self.dense_arch(dense_features)
            embedded = self.sparse_arch.stack(pooled)
        logits: torch.Tensor = self.over_arch(self.inter_arch(dense, embedded))
        return logits


class DLRMTrain(nn.Module):
    """Compute the loss of a model on a batch.

    Args:
        dlrm_module: Returns one logit per sample.

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
            batch: `B` samples. Its `sample_weights`, if it has them, multiply the losses of the
                samples before the mean, and its `label_mask` leaves out labels; see `mean_loss`.

        Returns:
            The mean binary cross entropy for `backward`; and, detached, loss, logits `[B]` and
            labels `[B]`. The loss of an empty batch is 0, so that its rank can take part in the
            backward pass.

        Raises:
            TypeError: `batch` is not a batch.
            ValueError: Labels and logits differ in number, or a label is NaN or not in [0, 1]; and
                errors of the model.
        """
        if not hasattr(batch, "dense_features"):
            wrong_type(
                f"{type(self).__name__}.batch",
                "a recsys.datasets.utils.Batch with dense_features, sparse_features and labels",
                batch,
            )
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        optional = (getattr(batch, name, None) for name in ("sample_weights", "label_mask"))
        loss = mean_loss(logits, batch.labels, *optional)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
