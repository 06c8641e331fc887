"""Choice of the cases of `make test`: quick cases that together execute the lines of all cases.

Cases are taken greedily by new lines of `recsys` per second, as in the minimization of test suites
(Yoo and Harman, "Regression testing minimization, selection and prioritization", 2012), until no
case adds enough lines; then the quickest others, until the time is over.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping

_LEAST_S = 0.005  # collection, reports and fixtures of each case
_EXPENSIVE_S = 2.0  # fixtures that the cases of a file share
_LEAST_GAIN = 0.5  # new lines for each second


def choose(
    lines: Mapping[str, Mapping[int, frozenset[str]]],
    seconds: Mapping[str, tuple[float, float]],
    limit_s: float,
) -> set[str]:
    """Return the cases to keep.

    Args:
        lines: The cases that execute each line, by file and number of line.
        seconds: Seconds of the fixtures of each case, and of the case.
        limit_s: Seconds of all cases together.
    """
    lines_of: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for path, by_number in lines.items():
        for number, cases in by_number.items():
            for case in cases:
                lines_of[case].add((path, number))
    fixture_s: dict[str, float] = defaultdict(float)
    for case, (setup_s, _) in seconds.items():
        if setup_s > _EXPENSIVE_S:
            fixture_s[_file(case)] += setup_s
    kept: set[str] = set()
    paid: set[str] = set()  # files whose fixtures are used
    known: set[tuple[str, int]] = set()
    spent_s = 0.0

    def cost_s(case: str) -> float:
        setup_s, own_s = seconds[case]
        shared_s = 0.0 if _file(case) in paid else fixture_s[_file(case)]
        return own_s + (setup_s if setup_s <= _EXPENSIVE_S else 0.0) + shared_s + _LEAST_S

    def keep(case: str) -> None:
        nonlocal spent_s
        spent_s += cost_s(case)
        paid.add(_file(case))
        kept.add(case)
        known.update(lines_of[case])

    heap = [(-len(lines_of[case]) / cost_s(case), case) for case in seconds]
    heapq.heapify(heap)
    while heap:
        _, case = heapq.heappop(heap)
        gain = len(lines_of[case] - known) / cost_s(case)
        if gain < _LEAST_GAIN or spent_s + cost_s(case) > limit_s:
            continue
        if heap and gain < -heap[0][0]:
            heapq.heappush(heap, (-gain, case))
        else:
            keep(case)
    for case in sorted(seconds.keys() - kept, key=cost_s):
        if spent_s + cost_s(case) <= limit_s:
            keep(case)
    return kept


def shortened(left_out: Collection[str], all_cases: Collection[str]) -> list[str]:
    """Return the list of cases that are left out: a test or a file for all of its cases.

    Args:
        left_out: The cases that are left out.
        all_cases: All cases.
    """
    names = set(left_out)
    for group_of in (_test, _file):
        groups: dict[str, set[str]] = defaultdict(set)
        for case in all_cases:
            groups[group_of(case)].add(case)
        for group, cases in groups.items():
            if cases <= set(left_out):
                names = {name for name in names if group_of(name) != group} | {group}
    return sorted(names)


def _test(case: str) -> str:
    return case.partition("[")[0]


def _file(case: str) -> str:
    return case.partition("::")[0]
