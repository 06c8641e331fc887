"""Search of the items with the largest dot products.

Legend: `B` queries, `I` items, `D` columns, `K` results.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from recsys.kernels.arguments import whole
from recsys.kernels.checked import checked
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, ops

__all__ = ["ItemIndex", "Recommend"]


@final
class ItemIndex(nn.Module):
    """Exact search by brute force. Memory grows with the queries times `chunk_items`, not `I`.

    The vectors are buffers, so an index moves, is saved and exported with the model that has it.

    Args:
        items: `[I, D]` floating, the vectors.
        ids: int64 `[I]`, ids of the items, distinct; None for 0 to `I - 1`.
        chunk_items: Items that are scored at once.

    Raises:
        ValueError: Shapes or sizes do not match, or ids are equal.

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
        if ids is None:
            ids = torch.arange(items.shape[0], device=items.device)
        else:
            check_item_ids(items, ids)
        self.chunk_items = whole("chunk_items", chunk_items)
        self.register_buffer("items", items.detach())
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
            Scores `[B, K]`, -inf where all other items are seen; and int64 ids `[B, K]`.

        Raises:
            ValueError: `k` is larger than the number of items, or shapes do not match.
        """
        if queries.dim() != 2 or queries.shape[1] != self.items.shape[1]:
            raise ValueError(
                f"queries must be [queries, {self.items.shape[1]}]; received {list(queries.shape)}."
            )
        check_seen(queries, seen)
        if not 1 <= k <= self.items.shape[0]:
            raise ValueError(f"k must be from 1 to {self.items.shape[0]}; received {k}.")
        scores, places = list[Tensor](), list[Tensor]()
        rows_of_seen = None if seen is None else self._places_of(seen)
        for first in range(0, self.items.shape[0], self.chunk_items):
            chunk = self.items[first : first + self.chunk_items]
            found = queries @ chunk.T
            if rows_of_seen is not None:
                rows, places_of_seen = rows_of_seen
                is_here = (places_of_seen >= first) & (places_of_seen < first + len(chunk))
                found[rows[is_here], places_of_seen[is_here] - first] = float("-inf")
            best, place = found.topk(min(k, len(chunk)), dim=1)
            scores.append(best)
            places.append(place + first)
        if len(scores) == 1:
            return scores[0], self.ids[places[0]]
        best, order = torch.cat(scores, 1).topk(k, dim=1)
        return best, self.ids[torch.cat(places, 1).gather(1, order)]

    def _places_of(self, seen: JaggedTensor) -> tuple[Tensor, Tensor]:
        """Return the query and the position of each id that the index has."""
        ordered, order = self.ids.sort()
        ids = seen.trim().values().long()
        place = torch.searchsorted(ordered, ids).clamp(max=len(ordered) - 1)
        is_known = ordered[place] == ids
        return ops.bags_of(seen)[is_known], order[place[is_known]]


def check_item_ids(items: Tensor, ids: Tensor) -> None:
    """Raise an error unless each item has an id of its own."""
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
        index: The items.
        k: Number of items of each user.
        history: Feature of ids that are not recommended again; None to recommend any.

    Raises:
        ValueError: `k` is below 1.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingConfig
        >>> from recsys.modules.embedding_modules import EmbeddingCollection
        >>> from recsys.modules.sequences.next_item import NextItem
        >>> from recsys.modules.sequences.sasrec import SASRec
        >>> films = EmbeddingConfig(
        ...     num_embeddings=10, embedding_dim=8, name="films", feature_names=["history"]
        ... )
        >>> model = NextItem(EmbeddingCollection(tables=[films]), SASRec(8, 50), "in_batch")
        >>> items = model.embedding_collection.embeddings["films"].weight
        >>> ids = torch.tensor([1, 2, 3])
        >>> features = KeyedJaggedTensor(["history"], ids, lengths=torch.tensor([2, 1]))
        >>> scores, found = Recommend(model.eval(), ItemIndex(items), k=3)(features)
        >>> found.shape
        torch.Size([2, 3])
    """

    @checked
    def __init__(
        self, model: nn.Module, index: ItemIndex, k: int, history: str | None = "history"
    ) -> None:
        super().__init__()
        self.model, self.index, self.history = model, index, history
        self.k = whole("k", k)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Return scores `[B, K]` and int64 ids `[B, K]`, the best first.

        Args:
            features: The features of `B` users.
        """
        seen = None if self.history is None else features[self.history]
        queries = self.model.users(features)  # type: ignore[operator]
        found: tuple[Tensor, Tensor] = self.index(queries, self.k, seen)
        return found
