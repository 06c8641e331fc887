"""Times, sizes and ranks as text, for reports and errors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def ms(milliseconds: float) -> str:
    """Return a time with three significant digits.

    Example:
        >>> ms(0.01204), ms(99.96), ms(1234.5)
        ('0.0120 ms', '100 ms', '1,234 ms')
    """
    # `#.3g` would show 99.95 as "100."
    if milliseconds >= 99.95:
        return f"{milliseconds:,.0f} ms"
    return f"{milliseconds:#.3g} ms" if milliseconds >= 1e-4 else "0 ms"


def size_of(num_bytes: int) -> str:
    """Return bytes in the largest unit in which they are at least 1.

    Example:
        >>> size_of(512), size_of(40_000_000_000)
        ('512 B', '37.3 GiB')
    """
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:,.0f} {units[0]}" if units[0] == "B" else f"{size:,.1f} {units[0]}"


def mib(size: int) -> str:
    """Return bytes as MiB.

    Example:
        >>> mib(1536 << 10)
        '1.5 MiB'
    """
    return f"{size / (1 << 20):,.1f} MiB"


def shorten(texts: Sequence[str], most: int = 3) -> str:
    """Return texts joined by commas, with a count instead of the last of many.

    Example:
        >>> shorten(["a", "b", "c", "d", "e"])
        'a, b, c, ... and 2 more'
    """
    rest = [f"... and {len(texts) - most} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *rest])


def show_ranks(ranks: Sequence[int], most: int = 4) -> str:
    """Return sorted ranks as runs.

    Example:
        >>> show_ranks([0, 1, 2, 5])
        '0-2, 5'
    """
    # rank minus position is constant within a run
    steady = groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in run] for _, run in steady]
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    rest = sum(map(len, runs[most:]))
    return ", ".join([*texts[:most], *([f"... and {rest} more"] if rest else [])])
