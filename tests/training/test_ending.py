"""`exit_on_error`: one message with the cause and the last save, and the exit code."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recsys.distributed.checkpoint import newest_version
from recsys.training import exit_on_error

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def _start(folder: Path, *arguments: str, ranks: int = 1, **settings: object) -> subprocess.Popen:  # type: ignore[type-arg]
    launcher = TORCHRUN if ranks > 1 else ()
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "tests.training.job", str(folder), *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **settings,  # type: ignore[call-overload]
    )


def _end(job: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Return the exit code of a job and its output before torchrun's own report."""
    _, text = job.communicate(timeout=120)
    lines = text.partition("failed (exitcode")[0].splitlines()
    return job.returncode, [line for line in lines if "torch/distributed/elastic" not in line]


def _wait_for_a_save(job: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while newest_version(folder / "last") is None:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c(tmp_path: Path, ranks: int) -> None:
    job = _start(tmp_path, "--epochs", "1000", ranks=ranks)
    _wait_for_a_save(job, tmp_path)
    os.killpg(job.pid, signal.SIGINT)  # as a terminal does
    code, lines = _end(job)
    (last,) = (line for line in lines if line.startswith("Training has ended: "))
    assert re.fullmatch(
        rf"Training has ended: interrupted\. The last save is {tmp_path}/last/step-\d+\. "
        r"Run the same command again\.",
        last,
    )
    if ranks == 1:
        assert code == 130
        assert lines == [last]
    assert sum("Traceback" in line for line in lines) == ranks - 1  # torchrun's own


def test_a_loader_that_raises(tmp_path: Path) -> None:
    code, lines = _end(_start(tmp_path, "--fault", "raise", "--after", "0.2", "--epochs", "1000"))
    assert code == 1
    assert lines[-2] == "ValueError: row 17 of day_3.parquet has no label"
    assert lines[-1].startswith(
        "Training has ended: ValueError: row 17 of day_3.parquet has no label. The last save is "
    )
    assert "".join(lines).count("Traceback") == 1


def test_a_bad_loss(tmp_path: Path) -> None:
    code, lines = _end(_start(tmp_path, "--fault", "nan"))
    assert code == 1
    (line,) = lines
    assert line.startswith("Training has ended: The loss of step 1 on rank 0 is nan. Its batch is ")
    assert line.endswith(f"Nothing was saved in {tmp_path}.")


def test_a_dead_rank(tmp_path: Path) -> None:
    code, lines = _end(
        _start(tmp_path, "--fault", "kill", "--after", "0.3", "--epochs", "1000", ranks=2)
    )
    assert code == 1
    assert len(lines) <= 12
    (line,) = (line for line in lines if "The last save is" in line or "Nothing was saved" in line)
    assert "rank 1 is gone, its process has ended" in line


def test_a_damaged_save(tmp_path: Path) -> None:
    assert _end(_start(tmp_path, "--epochs", "1"))[0] == 0
    for file in tmp_path.glob("last/*/*.distcp"):
        file.write_bytes(b"")
    code, (line,) = _end(_start(tmp_path, "--epochs", "2"))
    version = newest_version(tmp_path / "last")
    assert code == 1
    assert f"{version} cannot be loaded" in line
    assert line.endswith(f"{version} is the last save: move it away, or train in another folder.")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk(tmp_path: Path, ranks: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))

    code, lines = _end(_start(tmp_path, ranks=ranks, preexec_fn=limit))
    assert code == 1
    assert len(lines) <= 12
    (line,) = (line for line in lines if line.startswith("Training has ended: "))
    assert "File too large" in line
    assert line.endswith(f"Nothing was saved in {tmp_path}.")


def test_a_log_on_a_full_disk(tmp_path: Path) -> None:
    script = (
        "import errno, recsys.training as training\n"
        f"with training.exit_on_error({str(tmp_path)!r}):\n"
        "    raise OSError(errno.ENOSPC, 'No space left on device', 'log.jsonl')"
    )
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == [
        "Training has ended: [Errno 28] No space left on device: 'log.jsonl'. "
        f"Nothing was saved in {tmp_path}."
    ]


def test_without_an_error_it_does_nothing(tmp_path: Path) -> None:
    with exit_on_error(tmp_path / "none"):
        pass
    with pytest.raises(SystemExit), exit_on_error(tmp_path):
        sys.exit(3)
    with pytest.raises(TypeError, match=r"exit_on_error\.folder must be a path"), exit_on_error(3):  # type: ignore[arg-type]
        pass
