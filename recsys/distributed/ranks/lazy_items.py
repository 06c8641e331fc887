"""Entries of results that are under way."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from recsys.distributed.ranks.comm import LazyAwaitable

K = TypeVar("K")
V = TypeVar("V")


class GetItemLazyAwaitable(LazyAwaitable[V]):
    """An entry of a result that is under way: it arrives with the result.

    Args:
        parent: the result.
        key: of the entry.

    Example:
        >>> GetItemLazyAwaitable(LazyAwaitable(lambda: {"a": 3}), "a").wait()
        3
    """

    def __init__(self, parent: LazyAwaitable[Any], key: object) -> None:
        super().__init__(lambda: parent.wait()[key])


class LazyGetItemMixin(Generic[K, V]):
    """Makes entries of a `LazyAwaitable` awaitable, too: `pending[key]` does not wait.

    Name it before `LazyAwaitable` among the bases of a class.

    Example:
        >>> class Pending(LazyGetItemMixin[str, int], LazyAwaitable[dict[str, int]]):
        ...     def _wait_impl(self):
        ...         print("waits")
        ...         return {"a": 3}
        >>> entry = Pending()["a"]
        >>> entry + 1
        waits
        4
    """

    def __getitem__(self, key: K) -> GetItemLazyAwaitable[V]:
        return GetItemLazyAwaitable(self, key)  # type: ignore[arg-type]  # a LazyAwaitable
