"""Calibration on two ranks: the planner reads the measured values."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from recsys import calibrate
from recsys.distributed.planner import Topology
from recsys.distributed.planner.hardware import Hardware
from recsys.distributed.planner.measured import CollectivePoint, transfer_ms
from tests.ranks import RankPool

CPU = torch.device("cpu")


def measured() -> tuple[str, str]:
    sizes = (4, 1024, 65536)  # the first is less than a number for each rank
    small = {"DIMS": (8, 16), "POOLINGS": (1, 4), "SIZES": sizes, "_TURNS": 3}
    small |= {"_TABLE_BYTES": 1 << 16, "_IDS": {"cpu": 256}, "_COPIED_BYTES": {"cpu": 1 << 20}}
    with mock.patch.multiple(calibrate, **small):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            found = calibrate.calibrate(CPU).to_json()
        return found, said.getvalue()


def test_every_rank_measures_the_same(ranks: RankPool) -> None:
    (one, said), (other, of_other) = ranks(2, measured)
    assert one == other
    lines = said.splitlines()
    assert len(lines) == 9 * 4  # rounds of collectives, memory and two dims
    for done, line in enumerate(lines, 1):
        assert re.fullmatch(rf"{done} of 36 measured, about \d+ s left\.", line)
    assert lines[-1].endswith(" about 0 s left.")
    assert not of_other
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


@pytest.mark.parametrize("rank", [None, "0"])
def test_a_file_that_cannot_be_written_is_found_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str | None,
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)

    def fail(*arguments: object, **named: object) -> None:
        raise AssertionError("it began to measure")

    monkeypatch.setattr(calibrate.subprocess, "run", fail)
    monkeypatch.setattr(calibrate.dist, "init_process_group", fail)
    for out, reason in (
        (tmp_path / "none" / "t.json", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        assert calibrate.main(argparse.Namespace(world_size=1, out=out)) == 2
        assert f"--out {out} cannot be written: {reason}." in capsys.readouterr().err
    with pytest.raises(AssertionError, match="it began to measure"):
        calibrate.main(argparse.Namespace(world_size=1, out=tmp_path / "t.json"))
    assert list(tmp_path.iterdir()) == []


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
            ms=0.04 + transfer_ms("all_to_all", size, num_ranks=16, num_nodes=2, rank=node),
        )
        for size in (1 << 10, 1 << 30)
    ]
    found = calibrate.with_links(dataclasses.replace(node, inter_host_bw=1.0), points)
    assert found.inter_host_bw == pytest.approx(1e6, rel=0.01)
    assert found.intra_host_bw == 1e9
