"""A small model of Guo et al., "DeepFM" (IJCAI 2017, arXiv:1703.04247), with dense features too.

Dense features become one more embedding; all embeddings go through a deep network and through a
factorization machine, and one layer over both gives a probability.

Shapes: `B` samples, `F` sparse features, `D` embedding dim.
"""

import torch
from torch import nn

from recsys.kernels.arguments import whole
from recsys.kernels.checked import checked
from recsys.modules.deepfm import DeepFM, FactorizationMachine
from recsys.modules.dense_inputs import check_dense_features
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.mlp import check_sizes
from recsys.sparse import KeyedJaggedTensor, KeyedTensor


class SparseArch(nn.Module):
    """Look up every sparse feature.

    Args:
        embedding_bag_collection: the tables. Sharding replaces it in this place.

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
            features: the ids of all `F` features, stride `B`.

        Returns:
            `[B, F * D]`, pooled; of a sharded collection pending.
        """
        pooled: KeyedTensor = self.embedding_bag_collection(features)
        return pooled


class DenseArch(nn.Module):
    """Bring the dense features to the embeddings' dim by two layers with relu.

    Args:
        in_features: columns of the dense features.
        hidden_layer_size: columns of the first layer.
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
    """Put a deep network and a factorization machine of all embeddings beside the dense one.

    Args:
        fm_in_features: columns of all embeddings together, `(F + 1) * D`.
        sparse_feature_names: the sparse features, as the collection names them.
        deep_fm_dimension: columns of the deep network's output.

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
        """Let the features interact.

        Args:
            dense_features: `[B, D]`.
            sparse_features: `[B, F * D]`; features that were not named are left out.

        Returns:
            `[B, D + deep_fm_dimension + 1]`: the dense features, the deep network, the machine.

        Raises:
            KeyError: a named feature is missing.
        """
        by_name = sparse_features.to_dict()
        embeddings = [dense_features]
        embeddings += [by_name[name] for name in self.sparse_feature_names]
        return torch.cat([dense_features, self.deep_fm(embeddings), self.fm(embeddings)], dim=1)


class OverArch(nn.Module):
    """Turn the interactions into a probability.

    Args:
        in_features: columns of the interactions.

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
            `[B, 1]`, between 0 and 1.
        """
        output: torch.Tensor = self.model(features)
        return output


class SimpleDeepFMNN(nn.Module):
    """Predict a probability from dense and sparse features.

    Args:
        num_dense_features: columns of the dense features.
        embedding_bag_collection: tables of one embedding dim `D`.
        hidden_layer_size: columns of the dense features' hidden layer.
        deep_fm_dimension: columns of the deep network's output.

    Raises:
        ValueError: tables differ in their dim.

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
        dims = {
            config.name: config.embedding_dim
            for config in embedding_bag_collection.embedding_bag_configs()
        }
        if len(set(dims.values())) != 1:
            raise ValueError(
                "embedding_bag_collection must have tables, all of one embedding_dim; received "
                f"{dims}. The dense features become one more embedding of that dim."
            )
        dim = next(iter(dims.values()))
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
            sparse_features: the ids of all features, stride `B`.

        Returns:
            `[B, 1]`, between 0 and 1; train it by `binary_cross_entropy`.

        Raises:
            TypeError: the dense features are no tensor of floats.
            ValueError: the dense features have another shape, or one of them is NaN or infinite; on
                CUDA, this is raised with a later batch: see `recsys.sparse.finish_value_checks`.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            dense_features = check_dense_features(
                dense_features, self.dense_arch, "num_dense_features"
            )
        # The lookup first: sharded, it is a message on its way while the dense layers compute.
        pooled = self.sparse_arch(sparse_features)
        dense = self.dense_arch(dense_features)
        probabilities: torch.Tensor = self.over_arch(self.inter_arch(dense, pooled))
        return probabilities
