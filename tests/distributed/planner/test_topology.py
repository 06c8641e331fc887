"""The machine as the planner sees it."""

from __future__ import annotations

import os

import pytest
import torch

from recsys.distributed.planner.topology import Topology

GIB = 1 << 30


def test_memory_is_that_of_the_device_the_tables_are_on() -> None:
    sizes = {"hbm_cap": 3 * GIB, "ddr_cap": 5 * GIB}
    assert Topology(2, "cuda", **sizes).memory_cap == 3 * GIB
    assert Topology(2, "cpu", **sizes).memory_cap == 5 * GIB


def test_host_memory_is_shared_by_the_ranks_of_a_host() -> None:
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert Topology(4, "cpu").memory_cap == host // 4
    assert Topology(8, "cpu", local_world_size=2).memory_cap == host // 2


def test_planning_for_gpus_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Topology(8, "cuda").memory_cap == 32 * GIB


def test_exchanges_cross_the_slower_link() -> None:
    assert Topology(8, "cuda").exchange_bw == Topology(8, "cuda").intra_host_bw
    several = Topology(8, "cuda", local_world_size=4, inter_host_bw=7.0)
    assert several.exchange_bw == 7.0


def test_tables_are_read_where_they_are() -> None:
    topology = {"hbm_mem_bw": 3.0, "ddr_mem_bw": 2.0}
    assert Topology(1, "cuda", **topology).memory_bw == 3.0
    assert Topology(1, "cpu", **topology).memory_bw == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute_device": "mtia"}, "compute_device must be 'cpu' or 'cuda'; received 'mtia'"),
        ({"world_size": 0}, "world_size must be positive; received 0"),
        ({"local_world_size": 0}, "local_world_size must be positive; received 0"),
        ({"ddr_cap": -1}, "ddr_cap must be positive; received -1"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**{"world_size": 2, "compute_device": "cpu", **arguments})
