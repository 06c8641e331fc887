"""Damage of JSON files: each member removed or replaced by another value."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 65536, 2**31, 2**36, 2**63 - 1, 2**63, -(2**63) - 1, 10**30,
    10**400, 0.5, -1.5, 5e-324, 1e308, float("nan"), float("inf"), "", "x", "../x", "/x", "int64",
    "jagged", "\ud800", "a\u0000b", [], [None], [1, "x"], ["x"], [[-1]], {}, {"x": 1}, {"": None},
]  # fmt: skip


def members_of(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all members, at all levels."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, member in items:
        yield (*path, key)
        yield from members_of(member, (*path, key))


def damaged(value: Any, count: int, seed: int) -> Iterator[tuple[Path, str, Any]]:
    """Yield damaged copies; in each, one member is removed, repeated or replaced.

    All members have a turn before one has a second.

    Args:
        value: A JSON value.
        count: Number of copies.
        seed: Seed of the order and the values.

    Returns:
        The path of the member, the damage in words, and the copy.
    """
    draw = random.Random(seed)
    turn: list[Path] = []
    for _ in range(count):
        if not turn:
            turn = list(members_of(value))
            draw.shuffle(turn)
        *outer, key = path = turn.pop()
        found = copy.deepcopy(value)
        parent = found
        for one in outer:
            parent = parent[one]
        kind = draw.choice(["remove", "replace", "replace", "replace", "repeat", "neighbour"])
        if kind == "remove":
            del parent[key]
        elif kind == "repeat" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        elif kind == "neighbour":
            keys = range(len(parent)) if isinstance(parent, list) else list(parent)
            other = draw.choice(keys)
            kind, parent[key] = f"value of {other!r}", copy.deepcopy(parent[other])
        else:
            new = draw.choice(VALUES)
            kind, parent[key] = f"replaced by {str(new)[:20]!r}", new
        yield path, kind, found
