"""A machine whose ranks a user's own code takes memory from."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from recsys.distributed.planner import topology as ours
from recsys.distributed.planner.tables import Summable


@dataclass(order=True, unsafe_hash=True)
class Storage(Summable):
    """Bytes of memory. Orders by `hbm`, then `ddr`, then `ssd`.

    Args:
        hbm: of the device.
        ddr: of the host.
        ssd: of disks.

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
        """Return whether there is room for this in other, of every kind of memory."""
        return self.hbm <= other.hbm and self.ddr <= other.ddr and self.ssd <= other.ssd


@dataclass(unsafe_hash=True)
class Perf(Summable):
    """Milliseconds of a training step.

    Args:
        fwd_compute: looking rows up.
        fwd_comms: sending embeddings.
        bwd_compute: updating rows.
        bwd_comms: sending gradients of embeddings.
        input_dist_comms: sending ids.
        prefetch_compute: bringing rows into a cache.

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
        """All of it."""
        looked_up = self.fwd_compute + self.bwd_compute + self.prefetch_compute
        return looked_up + self.fwd_comms + self.bwd_comms + self.input_dist_comms


@dataclass(unsafe_hash=True)
class DeviceHardware:
    """A rank.

    Args:
        rank: its number.
        storage: bytes that are free.
        perf: milliseconds of what is on it.
    """

    rank: int
    storage: Storage
    perf: Perf


class Topology(ours.Topology):
    """The planner's `Topology`, with `devices`.

    Takes the same arguments. The storage of devices of a copy may be changed, to say what a storage
    reservation leaves free.

    Example:
        >>> topology = Topology(world_size=2, compute_device="cpu", ddr_cap=1000)
        >>> topology.devices[1].storage.ddr
        1000
    """

    @classmethod
    def of(cls, topology: ours.Topology) -> Topology:
        """Return a topology of this class."""
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
        """The ranks: storage that is free, and no milliseconds yet."""
        return [
            DeviceHardware(
                rank, Storage(of.hbm_cap, of.ddr_cap, of.ssd_cap), Perf(0.0, 0.0, 0.0, 0.0)
            )
            for rank, of in enumerate(self.hardware)
        ]
