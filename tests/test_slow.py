"""Every slow case has a quick case beside it; the cases of all lists exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rest import LIST, LONG, is_long, is_rest
from tests.slow import QUICK_CASE_OF, is_slow
from tests.without_compat import expected

ROOT = Path(__file__).parents[1]


def is_there(nodeid: str) -> bool:
    path, *_, name = nodeid.partition("[")[0].removesuffix("::runTest").split("::")
    # a test may be imported from another file
    return (ROOT / path).is_file() and name in (ROOT / path).read_text()


def test_slow_cases_and_their_quick_ones_are_there() -> None:
    both = {*QUICK_CASE_OF, *QUICK_CASE_OF.values()}
    assert sorted(case for case in both if not is_there(case)) == []


def test_quick_cases_are_not_slow() -> None:
    quick = QUICK_CASE_OF.values()
    assert sorted(case for case in quick if is_slow(case) or is_long(case)) == []


@pytest.mark.parametrize("listed", [LIST, LONG], ids=["rest", "long"])
def test_listed_cases_are_there(listed: Path) -> None:
    names = expected(listed.read_text().splitlines())
    files = {name for name in names if "::" not in name}
    gone = [name for name in names - files if not is_there(name)]
    assert sorted([*gone, *(name for name in files if not (ROOT / name).is_file())]) == []


def test_names_of_a_case_a_test_and_a_file() -> None:
    case = next(name for name in LIST.read_text().splitlines() if name.endswith("]"))
    test = next(name for name in LIST.read_text().splitlines() if not name.endswith("]"))
    assert is_rest(case)
    assert not is_rest(case.partition("[")[0])
    assert is_rest(test)
    assert is_rest(f"{test}[1]")
    assert not is_rest("tests/test_slow.py::test_listed_cases_are_there")
