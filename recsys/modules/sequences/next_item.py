"""Training of an encoder of histories to predict the next item.

Shapes: `M` samples, `N` values of all histories, `K` candidates, `D` columns.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from recsys.base.arguments import shown, whole
from recsys.base.checked import checked
from recsys.modules.embedding_interfaces import EmbeddingCollectionInterface
from recsys.modules.sequences.losses import (
    binary_loss,
    bpr_loss,
    full_softmax_loss,
    in_batch_softmax_loss,
    sampled_softmax_loss,
)
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, ops
from recsys.sparse.ops.bags import check_equal_lengths
from recsys.sparse.validate import is_readable

__all__ = ["NextItem", "with_catalogue"]

Loss: TypeAlias = Literal["full", "sampled", "in_batch", "bpr", "binary"]
_LOSSES = ("full", "sampled", "in_batch", "bpr", "binary")


@final
class NextItem(nn.Module):
    """Look up histories, encode them, and score the item that follows each value.

    All features read one table of items, so one lookup serves them: histories, targets, and
    candidates. The collection may be sharded by `DistributedModelParallel`.

    Args:
        embedding_collection: The tables. Sharding replaces this submodule.
        encoder: Maps `[N, D]` jagged embeddings, and times, to `[N, D]` jagged vectors, such as
            `SASRec` and `HSTU`.
        loss: Items against which a target is trained:
            "full": all items; `with_catalogue` adds them to a batch as `candidates`.
            "sampled": the ids of `candidates` of the batch, for all queries.
            "in_batch": the other targets of the batch. `candidates` is not read.
            "bpr" and "binary": the ids of `candidates` in the bag of the query, the same
            number for each value of the history, the candidates of the first value first.
        history: Feature of the ids of histories, the earliest first.
        target: Feature of the ids that follow, as many in each bag as the history has.
        candidates: Feature of the ids of other items.
        times: Feature of the times of the history's values, int64; None for none.
        log_q: `[I]`, logarithm of the probability of each item as a candidate for "sampled", and of
            its share of the targets for "in_batch"; None for no correction.

    Raises:
        TypeError: An argument has another type.
        ValueError: There is no loss of this name, or it does not read `log_q`.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingConfig
        >>> from recsys.modules.embedding_modules import EmbeddingCollection
        >>> from recsys.modules.sequences.sasrec import SASRec
        >>> films = EmbeddingConfig(
        ...     num_embeddings=10, embedding_dim=8, name="films", feature_names=["seen", "next"]
        ... )
        >>> model = NextItem(
        ...     EmbeddingCollection(tables=[films]), SASRec(8, max_length=50), loss="in_batch",
        ...     history="seen", target="next",
        ... )
        >>> ids, lengths = torch.tensor([1, 2, 3, 2, 5, 4]), torch.tensor([2, 1, 2, 1])
        >>> features = KeyedJaggedTensor(["seen", "next"], ids, lengths=lengths)
        >>> loss, _ = model(features)
        >>> loss.backward()
        >>> model.users(features).shape
        torch.Size([2, 8])
    """

    log_q: Tensor | None

    @checked
    def __init__(
        self,
        embedding_collection: EmbeddingCollectionInterface,
        encoder: nn.Module,
        loss: Loss,
        *,
        history: str = "history",
        target: str = "target",
        candidates: str = "candidates",
        times: str | None = None,
        log_q: Tensor | None = None,
    ) -> None:
        super().__init__()
        if loss not in _LOSSES:
            raise ValueError(f"loss must be one of {', '.join(_LOSSES)}; received {shown(loss)}.")
        if log_q is not None and loss not in ("sampled", "in_batch"):
            raise ValueError(f"loss {loss!r} does not read log_q. Leave it out.")
        self.embedding_collection = embedding_collection
        self.encoder = encoder
        self.loss, self.history, self.target = loss, history, target
        self.candidates, self.times = candidates, times
        self.register_buffer("log_q", log_q)

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the mean loss of the values of all histories.

        Args:
            batch: A `KeyedJaggedTensor`, or a batch with one as `sparse_features`. Its
                `sample_weights`, if it has them, multiply the losses of a sample's values.

        Returns:
            The loss for `backward`, 0 for a batch without values; and, detached, the loss, the
            vectors of the users `[M, D]` and the ids of the targets `[N]`.

        Raises:
            KeyError: A feature is missing.
            ValueError: A bag of targets or times has another length than its history; a bag of
                candidates does not have as many for each value; or, on a CPU, `candidates` of
                "full" or `log_q` lack an id.
        """
        features: KeyedJaggedTensor = getattr(batch, "sparse_features", batch)
        rows = self.embedding_collection(features)
        encoded = self._encode(rows, features)
        queries = encoded.values()
        targets, targets_of = features[self.target], rows[self.target]
        check_equal_lengths(features[self.history], targets)
        # ids may be int32, which cross_entropy refuses
        # docs/decisions/ragged.md, "Values after the last bag are never read"
        ids, positives = targets.trim().values().long(), targets_of.trim().values()
        losses = self._losses(queries, positives, ids, rows, features)
        weights = getattr(batch, "sample_weights", None)
        weighted = losses
        if weights is not None:
            weighted = losses * ops.expand(weights, targets).values()
        # not by the sum of weights: a sample's loss must not depend on other weights of its batch
        loss = weighted.sum() / max(1, losses.shape[0])
        return loss, (loss.detach(), _last(encoded).detach(), ids)

    def users(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the vector after the last value of each history.

        Args:
            features: Histories, and the other features of the collection, which may be empty.

        Returns:
            `[M, D]`; 0 for an empty history. Its dot product with the embedding of an item is the
            score of the item.
        """
        return _last(self._encode(self.embedding_collection(features), features))

    def items(self, num_items: int, device: torch.device) -> Tensor:
        """Return the vectors of all items, `[num_items, D]`; every rank calls it if sharded.

        The special rows of the table are -inf, as they are not items.

        Args:
            num_items: Number of ids of the table.
            device: Device of the table.
        """
        configs = self.embedding_collection.embedding_configs()
        names = [name for config in configs for name in config.feature_names]
        # one sample, whose bag of targets has every id; other features are empty
        lengths = torch.tensor([num_items * (name == self.target) for name in names], device=device)
        ids = torch.arange(num_items, device=device)
        rows = self.embedding_collection(KeyedJaggedTensor(names, ids, lengths=lengths))
        vectors: Tensor = rows[self.target].values()
        is_special = torch.isin(ids, self.special_ids().to(device))
        return vectors.masked_fill(is_special.unsqueeze(1), float("-inf"))

    def special_ids(self) -> Tensor:
        """Return the ids that are not items, int64: the special rows of the table."""
        return special_rows(self.embedding_collection, self.history)

    def _encode(self, rows: dict[str, JaggedTensor], features: KeyedJaggedTensor) -> JaggedTensor:
        times = None
        if self.times is not None:
            check_equal_lengths(rows[self.history], features[self.times])
            times = features[self.times].trim().values()
        encoded: JaggedTensor = self.encoder(rows[self.history], times)
        return encoded

    def _losses(
        self,
        queries: Tensor,
        positives: Tensor,
        ids: Tensor,
        rows: dict[str, JaggedTensor],
        features: KeyedJaggedTensor,
    ) -> Tensor:
        if self.loss == "in_batch":
            return in_batch_softmax_loss(queries, positives, ids, self.log_q)
        candidates = rows[self.candidates].trim().values()
        if self.loss == "full":
            # row i is item i: with_catalogue lists the ids in ascending order
            return full_softmax_loss(queries, candidates, ids)
        if self.loss == "sampled":
            others = features[self.candidates].trim().values().long()
            return sampled_softmax_loss(queries, positives, candidates, ids, others, self.log_q)
        if not queries.shape[0]:
            # view(0, -1, D) raises; the sum keeps the graph, as other ranks exchange in backward
            return queries.sum(1)
        _check_candidates(features[self.history], features[self.candidates])
        of_each = candidates.view(queries.shape[0], -1, queries.shape[1])
        negative = torch.bmm(of_each, queries.unsqueeze(2)).squeeze(2)
        function = bpr_loss if self.loss == "bpr" else binary_loss
        return function((queries * positives).sum(1), negative)


def _check_candidates(history: JaggedTensor, candidates: JaggedTensor) -> None:
    """Raise an error if, on a CPU, values of histories have different numbers of candidates."""
    lengths, num_candidates = history.lengths(), candidates.lengths()
    if is_readable(lengths) and is_readable(num_candidates):
        count = int(num_candidates.sum()) // int(lengths.sum())
        # the second term finds bags without candidates if `count` is 0
        is_wrong = (num_candidates != lengths * count) | (num_candidates < lengths)
        if is_wrong.any():
            bag = int(is_wrong.long().argmax())
            raise ValueError(
                "candidates must be the same number for each value of a history, at least 1; "
                f"received {int(num_candidates[bag])} for {int(lengths[bag])} values of bag {bag}, "
                f"and {int(num_candidates.sum())} for {int(lengths.sum())} of all bags."
            )


def special_rows(collection: EmbeddingCollectionInterface, feature: str) -> Tensor:
    """Return the special rows of the table of a feature, int64."""
    configs = collection.embedding_configs()
    counts = [c.num_special_rows for c in configs if feature in c.feature_names]
    return torch.arange(max(counts, default=0))


def _last(encoded: JaggedTensor) -> Tensor:
    """Return the last value of each bag; 0 of an empty one."""
    return ops.sum(ops.slice(encoded, -1))


def with_catalogue(
    features: KeyedJaggedTensor, num_items: int, feature: str = "candidates"
) -> KeyedJaggedTensor:
    """Add a feature that has all ids in its first bag, for the loss "full".

    Args:
        features: A rank's batch of `M` samples; without samples it stays so.
        num_items: Number of ids.
        feature: Name of the feature.

    Returns:
        The features and one more.

    Example:
        >>> lengths = torch.tensor([2, 1])
        >>> ids = KeyedJaggedTensor(["history"], torch.tensor([2, 0, 1]), lengths=lengths)
        >>> with_catalogue(ids, 3)["candidates"].to_dense()
        [tensor([0, 1, 2]), tensor([], dtype=torch.int64)]
    """
    whole("with_catalogue: num_items", num_items)
    lengths = features.lengths().new_zeros(features.stride())
    lengths[:1] = num_items
    ids = torch.arange(
        num_items if features.stride() else 0, dtype=features.values().dtype, device=lengths.device
    )
    return KeyedJaggedTensor.concat([features, KeyedJaggedTensor([feature], ids, lengths=lengths)])
