"""Hardware of one rank: memories and links.

Units: bytes, bytes per millisecond (1e6 is 1 GB/s), milliseconds.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast, final

from recsys.base.arguments import instance, wrong_type
from recsys.distributed.placement.plan import format_table
from recsys.distributed.planner.formatting import show_ranks

DEVICES = ("cpu", "cuda")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Memories and links of one rank. Ranks with equal hardware are of one kind.

    Links count one direction. Bandwidths are the speeds of long transfers, not the peak of the
    datasheet. Costs do not read `ssd_cap`, `ssd_mem_bw`, `kernel_launch_ms` and the latencies.

    Args:
        compute_device: "cpu" or "cuda".
        name: Label for reports, such as "H100"; ignored by comparisons.
        hbm_cap: Bytes of device memory.
        ddr_cap: Bytes of host memory, this rank's share of its node.
        ssd_cap: Bytes of solid-state disk, this rank's share of its node.
        hbm_mem_bw: Device memory bandwidth; unused if `hbm_cap` is 0.
        ddr_mem_bw: Host memory bandwidth, this rank's share of its node.
        ssd_mem_bw: Disk bandwidth for reads of single rows.
        hbm_to_ddr_mem_bw: Bandwidth between device and host.
        intra_host_bw: Bandwidth between this rank and all others of its node together.
        inter_host_bw: Bandwidth between this rank and all other nodes together.
        kernel_launch_ms: Least time of one kernel.
        intra_host_latency_ms: Least time of a collective inside a node.
        inter_host_latency_ms: Least time of a collective across nodes.
        step_ms: Least time of a training step with almost no data: host work and latencies, the
            same under every plan. 0 if it was not measured.

    Raises:
        ValueError: A size or latency is negative, or a bandwidth is not positive.
        TypeError: A number has another type.

    Example:
        >>> rank = Hardware(compute_device="cpu", hbm_cap=0, ddr_cap=1 << 30, ddr_mem_bw=2e7)
        >>> rank.memory_cap, rank.memory_bw
        (1073741824, 20000000.0)
    """

    compute_device: str
    # ranks with equal numbers are of one kind, even if their labels differ
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
        instance("Hardware.name", self.name, str, "text")
        check_device("Hardware", self.compute_device)
        for name in NUMBERS:
            check_number(f"Hardware.{name}", name, getattr(self, name))

    @property
    def memory_cap(self) -> int:
        """Bytes of the memory of tables: device memory for "cuda", host memory for "cpu"."""
        return self.hbm_cap if self.compute_device == "cuda" else self.ddr_cap

    @property
    def memory_bw(self) -> float:
        """Bandwidth of the memory of tables, in bytes per millisecond."""
        return self.hbm_mem_bw if self.compute_device == "cuda" else self.ddr_mem_bw


NUMBERS = tuple(f.name for f in fields(Hardware) if f.name not in ("compute_device", "name"))
"""Fields of Hardware that are numbers. They may differ between ranks."""


def check_device(subject: str, device: str) -> None:
    """Raise ValueError unless this is a supported device type."""
    if not isinstance(cast(object, device), str) or device not in DEVICES:
        raise ValueError(f"{subject}.compute_device must be 'cpu' or 'cuda'; received {device!r}.")


def check_number(subject: str, name: str, value: object) -> float:
    """Return one number of Hardware, bytes as int and others as float.

    Args:
        subject: Name of the value in errors.
        name: Field, which determines the allowed range.
        value: Number to check.

    Raises:
        ValueError: A size or latency is negative, or a bandwidth is not positive.
        TypeError: The value is not a number.

    Example:
        >>> check_number("Topology.hbm_cap", "hbm_cap", 2e9)
        2000000000
    """
    # integers of NumPy are `numbers.Real` but not `int`; a bool is an `int`
    if isinstance(value, bool) or not isinstance(value, int | float | numbers.Real):
        raise TypeError(f"{subject} must be a number; received {value!r}.")
    number, is_bytes = float(value), name.endswith("_cap")
    rules = {
        "be finite": math.isfinite(number),
        "be positive": number > 0 or not name.endswith("_bw"),
        "not be negative": number >= 0,
        "be a whole number of bytes": number.is_integer() or not is_bytes,
    }
    for rule, holds in rules.items():
        if not holds:
            unit = (
                " It is in bytes per millisecond: 1 GB/s is 1e6." if rule == "be positive" else ""
            )
            raise ValueError(f"{subject} must {rule}; received {value}.{unit}")
    # above 9 PB a float is not exact
    return int(value if isinstance(value, int) else number) if is_bytes else number


