"""A small model after Guo et al., "DeepFM" (IJCAI 2017, arXiv:1703.04247), with dense features.

Two layers map the dense features to one more embedding. A deep network and a factorization machine
read all embeddings, and one layer maps their outputs to a probability.

Shapes: `B` samples, `F` sparse features, `D` embedding dim.
"""

import torch
from torch import nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.modules.deepfm import DeepFM, FactorizationMachine
from recsys.modules.dense_inputs import check_dense_features, common_dim
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.mlp import check_sizes
from recsys.sparse import KeyedJaggedTensor, KeyedTensor


class SparseArch(nn.Module):
    """Look up every sparse feature.

    Args:
        embedding_bag_collection: The tables. Sharding replaces this submodule.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> arch = SparseArch(EmbeddingBagCollection(tables=[films]))
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> arch(ids).keys()
        ['film']
    """

    @checked
    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up ids.

        Args:
            features: Ids of all `F` features, batch size `B`.

        Returns:
            `[B, F * D]`, pooled; pending if the collection is sharded.
        """
        pooled: KeyedTensor = self.embedding_bag_collection(features)
        return pooled


class DenseArch(nn.Module):
    """Map the dense features to the embedding dim by two layers with ReLU.

    Args:
        in_features: Columns of the dense features.
        hidden_layer_size: Columns of the first layer.
        embedding_dim: `D`.

    Example:
        >>> DenseArch(13, hidden_layer_size=8, embedding_dim=4)(torch.ones(2, 13)).shape
        torch.Size([2, 4])
    """

    @checked
    def __init__(self, in_features: int, hidden_layer_size: int, embedding_dim: int) -> None:
        super().__init__()
        check_sizes("DenseArch", in_features, [])
        whole("DenseArch.hidden_layer_size", hidden_layer_size)
        whole("DenseArch.embedding_dim", embedding_dim)
        self.in_features = in_features
        self.model = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim),
            nn.ReLU(),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Apply the layers.

        Args:
            features: `[B, in_features]`.

        Returns:
            `[B, D]`.
        """
        output: torch.Tensor = self.model(features)
        return output


class FMInteractionArch(nn.Module):
    """Concatenate the dense vector, a deep network and a factorization machine.

    Args:
        fm_in_features: Columns of all embeddings together, `(F + 1) * D`.
        sparse_feature_names: Names of the sparse features in the collection's output.
        deep_fm_dimension: Columns of the deep network's output.

    Example:
        >>> arch = FMInteractionArch(8, ["film"], deep_fm_dimension=3)
        >>> arch(torch.ones(2, 4), KeyedTensor(["film"], [4], torch.ones(2, 4))).shape
        torch.Size([2, 8])
    """

    @checked
    def __init__(
        self, fm_in_features: int, sparse_feature_names: list[str], deep_fm_dimension: int
    ) -> None:
        super().__init__()
        whole("FMInteractionArch.fm_in_features", fm_in_features)
        whole("FMInteractionArch.deep_fm_dimension", deep_fm_dimension)
        self.sparse_feature_names = sparse_feature_names
        self.deep_fm = DeepFM(
            nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU())
        )
        self.fm = FactorizationMachine()

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedTensor) -> torch.Tensor:
        """Compute the interactions.

        Args:
            dense_features: `[B, D]`.
            sparse_features: `[B, F * D]`; other features are ignored.

        Returns:
            `[B, D + deep_fm_dimension + 1]`: dense vector, deep network, factorization machine.

        Raises:
            KeyError: A feature of `sparse_feature_names` is missing.
        """
        by_name = sparse_features.to_dict()
        embeddings = [dense_features]
        embeddings += [by_name[name] for name in self.sparse_feature_names]
        return torch.cat([dense_features, self.deep_fm(embeddings), self.fm(embeddings)], dim=1)


class OverArch(nn.Module):
    """Map the interactions to a probability.

    Args:
        in_features: Columns of the interactions.

    Example:
        >>> OverArch(8)(torch.ones(2, 8)).shape
        torch.Size([2, 1])
    """

    @checked
    def __init__(self, in_features: int) -> None:
        super().__init__()
        whole("OverArch.in_features", in_features)
        self.model = nn.Sequential(nn.Linear(in_features, 1), nn.Sigmoid())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            features: `[B, in_features]`.

        Returns:
            `[B, 1]` in (0, 1).
        """
        output: torch.Tensor = self.model(features)
        return output


class SimpleDeepFMNN(nn.Module):
    """Predict a probability from dense and sparse features.

    Args:
        num_dense_features: Columns of the dense features.
        embedding_bag_collection: Tables of one embedding dim `D`.
        hidden_layer_size: Columns of the hidden layer for dense features.
        deep_fm_dimension: Columns of the deep network's output.

    Raises:
        ValueError: There is no table, or the tables have different dims.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> tables = EmbeddingBagCollection(tables=[films])
        >>> model = SimpleDeepFMNN(13, tables, hidden_layer_size=20, deep_fm_dimension=5)
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> model(torch.ones(2, 13), ids).shape
        torch.Size([2, 1])
    """

    @checked
    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: EmbeddingBagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
    ) -> None:
        super().__init__()
        check_sizes("SimpleDeepFMNN", num_dense_features, [], "num_dense_features")
        whole("SimpleDeepFMNN.hidden_layer_size", hidden_layer_size)
        whole("SimpleDeepFMNN.deep_fm_dimension", deep_fm_dimension)
        reason = "The dense features become one more embedding of that dim."
        dim = common_dim(embedding_bag_collection, reason)
        names = embedding_bag_collection.embedding_names
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, dim)
        self.inter_arch = FMInteractionArch((len(names) + 1) * dim, names, deep_fm_dimension)
        self.over_arch = OverArch(dim + deep_fm_dimension + 1)

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
    ) -> torch.Tensor:
        """Predict.

        Args:
            dense_features: `[B, num_dense_features]`.
            sparse_features: Ids of all features, batch size `B`.

        Returns:
            `[B, 1]` in (0, 1), for `binary_cross_entropy`.

        Raises:
            TypeError: The dense features are not a tensor of floats.
            ValueError: The dense features have another shape, or a value is NaN or infinite. On
                CUDA, the latter is raised with a later batch; see
                `recsys.sparse.finish_value_checks`.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            dense_features = check_dense_features(
                dense_features, self.dense_arch, "num_dense_features"
            )
        # look up first: the exchange of a sharded lookup overlaps with the dense layers
        pooled = self.sparse_arch(sparse_features)
        dense = self.dense_arch(dense_features)
        probabilities: torch.Tensor = self.over_arch(self.inter_arch(dense, pooled))
        return probabilities
