"""Machine of the planner: all ranks with their memory and links."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Self, final

import torch

from recsys.base.arguments import MissingKeyError, whole
from recsys.base.checked import checked
from recsys.distributed.placement.file_checks import read_source
from recsys.distributed.planner import topology_json
from recsys.distributed.planner.hardware import (
    NUMBERS,
    Hardware,
    build_hardware,
    check_device,
    hardware_table,
    per_rank,
)
from recsys.distributed.planner.measured import (
    CollectivePoint,
    LookupPoint,
    LookupSpeed,
    LookupTable,
    largest_collectives,
    transfer_ms,
)
from recsys.distributed.planner.presets import DATASHEETS, PRESETS, check_preset
from recsys.distributed.ranks.node import get_local_size

_CUDA_DEFAULT_BYTES = 32 << 30  # used on hosts without a GPU


@final
class CustomTopologyData:
    """Numbers that differ between ranks, by field. They override the arguments of `Topology`.

    Args:
        data: Numbers of all ranks for each field, such as "hbm_cap".
        world_size: Number of ranks.

    Raises:
        ValueError: A field is unknown, or does not have one number in range for each rank.
        TypeError: A number has another type.

    Example:
        >>> data = CustomTopologyData({"hbm_cap": [40 << 30, 80 << 30]}, world_size=2)
        >>> data.has_data("ddr_cap"), data.get_data("hbm_cap")
        (False, [42949672960, 85899345920])
    """

    supported_fields: ClassVar[list[str]] = list(NUMBERS)

    @checked
    def __init__(self, data: Mapping[str, Sequence[float]], world_size: int) -> None:
        whole("CustomTopologyData.world_size", world_size)
        unknown = sorted(data.keys() - set(NUMBERS))
        if unknown:
            raise ValueError(
                f"CustomTopologyData.data must have keys among {', '.join(NUMBERS)}; received "
                f"{', '.join(map(repr, unknown))}."
            )
        self._data = {
            name: per_rank("CustomTopologyData", name, values, world_size)
            for name, values in data.items()
        }
        self.world_size = world_size

    @checked
    def has_data(self, key: str) -> bool:
        """Return whether the caller set this field of the topology."""
        return key in self._data

    @checked
    def get_data(self, key: str) -> list[float]:
        """Return the numbers of all ranks.

        Raises:
            KeyError: The field was not given.
        """
        if key not in self._data:
            raise MissingKeyError(
                f"key must be one of the given fields {list(self._data)}; received {key!r}."
            )
        return list(self._data[key])

    def all_of(self, world_size: int) -> dict[str, list[float]]:
        """Return all given fields.

        Raises:
            ValueError: They were given for another number of ranks.
        """
        if self.world_size != world_size:
            raise ValueError(
                f"Topology.custom_topology_data must be made for {world_size} ranks; received "
                f"data for {self.world_size}."
            )
        return {name: list(values) for name, values in self._data.items()}


def _least(name: str, what: str) -> Any:
    """Return a property with the least value of a field over all ranks."""
    return property(attrgetter(f"slowest.{name}"), doc=f"Least {what}, over all ranks.")


@dataclass(frozen=True, init=False, repr=False)
class Topology:
    """Ranks, their memory and the links between them.

    Each number is one value for all ranks or a sequence with one value for each rank. Ranks with
    consecutive numbers share a node. Bandwidths are in bytes per millisecond (1 GB/s is 1e6) and
    count one direction. `preset` and `from_json` do not query this machine.

    Args:
        world_size: Number of ranks.
        compute_device: "cpu" or "cuda".
        hbm_cap: Bytes of device memory per rank. Default: memory of the current GPU (32 GiB without
            a GPU); 0 for "cpu".
        ddr_cap: Bytes of host memory per rank. Default: memory of this host divided by
            `local_world_size`.
        ssd_cap: Bytes of solid-state disk per rank. Not read by costs.
        local_world_size: Ranks per node, at most all. Default: the number set by torchrun
            (`get_local_size`), or else all ranks.
        hbm_mem_bw: Device memory bandwidth.
        ddr_mem_bw: Host memory bandwidth.
        ssd_mem_bw: Disk bandwidth for reads of single rows. Not read by costs.
        hbm_to_ddr_mem_bw: Bandwidth between device and host.
        intra_host_bw: Bandwidth between ranks of a node. Default: 3e8; for "cpu" a quarter of
            `ddr_mem_bw`.
        inter_host_bw: Bandwidth between nodes.
        kernel_launch_ms: Least milliseconds of a kernel. Not read by costs.
        intra_host_latency_ms: Least milliseconds of a collective inside a node. Default: 0.02; 0.1
            for "cpu". Not read by costs.
        inter_host_latency_ms: Least milliseconds of a collective across nodes. Default: 0.04; 0.15
            for "cpu". Not read by costs.
        step_ms: Least milliseconds of a training step with almost no data.
        custom_topology_data: Numbers that differ between ranks, instead of sequences.

    Attributes:
        hardware: `Hardware` of each rank.
        lookup: Measured lookups; see `lookup_speed`.
        collectives: Measured collectives; see `transfer_ms`.

    Raises:
        ValueError: A number is out of range, a sequence does not have one number for each rank,
            nodes would differ in their number of ranks, or the device type is unknown.
        TypeError: A number has another type.

    Example:
        >>> topology = Topology(world_size=2, compute_device="cpu", ddr_cap=[1 << 30, 2 << 30])
        >>> topology.hardware[1].ddr_cap, topology.memory_cap
        (2147483648, 1073741824)
    """

    local_world_size: int
    hardware: tuple[Hardware, ...]
    lookup: tuple[LookupPoint, ...]
    collectives: tuple[CollectivePoint, ...]

    @checked
    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: float | Sequence[float] | None = None,
        ddr_cap: float | Sequence[float] | None = None,
        ssd_cap: float | Sequence[float] = 0,
        local_world_size: int | None = None,
        *,
        hbm_mem_bw: float | Sequence[float] = 2.0e9,
        ddr_mem_bw: float | Sequence[float] = 1.0e7,
        ssd_mem_bw: float | Sequence[float] = 1.0e6,
        hbm_to_ddr_mem_bw: float | Sequence[float] = 2.5e7,
        intra_host_bw: float | Sequence[float] | None = None,
        inter_host_bw: float | Sequence[float] = 1.25e7,
        kernel_launch_ms: float | Sequence[float] = 0.005,
        intra_host_latency_ms: float | Sequence[float] | None = None,
        inter_host_latency_ms: float | Sequence[float] | None = None,
        step_ms: float | Sequence[float] = 0.0,
        custom_topology_data: CustomTopologyData | None = None,
    ) -> None:
        # first statement, so that locals are the arguments alone
        numbers = {name: value for name, value in locals().items() if name in NUMBERS}
        check_device("Topology", compute_device)
        whole("Topology.world_size", world_size)
        local_world_size = _local_size(world_size, local_world_size)
        for name, of in numbers.items():
            # a check only: arguments must be valid even if custom_topology_data overrides them
            if of is not None:
                per_rank("Topology", name, of, world_size)
        if custom_topology_data is not None:
            numbers |= custom_topology_data.all_of(world_size)
        on_cpu = compute_device == "cpu"
        if numbers["hbm_cap"] is None:  # queries the GPU only in this case
            numbers["hbm_cap"] = 0 if on_cpu else _device_bytes()
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        defaults = {
            "ddr_cap": host_bytes // local_world_size,
            "intra_host_latency_ms": 0.1 if on_cpu else 0.02,
            "inter_host_latency_ms": 0.15 if on_cpu else 0.04,
        }
        values = defaults | {name: of for name, of in numbers.items() if of is not None}
        columns = {name: per_rank("Topology", name, of, world_size) for name, of in values.items()}
        memory_bw = columns["ddr_mem_bw"]
        columns.setdefault("intra_host_bw", tuple(bw / 4 if on_cpu else 3.0e8 for bw in memory_bw))
        hardware = build_hardware(compute_device, columns)
        # assignment to an attribute of a frozen class is an error
        self.__dict__.update(vars(Topology.from_hardware(hardware, local_world_size)))

    @classmethod
    @checked
    def from_hardware(
        cls,
        hardware: Sequence[Hardware],
        local_world_size: int | None = None,
        *,
        lookup: Sequence[LookupPoint] = (),
        collectives: Sequence[CollectivePoint] = (),
    ) -> Self:
        """Return the topology of some ranks.

        Args:
            hardware: Hardware of each rank, all with one `compute_device`.
            local_world_size: As in the constructor.
            lookup: Measured lookups.
            collectives: Measured collectives.

        Raises:
            ValueError: There are no ranks, their device types differ, nodes would differ in their
                number of ranks, or a point was measured twice.

        Example:
            >>> from dataclasses import replace
            >>> slow_network = replace(PRESETS["H100"], inter_host_bw=1.25e7)
            >>> Topology.from_hardware([slow_network] * 16, local_world_size=8).exchange_bw
            12500000.0
        """
        whole("Topology.world_size", len(hardware))
        devices = sorted({rank.compute_device for rank in hardware})
        if len(devices) > 1:
            raise ValueError(
                f"Topology.hardware must have one compute_device for all ranks; received "
                f"{' and '.join(devices)}."
            )
        topology = cls.__new__(cls)
        topology.__dict__.update(
            local_world_size=_local_size(len(hardware), local_world_size),
            hardware=tuple(hardware),
            lookup=tuple(lookup),
            collectives=tuple(collectives),
        )
        _ = topology._lookups, topology._collectives  # raises if a point occurs twice
        return topology

    @classmethod
    @checked
    def preset(
        cls, name: str | Sequence[str], world_size: int, local_world_size: int | None = None
    ) -> Self:
        """Return the topology of machines known by name, with numbers of their vendors.

        Args:
            name: "A100-40", "A100-80", "H100", "H200", "B200" or "CPU", for all ranks or as a
                sequence with one name for each rank.
            world_size: Number of ranks.
            local_world_size: Ranks per node. Default: 8 for GPUs, 2 for CPUs.

        Raises:
            ValueError: A name is unknown, or there is not one for each rank.

        Example:
            >>> Topology.preset("H100", world_size=64).num_nodes
            8
        """
        names = [name] * world_size if isinstance(name, str) else list(name)
        whole("Topology.world_size", world_size)
        if len(names) != world_size:
            raise ValueError(
                f"Topology.preset takes one name, or one for each of the {world_size} ranks; "
                f"received {len(names)} names."
            )
        for machine in names:
            check_preset(machine)
        if local_world_size is None:
            local_world_size = DATASHEETS[names[0]].ranks_per_node
        return cls.from_hardware([PRESETS[machine] for machine in names], local_world_size)

    @classmethod
    @checked
    def from_json(cls, source: str | Path) -> Self:
        """Return the topology that a file describes.

        Args:
            source: Path, or the JSON text itself, which starts with a brace.

        Raises:
            OSError: The file cannot be read.
            ValueError: The text is not JSON, a key is missing or unknown, a list does not have one
                value for each rank, or a number is out of range.
            TypeError: A value has another type.

        Example:
            >>> topology = Topology.preset("B200", world_size=8)
            >>> Topology.from_json(topology.to_json()) == topology
            True
        """
        text, subject = read_source(source, "Topology file")
        of_file = topology_json.read(text, subject)
        try:
            return cls.from_hardware(**of_file)
        except ValueError as error:
            raise ValueError(f"{subject}: {error}") from None

    @checked
    def to_json(self, path: str | Path | None = None) -> str:
        """Return the topology as JSON, and write it to a file if a path is given."""
        text = topology_json.write(
            self.hardware, self.local_world_size, lookup=self.lookup, collectives=self.collectives
        )
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @checked
    def with_measurements(
        self,
        *,
        lookup: Sequence[LookupPoint] | None = None,
        collectives: Sequence[CollectivePoint] | None = None,
    ) -> Self:
        """Return this topology with other measurements; None keeps the present ones.

        Raises:
            ValueError: A point occurs twice.
        """
        tables = {"lookup": lookup, "collectives": collectives}
        return self._with(**{name: of for name, of in tables.items() if of is not None})

    @checked
    def with_nodes(self, num_nodes: int) -> Self:
        """Return a topology with another number of nodes, which repeat the present ones in turn."""
        whole("Topology.with_nodes: num_nodes", num_nodes)
        ranks = range(num_nodes * self.local_world_size)
        return self._with(hardware=[self.hardware[rank % self.world_size] for rank in ranks])

    def _with(self, **changes: Any) -> Self:
        return self.from_hardware(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hardware)

    @property
    def compute_device(self) -> str:
        """Device type of all ranks, "cpu" or "cuda"."""
        return self.hardware[0].compute_device

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Kind of each rank, numbered from 0; ranks with equal hardware have the same kind.

        Example:
            >>> Topology.preset(["A100-80", "A100-80", "H100", "H100"], 4).kinds
            (0, 0, 1, 1)
        """
        distinct = {rank: kind for kind, rank in enumerate(dict.fromkeys(self.hardware))}
        return tuple(distinct[rank] for rank in self.hardware)

    @cached_property
    def slowest(self) -> Hardware:
        """Least memory and bandwidth and largest latency of all ranks."""
        distinct = set(self.hardware)
        worst = {
            name: [(max if name.endswith("_ms") else min)(getattr(r, name) for r in distinct)]
            for name in NUMBERS
        }
        return build_hardware(self.compute_device, worst)[0]

    @cached_property
    def _lookups(self) -> LookupTable | None:
        return LookupTable(self.lookup) if self.lookup else None

    @cached_property
    def _collectives(self) -> dict[tuple[str, int], tuple[float, float]]:
        return largest_collectives(self.collectives)

    hbm_cap = _least("hbm_cap", "bytes of device memory")
    ddr_cap = _least("ddr_cap", "bytes of host memory")
    ssd_cap = _least("ssd_cap", "bytes of disk")
    hbm_mem_bw = _least("hbm_mem_bw", "bandwidth of device memory")
    ddr_mem_bw = _least("ddr_mem_bw", "bandwidth of host memory")
    ssd_mem_bw = _least("ssd_mem_bw", "bandwidth of disks")
    hbm_to_ddr_mem_bw = _least("hbm_to_ddr_mem_bw", "bandwidth between device and host")
    intra_host_bw = _least("intra_host_bw", "bandwidth inside nodes")
    inter_host_bw = _least("inter_host_bw", "bandwidth across nodes")
    memory_bw = _least("memory_bw", "bandwidth of the memory of tables")
    memory_cap = _least("memory_cap", 'bytes of the memory of tables, on the host for "cpu"')
    host_cap = ddr_cap

    @property
    def exchange_bw(self) -> float:
        """Bytes per millisecond between two ranks, across nodes if there are several."""
        return self.slowest.inter_host_bw if self.num_nodes > 1 else self.slowest.intra_host_bw

    @checked
    def lookup_speed(self, dim: int, pooling: float, rank: Hardware | None = None) -> LookupSpeed:
        """Return the speed of lookups and updates.

        It is interpolated from measurements (`LookupTable`), which hold for all ranks. Without
        measurements, it is the bandwidth of the memory of tables.

        Args:
            dim: Columns of the shard.
            pooling: Ids per bag.
            rank: Hardware whose memory bandwidth to use without measurements; the slowest if None.
        """
        if self._lookups is not None:
            return self._lookups.at(dim, pooling)
        memory_bw = (rank or self.slowest).memory_bw
        return LookupSpeed(memory_bw, memory_bw, memory_bw)

    def transfer_ms(
        self, kind: str, num_bytes: float, num_ranks: int, num_nodes: int, rank: Hardware
    ) -> float:
        """Return the milliseconds that a collective takes to transfer its bytes, without latency.

        The formula of `measured.transfer_ms`, scaled to the measurement with the most bytes at the
        nearest world size, if there is one for the same links.

        Args:
            kind: "all_to_all", "reduce_scatter", "all_gather" or "all_reduce".
            num_bytes: Bytes of the larger of a rank's two buffers.
            num_ranks: Ranks that take part.
            num_nodes: Their nodes.
            rank: Hardware whose links are used.
        """
        modelled = transfer_ms(kind, num_bytes, num_ranks, num_nodes, rank)
        sizes = [size for measured, size in self._collectives if measured == kind]
        near = min(sizes, key=lambda s: (abs(math.log(s / num_ranks)), -s), default=1)
        near_nodes = math.ceil(near / self.local_world_size)
        # 1: no measurement, or one of a single rank, which transfers nothing
        if near == 1 or (near_nodes > 1) != (num_nodes > 1):
            return modelled
        most, ms = self._collectives[kind, near]
        return modelled * ms / transfer_ms(kind, most, near, near_nodes, self.slowest)

    def __str__(self) -> str:
        """Return a table with one column for each kind of rank."""
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        return (
            f"{self.world_size} {self.compute_device} ranks on {nodes}\n"
            f"{hardware_table(self.hardware, self.kinds)}\n"
            f"measured: {len(self.lookup)} lookups, {len(self.collectives)} collectives"
        )

    __repr__ = __str__


def _local_size(world_size: int, local_world_size: int | None) -> int:
    if local_world_size is None:
        return get_local_size(world_size)
    local_world_size = min(whole("Topology.local_world_size", local_world_size), world_size)
    if world_size % local_world_size:
        raise ValueError(
            f"Topology.local_world_size must divide world_size: all nodes have the same number of "
            f"ranks; received local_world_size={local_world_size}, world_size={world_size}."
        )
    return local_world_size


def _device_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return _CUDA_DEFAULT_BYTES
