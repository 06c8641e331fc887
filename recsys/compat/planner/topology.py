"""Machine whose memory users' code may change."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from recsys.distributed.planner import topology as ours
from recsys.distributed.planner.tables import Summable


@dataclass(order=True, unsafe_hash=True)
class Storage(Summable):
    """Bytes of memory. Ordered by `hbm`, then `ddr`, then `ssd`.

    Args:
        hbm: Bytes on the device.
        ddr: Bytes on the host.
        ssd: Bytes on disks.

    Example:
        >>> free, part = Storage(hbm=10, ddr=20), Storage(hbm=4, ddr=0)
        >>> part.fits_in(free), free - part
        (True, Storage(hbm=6, ddr=20, ssd=0))
    """

    hbm: int
    ddr: int
    ssd: int = 0

    def __sub__(self, other: Storage) -> Storage:
        return Storage(self.hbm - other.hbm, self.ddr - other.ddr, self.ssd - other.ssd)

    def fits_in(self, other: Storage) -> bool:
        """Return whether another memory has space for this one, in every kind of memory."""
        return self.hbm <= other.hbm and self.ddr <= other.ddr and self.ssd <= other.ssd


@dataclass(unsafe_hash=True)
class Perf(Summable):
    """Milliseconds of a training step.

    Args:
        fwd_compute: Looking up rows.
        fwd_comms: Sending embeddings.
        bwd_compute: Updating rows.
        bwd_comms: Sending gradients of embeddings.
        input_dist_comms: Sending ids.
        prefetch_compute: Fetching rows into a cache.

    Example:
        >>> (Perf(1.0, 2.0, 3.0, 4.0) + Perf(1.0, 0.0, 0.0, 0.0)).total
        11.0
    """

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all phases."""
        looked_up = self.fwd_compute + self.bwd_compute + self.prefetch_compute
        return looked_up + self.fwd_comms + self.bwd_comms + self.input_dist_comms


@dataclass(unsafe_hash=True)
class DeviceHardware:
    """One rank.

    Args:
        rank: Number of the rank.
        storage: Free bytes.
        perf: Milliseconds of the shards on it.
    """

    rank: int
    storage: Storage
    perf: Perf


class Topology(ours.Topology):
    """The planner's `Topology` with `devices`.

    Takes the same arguments. Storage reservations change the storage of the devices of a copy to
    the free memory.

    Example:
        >>> topology = Topology(world_size=2, compute_device="cpu", ddr_cap=1000)
        >>> topology.devices[1].storage.ddr
        1000
    """

    @classmethod
    def of(cls, topology: ours.Topology) -> Topology:
        """Return a topology as one of this class."""
        if isinstance(topology, Topology):
            return topology
        return cls.from_hardware(
            topology.hardware,
            topology.local_world_size,
            lookup=topology.lookup,
            collectives=topology.collectives,
        )

    @functools.cached_property
    def devices(self) -> list[DeviceHardware]:
        """Ranks with their free storage, and 0 milliseconds."""
        return [
            DeviceHardware(
                rank, Storage(of.hbm_cap, of.ddr_cap, of.ssd_cap), Perf(0.0, 0.0, 0.0, 0.0)
            )
            for rank, of in enumerate(self.hardware)
        ]
