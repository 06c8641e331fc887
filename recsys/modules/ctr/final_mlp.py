"""FinalMLP: two deep networks over gated features, and products of their outputs.

Mao et al., "FinalMLP: an enhanced two-stream MLP model for CTR prediction", AAAI 2023,
arXiv:2304.00902.

Shapes: `B` samples, `N` columns of all features, `T` tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from recsys.base.arguments import MissingKeyError, whole
from recsys.base.checked import checked
from recsys.modules.ctr.inputs import FlatInput
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.mlp import MLP, Perceptron
from recsys.sparse import KeyedJaggedTensor

__all__ = ["BilinearFusion", "FeatureGate", "FinalMLP"]


@final
class FeatureGate(nn.Module):
    """Multiply each column by `2 * sigmoid(MLP(context))`.

    Args:
        in_features: `N`.
        context: Columns of the context; 0 for a learned constant.
        hidden: Columns of the hidden layer.
        device: Device of the parameters.

    Raises:
        ValueError: A size is out of its range.

    Example:
        >>> FeatureGate(4, 2, 8)(torch.ones(3, 4), torch.ones(3, 2)).shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(
        self, in_features: int, context: int, hidden: int, *, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.hidden = Perceptron(context, hidden, device=device)
        self.out = nn.Linear(hidden, whole("FeatureGate.in_features", in_features), device=device)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Return `[B, N]`.

        Args:
            x: `[B, N]`.
            context: `[B, context]`.
        """
        gates: Tensor = 2 * self.out(self.hidden(context)).sigmoid()
        return x * gates


@final
class BilinearFusion(nn.Module):
    """Add a linear layer of each input, and a bilinear form of each pair of their parts.

    Args:
        left: Columns of the first input.
        right: Columns of the second input.
        num_heads: Parts of each input, which divide its columns.
        num_tasks: `T`.
        device: Device of the parameters.

    Raises:
        ValueError: A number is out of its range, or the heads do not divide the columns.

    Example:
        >>> BilinearFusion(4, 6, num_heads=2)(torch.ones(3, 4), torch.ones(3, 6)).shape
        torch.Size([3, 1])
    """

    @checked
    def __init__(
        self,
        left: int,
        right: int,
        num_heads: int = 1,
        num_tasks: int = 1,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        whole("num_heads", num_heads)
        if left % num_heads or right % num_heads:
            raise ValueError(
                f"columns must be multiples of num_heads={num_heads}; received {left} and {right}."
            )
        self.num_heads = num_heads
        self.left = nn.Linear(left, whole("num_tasks", num_tasks), device=device)
        self.right = nn.Linear(right, num_tasks, bias=False, device=device)
        sizes = num_heads, left // num_heads, right // num_heads, num_tasks
        self.pairs = nn.Parameter(nn.init.xavier_normal_(torch.empty(*sizes, device=device)))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return `[B, T]`.

        Args:
            left: `[B, left]`.
            right: `[B, right]`.
        """
        of_left, of_right = (x.unflatten(1, (self.num_heads, -1)) for x in (left, right))
        # [B, H, right / H, T]; a product of all pairs of columns first would need more memory
        products = torch.einsum("bhl,hlk->bhk", of_left, self.pairs.flatten(2))
        products = products.unflatten(2, self.pairs.shape[2:]) * of_right.unsqueeze(3)
        logits: Tensor = self.left(left) + self.right(right) + products.sum((1, 2))
        return logits


@final
class FinalMLP(nn.Module):
    """Two streams, each a gate over all features and a deep network, joined by a bilinear form.

    Args:
        embedding_bag_collection: Tables of any dims. Sharding replaces this submodule.
        dense_in_features: Columns of the dense features; 0 for none.
        layer_sizes: Layers of the first stream.
        other_layer_sizes: Layers of the second stream; None for the layers of the first.
        contexts: Names of the sparse features that each gate reads, such as features of users
            and features of items; empty for a learned constant.
        gate_hidden: Columns of the hidden layer of a gate.
        num_heads: Parts of the outputs in the bilinear form.
        num_tasks: `T`.
        batch_norm: As in `MLP`.
        dropout: As in `MLP`.
        device: Device of the dense parameters.

    Raises:
        KeyError: There is no feature of this name.
        ValueError: A size is out of its range.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(
        ...     name="films", embedding_dim=4, num_embeddings=10, feature_names=["film"]
        ... )
        >>> model = FinalMLP(
        ...     EmbeddingBagCollection(tables=[films]), 3, [16, 8], contexts=(["film"], [])
        ... )
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> model(torch.ones(2, 3), ids).shape
        torch.Size([2, 1])
    """

    @checked
    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        layer_sizes: Sequence[int] = (256, 256),
        other_layer_sizes: Sequence[int] | None = None,
        *,
        contexts: tuple[Sequence[str], Sequence[str]] = ((), ()),
        gate_hidden: int = 64,
        num_heads: int = 1,
        num_tasks: int = 1,
        batch_norm: bool = False,
        dropout: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.inputs = FlatInput(embedding_bag_collection, dense_in_features)
        columns = self.inputs.out_features
        places = _columns_of(embedding_bag_collection, dense_in_features)
        both = [
            [*layer_sizes],
            [*(layer_sizes if other_layer_sizes is None else other_layer_sizes)],
        ]
        if not all(both):
            raise ValueError(
                f"layer_sizes and other_layer_sizes must have at least one layer; received {both}."
            )
        unknown = [name for names in contexts for name in names if name not in places]
        if unknown:
            raise MissingKeyError(
                f"contexts must name features of {[*places]}; received {unknown}."
            )
        self.gates, self.streams = nn.ModuleList(), nn.ModuleList()
        self.contexts: list[list[int]] = []
        for names, sizes in zip(contexts, both, strict=True):
            self.contexts.append([column for name in names for column in places[name]])
            context = len(self.contexts[-1])
            self.gates.append(FeatureGate(columns, context, gate_hidden, device=device))
            self.streams.append(
                MLP(columns, sizes, device=device, batch_norm=batch_norm, dropout=dropout)
            )
        self.fusion = BilinearFusion(both[0][-1], both[1][-1], num_heads, num_tasks, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits `[B, T]`.

        Args:
            dense_features: `[B, dense_in_features]`.
            sparse_features: Ids of all features, batch size `B`.
        """
        x = self.inputs(dense_features, sparse_features)
        streams = zip(self.gates, self.streams, self.contexts, strict=True)
        left, right = (stream(gate(x, x[:, columns])) for gate, stream, columns in streams)
        logits: Tensor = self.fusion(left, right)
        return logits


def _columns_of(collection: EmbeddingBagCollection, first: int) -> dict[str, range]:
    """Return the columns of each feature in the input of the streams."""
    columns: dict[str, range] = {}
    for config in collection.embedding_bag_configs():
        for name in config.feature_names:
            columns[name] = range(first, first + config.embedding_dim)
            first += config.embedding_dim
    return columns
