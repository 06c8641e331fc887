"""Short cases return the same here as under TorchRec: values, dtypes, shapes, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from recsys.compat import torchrec as compat
from tests.compat.answers import TOPICS, answer_of, cases_of, recorded

NAMES = [(topic, name) for topic in TOPICS for name in sorted(cases_of(topic))]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def nearly(found: Any) -> Any:
    """The same with every number approximate, however deep it lies."""
    if isinstance(found, dict):
        return {key: nearly(value) for key, value in found.items()}
    if isinstance(found, list):
        return [nearly(value) for value in found]
    if isinstance(found, float):
        return pytest.approx(found, rel=1e-5, abs=1e-6, nan_ok=True)
    return found


@pytest.mark.parametrize(("topic", "name"), NAMES)
def test_it_is_what_torchrec_returns(topic: str, name: str) -> None:
    assert answer_of(cases_of(topic)[name]) == nearly(recorded(topic)[name])


@pytest.mark.parametrize("topic", TOPICS)
def test_each_case_has_an_answer(topic: str) -> None:
    assert sorted(cases_of(topic)) == sorted(recorded(topic))
