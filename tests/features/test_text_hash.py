"""Hashes of texts."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
import torch

from recsys.features.text_hash import hash_rows, hash_texts
from recsys.sparse import KeyedJaggedTensor, hash_ids
from tests.features.plain import fnv, split_mix


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    alphabet = "ab0 é漢🙂\0"
    most = rng.choice([0, 1, 5, 40, 300])
    count = rng.choice([1, 3, 15, 16, 17, 300])
    return ["".join(rng.choices(alphabet, k=rng.randint(0, most))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(30))
def test_hashes_equal_a_loop_over_bytes(seed: int) -> None:
    given = texts(seed)
    array = pa.array(given, pa.large_string())
    assert hash_texts(array).tolist() == [fnv(text) for text in given]
    start, stop = sorted(random.Random(seed).choices(range(len(given) + 1), k=2))
    sliced = array.slice(start, stop - start)
    assert hash_texts(sliced).tolist() == [fnv(text) for text in given[start:stop]]


def test_few_long_texts_among_short_ones() -> None:
    given = [""] * 20 + ["x" * 10_000] + ["yz"] * 20 + ["w" * 9_999]
    found = hash_texts(pa.array(given, pa.large_string()))
    assert found.tolist() == [fnv(text) for text in given]


def test_published_values() -> None:
    # of the IETF draft, section "FNV-1a test vectors": "", "a", "foobar"
    found = hash_texts(pa.array(["", "a", "foobar"], pa.large_string())).view(np.uint64)
    assert [hex(value) for value in found] == [
        "0xcbf29ce484222325",
        "0xaf63dc4c8601ec8c",
        "0x85944171f73967e8",
    ]
    assert hash_texts(pa.array([], pa.large_string())).tolist() == []


@pytest.mark.parametrize("rows", [1, 2, 1000, 2**31 + 11, 2**62])
def test_rows_are_those_of_hash_ids(rows: int) -> None:
    ids = np.random.default_rng(rows % 97).integers(-(2**63), 2**63, 1000)
    ids[:4] = [0, -1, -(2**63), 2**63 - 1]
    before = ids.copy()
    features = KeyedJaggedTensor(["a"], torch.from_numpy(ids), lengths=torch.ones(1000).long())
    found = hash_rows(ids, rows).tolist()
    assert found == hash_ids(features, {"a": rows}).values().tolist()
    assert found == [split_mix(int(i)) % rows for i in ids]
    assert (ids == before).all()
