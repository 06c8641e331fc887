"""Evaluation of models of the next item over a whole catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from recsys.base.arguments import shown, whole
from recsys.base.checked import checked
from recsys.metrics.retrieval import RetrievalMetrics
from recsys.modules.item_index import ItemIndex
from recsys.sparse import ops
from recsys.training.evaluation import MeanOfLosses

__all__ = ["FullRanking"]


@final
class FullRanking:
    """Metrics for `NextItem` in a `Trainer`. They rank all items that the user has not seen.

    `Trainer(..., metrics=lambda device: FullRanking(model, num_items, device))`. The item to find
    is the last target of each sample. The metrics have the names and rules of `RetrievalMetrics`;
    `loss` is the mean of the batches' losses. Special rows of the table, such as missing and
    unknown items, are not ranked; a sample with such a target counts as a miss. If the vector of a
    user, or the score of the target, is not finite, the metrics are NaN.

    Args:
        model: The trained `NextItem`, in a `DistributedModelParallel` or not. Its items are looked
            up once, when the metrics are created; every rank creates them.
        num_items: Number of rows of the item table.
        device: Device of the model.
        ks: Numbers of items that are recommended.
        seen: Features of items that a user has seen, beside the history of the model.
        seen_targets: What to do if a user has seen the target before. "rank": rank it, and leave
            out only the other seen items, as a recommender with `history=None` may find it.
            "skip": leave the sample out; the metric `seen_targets` is the number of such samples.

    Raises:
        ValueError: A number is below 1, or `seen_targets` is another text.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingConfig
        >>> from recsys.modules.embedding_modules import EmbeddingCollection
        >>> from recsys.modules.sequences.next_item import NextItem
        >>> from recsys.modules.sequences.sasrec import SASRec
        >>> from recsys.sparse import KeyedJaggedTensor
        >>> names = ["history", "target"]
        >>> films = EmbeddingConfig(20, 8, "films", feature_names=names)
        >>> model = NextItem(EmbeddingCollection(tables=[films]), SASRec(8, 50), "in_batch").eval()
        >>> ids, lengths = torch.tensor([1, 2, 3, 2, 5, 4]), torch.tensor([2, 1, 2, 1])
        >>> features = KeyedJaggedTensor(names, ids, lengths=lengths)
        >>> metrics = FullRanking(model, 20, torch.device("cpu"), ks=[5])
        >>> metrics.update(model(features)[1], features)
        >>> sorted(metrics.compute())
        ['hit_rate@5', 'loss', 'mrr@5', 'ndcg@5', 'recall@5']
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        num_items: int,
        device: torch.device,
        ks: Sequence[int] = (10,),
        seen: Sequence[str] = (),
        seen_targets: Literal["rank", "skip"] = "rank",
    ) -> None:
        if seen_targets not in ("rank", "skip"):
            raise ValueError(
                f'seen_targets must be "rank" or "skip"; received {shown(seen_targets)}.'
            )
        self._module: Any = getattr(model, "module", model)
        self._seen = [self._module.history, *seen]
        self._metrics = RetrievalMetrics(ks, device)
        with torch.no_grad():
            self._num_items = whole("num_items", num_items)
            items = self._module.items(self._num_items, device)
        self._index = ItemIndex(items)
        self._skips = seen_targets == "skip"
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)
        self._loss = MeanOfLosses(device)

    def update(self, output: tuple[Tensor, Tensor, Tensor], batch: Any) -> None:
        """Add a batch.

        Args:
            output: The second output of the model: loss, vectors of the users, and targets.
            batch: The batch.
        """
        self._loss.update(output, batch)
        features = getattr(batch, "sparse_features", batch)
        seen = ops.concat([features[name] for name in self._seen])
        last = ops.slice(features[self._module.target], -1)
        users, targets = output[1].to(self._index.items.dtype), last.values().long()
        better, tied = self._index.rank(users, targets, last.offsets(), seen)
        offsets = last.offsets()
        if self._skips:
            seen_of = ops.bags_of(seen) * self._num_items + seen.trim().values().long()
            is_seen = torch.isin(ops.bags_of(last) * self._num_items + targets, seen_of)
            is_left = ~(is_seen & torch.isin(targets, self._index.ids))  # unknown ones are misses
            lengths = last.lengths().new_zeros(last.lengths().shape)
            lengths.index_add_(0, ops.bags_of(last), is_left.to(lengths.dtype))
            better, tied = better[is_left], tied[is_left]
            offsets = torch.cat([offsets.new_zeros(1), lengths.cumsum(0).to(offsets.dtype)])
            self._skipped += (~is_left).sum()
        self._metrics.update_ranks(better, tied, offsets)

    def sync(self) -> None:
        """Add the state of all ranks; every rank calls it, if there are several."""
        self._metrics.sync()
        if torch.distributed.is_initialized():
            self._loss.sync()
            torch.distributed.all_reduce(self._skipped)

    def compute(self) -> dict[str, float]:
        """Return the metrics by name."""
        skipped = {"seen_targets": float(self._skipped)} if self._skips else {}
        return {**self._metrics.compute(), **skipped, **self._loss.compute()}
