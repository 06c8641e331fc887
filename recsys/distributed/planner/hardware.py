"""What one rank is made of: memories, links, and the fixed cost of starting work.

Units everywhere: bytes, bytes per millisecond (1e6 is 1 GB/s), milliseconds.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, final

from recsys.distributed.placement.plan import format_table

DEVICES = ("cpu", "cuda")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One rank's memories and links; ranks with equal hardware are of one kind.

    Links count one direction. A bandwidth is what a long transfer achieves, not what is printed on
    the box.

    Args:
        compute_device: "cpu" or "cuda".
        name: a label for people, such as "H100"; not compared.
        hbm_cap: bytes of device memory.
        ddr_cap: bytes of host memory, this rank's share of its node.
        ssd_cap: bytes of solid-state disk, this rank's share of its node.
        hbm_mem_bw: device memory bandwidth; means nothing where ``hbm_cap`` is 0.
        ddr_mem_bw: host memory bandwidth, this rank's share of its node.
        ssd_mem_bw: disk bandwidth for reads of single rows.
        hbm_to_ddr_mem_bw: the link between device and host.
        intra_host_bw: between this rank and the others of its node, all together.
        inter_host_bw: between this rank and other nodes, all together.
        kernel_launch_ms: the least time of one kernel.
        intra_host_latency_ms: the least time of one collective inside a node.
        inter_host_latency_ms: the least time of one collective across nodes.
        step_ms: the least time of a training step, with next to no data: work of the host and
            latencies, the same under every plan. 0 where it was not measured.

    Raises:
        ValueError: if a size or latency is negative, or a bandwidth is not positive.
        TypeError: if a number is not one.

    Example:
        >>> rank = Hardware(compute_device="cpu", hbm_cap=0, ddr_cap=1 << 30, ddr_mem_bw=2e7)
        >>> rank.memory_cap, rank.memory_bw
        (1073741824, 20000000.0)
    """

    compute_device: str
    name: str = field(default="", compare=False)
    hbm_cap: int
    ddr_cap: int
    ssd_cap: int = 0
    hbm_mem_bw: float = 2.0e9
    ddr_mem_bw: float = 1.0e7
    ssd_mem_bw: float = 1.0e6
    hbm_to_ddr_mem_bw: float = 2.5e7
    intra_host_bw: float = 3.0e8
    inter_host_bw: float = 1.25e7
    kernel_launch_ms: float = 0.005
    intra_host_latency_ms: float = 0.02
    inter_host_latency_ms: float = 0.04
    step_ms: float = 0.0

    def __post_init__(self) -> None:
        check_device("Hardware", self.compute_device)
        for name in NUMBERS:
            check_number(f"Hardware.{name}", name, getattr(self, name))

    @property
    def memory_cap(self) -> int:
        """Bytes where tables live: device memory for "cuda", host memory for "cpu"."""
        return self.hbm_cap if self.compute_device == "cuda" else self.ddr_cap

    @property
    def memory_bw(self) -> float:
        """Bytes per millisecond where tables live."""
        return self.hbm_mem_bw if self.compute_device == "cuda" else self.ddr_mem_bw


NUMBERS = tuple(f.name for f in fields(Hardware) if f.name not in ("compute_device", "name"))
"""The fields of Hardware that are numbers: what may differ from rank to rank."""


def check_device(subject: str, device: str) -> None:
    """Raises ValueError unless this is a kind of device that ranks compute on."""
    if device not in DEVICES:
        raise ValueError(f"{subject}.compute_device must be 'cpu' or 'cuda'; received {device!r}.")


def check_number(subject: str, name: str, value: object) -> float:
    """Returns the value of one number of Hardware, bytes as int and the rest as float.

    Args:
        subject: what the number belongs to, for the error.
        name: the field, which decides what is allowed.
        value: the number to check.

    Raises:
        ValueError: if a size or latency is negative, or a bandwidth is not positive.
        TypeError: if this is no number.

    Example:
        >>> check_number("Topology.hbm_cap", "hbm_cap", 2e9)
        2000000000
    """
    if isinstance(value, bool) or not isinstance(value, int | float | numbers.Real):
        raise TypeError(f"{subject} must be a number; received {value!r}.")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{subject} must be finite; received {value}.")
    if name.endswith("_bw"):
        if number <= 0:
            raise ValueError(
                f"{subject} must be positive; received {value}. It is in bytes per millisecond: "
                "1 GB/s is 1e6."
            )
        return number
    if number < 0:
        raise ValueError(f"{subject} must not be negative; received {value}.")
    if not name.endswith("_cap"):
        return number
    if not number.is_integer():
        raise ValueError(f"{subject} must be a whole number of bytes; received {value}.")
    return value if isinstance(value, int) else int(number)  # from 9 PB on a float is not exact


def per_rank(owner: str, name: str, value: object, world_size: int) -> tuple[float, ...]:
    """Returns the number of each rank: the same for all, or the sequence that was given.

    Args:
        owner: what the number belongs to, for the error.
        name: the field of Hardware.
        value: one number for all ranks or a sequence of one per rank.
        world_size: number of ranks.

    Returns:
        ``world_size`` numbers.

    Raises:
        ValueError: if the sequence has another length, or a number is out of range.
        TypeError: if a number is not one.

    Example:
        >>> per_rank("Topology", "hbm_cap", 8, world_size=3)
        (8, 8, 8)
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (check_number(f"{owner}.{name}", name, value),) * world_size
    if len(value) != world_size:
        raise ValueError(
            f"{owner}.{name} must be one number, or one for each of the {world_size} ranks; "
            f"received {len(value)} numbers."
        )
    return tuple(
        check_number(f"{owner}.{name} of rank {rank}", name, one) for rank, one in enumerate(value)
    )


def build_hardware(
    device: str, names: Sequence[str], columns: Mapping[str, Sequence[float]]
) -> tuple[Hardware, ...]:
    """Returns the hardware of each rank from one column of checked numbers per field.

    Args:
        device: "cpu" or "cuda", for all ranks.
        names: the label of each rank.
        columns: for each of :data:`NUMBERS` the number of every rank.

    Returns:
        One value per rank; ranks alike share one object.
    """
    built: dict[tuple[object, ...], Hardware] = {}
    ranks = []
    for label, *row in zip(names, *(columns[name] for name in NUMBERS), strict=True):
        key = (label, *row)
        if key not in built:
            numbers: dict[str, Any] = dict(zip(NUMBERS, row, strict=True))  # int or float each
            built[key] = Hardware(compute_device=device, name=label, **numbers)
        ranks.append(built[key])
    return tuple(ranks)


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
