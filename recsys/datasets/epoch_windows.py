"""Windows of an epoch: some consecutive row groups each, of a share of all row groups.

A job that continues on another number of ranks divides the windows that are left of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from recsys.datasets.sources import Unit

POSITION = ("epoch", "window", "row")
"""Names in a state of the place at which the next batch begins."""


class UnreadWindow(NamedTuple):
    """A window that a run on another number of ranks has left, as a whole or in part."""

    shares: int
    """Number of shares of the row groups then."""
    share: int
    number: int
    """Number of the window in its share."""
    row: int
    """Number of its rows that were read."""


class WindowUnits(NamedTuple):
    """The row groups of a window."""

    units: list[Unit]
    number: int
    """Number of the window in its share, on which the order of its rows depends."""
    row: int
    """Row to begin at."""


def windows_of(units: Sequence[Unit], window_rows: int) -> list[list[Unit]]:
    """Join row groups to windows.

    Args:
        units: The row groups of a share, in the order of the epoch.
        window_rows: Rows of a window, at least.
    """
    windows: list[list[Unit]] = []
    rows = window_rows
    for unit in units:
        if rows >= window_rows:
            windows.append([])
            rows = 0
        windows[-1].append(unit)
        rows += unit.num_rows
    return windows


def unread_windows(
    states: Sequence[Mapping[str, Any]], count: Callable[[int, int], int]
) -> list[UnreadWindow] | None:
    """Return the windows that a run has left of its epoch; None if no rank has begun it.

    Args:
        states: The state of a reader of each rank. Ranks that have read all of their windows are in
            the next epoch.
        count: Function of a share and the number of shares: its number of windows.

    Raises:
        ValueError: They are not the states of all ranks of a run.
    """
    places = {*POSITION, "rank", "unread"}
    runs = [{name: state[name] for name in {*state} - places} for state in states]
    epoch = min(state["epoch"] for state in states)
    at_next = [[*map(state.get, POSITION)] for state in states if state["epoch"] != epoch]
    if (
        any(run != runs[0] for run in runs)
        or sorted(state["rank"] for state in states) != [*range(states[0]["world_size"])]
        or any(place != [epoch + 1, 0, 0] for place in at_next)
    ):
        ranks = [(state["rank"], state["world_size"]) for state in states]
        raise ValueError(
            "The states must be of all ranks of one run, saved after the same step, without "
            f"workers of a DataLoader; received {len(states)} states of {ranks[:8]} (rank, number "
            "of ranks). Begin an epoch with set_epoch."
        )
    if not at_next and not any(s["window"] or s["row"] or "unread" in s for s in states):
        return None
    unread: list[UnreadWindow] = []
    for state in states:
        if state["epoch"] != epoch:
            continue
        share, shares = state["rank"], state["world_size"]
        windows = [UnreadWindow(*window) for window in state.get("unread", ())]
        if "unread" not in state:
            numbers = range(count(share, shares))
            windows = [UnreadWindow(shares, share, number, 0) for number in numbers]
        windows = windows[state["window"] :]
        unread += [window._replace(row=state["row"]) for window in windows[:1]] + windows[1:]
    return sorted(unread, key=lambda window: (window.number, window.share))
