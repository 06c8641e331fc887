"""Machines by name, from what vendors publish; docs/planner.md has the source of each number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from recsys.distributed.planner.hardware import Hardware

_GB = 1_000_000_000  # vendors count in powers of ten
_GB_PER_S = 1e6  # in bytes per millisecond

# Assumptions: the share of a peak that a long transfer achieves. Peaks are the vendors'.
HBM_SHARE, DDR_SHARE, LINK_SHARE, NODE_SHARE, NIC_SHARE = 0.8, 0.8, 0.85, 0.8, 0.9


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Datasheet:
    """The peaks of one rank, one direction of every link, in GB and GB/s.

    Args:
        compute_device: "cpu" or "cuda".
        ranks_per_node: among which the node's host memory, disks and network are shared.
        hbm_gb: device memory.
        hbm: its bandwidth.
        ddr_gb: host memory of the node over its ranks.
        ddr: its bandwidth over its ranks.
        ssd_gb: data disks of the node over its ranks.
        link: between device and host.
        node: to the other ranks of the node.
        nic: to other nodes.
        latencies_ms: of a kernel, a collective inside a node and one across nodes: assumptions.
    """

    compute_device: str = "cuda"
    ranks_per_node: int = 8
    hbm_gb: float
    hbm: float
    ddr_gb: float
    ddr: float
    ssd_gb: float
    link: float
    node: float
    nic: float
    latencies_ms: tuple[float, float, float] = (0.005, 0.02, 0.04)

    def hardware(self, name: str) -> Hardware:
        """Returns what a rank achieves."""
        kernel, inside, across = self.latencies_ms
        return Hardware(
            compute_device=self.compute_device,
            name=name,
            hbm_cap=int(self.hbm_gb * _GB),
            ddr_cap=int(self.ddr_gb * _GB),
            ssd_cap=int(self.ssd_gb * _GB),
            hbm_mem_bw=_achieved(self.hbm, HBM_SHARE),
            ddr_mem_bw=_achieved(self.ddr, DDR_SHARE),
            # an assumption: 750,000 random reads of 4 KiB a second, what a PCIe 4.0 drive does
            ssd_mem_bw=3.0 * _GB_PER_S,
            hbm_to_ddr_mem_bw=_achieved(self.link, LINK_SHARE),
            intra_host_bw=_achieved(self.node, NODE_SHARE),
            inter_host_bw=_achieved(self.nic, NIC_SHARE),
            kernel_launch_ms=kernel,
            intra_host_latency_ms=inside,
            inter_host_latency_ms=across,
        )


def _achieved(peak: float, share: float) -> float:
    return round(peak * share * _GB_PER_S, 3)  # 3: files of presets are for people


# GPUs: the SXM modules in NVIDIA's DGX systems, whose nodes have eight.
DATASHEETS = {
    "A100-40": Datasheet(
        hbm_gb=40, hbm=1555, ddr_gb=125, ddr=51.2, ssd_gb=1920, link=32, node=300, nic=25
    ),
    "A100-80": Datasheet(
        hbm_gb=80, hbm=2039, ddr_gb=250, ddr=51.2, ssd_gb=3840, link=32, node=300, nic=25
    ),
    "H100": Datasheet(
        hbm_gb=80, hbm=3350, ddr_gb=250, ddr=76.8, ssd_gb=3840, link=64, node=450, nic=50
    ),
    "H200": Datasheet(
        hbm_gb=141, hbm=4800, ddr_gb=250, ddr=76.8, ssd_gb=3840, link=64, node=450, nic=50
    ),
    "B200": Datasheet(
        hbm_gb=180, hbm=8000, ddr_gb=250, ddr=89.6, ssd_gb=3840, link=64, node=900, nic=50
    ),
    # one rank per socket of a two-socket server; there is no device, so its numbers are the host's
    "CPU": Datasheet(
        compute_device="cpu",
        ranks_per_node=2,
        hbm_gb=0,
        hbm=307.2,
        ddr_gb=256,
        ddr=307.2,
        ssd_gb=1920,
        link=307.2,
        node=6.25,
        nic=6.25,
        latencies_ms=(0.005, 0.1, 0.15),
    ),
}

PRESETS = {name: datasheet.hardware(name) for name, datasheet in DATASHEETS.items()}
"""The hardware of one rank of each machine."""


def check_preset(name: str) -> None:
    """Raises ValueError unless there is a preset of this name."""
    if name not in PRESETS:
        raise ValueError(f"A preset must be one of {', '.join(PRESETS)}; received {name!r}.")
