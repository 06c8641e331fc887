"""The two-tower example finds planted tastes, on one process, on two, and on two machines."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "two_tower" / "train.py"
TORCHRUN = ("-m", "torch.distributed.run")
SETTINGS = ("--epochs", "12", "--batch-size", "64", "--embedding-dim", "16")
USERS, FILMS, TASTES = 120, 240, 4


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release in which users like the films of their own taste alone."""
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("release")
    ratings, second = ["userId,movieId,rating,timestamp"], 0
    for user in range(USERS):
        for film in rng.sample(range(FILMS), 60):
            second += 1
            rating = 5.0 if film % TASTES == user % TASTES else 2.0
            ratings.append(f"{user + 1},{film + 1},{rating},{second}")
    (folder / "ratings.csv").write_text("\n".join(ratings) + "\n")
    films = (f"{film + 1},Film {film + 1} (1995),Drama" for film in range(FILMS))
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *films]) + "\n")
    return folder


def start(release: Path, out: Path, *launch: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            *launch,
            str(SCRIPT),
            "--data",
            str(release),
            "--out",
            str(out),
            *SETTINGS,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def output_of(jobs: list[subprocess.Popen[str]]) -> str:
    """Return the output of the jobs, after they have ended well."""
    try:
        printed = [job.communicate(timeout=240)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * len(jobs), "\n".join(printed)
    return "".join(printed)


@pytest.mark.parametrize("machines", [0, 1, 2])
def test_likes_are_among_the_nearest(release: Path, tmp_path: Path, machines: int) -> None:
    if machines == 0:  # without torchrun
        jobs = [start(release, tmp_path)]
    elif machines == 1:
        jobs = [start(release, tmp_path, *TORCHRUN, "--standalone", "--nproc-per-node=2")]
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meeting = f"--rdzv-endpoint=127.0.0.1:{probe.getsockname()[1]}"
        both = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", meeting, "--rdzv-id=a")
        jobs = [
            start(release, tmp_path, *TORCHRUN, *both, "--local-addr=127.0.0.1") for _ in range(2)
        ]
    found = re.findall(r"^test: .*two towers (\S+), the most liked (\S+)$", output_of(jobs), re.M)
    assert len(found) == 1  # one rank speaks
    towers, popular = map(float, found[0])
    # 50 of about 190 unseen films; about 45 of them match the user's taste
    assert popular < 0.5
    assert towers > 0.8