def per_rank(owner: str, name: str, value: object, world_size: int) -> tuple[Any, ...]:
    """Return one number or label for each rank, from one value for all or one for each.

    Args:
        owner: Owner of the number in errors.
        name: Field of Hardware.
        value: One number for all ranks, or a sequence with one for each; texts if `name` is "name".
        world_size: Number of ranks.

    Returns:
        `world_size` numbers or texts.

    Raises:
        ValueError: The sequence has another length, or a number is out of range.
        TypeError: A number or label has another type.

    Example:
        >>> per_rank("Topology", "hbm_cap", 8, world_size=3)
        (8, 8, 8)
    """
    kind, subject = "text" if name == "name" else "number", f"{owner}.{name}"

    def check(subject: str, one: object) -> object:
        if kind == "number":
            return check_number(subject, name, one)
        return one if isinstance(one, str) else wrong_type(subject, "text", one)

    # a text is a sequence, too
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (check(subject, value),) * world_size
    if len(value) != world_size:
        raise ValueError(
            f"{subject} must be one {kind}, or one for each of the {world_size} ranks; received "
            f"{len(value)} {kind}s."
        )
    return tuple(check(f"{subject} of rank {rank}", one) for rank, one in enumerate(value))


def build_hardware(device: str, columns: Mapping[str, Sequence[Any]]) -> tuple[Hardware, ...]:
    """Return the hardware of each rank from columns of checked numbers.

    Args:
        device: "cpu" or "cuda", for all ranks.
        columns: Values of all ranks for each of `NUMBERS`, and for "name" if ranks have names.

    Returns:
        One value for each rank; identical ranks share one object.
    """
    rows = list(zip(*columns.values(), strict=True))
    built = {
        row: Hardware(compute_device=device, **dict(zip(columns, row, strict=True)))
        for row in set(rows)
    }
    return tuple(built[row] for row in rows)


_ON_DEVICES = ("device memory", "device to host", "kernel launch")
_LINES = (
    ("device memory", "hbm_cap", "hbm_mem_bw"),
    ("host memory", "ddr_cap", "ddr_mem_bw"),
    ("disk", "ssd_cap", "ssd_mem_bw"),
    ("device to host", "hbm_to_ddr_mem_bw"),
    ("inside a node", "intra_host_latency_ms", "intra_host_bw"),
    ("across nodes", "inter_host_latency_ms", "inter_host_bw"),
    ("kernel launch", "kernel_launch_ms"),
    ("empty step", "step_ms"),
)


def hardware_table(hardware: Sequence[Hardware], kinds: Sequence[int]) -> str:
    """Return a text table with one column for each kind of rank.

    Args:
        hardware: Hardware of each rank.
        kinds: Kind of each rank, numbered in order of first appearance.

    Returns:
        Lines of text; a GB is 1e9 bytes. CPUs have no rows for devices.
    """
    shown = {kind: hardware[kinds.index(kind)] for kind in sorted(set(kinds))}
    alone = "each rank" if len(shown) == 1 else ""
    head = ("", *(rank.name or alone or f"kind {kind}" for kind, rank in shown.items()))
    ranks = (show_ranks([rank for rank, of in enumerate(kinds) if of == kind]) for kind in shown)
    left_out = _ON_DEVICES if hardware[0].compute_device == "cpu" else ()
    rows = [
        (label, *(", ".join(_cell(name, rank) for name in names) for rank in shown.values()))
        for label, *names in _LINES
        if label not in left_out
    ]
    return format_table(head, [("ranks", *ranks), *rows])


def _cell(name: str, rank: Hardware) -> str:
    value = getattr(rank, name)
    if name.endswith("_ms"):
        return f"{value:g} ms"
    return f"{value / 1e9:,.1f} GB" if name.endswith("_cap") else f"{value / 1e6:,.1f} GB/s"
