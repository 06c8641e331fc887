"""DIN: a history is summed with weights that depend on the candidate.

Zhou et al., "Deep interest network for click-through rate prediction", KDD 2018, arXiv:1706.06978.

Shapes: `B` samples, `N` values of all histories, `D` embedding dim, `T` tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.modules.ctr.inputs import FlatInput
from recsys.modules.embedding_interfaces import EmbeddingCollectionInterface
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, ops
from recsys.sparse.validate import is_readable

__all__ = ["DIN", "Dice", "InterestAttention"]


@final
class Dice(nn.Module):
    """Activation `p * x + (1 - p) * a * x`, with `p = sigmoid(batch_norm(x))` and a learned `a`.

    Args:
        columns: Columns of the input.
        device: Device of the parameters.

    Example:
        >>> Dice(3).eval()(torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """

    @checked
    def __init__(self, columns: int, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(whole("Dice.columns", columns), affine=False, device=device)
        self.alpha = nn.Parameter(torch.zeros(columns, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[B, columns]`.

        Args:
            x: `[B, columns]`. In training, a batch of fewer than two rows is normalized as in
                evaluation, since one row has no variance.
        """
        if self.training and x.shape[0] > 1:
            normal: Tensor = self.norm(x)
        else:
            mean, variance = self.norm.running_mean, self.norm.running_var
            assert mean is not None
            assert variance is not None
            normal = (x - mean) * (variance + self.norm.eps).rsqrt()
        shares = normal.sigmoid()
        return (shares + (1 - shares) * self.alpha) * x


@final
class InterestAttention(nn.Module):
    """Sum the values of each history with weights by a network of value and candidate.

    The weights are not normalized: their sum keeps the strength of the interest.

    Args:
        dim: `D`.
        layer_sizes: Layers of the network, before one linear layer.
        device: Device of the parameters.

    Example:
        >>> history = JaggedTensor(torch.ones(3, 4), lengths=torch.tensor([2, 1]))
        >>> InterestAttention(4, [8])(history, torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    @checked
    def __init__(
        self, dim: int, layer_sizes: Sequence[int] = (36,), *, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.network = _network(4 * whole("InterestAttention.dim", dim), layer_sizes, 1, device)

    def forward(self, history: JaggedTensor, candidate: Tensor) -> Tensor:
        """Return `[B, D]`.

        Args:
            history: `[N, D]`, jagged.
            candidate: `[B, D]`.
        """
        history = history.trim()
        rows, other = history.values(), ops.expand(candidate, history).values()
        weights = self.network(torch.cat([rows, other, rows - other, rows * other], 1))
        return ops.sum(ops.with_values(history, rows * weights))


@final
class DIN(nn.Module):
    """Deep network over pooled features, candidates, and histories read by their candidates.

    Args:
        embedding_bag_collection: Tables of the pooled features. Sharding replaces this submodule.
        embedding_collection: Tables of histories and candidates, all of one dim; a history and its
            candidate usually read one table. Sharding replaces this submodule.
        dense_in_features: Columns of the dense features; 0 for none.
        pairs: Feature of each history, and the feature of its candidate, which has one id per
            sample.
        layer_sizes: Layers of the deep network, before one linear layer.
        attention_sizes: Layers of each attention network, before one linear layer.
        num_tasks: `T`.
        device: Device of the dense parameters.

    Raises:
        ValueError: There is no pair, or a size is out of its range.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
        >>> from recsys.modules.embedding_modules import EmbeddingCollection
        >>> users = EmbeddingBagConfig(
        ...     name="users", embedding_dim=4, num_embeddings=10, feature_names=["user"]
        ... )
        >>> films = EmbeddingConfig(
        ...     name="films", embedding_dim=8, num_embeddings=10, feature_names=["seen", "film"]
        ... )
        >>> model = DIN(
        ...     EmbeddingBagCollection(tables=[users]), EmbeddingCollection(tables=[films]), 3,
        ...     pairs=[("seen", "film")],
        ... )
        >>> features = KeyedJaggedTensor(
        ...     ["user", "seen", "film"], torch.tensor([1, 2, 3, 4, 5, 6, 7]),
        ...     lengths=torch.tensor([1, 1, 3, 0, 1, 1]),
        ... )
        >>> model(torch.ones(2, 3), features).shape
        torch.Size([2, 1])
    """

    @checked
    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        embedding_collection: EmbeddingCollectionInterface,
        dense_in_features: int,
        pairs: Sequence[tuple[str, str]],
        layer_sizes: Sequence[int] = (200, 80),
        attention_sizes: Sequence[int] = (36,),
        *,
        num_tasks: int = 1,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not pairs:
            raise ValueError("DIN.pairs must name a history and its candidate; received none.")
        self.inputs = FlatInput(embedding_bag_collection, dense_in_features)
        self.embedding_collection = embedding_collection
        self.pairs = [*pairs]
        dim = embedding_collection.embedding_configs()[0].embedding_dim
        self.attention = nn.ModuleList(
            InterestAttention(dim, attention_sizes, device=device) for _ in pairs
        )
        columns = self.inputs.out_features + 2 * dim * len(self.pairs)
        self.network = _network(columns, layer_sizes, whole("num_tasks", num_tasks), device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits `[B, T]`.

        Args:
            dense_features: `[B, dense_in_features]`.
            sparse_features: Ids of all features, batch size `B`.

        Raises:
            KeyError: A feature is missing.
            ValueError: A sample does not have one candidate.
        """
        parts = [self.inputs(dense_features, sparse_features)]
        rows = self.embedding_collection(sparse_features)
        for (history, candidate), attention in zip(self.pairs, self.attention, strict=True):
            of_candidate = rows[candidate].trim().values()
            size, expected = of_candidate.shape[0], parts[0].shape[0]
            lengths = rows[candidate].lengths()
            if torch.compiler.is_compiling():
                torch._check(size == expected)  # so that both can be concatenated
            elif size != expected or (is_readable(lengths) and bool((lengths != 1).any())):
                raise ValueError(
                    f"Feature {candidate!r} must have one id per sample; received {size} ids of "
                    f"{expected} samples, at most {int(lengths.max())} of one."
                )
            parts += [of_candidate, attention(rows[history], of_candidate)]
        logits: Tensor = self.network(torch.cat(parts, 1))
        return logits


def _network(
    in_features: int, layer_sizes: Sequence[int], out_features: int, device: torch.device | None
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in layer_sizes:
        layers += [
            nn.Linear(in_features, whole("layer_sizes", size), device=device),
            Dice(size, device=device),
        ]
        in_features = size
    return nn.Sequential(*layers, nn.Linear(in_features, out_features, device=device))
