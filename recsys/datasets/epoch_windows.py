"""Windows of an epoch: each contains consecutive row groups of one rank or DataLoader worker.

If a job continues on another number of ranks, the new ranks divide its unread windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from recsys.datasets.sources import Unit


class Position(NamedTuple):
    """The place at which the next batch begins."""

    epoch: int
    window: int
    row: int


class UnreadWindow(NamedTuple):
    """A window that a run on another number of ranks did not read, or only in part."""

    num_shares: int
    """Number of shares into which this run divided the row groups."""
    share: int
    number: int
    """Number of the window in its share."""
    row: int
    """First row that was not read."""


class WindowUnits(NamedTuple):
    """The row groups of a window."""

    units: list[Unit]
    number: int
    """Number of the window in its share; it seeds the shuffle of its rows."""
    row: int
    """First row to read."""


def windows_of(units: Sequence[Unit], window_rows: int) -> list[list[Unit]]:
    """Join consecutive row groups to windows.

    Args:
        units: The row groups of a share, in the order of the epoch.
        window_rows: Least number of rows of a window.
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
    """Return the unread windows of an epoch; None if no rank has begun the epoch.

    Args:
        states: The reader state of each rank. A rank that has read all of its windows is in the
            next epoch.
        count: Function that returns the number of windows of a share. Its arguments are the share
            and the number of shares.

    Raises:
        ValueError: `states` does not contain the states of all ranks of one run.
    """
    places = {*Position._fields, "rank", "unread"}
    runs = [{name: state[name] for name in {*state} - places} for state in states]
    epoch = min(state["epoch"] for state in states)
    at_next = [[*map(state.get, Position._fields)] for state in states if state["epoch"] != epoch]
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
        share, num_shares = state["rank"], state["world_size"]
        windows = [UnreadWindow(*window) for window in state.get("unread", ())]
        if "unread" not in state:
            numbers = range(count(share, num_shares))
            windows = [UnreadWindow(num_shares, share, number, 0) for number in numbers]
        windows = windows[state["window"] :]
        unread += [window._replace(row=state["row"]) for window in windows[:1]] + windows[1:]
    return sorted(unread, key=lambda window: (window.number, window.share))
