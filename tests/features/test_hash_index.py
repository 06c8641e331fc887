"""Positions of distinct numbers."""

from __future__ import annotations

import numpy as np
import pytest

from recsys.features.hash_index import HashIndex


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
    index = HashIndex(numbers)
    positions = {int(number): i for i, number in enumerate(numbers)}
    asked = np.concatenate([numbers, rng.integers(-100, 100, 300), numbers[:50] + 1])
    asked = rng.permutation(np.concatenate([asked, [0, -1, -(2**63), 2**63 - 1]]))
    assert index.find(asked).tolist() == [positions.get(int(number), -1) for number in asked]
    assert index.find(asked[:0]).tolist() == []


def test_numbers_of_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_slot(index: HashIndex, numbers: np.ndarray) -> np.ndarray:
        return np.full(len(numbers), len(index._slots) - 1)

    monkeypatch.setattr(HashIndex, "_first_slots", last_slot)
    numbers = np.random.default_rng(0).permutation(100)
    index = HashIndex(numbers)
    asked = np.arange(-20, 150)
    expected = [numbers.tolist().index(i) if i in numbers else -1 for i in asked]
    assert index.find(asked).tolist() == expected


@pytest.mark.parametrize("size", [2, 10, 3000])
def test_equal_numbers(size: int) -> None:
    numbers = np.random.default_rng(0).integers(-(2**63), 2**63, size)
    numbers[size - 1] = numbers[0]
    with pytest.raises(ValueError, match="must be distinct"):
        HashIndex(numbers)
