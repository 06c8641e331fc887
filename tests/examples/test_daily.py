"""The daily example: broken days are refused, requests are answered, kills change nothing."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recsys.distributed.checkpoint import read_checkpoint
from recsys.features import FeatureSpec

SCRIPT = Path(__file__).parents[2] / "examples/daily/daily.py"


def _start(out: Path, days: int, rows: int = 10_000) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), str(out), f"--days={days}", f"--rows={rows}"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def _ends(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return printed


def state_of(out: Path) -> dict[str, Any]:
    """Return the weights, optimizer states, values and packaged rows of all days."""
    state: dict[str, Any] = {}
    for work in sorted((out / "work").iterdir()):
        if (work / "refused").exists():
            state[f"{work.name}/refused"] = (work / "refused").read_text()
        if (work / "job/last").exists():
            for name, value in read_checkpoint(work / "job/last", optimizer=True).items():
                state[f"{work.name}/{name}"] = value
            spec = FeatureSpec.load(work / "spec")
            for table, vocabulary in spec.fitted.vocabularies.items():
                state[f"{work.name}/{table}"] = vocabulary.fingerprint, vocabulary.ages.tolist()
    for version in sorted(path.parent for path in out.glob("models/*/manifest.json")):
        for rows in sorted(version.glob("tables/*.rows")):
            state[f"models/{version.name}/{rows.name}"] = rows.read_bytes()
    return state


def assert_equal_states(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two states bit for bit."""
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert np.array_equal(state[name].numpy(), value.numpy()), name
        else:
            assert state[name] == value, name


def run_with_kills(out: Path, days: int, kills: int, seed: int, seconds: float) -> None:
    """Run the days, and kill the program at random moments within so many seconds."""
    moments = random.Random(seed)
    for _ in range(kills):
        with _start(out, days) as process:
            time.sleep(moments.uniform(0.0, seconds))
            process.kill()
    _ends(_start(out, days))


def test_days_are_published_and_broken_ones_refused(tmp_path: Path) -> None:
    printed = _ends(_start(tmp_path, 5))
    versions = sorted(path.parent.name for path in tmp_path.glob("models/*/manifest.json"))
    assert versions == ["1", "2", "3", "4"]
    assert printed.splitlines().count("published") == 4
    assert "extend needs at least one row" in (tmp_path / "work/4/refused").read_text()
    assert "<svg" in (tmp_path / "work/3/report.html").read_text()
    answered, failed = map(int, re.findall(r"(\d+) requests answered, (\d+) failed", printed)[0])
    assert answered > 0
    assert failed == 0


@pytest.mark.slow
def test_kills_change_nothing(tmp_path: Path) -> None:
    _ends(_start(tmp_path / "whole", 3))
    run_with_kills(tmp_path / "killed", 3, kills=3, seed=5, seconds=15)
    assert_equal_states(state_of(tmp_path / "killed"), state_of(tmp_path / "whole"))
