"""Search of the items with the largest dot products.

Shapes: `B` queries, `I` items, `D` columns, `K` results.
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor, nn

from recsys.base.arguments import whole
from recsys.base.checked import checked, checked_late
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, ops

__all__ = ["ItemIndex", "Recommend"]

_CACHED_ITEMS: Final = 1 << 12
"""Items whose scores for some hundred queries fit into the cache of a CPU."""


@final
class ItemIndex(nn.Module):
    """Exact search by brute force. Memory grows with the queries times `chunk_items`, not `I`.

    The vectors are buffers, so an index moves, is saved and exported with the model that has it.

    A score must be finite: an item with a NaN or infinite vector is never found, nor is an item
    whose score overflows. All scores of a query with such a vector are NaN.

    Args:
        items: `[I, D]` floating, the vectors. Rows of -inf, as `NextItem.items` has for rows that
            are not items, are left out of the index.
        ids: int64 `[I]`, ids of the items, distinct; None for 0 to `I - 1`.
        chunk_items: Items that are scored at once.

    Raises:
        TypeError: `ids` are not whole numbers.
        ValueError: Shapes or sizes do not match, ids are equal, or there is not an item.

    Example:
        >>> index = ItemIndex(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]))
        >>> scores, ids = index(torch.tensor([[1.0, 0.5]]), 2)
        >>> scores.tolist(), ids.tolist()
        ([[2.0, 1.0]], [[2, 0]])
    """

    items: Tensor
    ids: Tensor

    @checked
    def __init__(
        self, items: Tensor, ids: Tensor | None = None, chunk_items: int = 1 << 16
    ) -> None:
        super().__init__()
        if items.dim() != 2 or not items.shape[0] or not items.is_floating_point():
            raise ValueError(
                f"items must be floats, [items, columns]; received {items.dtype} "
                f"{list(items.shape)}."
            )
        self.has_row_ids = ids is None
        if ids is None:
            ids = torch.arange(items.shape[0], device=items.device)
        else:
            check_item_ids(items, ids)
        self.chunk_items = whole("chunk_items", chunk_items)
        items, ids = select_items(items.detach(), ids, ~items.isneginf().all(1))
        self.register_buffer("items", items)
        self.register_buffer("ids", ids.long())

    def forward(
        self, queries: Tensor, k: int, seen: JaggedTensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the best items of each query, the best first.

        Args:
            queries: `[B, D]`.
            k: `K`, at most `I`.
            seen: Ids that a query must not find, one bag per query; unknown ids are allowed. None
                for none.

        Returns:
            Scores `[B, K]` and int64 ids `[B, K]`. Where a query has no other items, the score is
            -inf and the id -1. For a query that is not finite, scores are NaN and ids -1. Items
            with equal scores are in no particular order.

        Raises:
            ValueError: `k` is larger than the number of items, or shapes do not match.
        """
        self._check(queries, seen)
        if not 1 <= k <= self.items.shape[0]:
            raise ValueError(f"k must be from 1 to {self.items.shape[0]}; received {k}.")
        scores, places = list[Tensor](), list[Tensor]()
        places_of_seen = None if seen is None else self._places_of(seen)
        for first in range(0, self.items.shape[0], self.chunk_items):
            chunk_scores = self._scores(queries, first, self.chunk_items, places_of_seen)
            best, place = chunk_scores.topk(min(k, chunk_scores.shape[1]), dim=1)
            scores.append(best)
            places.append(place + first)
        best, place = scores[0], places[0]
        if len(scores) > 1:
            best, order = torch.cat(scores, 1).topk(k, dim=1)
            place = torch.cat(places, 1).gather(1, order)
        ids = self.ids[place].masked_fill(best == float("-inf"), -1)
        return best.masked_fill(~queries.isfinite().all(1, keepdim=True), float("nan")), ids

    @checked_late
    def rank(
        self, queries: Tensor, targets: Tensor, offsets: Tensor, seen: JaggedTensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the ranks of targets among all items, for `RetrievalMetrics.update_ranks`.

        Args:
            queries: `[B, D]`.
            targets: `[T]` ids of the targets, distinct for each query.
            offsets: `[B + 1]`, the position of the first target of each query, and the end.
            seen: Ids that are not ranked for a query, except its targets; one bag per query. None
                for none.

        Returns:
            float64 `[T]`, the number of items with a higher score: inf for an id that the index
            does not have, NaN if the query or the score is not finite. And float64 `[T]`, the
            number of items with the score of the target, the target included.

        Raises:
            ValueError: Shapes do not match.

        Example:
            >>> index = ItemIndex(torch.tensor([[1.0], [2.0], [1.0], [3.0]]))
            >>> index.rank(torch.ones(1, 1), torch.tensor([0, 9]), torch.tensor([0, 2]))
            (tensor([2., inf], dtype=torch.float64), tensor([2., 1.], dtype=torch.float64))
        """
        self._check(queries, seen)
        if targets.dim() != 1 or offsets.shape != (queries.shape[0] + 1,):
            raise ValueError(
                f"targets must be [targets] and offsets [{queries.shape[0] + 1}]; received "
                f"{list(targets.shape)} and {list(offsets.shape)}."
            )
        query_T = ops.bags_of(JaggedTensor(targets, offsets=offsets))
        place_T, is_known_T = self._find(targets.long())
        queries_T, num_items = queries[query_T], self.items.shape[0]
        hidden = None
        if seen is not None:
            query, place = self._places_of(seen)
            of_targets = (query_T * num_items + place_T)[is_known_T]
            is_hidden = ~torch.isin(query * num_items + place, of_targets)
            lengths = query[is_hidden].bincount(minlength=queries.shape[0])
            each = ops.select(JaggedTensor(place[is_hidden], lengths=lengths), query_T)
            hidden = ops.bags_of(each), each.values()
        step = min(self.chunk_items, _CACHED_ITEMS) if self.items.is_cpu else self.chunk_items
        firsts = range(0, num_items, step)
        # The score of a target is of the product that it is compared with, so it equals itself.
        score_T = queries.new_zeros(query_T.shape)
        for first in firsts:
            scores = self._scores(queries_T, first, step, None)
            column_T = (place_T - first).clamp(0, scores.shape[1] - 1).unsqueeze(1)
            is_here_T = is_known_T & (place_T >= first) & (place_T < first + step)
            score_T = scores.gather(1, column_T).squeeze(1).where(is_here_T, score_T)
        better_T = torch.zeros_like(query_T, dtype=torch.float64)
        tied_T = torch.zeros_like(better_T)
        for first in firsts:
            scores = self._scores(queries_T, first, step, hidden)
            # Floats are summed several times as fast as bools.
            flags = torch.empty_like(scores, dtype=torch.float32)
            better_T += torch.gt(scores, score_T.unsqueeze(1), out=flags).sum(1)
            tied_T += torch.eq(scores, score_T.unsqueeze(1), out=flags).sum(1)
        better_T = better_T.masked_fill(~is_known_T, float("inf"))
        is_finite_T = score_T.isfinite() & queries_T.isfinite().all(1)
        return (
            better_T.masked_fill(~is_finite_T, float("nan")),
            tied_T.where(is_known_T & is_finite_T, 1.0),
        )

    @checked
    def without(self, ids: Tensor) -> ItemIndex:
        """Return an index without some items, or this index if it has none of them.

        Args:
            ids: int64 `[N]`.

        Example:
            >>> ItemIndex(torch.eye(3)).without(torch.tensor([0, 7])).ids
            tensor([1, 2])
        """
        is_left = ~torch.isin(self.ids, ids.to(self.ids.device))
        if is_left.all():
            return self
        index = ItemIndex(*select_items(self.items, self.ids, is_left), self.chunk_items)
        index.has_row_ids = self.has_row_ids
        return index

    def _check(self, queries: Tensor, seen: JaggedTensor | None) -> None:
        if queries.dim() != 2 or queries.shape[1] != self.items.shape[1]:
            raise ValueError(
                f"queries must be [queries, {self.items.shape[1]}]; received {list(queries.shape)}."
            )
        check_seen(queries, seen)

    def _scores(
        self, queries: Tensor, first: int, size: int, hidden: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Return the scores of a chunk of items; -inf for items that are not found.

        Args:
            queries: The queries.
            first: The first item of the chunk.
            size: The largest number of items.
            hidden: Queries, and the items that they do not find.
        """
        scores = queries @ self.items[first : first + size].T
        scores = scores.nan_to_num_(*[float("-inf")] * 3)
        if hidden is not None:
            rows, items = hidden
            is_here = (items >= first) & (items < first + scores.shape[1])
            scores[rows[is_here], items[is_here] - first] = float("-inf")
        return scores

    def _places_of(self, seen: JaggedTensor) -> tuple[Tensor, Tensor]:
        """Return the query and the position of each id that the index has."""
        places, is_known = self._find(seen.trim().values().long())
        return ops.bags_of(seen)[is_known], places[is_known]

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position of each id, and whether the index has it."""
        ordered, order = self.ids.sort()
        place = torch.searchsorted(ordered, ids).clamp(max=len(ordered) - 1)
        return order[place], ordered[place] == ids


def select_items(items: Tensor, ids: Tensor, is_item: Tensor) -> tuple[Tensor, Tensor]:
    """Return some of the items and their ids."""
    if items.is_meta or is_item.all():
        return items, ids
    if not is_item.any():
        raise ValueError(
            f"items must have a vector of an item; received {list(items.shape)} without any."
        )
    return items[is_item], ids[is_item]


def check_item_ids(items: Tensor, ids: Tensor) -> None:
    """Raise an error unless each item has an id of its own."""
    if ids.is_floating_point():
        raise TypeError(f"ids must be whole numbers; received {ids.dtype}. Convert them to int64.")
    if ids.shape != items.shape[:1]:
        raise ValueError(
            f"ids must be one per item, [{items.shape[0]}]; received {list(ids.shape)}."
        )
    count = ids.unique().numel()
    if count < ids.numel():
        raise ValueError(f"ids must be distinct; received {count} different of {ids.numel()}.")


def check_seen(queries: Tensor, seen: JaggedTensor | None) -> None:
    """Raise an error if there is not one bag of seen ids per query."""
    if seen is not None and seen.lengths().shape[0] != queries.shape[0]:
        raise ValueError(
            f"seen must have one bag per query, {queries.shape[0]}; received "
            f"{seen.lengths().shape[0]}."
        )


@final
class Recommend(nn.Module):
    """Histories in, items out: a model of users with an index of items inside, to be served.

    Args:
        model: Its `users(features)` are the queries, as of `NextItem`.
        index: The items. The ids of the model's `special_ids()`, such as of `NextItem`, are left
            out, if `history` is given or the index was created without ids, from all rows.
        k: Number of items of each user.
        history: Feature of ids that are not recommended again; None to recommend any.

    Raises:
        ValueError: `k` is below 1.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingConfig
        >>> from recsys.modules.embedding_modules import EmbeddingCollection
        >>> from recsys.modules.sequences.next_item import NextItem
        >>> from recsys.modules.sequences.sasrec import SASRec
        >>> films = EmbeddingConfig(10, 8, "films", feature_names=["history", "target"])
        >>> model = NextItem(EmbeddingCollection(tables=[films]), SASRec(8, 50), "in_batch")
        >>> items = model.items(10, torch.device("cpu"))
        >>> ids = torch.tensor([1, 2, 3])
        >>> lengths = torch.tensor([2, 1, 0, 0])
        >>> features = KeyedJaggedTensor(["history", "target"], ids, lengths=lengths)
        >>> scores, found = Recommend(model.eval(), ItemIndex(items), k=3)(features)
        >>> found.shape
        torch.Size([2, 3])
    """

    @checked
    def __init__(
        self, model: nn.Module, index: ItemIndex, k: int, history: str | None = "history"
    ) -> None:
        super().__init__()
        self.has_row_ids = history is not None or index.has_row_ids
        if self.has_row_ids and hasattr(model, "special_ids"):
            index = index.without(model.special_ids())  # type: ignore[operator]
        self.model, self.index, self.history = model, index, history
        self.k = whole("k", k)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Return scores `[B, K]` and int64 ids `[B, K]`, the best first, as of `ItemIndex`.

        Args:
            features: The features of `B` users.
        """
        seen = None if self.history is None else features[self.history]
        queries = self.model.users(features)  # type: ignore[operator]
        best: tuple[Tensor, Tensor] = self.index(queries, self.k, seen)
        return best
