"""Calibration on two ranks: what it measures is what the planner then reads."""

from __future__ import annotations

from unittest import mock

import torch

from recsys import calibrate
from recsys.distributed.planner import Topology
from tests.ranks import RankPool

CPU = torch.device("cpu")


def measured() -> str:
    small = {"DIMS": (8, 16), "POOLINGS": (1, 4), "SIZES": (1024, 65536), "_TURNS": 3}
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
