"""TorchRec returns the recorded answers; tests/compat/test_answers compares ours with them."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest

from tests.compat.answers import asked, recorded
from tests.compat.test_answers import NAMES, nearly

SINCE_1_9 = {"dry_run": "torchrec.distributed.planner.dry_run"}
"""Topics whose answers are of a release later than the one that `make peers` installs."""


@functools.cache
def answers_of(topic: str) -> dict[str, Any]:
    return asked(topic)


@pytest.mark.parametrize(("topic", "name"), NAMES)
def test_torchrec_returns_what_is_recorded(topic: str, name: str) -> None:
    if topic in SINCE_1_9 and importlib.util.find_spec(SINCE_1_9[topic]) is None:
        pytest.skip("this TorchRec has no planner.dry_run: put a 1.9 first on PYTHONPATH")
    assert answers_of(topic)[name] == nearly(recorded(topic)[name])
