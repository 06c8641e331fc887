"""Machines by name, from published numbers; docs/topology.md has the source of each number."""

from __future__ import annotations

from typing import NamedTuple

from recsys.distributed.placement.file_checks import choice_of
from recsys.distributed.planner.hardware import Hardware

_GB = 1_000_000_000  # vendors use powers of ten
_GB_PER_S = 1e6  # in bytes per millisecond

# Assumed share of the vendor's peak that a long transfer achieves.
HBM_SHARE, DDR_SHARE, LINK_SHARE, NODE_SHARE, NIC_SHARE = 0.8, 0.8, 0.85, 0.8, 0.9


class Datasheet(NamedTuple):
    """Peaks of one rank, one direction of every link, in GB and GB/s.

    Attributes:
        hbm_gb: Device memory.
        hbm: Device memory bandwidth.
        ddr_gb: Host memory of the node divided by its ranks.
        ddr: Host memory bandwidth divided by the ranks.
        ssd_gb: Data disks of the node divided by its ranks.
        link: Bandwidth between device and host.
        node: Bandwidth to the other ranks of the node.
        nic: Bandwidth to other nodes.
        compute_device: "cpu" or "cuda".
        ranks_per_node: Ranks that share the node's host memory, disks and network.
        latencies_ms: Assumed latencies of a kernel, a collective inside a node and one across
            nodes.
    """

    hbm_gb: float
    hbm: float
    ddr_gb: float
    ddr: float
    ssd_gb: float
    link: float
    node: float
    nic: float
    compute_device: str = "cuda"
    ranks_per_node: int = 8
    latencies_ms: tuple[float, float, float] = (0.005, 0.02, 0.04)


# GPUs: the SXM modules in NVIDIA's DGX systems, whose nodes have eight.
DATASHEETS = {
    "A100-40": Datasheet(40, 1555, 125, 51.2, 1920, 32, 300, 25),
    "A100-80": Datasheet(80, 2039, 250, 51.2, 3840, 32, 300, 25),
    "H100": Datasheet(80, 3350, 250, 76.8, 3840, 64, 450, 50),
    "H200": Datasheet(141, 4800, 250, 76.8, 3840, 64, 450, 50),
    "B200": Datasheet(180, 8000, 250, 89.6, 3840, 64, 900, 50),
    # one rank per socket of a two-socket server; the device numbers repeat the host numbers
    "CPU": Datasheet(0, 307.2, 256, 307.2, 1920, 307.2, 6.25, 6.25, "cpu", 2, (0.005, 0.1, 0.15)),
}


def _hardware(name: str, peak: Datasheet) -> Hardware:
    """Return the achievable numbers of a rank."""
    kernel, inside, across = peak.latencies_ms
    return Hardware(
        compute_device=peak.compute_device,
        name=name,
        hbm_cap=int(peak.hbm_gb * _GB),
        ddr_cap=int(peak.ddr_gb * _GB),
        ssd_cap=int(peak.ssd_gb * _GB),
        hbm_mem_bw=_achieved(peak.hbm, HBM_SHARE),
        ddr_mem_bw=_achieved(peak.ddr, DDR_SHARE),
        # assumed: 750,000 random reads of 4 KiB per second, as of a PCIe 4.0 drive
        ssd_mem_bw=3.0 * _GB_PER_S,
        hbm_to_ddr_mem_bw=_achieved(peak.link, LINK_SHARE),
        intra_host_bw=_achieved(peak.node, NODE_SHARE),
        inter_host_bw=_achieved(peak.nic, NIC_SHARE),
        kernel_launch_ms=kernel,
        intra_host_latency_ms=inside,
        inter_host_latency_ms=across,
    )


def _achieved(peak: float, share: float) -> float:
    return round(peak * share * _GB_PER_S, 3)  # 3 digits: people read the files


PRESETS = {name: _hardware(name, peak) for name, peak in DATASHEETS.items()}
"""Hardware of one rank of each machine."""


def check_preset(name: str) -> None:
    """Raise ValueError unless a preset has this name."""
    choice_of("A preset", name, [*PRESETS])
