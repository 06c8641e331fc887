"""Faults of one place, and the choice of cases."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.choose import choose, shortened
from tests.mutants.mutate import draw, faults_of

SOURCE = '''
def f(a: int = 2, *, flag=True) -> int:
    """A docstring with 1 number."""
    import os
    if a < 3 and not flag:
        raise ValueError(f"received {a + 1}")
    a += 1
    print(a)
    zip(a, a, strict=True)
    return a if flag else a * 2
'''


def test_faults_of_each_kind() -> None:
    changes = {(fault.kind, fault.before, fault.after) for fault in faults_of(SOURCE)}
    assert changes == {
        ("constant", "2", "(3)"),
        ("constant", "True", "(False)"),
        ("constant", "3", "(4)"),
        ("constant", "1", "(2)"),
        ("and, or", "a < 3 and not flag", "(a < 3 or not flag)"),
        ("comparison", "a < 3", "(a <= 3)"),
        ("not", "not flag", "(flag)"),
        ("arithmetic", "a += 1", "a -= 1"),
        ("call", "print(a)", "pass"),
        ("call", "zip(a, a, strict=True)", "pass"),
        ("result", "return a if flag else a * 2", "return None"),
        ("condition", "flag", "(not flag)"),
        ("arithmetic", "a * 2", "(a // 2)"),
    }


def test_each_fault_is_one_change_of_a_program() -> None:
    for fault in faults_of(SOURCE):
        ast.parse(fault.source)
        assert fault.source.replace(fault.after, fault.before, 1) == SOURCE


def test_draws_repeat_by_seed() -> None:
    files = {"a.py": SOURCE, "b.py": SOURCE}
    assert draw(files, 5, 1) == draw(files, 5, 1)
    assert draw(files, 5, 1) != draw(files, 5, 2)
    drawn = draw(files, 10, 0)
    assert len({(path, fault.line) for path, fault in drawn}) == 10


def test_quick_cases_of_all_lines_are_kept() -> None:
    lines = {"a.py": {1: frozenset("abc"), 2: frozenset("bc"), 3: frozenset("d")}}
    seconds = {"a": (0.0, 0.1), "b": (0.0, 0.2), "c": (0.0, 5.0), "d": (0.0, 1.0)}
    assert choose(lines, seconds, limit_s=1.3) == {"b", "d"}
    assert choose(lines, seconds, limit_s=1.4) == {"a", "b", "d"}


def test_a_fixture_counts_for_its_file_once() -> None:
    lines = {"a.py": {1: frozenset({"x::1"}), 2: frozenset({"x::2"}), 3: frozenset({"y::1"})}}
    seconds = {"x::1": (9.0, 0.1), "x::2": (0.0, 0.1), "y::1": (0.0, 0.1)}
    assert choose(lines, seconds, limit_s=0.3) == {"y::1"}
    assert choose(lines, seconds, limit_s=10.0) == {"x::1", "x::2", "y::1"}


@pytest.mark.parametrize(
    ("left_out", "names"),
    [
        (["x::1[a]"], ["x::1[a]"]),
        (["x::1[a]", "x::1[b]"], ["x::1"]),
        (["x::1[a]", "x::1[b]", "x::2"], ["x"]),
        (["x::2", "y::1"], ["x::2", "y"]),
    ],
)
def test_names_of_whole_tests_and_files(left_out: list[str], names: list[str]) -> None:
    assert shortened(left_out, ["x::1[a]", "x::1[b]", "x::2", "y::1"]) == names
