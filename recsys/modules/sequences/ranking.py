"""Ranking of candidates after a history of items and actions.

Shapes: `M` samples, `C` candidates of all samples, `D` columns, `T` tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.modules.embedding_interfaces import EmbeddingCollectionInterface
from recsys.modules.mlp import MLP
from recsys.modules.sequences.hstu import HSTU
from recsys.sparse import KeyedJaggedTensor, ops
from recsys.sparse.ops.bags import check_equal_lengths

__all__ = ["Ranking"]


@final
class Ranking(nn.Module):
    """Predict the action on each candidate, by HSTU over the history and the candidates.

    The value of a history is the sum of the embeddings of its item and of its action. Candidates
    follow the history; each reads the history and itself, so its score does not depend on the
    others. It is called as `DLRM` is: `DLRMTrain` trains it on batches with one candidate per
    sample.

    Args:
        embedding_collection: The tables of items, read by `history` and `candidate`, and of
            actions. Sharding replaces this submodule.
        encoder: The encoder of history and candidates.
        dim: Columns of the embeddings and of the encoder.
        layer_sizes: Columns of the layers after the encoder; the last is `T`.
        history: Feature of the ids of histories, the earliest first.
        actions: Feature of the actions of histories, as many in each bag.
        candidate: Feature of the ids of the candidates.
        times: Feature of the times of histories, int64; with an encoder that has times.
        candidate_times: Feature of the times of the candidates.
        device: Device of the parameters.

    Raises:
        ValueError: A number is out of its range, or only one feature of times is given.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingConfig
        >>> from recsys.modules.embedding_modules import EmbeddingCollection
        >>> films = EmbeddingConfig(
        ...     num_embeddings=10, embedding_dim=8, name="films", feature_names=["seen", "film"]
        ... )
        >>> stars = EmbeddingConfig(
        ...     num_embeddings=6, embedding_dim=8, name="stars", feature_names=["stars"]
        ... )
        >>> model = Ranking(
        ...     EmbeddingCollection(tables=[films, stars]), HSTU(8, max_length=50), 8, [16, 1],
        ...     history="seen", actions="stars", candidate="film",
        ... )
        >>> features = KeyedJaggedTensor(
        ...     ["seen", "stars", "film"],
        ...     torch.tensor([1, 2, 3, 5, 4, 1, 7, 8]), lengths=torch.tensor([2, 1, 2, 1, 1, 1]),
        ... )
        >>> model(torch.zeros(2, 0), features).shape
        torch.Size([2, 1])
    """

    @checked
    def __init__(
        self,
        embedding_collection: EmbeddingCollectionInterface,
        encoder: HSTU,
        dim: int,
        layer_sizes: Sequence[int],
        *,
        history: str = "history",
        actions: str = "actions",
        candidate: str = "candidate",
        times: str | None = None,
        candidate_times: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if (times is None) != (candidate_times is None):
            raise ValueError("times and candidate_times must be given together.")
        self.embedding_collection = embedding_collection
        self.encoder = encoder
        self.history, self.actions, self.candidate = history, actions, candidate
        self.times, self.candidate_times = times, candidate_times
        *hidden, tasks = layer_sizes
        self.mlp = MLP(whole("Ranking.dim", dim), hidden, device=device)
        self.out = nn.Linear(hidden[-1] if hidden else dim, tasks, device=device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits `[C, T]`, of the candidates in the order of the samples.

        Args:
            dense_features: Not read.
            sparse_features: Ids of all features.

        Raises:
            KeyError: A feature is missing.
            ValueError: A bag of actions or times has another length than its history or candidates.
        """
        rows = self.embedding_collection(sparse_features)
        candidates = rows[self.candidate].trim()
        # the paper of HSTU alternates items and actions; their sum halves the length
        history = ops.add(rows[self.history], rows[self.actions])
        times = None
        if self.times is not None and self.candidate_times is not None:
            of_both = [sparse_features[name] for name in (self.times, self.candidate_times)]
            check_equal_lengths(history, of_both[0])
            check_equal_lengths(candidates, of_both[1])
            times = ops.concat(of_both).values()
        encoded = self.encoder(ops.concat([history, candidates]), times, candidates.lengths())
        # in front of a candidate are the earlier ones, and the histories up to its own
        before = history.offsets()[1:].index_select(0, ops.bags_of(candidates))
        picked = before + torch.arange(before.shape[0], device=before.device)
        logits: Tensor = self.out(self.mlp(encoded.values().index_select(0, picked)))
        return logits
