"""Tests of the core that also run on objects of `recsys.compat`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest


def again(
    test: Callable[..., None], names: str | tuple[str, ...], cases: Mapping[str, Any]
) -> Callable[..., None]:
    """Return a test with its other parameters, and other cases of some.

    Args:
        test: A parametrized test.
        names: The arguments of one of its `parametrize`.
        cases: Their values by the id of the case.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    marks = list(test.pytestmark)  # type: ignore[attr-defined]
    others = [mark for mark in marks if mark.args[:1] != (names,)]
    assert len(others) == len(marks) - 1, f"{test.__name__} has no parametrize of {names!r}"
    run.pytestmark = others  # type: ignore[attr-defined]
    return pytest.mark.parametrize(names, cases.values(), ids=cases)(run)
