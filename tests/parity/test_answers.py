"""TorchRec returns what is recorded of it, to which tests/compat/test_answers holds ours."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.compat.answers import asked, recorded
from tests.compat.test_answers import NAMES, nearly


@functools.cache
def answers_of(topic: str) -> dict[str, Any]:
    return asked(topic)


@pytest.mark.parametrize(("topic", "name"), NAMES)
def test_torchrec_returns_what_is_recorded(topic: str, name: str) -> None:
    assert answers_of(topic)[name] == nearly(recorded(topic)[name])
