"""Benchmarks for machines that are not here run, tiny, on this one: their figures mean nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recsys.kernels import ops

pytestmark = pytest.mark.skipif(not ops.HAS_FBGEMM, reason="fbgemm_gpu is not installed")


def _run(module: str, *arguments: str, out: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_the_gpu_benchmark_runs(tmp_path: Path) -> None:
    found = _run("benchmarks.gpu", "--smoke", out=tmp_path / "none.json")
    assert not [name for name in found if name.endswith("failed")]
    for case in found["bandwidth"]:
        times = case["times_ms"]
        assert {*times} >= {"copy", "ours forward", "ours both", "fbgemm forward", "fbgemm both"}
        assert all(share > 0 for by in case["share_of_copy"].values() for share in by.values())
    assert {case["plan"] for case in found["dlrm_step"]} > {"table_wise", "row_wise", "column_wise"}
    assert len(found["against_embedding_bags"]) == 2


def test_ranks_that_are_not_there(tmp_path: Path) -> None:
    arguments = "--ranks", "16", "64", "--rounds", "1"
    found = _run("benchmarks.scale", *arguments, out=tmp_path / "s.json")
    for by_world in found["rounds"].values():
        for (of_rank,) in by_world.values():
            assert all(math.isfinite(value) and value > 0 for value in of_rank.values())
        (of_few,), (of_many,) = by_world["16"], by_world["64"]
        assert of_few["operators"] == of_many["operators"]  # no loop over ranks calls any
    # every rank looks up for all, by bag: its send and receive buffers grow with their number
    by_bag, by_id, in_parts = (
        [found["rounds"][plan][world][0]["peak_of_output"] for world in ("16", "64")]
        for plan in ("row_wise by bag", "row_wise", "row_wise by bag, 8 collections")
    )
    assert 3 < by_bag[1] / by_bag[0] < 5
    assert by_id[1] / by_id[0] < 2
    assert by_id[1] < by_bag[1] / 5
    assert in_parts[1] < by_bag[1] / 4


def test_a_regression_on_a_table_of_clicks(tmp_path: Path) -> None:
    found = _run("benchmarks.own_data", "--rows", "20000", out=tmp_path / "found.json")
    assert 0.65 < found["auc"] < found["bayes_auc"] < 0.95
    assert found["bayes_log_loss"] < found["log_loss"] < 0.6
