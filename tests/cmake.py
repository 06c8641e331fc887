"""Builds of C++ targets that all runs of the tests in this folder share."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def built(source: Path, *targets: str, needs_torch: bool = False) -> Path:
    """Return the folder of a build, below `build/tests`; unchanged parts are not built again.

    Args:
        source: A folder with CMakeLists.txt.
        targets: The targets; all, if there is none.
        needs_torch: The build finds torch by this Python.
    """
    key = repr((str(source), sys.executable, torch.__version__, os.environ.get("CXX")))
    name = f"{source.name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    folder = ROOT / "build" / "tests" / name
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--parallel", "2", *(["--target", *targets] if targets else [])]
    python = [f"-DPython3_EXECUTABLE={sys.executable}"] if needs_torch else []
    commands = [
        ["cmake", "-S", str(source), "-B", str(folder), *python],
        ["cmake", "--build", str(folder), *options],
    ]
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            text = done.stdout + done.stderr
            if done.returncode or "warning" in text:
                shutil.rmtree(folder)
                raise AssertionError(text)
    return folder
