"""Results of threads come in order, and their number is bounded."""

from __future__ import annotations

import threading
import time

import pytest

from recsys.datasets.ahead import map_ahead


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_results_come_in_order(num_workers: int) -> None:
    begun: list[int] = []

    def slow(number: int) -> int:
        begun.append(number)
        time.sleep(0.001 * (number % 3))
        return -number

    found = []
    for result in map_ahead(slow, range(20), num_workers):
        found.append(result)
        assert len(begun) <= len(found) + num_workers + 1
    assert found == [-number for number in range(20)]
    assert list(map_ahead(slow, [], num_workers)) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_comes_at_its_turn(num_workers: int) -> None:
    def fails(number: int) -> int:
        return 10 // (number - 3)

    found = []
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        found.extend(map_ahead(fails, [1, 2, 3, 4], num_workers))
    results = map_ahead(fails, [1, 2, 3, 4], num_workers)
    assert [next(results), next(results)] == [-5, -10]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert threading.active_count() == before
