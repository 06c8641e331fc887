"""Calibration on two ranks: what it measures is what the planner then reads."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from recsys import calibrate
from recsys.distributed.planner import Topology
from recsys.distributed.planner.hardware import Hardware
from recsys.distributed.planner.measured import CollectivePoint, modelled_ms
from tests.ranks import RankPool

CPU = torch.device("cpu")


def measured() -> str:
    sizes = (4, 1024, 65536)  # the first is less than a number for each rank
    small = {"DIMS": (8, 16), "POOLINGS": (1, 4), "SIZES": sizes, "_TURNS": 3}
    small |= {"_TABLE_BYTES": 1 << 16, "_IDS": {"cpu": 256}, "_COPIED_BYTES": {"cpu": 1 << 20}}
    with mock.patch.multiple(calibrate, **small):
        return calibrate.calibrate(CPU).to_json()


def test_every_rank_measures_the_same(ranks: RankPool) -> None:
    one, other = ranks(2, measured)
    assert one == other
    topology = Topology.from_json(one)
    assert [(p.dim, p.pooling) for p in topology.lookup] == [(8, 1), (8, 4), (16, 1), (16, 4)]
    kinds = [(p.kind, p.bytes, p.world_size) for p in topology.collectives]
    assert kinds == [(k, n, 2) for n in (1024, 65536) for k in ("all_to_all", "all_reduce")]
    rank = topology.hardware[0]
    assert rank.name == "measured"
    assert rank.step_ms > 0
    exchanges = [p for p in topology.collectives if p.kind == "all_to_all"]
    assert rank.intra_host_latency_ms == exchanges[0].ms
    assert rank.intra_host_bw == 65536 / 2 / exchanges[1].ms


def test_what_crosses_between_nodes_goes_over_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "get_local_size", lambda world_size: 8)
    node = Hardware(
        compute_device="cuda", hbm_cap=0, ddr_cap=0, intra_host_bw=1e9, inter_host_bw=1e6
    )
    points = [
        CollectivePoint(
            kind="all_to_all",
            world_size=16,
            bytes=size,
            ms=modelled_ms("all_to_all", size, num_ranks=16, num_nodes=2, rank=node),
        )
        for size in (1 << 10, 1 << 30)
    ]
    found = calibrate.with_links(dataclasses.replace(node, inter_host_bw=1.0), points)
    assert found.inter_host_bw == pytest.approx(1e6, rel=0.01)
    assert found.intra_host_bw == 1e9
