"""Every slow case has a quick case beside it, and both exist."""

from __future__ import annotations

from pathlib import Path

from tests.slow import QUICK_CASE_OF, is_slow

ROOT = Path(__file__).parents[1]


def is_there(nodeid: str) -> bool:
    path, *_, name = nodeid.partition("[")[0].split("::")
    return (ROOT / path).is_file() and f"def {name}(" in (ROOT / path).read_text()


def test_slow_cases_and_their_quick_ones_are_there() -> None:
    both = {*QUICK_CASE_OF, *QUICK_CASE_OF.values()}
    assert sorted(case for case in both if not is_there(case)) == []


def test_quick_cases_are_not_slow() -> None:
    assert sorted(case for case in QUICK_CASE_OF.values() if is_slow(case)) == []
