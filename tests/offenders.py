"""Facts that hold of many things: one test, which names all that they do not hold of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def check_each(
    check: Callable[[T], None], cases: Iterable[T], name: Callable[[T], object] = str
) -> None:
    """Run a check on every case, and fail at the end with the error of each offender.

    Args:
        check: raises if a case is wrong.
        cases: at least one.
        name: returns the name of a case.
    """
    offenders, count = [], 0
    for case in cases:
        count += 1
        try:
            check(case)
        except Exception as error:
            offenders.append(f"{name(case)}: {type(error).__name__}: {error}")
    assert count, "nothing was checked"
    assert not offenders, f"{len(offenders)} of {count} are wrong\n" + "\n".join(offenders)
