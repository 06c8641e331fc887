"""Hardware as a table that people read."""

from __future__ import annotations

from collections.abc import Sequence

from recsys.distributed.placement.plan import format_table
from recsys.distributed.planner.hardware import Hardware

_ON_DEVICES = ("device memory", "device to host", "kernel launch")
_LINES = (
    ("device memory", "hbm_cap", "hbm_mem_bw"),
    ("host memory", "ddr_cap", "ddr_mem_bw"),
    ("disk", "ssd_cap", "ssd_mem_bw"),
    ("device to host", None, "hbm_to_ddr_mem_bw"),
    ("inside a node", "intra_host_latency_ms", "intra_host_bw"),
    ("across nodes", "inter_host_latency_ms", "inter_host_bw"),
    ("kernel launch", "kernel_launch_ms", None),
    ("empty step", "step_ms", None),
)


def hardware_table(hardware: Sequence[Hardware], kinds: Sequence[int]) -> str:
    """Returns one column for each kind of rank.

    Args:
        hardware: of each rank.
        kinds: of each rank, counted from 0 in the order they first come.

    Returns:
        Lines of text; a GB is 1e9 bytes. Of CPUs without those on devices.
    """
    shown = [hardware[kinds.index(kind)] for kind in range(max(kinds) + 1)]
    alone = "each rank" if len(shown) == 1 else ""
    head = ("", *(rank.name or alone or f"kind {kind}" for kind, rank in enumerate(shown)))
    rows = [("ranks", *(_ranks_of(kind, kinds) for kind in range(len(shown))))]
    on_cpu = all(rank.compute_device == "cpu" for rank in shown)
    for label, size, bandwidth in _LINES:
        if on_cpu and label in _ON_DEVICES:
            continue
        rows.append((label, *(_cell(rank, size, bandwidth) for rank in shown)))
    return format_table(head, rows)


def _ranks_of(kind: int, kinds: Sequence[int]) -> str:
    """Returns the ranks of a kind as ranges, such as "0-7, 16-23"."""
    last = len(kinds) - 1
    ranks = [rank for rank, own in enumerate(kinds) if own == kind]
    starts = [rank for rank in ranks if rank == 0 or kinds[rank - 1] != kind]
    stops = [rank for rank in ranks if rank == last or kinds[rank + 1] != kind]
    spans = [f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, stops, strict=True)]
    return ", ".join(spans if len(spans) <= 4 else [*spans[:3], f"... {spans[-1]}"])


def _cell(rank: Hardware, size: str | None, bandwidth: str | None) -> str:
    parts = []
    if size is not None:
        value = getattr(rank, size)
        parts.append(f"{value:g} ms" if size.endswith("_ms") else f"{value / 1e9:,.1f} GB")
    if bandwidth is not None:
        parts.append(f"{getattr(rank, bandwidth) / 1e6:,.1f} GB/s")
    return ", ".join(parts)
