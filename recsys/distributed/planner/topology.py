"""The machine as the planner sees it."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import final

import torch

from recsys.distributed.node import get_local_size

_GIB = 1 << 30
_CUDA_DEFAULT_BYTES = 32 * _GIB  # where no GPU is at hand to ask


@final
@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks, their memory and the bandwidths between them.

    Args:
        world_size: number of ranks.
        compute_device: "cpu" or "cuda".
        hbm_cap: bytes of device memory per rank; that of the current GPU (32 GiB if there is
            none) by default, 0 for "cpu".
        ddr_cap: bytes of host memory per rank; this host's memory divided by ``local_world_size``
            by default.
        local_world_size: ranks per node; by default what torchrun says
            (:func:`~recsys.distributed.node.get_local_size`), else all.
        hbm_mem_bw: device memory bandwidth in bytes per millisecond.
        ddr_mem_bw: host memory bandwidth in bytes per millisecond.
        intra_host_bw: bandwidth between ranks of a node in bytes per millisecond.
        inter_host_bw: bandwidth between nodes in bytes per millisecond.

    Raises:
        ValueError: if a size is not positive or the device kind is unknown.

    Example:
        >>> Topology(world_size=2, compute_device="cpu", ddr_cap=1 << 30).memory_cap
        1073741824
    """

    world_size: int
    compute_device: str
    hbm_cap: int | None = None
    ddr_cap: int | None = None
    _: KW_ONLY
    local_world_size: int | None = None
    hbm_mem_bw: float = 2.0e9
    ddr_mem_bw: float = 1.0e7
    intra_host_bw: float = 3.0e8
    inter_host_bw: float = 1.25e7

    def __post_init__(self) -> None:
        if self.compute_device not in ("cpu", "cuda"):
            raise ValueError(
                f"Topology.compute_device must be 'cpu' or 'cuda'; received "
                f"{self.compute_device!r}."
            )
        for name in ("world_size", "local_world_size", "hbm_cap", "ddr_cap"):
            value = getattr(self, name)
            if value is not None and (value < 0 or (value == 0 and "size" in name)):
                raise ValueError(f"Topology.{name} must be positive; received {value}.")

    @property
    def memory_cap(self) -> int:
        """Bytes per rank where tables live: device memory for "cuda", host memory for "cpu"."""
        if self.compute_device == "cuda":
            if self.hbm_cap is not None:
                return self.hbm_cap
            if torch.cuda.is_available():
                return int(
                    torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
                )
            return _CUDA_DEFAULT_BYTES
        return self.host_cap

    @property
    def host_cap(self) -> int:
        """Bytes of host memory per rank."""
        if self.ddr_cap is not None:
            return self.ddr_cap
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return host_bytes // self.local_size

    @property
    def local_size(self) -> int:
        """Ranks per node."""
        return self.local_world_size or get_local_size(self.world_size)

    @property
    def memory_bw(self) -> float:
        """Bytes per millisecond where tables live."""
        return self.hbm_mem_bw if self.compute_device == "cuda" else self.ddr_mem_bw

    @property
    def intra_bw(self) -> float:
        """Bytes per millisecond between two ranks of a node."""
        return self.intra_host_bw if self.compute_device == "cuda" else self.ddr_mem_bw / 4

    @property
    def exchange_bw(self) -> float:
        """Bytes per millisecond between two ranks, across nodes if there are several."""
        if self.local_size < self.world_size:  # several nodes
            return self.inter_host_bw
        return self.intra_host_bw if self.compute_device == "cuda" else self.ddr_mem_bw / 4
