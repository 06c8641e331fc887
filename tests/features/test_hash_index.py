"""Positions of distinct numbers."""

from __future__ import annotations

import time

import numpy as np
import pytest

from recsys.features.hash_index import NumberPositions


def numbers_of(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "random":
        found = rng.integers(-(2**63), 2**63, size)
    elif kind == "multiples":
        found = (np.arange(size) - size // 2) * 2**40
    elif kind == "high bits":
        found = np.arange(size) << np.int64(48)
    else:
        found = np.arange(size)
    found = np.unique(np.concatenate([found, [0, -1, -(2**63), 2**63 - 1]])[: max(size, 0)])
    return rng.permutation(found)


@pytest.mark.parametrize("kind", ["random", "multiples", "high bits", "counter"])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 100, 5000])
def test_positions_equal_a_dict(kind: str, size: int) -> None:
    rng = np.random.default_rng(size)
    numbers = numbers_of(kind, size, rng)
    index = NumberPositions(numbers)
    positions = {int(number): i for i, number in enumerate(numbers)}
    asked = np.concatenate([numbers, rng.integers(-100, 100, 300), numbers[:50] + 1])
    asked = rng.permutation(np.concatenate([asked, [0, -1, -(2**63), 2**63 - 1]]))
    assert index.find(asked).tolist() == [positions.get(int(number), -1) for number in asked]
    assert index.find(asked[:0]).tolist() == []


@pytest.mark.parametrize("size", [2, 63, 64, 65, 66, 100, 300])
def test_numbers_of_one_slot(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    def last_slot(index: NumberPositions, numbers: np.ndarray) -> np.ndarray:
        return np.full(len(numbers), len(index._slots) - 1)

    monkeypatch.setattr(NumberPositions, "_first_slots", last_slot)
    numbers = np.random.default_rng(0).permutation(size)
    index = NumberPositions(numbers)
    asked = np.arange(-20, size + 50)
    expected = [numbers.tolist().index(i) if i in numbers else -1 for i in asked]
    assert index.find(asked).tolist() == expected


@pytest.mark.parametrize("size", [2, 10, 3000])
def test_equal_numbers(size: int) -> None:
    numbers = np.random.default_rng(0).integers(-(2**63), 2**63, size)
    numbers[size - 1] = numbers[0]
    with pytest.raises(ValueError, match="must be distinct"):
        NumberPositions(numbers)


@pytest.mark.parametrize("size", [66, 200])
def test_equal_numbers_of_one_slot(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(
        NumberPositions, "_first_slots", lambda _, numbers: np.zeros(len(numbers), int)
    )
    for numbers in (np.arange(size), np.zeros(size, np.int64)):
        numbers = numbers.copy()
        numbers[size - 1] = numbers[size // 2]
        with pytest.raises(ValueError, match="must be distinct"):
            NumberPositions(numbers)


def _numbers_of_slot(size: int) -> np.ndarray:
    """Numbers that a stranger can choose: all of them have one slot."""
    bits = max(1, size).bit_length() + 1
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    mixed = [(((5 << (64 - bits)) + i) * inverse) % (1 << 64) for i in range(size)]
    return np.array([one ^ (one >> 32) for one in mixed], np.uint64).view(np.int64)


def test_chosen_numbers_cost_little_more() -> None:
    """20,000 of them took 10 seconds each way."""
    numbers = _numbers_of_slot(20_000)
    slots = NumberPositions(numbers[:0])._first_slots(numbers)
    assert len({*slots.tolist()}) == 1
    start = time.process_time()
    index = NumberPositions(numbers)
    assert index.find(numbers).tolist() == list(range(20_000))
    assert index.find(numbers + 1).max() == -1
    assert time.process_time() - start < 2
