"""The DLRM example goes its whole way on each data set, on one and on two processes."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.kills import saved_by

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "dlrm" / "train.py"


def _run(command: list[str], *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def _auc(output: str, row: str) -> float:
    (line,) = (line for line in output.splitlines() if line.startswith(row))
    return float(line.removeprefix(row).split()[0])


def _criteo_line(rng: random.Random) -> str:
    category = rng.randrange(4)
    label = int(rng.random() < (0.1, 0.3, 0.7, 0.9)[category])
    counts = [str(rng.randrange(100)) if rng.random() < 0.9 else "" for _ in range(13)]
    ids = [f"{category:08x}"] + [f"{rng.randrange(50):08x}" for _ in range(25)]
    return "\t".join([str(label), *counts, *ids])


def test_random_data_on_one_process(tmp_path: Path) -> None:
    arguments = (
        *("--dataset", "random", "--num-embeddings", "100", "--batch-size", "16"),
        *("--embedding-dim", "8", "--bits", "4", "--out", str(tmp_path)),
    )
    assert "Overwrites" not in _run([], *arguments)
    output = _run([], *arguments)
    assert f"Overwrites the job in {tmp_path}: last/step-" in output
    assert (tmp_path / "best").is_dir()
    assert (tmp_path / "model.pt").is_file()
    test, scores = (torch.load(tmp_path / name) for name in ("test.pt", "scores.pt"))
    assert [len(inputs) for inputs in test["inputs"]] == [3] * 4  # what examples/cpp scores
    assert [score.shape for score in scores] == [(16, 1)] * 4
    assert _auc(output, "int4 TorchScript, fresh process") == pytest.approx(
        _auc(output, "unsharded, from the checkpoint"), abs=0.05
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_ends_it_in_a_few_lines(tmp_path: Path, ranks: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [
            *(sys.executable, *(launcher if ranks > 1 else []), str(SCRIPT)),
            *("--dataset", "random", "--batch-size", "16", "--out", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        # no bytecode: its files would be cut off as well
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)),
    )
    assert done.returncode != 0
    told = done.stderr.partition("torch/distributed/elastic")[
        0
    ].splitlines()  # then it is torchrun's
    assert len(told) <= 12, done.stderr
    (last,) = (line for line in told if line.startswith("Training has ended: "))
    assert "cannot be saved. rank 0: OSError: [Errno 27] File too large" in last
    assert f"Nothing was saved in {tmp_path / 'out'}." in last


def test_a_folder_that_cannot_be_written_to_is_refused_at_once() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dataset", "random", "--out", "/dev/null/out"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "argument --out: must be a folder that can be written to" in done.stderr


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of clicks, one of them compressed."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("days")
    for day in range(4):
        lines = [_criteo_line(rng) for _ in range(800)]
        text = "\n".join(lines).encode() + b"\n"
        if day == 1:
            (folder / "day_1.gz").write_bytes(gzip.compress(text))
        else:
            (folder / f"day_{day}").write_bytes(text)
    return folder


def _run_criteo(data: Path, out: Path) -> str:
    output = _run(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        *("--dataset", "criteo", "--data", str(data), "--batch-size", "32"),
        *("--embedding-dim", "8", "--out", str(out)),
    )
    auc = _auc(output, "DLRM, sharded")
    assert auc > 0.75  # the first category determines the label; guessing gives 0.5
    assert _auc(output, "unsharded, from the checkpoint") == pytest.approx(auc, abs=1e-4)
    assert _auc(output, "int8 TorchScript, fresh process") == pytest.approx(auc, abs=0.002)
    return output


def test_criteo_files_on_two_processes(days: Path, tmp_path: Path) -> None:
    _run_criteo(days, tmp_path / "out")


def test_prepared_criteo_files_on_two_processes(days: Path, tmp_path: Path) -> None:
    spec, ready = SCRIPT.with_name("criteo_spec.py"), tmp_path / "ready"
    given = ("--spec", str(spec), "--format", "tsv", "--input", f"{days}/day_*")
    subprocess.run(
        [
            *(sys.executable, "-m", "recsys", "prepare", *given, "--output", str(ready)),
            *("--row-group-rows", "400", "--file-rows", "800"),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert len(list(ready.glob("*.parquet"))) == 4
    _run_criteo(ready, tmp_path / "out")


def test_a_killed_job_goes_on_and_ends_alike() -> None:
    """A short form of what ``python -m tests.examples.kills`` does at length.

    On three ranks, since sums over two do not depend on their order.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.examples.kills"),
            *("--ranks=3", "--one=1", "--all=0", "--agent=1"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] == 2


def test_it_goes_on_from_its_last_save(tmp_path: Path) -> None:
    """In two parts on one process: the second ends where an undivided run ends."""
    settings = ("--dataset", "random", "--num-embeddings", "100", "--batch-size", "16")
    settings += ("--embedding-dim", "8", "--resume", "auto", "--save-every", "20", "--out")
    undivided, divided = tmp_path / "undivided", tmp_path / "divided"
    _run([], *settings, str(undivided), "--epochs", "2")
    _run([], *settings, str(divided), "--epochs", "1")
    said = _run([], *settings, str(divided), "--epochs", "2")
    assert "Resumed from" in said
    assert "epoch 2, step 0" in said
    assert saved_by(divided) == saved_by(undivided)
