"""Entries of results that are under way."""

from __future__ import annotations

import copy

import pytest

from recsys.distributed.ranks.awaitables import (
    GetItemLazyAwaitable,
    LazyAwaitable,
    LazyGetItemMixin,
)


class Pending(LazyGetItemMixin[str, int], LazyAwaitable[dict[str, int]]):
    num_waits = 0

    def __init__(self) -> None:
        super().__init__()

    def _wait_impl(self) -> dict[str, int]:
        Pending.num_waits += 1
        return {"a": 3, "b": 4}


def test_an_entry_waits_when_it_is_used_and_once_for_all() -> None:
    Pending.num_waits = 0
    pending = Pending()
    one, other, missing = pending["a"], pending["b"], pending["c"]
    assert isinstance(one, GetItemLazyAwaitable)
    assert Pending.num_waits == 0
    assert one + other == 7
    assert copy.deepcopy(one).wait() == 3
    assert Pending.num_waits == 1
    with pytest.raises(KeyError):
        missing.wait()
