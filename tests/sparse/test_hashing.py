import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.sparse import KeyedJaggedTensor, hash_ids

INT64 = st.integers(-(2**63), 2**63 - 1)


def split_mix(ids: list[int], rows: int) -> list[int]:
    """SplitMix64's output function in Python's own numbers."""
    found = []
    for x in ids:
        x %= 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        found.append(((x ^ (x >> 31)) % 2**63) % rows)
    return found


@given(st.lists(st.lists(INT64, max_size=5), min_size=6, max_size=6), st.integers(1, 2**40))
def test_against_pythons_numbers(bags, rows):
    flat = [id for bag in bags for id in bag]
    features = KeyedJaggedTensor(
        ["a", "b", "kept"],
        torch.tensor(flat, dtype=torch.int64),
        torch.arange(len(flat), dtype=torch.float32),
        lengths=torch.tensor([len(bag) for bag in bags]),
    )
    hashed = hash_ids(features, {"b": rows + 7, "a": rows})
    a, b, kept = ([id for bag in bags[i : i + 2] for id in bag] for i in (0, 2, 4))
    expected = [*split_mix(a, rows), *split_mix(b, rows + 7), *kept]
    assert hashed.values().tolist() == expected
    assert hashed.keys() == features.keys()
    assert hashed.lengths() is features.lengths()
    assert hashed.weights() is features.weights()


def test_known_numbers_of_split_mix():
    # the first outputs of the generator with seed 1234567 (Rosetta Code, "Pseudo-random numbers")
    gamma, seed, mask = 0x9E3779B97F4A7C15, 1234567, 2**64 - 1
    states = [(seed + gamma * step) & mask for step in (1, 2, 3)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    signed = torch.tensor([state - 2**64 if state >> 63 else state for state in states])
    features = KeyedJaggedTensor(["a"], signed, lengths=torch.tensor([3]))
    rows = 2**62
    assert hash_ids(features, {"a": rows}).values().tolist() == [x % rows for x in published]


def test_regular_ids_are_spread():
    # multiples of the number of rows would all share row 0 by a plain remainder
    rows = 1000
    features = KeyedJaggedTensor(["a"], torch.arange(100_000) * rows, lengths=torch.tensor([10**5]))
    counts = np.bincount(hash_ids(features, {"a": rows}).values().numpy(), minlength=rows)
    chi_squared = ((counts - 100) ** 2 / 100).sum()
    assert abs(chi_squared - (rows - 1)) < 6 * np.sqrt(2 * (rows - 1))


def test_batches_of_several_sizes():
    features = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(5, dtype=torch.int32),
        lengths=torch.tensor([1, 2, 2]),
        stride_per_key_per_rank=[[1], [2]],
    )
    hashed = hash_ids(features, {"b": 9})
    assert hashed.values().tolist() == [0, *split_mix([1, 2, 3, 4], 9)]
    assert hashed.stride_per_key() == [1, 2]


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        ({"c": 3}, KeyError, "'c'"),
        ({"a": 0}, ValueError, "positive; received 0"),
        ({"a": 2.5}, TypeError, "a whole number; received 2.5"),
        ({"a": True}, TypeError, "a whole number; received True"),
    ],
)
def test_what_is_no_number_of_rows(rows, error, text):
    features = KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.tensor([2]))
    with pytest.raises(error, match=text):
        hash_ids(features, rows)


def test_what_are_no_ids():
    features = KeyedJaggedTensor(["a"], torch.rand(2), lengths=torch.tensor([2]))
    with pytest.raises(TypeError, match=r"int32 or int64; received torch\.float32"):
        hash_ids(features, {"a": 2})


def test_unsigned_ids_keep_their_bits():
    ids = np.array([2**63 + 5, 1], dtype=np.uint64)
    lengths = torch.tensor([2])
    features = KeyedJaggedTensor(["a"], torch.from_numpy(ids), lengths=lengths)
    with pytest.raises(TypeError, match=r"received torch\.uint64\. .*with \.view\("):
        hash_ids(features, {"a": 2})
    features = KeyedJaggedTensor(["a"], torch.from_numpy(ids).view(torch.int64), lengths=lengths)
    assert hash_ids(features, {"a": 1000}).values().tolist() == split_mix([2**63 + 5, 1], 1000)


def test_other_values_for_the_same_bags():
    features = KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.tensor([2]))
    with pytest.raises(ValueError, match=r"2 on cpu; received \(3,\)"):
        features.with_values(torch.arange(3))
