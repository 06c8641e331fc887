"""The C++ core with a program of its own, built once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds a target of CMakeLists.txt in this folder."""
    folder = tmp_path_factory.mktemp("core")
    configured = ["cmake", "-S", str(SOURCE), "-B", str(folder)]
    subprocess.run(configured, check=True, capture_output=True, timeout=60)

    def built(target: str) -> Path:
        command = ["cmake", "--build", str(folder), "--parallel", "2", "--target", target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder / target

    return built


@pytest.fixture(scope="session")
def library(build: Callable[[str], Path]) -> Path:
    return build("recsys_fake").with_name("librecsys_fake.so")
