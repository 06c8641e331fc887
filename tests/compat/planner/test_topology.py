from __future__ import annotations

import copy
import pickle
import random

import pytest

from recsys.compat.planner.topology import DeviceHardware, Perf, Storage, Topology
from recsys.distributed import planner as ours


def test_arithmetic_is_that_of_each_number() -> None:
    rng = random.Random(0)
    for _ in range(200):
        a, b = ([rng.randint(0, 5) for _ in range(3)] for _ in range(2))
        one, other = Storage(*a), Storage(*b)
        assert one + other == Storage(*(x + y for x, y in zip(a, b, strict=True)))
        assert one - other == Storage(*(x - y for x, y in zip(a, b, strict=True)))
        assert (one - other) + other == one
        assert one.fits_in(other) == all(x <= y for x, y in zip(a, b, strict=True))
        assert (one < other) == (a < b)
        assert (hash(one) == hash(other)) == (a == b) == (one == other)
        ms, more = ([rng.random() for _ in range(6)] for _ in range(2))
        total = (Perf(*ms) + Perf(*more)).total
        assert total == pytest.approx(sum(ms) + sum(more))
        assert hash(Perf(*ms)) == hash(Perf(*ms))
        assert Perf(*ms) != Perf(*more)


def test_defaults() -> None:
    assert Storage(1, 2) == Storage(hbm=1, ddr=2, ssd=0)
    assert Perf(1.0, 2.0, 3.0, 4.0) == Perf(1.0, 2.0, 3.0, 4.0, 0.0, 0.0)


def test_devices_are_the_ranks() -> None:
    topology = Topology(2, "cuda", hbm_cap=[10, 20], ddr_cap=5)
    assert topology.devices == [
        DeviceHardware(0, Storage(10, 5), Perf(0.0, 0.0, 0.0, 0.0)),
        DeviceHardware(1, Storage(20, 5), Perf(0.0, 0.0, 0.0, 0.0)),
    ]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_keep_what_was_taken(copied: object) -> None:
    topology = Topology(2, "cpu", ddr_cap=10)
    topology.devices[0].storage.ddr -= 4
    other = copied(topology)  # type: ignore[operator]
    other.devices[1].storage.ddr = 0
    assert [device.storage.ddr for device in topology.devices] == [6, 10]
    assert [device.storage.ddr for device in other.devices] == [6, 0]
    assert other == topology, "the same machine"


def test_any_topology_becomes_one_with_devices() -> None:
    plain = ours.Topology.preset("H100", world_size=8)
    found = Topology.of(plain)
    assert (found.hardware, found.local_world_size) == (plain.hardware, plain.local_world_size)
    assert Topology.of(found) is found
    for made in (
        Topology.preset("H100", 8),
        found.with_measurements(),
        Topology.from_json(plain.to_json()),
    ):
        assert isinstance(made, Topology)
        assert len(made.devices) == 8
