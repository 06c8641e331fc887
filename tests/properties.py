"""Counts of the properties of random cases, and of each pair of properties."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

Counts = Counter[tuple[str, ...]]


def count(counts: Counts, properties: Sequence[str], has: Collection[str]) -> None:
    """Add a case.

    Args:
        counts: The counts, by the names in the order of `properties`.
        properties: All properties.
        has: Properties of the case.
    """
    names = [name for name in properties if name in has]
    counts.update((name,) for name in names)
    counts.update(itertools.combinations(names, 2))


def lines(counts: Counts, properties: Sequence[str]) -> list[str]:
    """Return a line for each property: its cases, and those with each other property.

    Args:
        counts: Result of `count`.
        properties: All properties.
    """
    found = []
    for name in properties:
        pairs = [
            f"{other} {counts[tuple(sorted((name, other), key=properties.index))]}"
            for other in properties
            if other != name
        ]
        found.append(f"  {name}: {counts[(name,)]}; with {', '.join(pairs)}")
    return found
