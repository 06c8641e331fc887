"""The C++ core with a program of its own, built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cmake import built

SOURCE = Path(__file__).parent


@pytest.fixture(scope="session")
def build() -> Callable[[str], Path]:
    """Builds a target of CMakeLists.txt in this folder."""
    return lambda target: built(SOURCE, target) / target


@pytest.fixture(scope="session")
def library(build: Callable[[str], Path]) -> Path:
    return build("recsys_fake").with_name("librecsys_fake.so")
