"""Vocabularies and counts of values."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from recsys.features import Categorical, FeatureSpec
from recsys.features.arrow import Keys, Values, read_keys
from recsys.features.counts import Counts
from recsys.features.vocabulary import Vocabulary
from tests.features import plain


def values_of(rng: random.Random, kind: str, count: int) -> list[Any]:
    numbers = [int(rng.paretovariate(0.7)) % 200 for _ in range(count)]
    named: dict[str, Any] = {
        "text": lambda n: "é" * (n % 3) + str(n),
        "number": lambda n: (-1) ** n * n * 2**50,
    }
    return [None if rng.random() < 0.1 else named[kind](n) for n in numbers]


def keys_of(values: list[Any], kind: str) -> Keys:
    array = pa.array(values, pa.string() if kind == "text" else pa.int64())
    return read_keys(Values("c", array, None))


@pytest.mark.parametrize("limit", [50_000_000, 7])
@pytest.mark.parametrize("kind", ["text", "number"])
@pytest.mark.parametrize("seed", range(6))
def test_counts_equal_a_counter(seed: int, kind: str, limit: int) -> None:
    rng = random.Random(seed)
    pieces = [values_of(rng, kind, rng.choice([0, 1, 50, 400])) for _ in range(7)]
    together = [value for piece in pieces for value in piece]
    min_count = rng.choice([1, 2, 5])
    max_size = rng.choice([None, 1, 10])
    parts = []
    for _ in range(3):
        parts.append(Counts(limit))
    for piece in pieces:
        rng.choice(parts).add("c", keys_of(piece, kind))
    rng.shuffle(parts)
    parts = [pickle.loads(pickle.dumps(part)) if rng.random() < 0.5 else part for part in parts]
    first, *others = parts
    for other in others:
        first.merge("c", other)
    found = first.vocabulary(min_count, max_size)
    expected = plain.vocabulary(together, min_count, max_size)
    assert found.values.to_pylist() == list(expected)

    present = pc.value_counts(pa.array(together).drop_null())
    counted = first.table()
    assert dict(
        zip(counted["value"].to_pylist(), counted["count"].to_pylist(), strict=True)
    ) == dict(
        zip(present.field("values").to_pylist(), present.field("counts").to_pylist(), strict=True)
    )

    unseen = ["new", ""] if kind == "text" else [3, -(2**63), 2**63 - 1]
    asked = [*values_of(rng, kind, 50), *unseen, None]
    rows = found.rows_of(keys_of(asked, kind)).tolist()
    assert rows == [0 if value is None else expected.get(value, 1) for value in asked]


def test_counts_beyond_the_limit_are_in_files() -> None:
    counts = Counts(limit=100)
    for start in range(0, 1000, 50):
        counts.add("c", keys_of(list(range(start, start + 60)), "number"))
    assert counts._folder is not None
    assert sum(map(len, counts._parts)) <= 200
    expected = plain.vocabulary([n for s in range(0, 1000, 50) for n in range(s, s + 60)])
    assert counts.vocabulary(1, None).values.to_pylist() == list(expected)


def test_small_parts_are_merged() -> None:
    """Each part has some kilobytes beside its rows."""
    counts = Counts(limit=100_000)
    for number in range(2000):
        counts.add("c", keys_of([number % 3, 7], "number"))
    assert len(counts._parts) < 400
    found = dict(
        zip(*(counts.table()[name].to_pylist() for name in ("value", "count")), strict=True)
    )
    assert found == {0: 667, 1: 667, 2: 666, 7: 2000}


def test_one_kind_of_value() -> None:
    counts, other = Counts(), Counts()
    counts.add("city", keys_of(["a"], "text"))
    other.add("city", keys_of([1], "number"))
    with pytest.raises(TypeError, match=r"'town' must .*received numbers after texts"):
        counts.add("town", keys_of([1], "number"))
    with pytest.raises(TypeError, match=r"'city' must .*received numbers after texts"):
        counts.merge("city", other)
    counts.add("city", keys_of([None], "number"))
    counts.merge("city", Counts())
    assert counts.vocabulary(1, None).values.to_pylist() == ["a"]


@pytest.mark.parametrize("kind", ["text", "number"])
def test_texts_and_numbers_are_not_mixed(kind: str) -> None:
    other = "number" if kind == "text" else "text"
    known, asked = {"text": ["a"], "number": [1]}[kind], {"text": ["a"], "number": [1]}[other]
    vocabulary = Vocabulary(keys_of(known, kind).texts if kind == "text" else pa.array(known))
    with pytest.raises(TypeError, match=f"'c' must have {kind}s, .*received {other}s"):
        keys_of(asked, other).check_kind("c", vocabulary.kind)
    for values, wanted in (([None, None], kind), ([], kind), (asked, other), (asked, None)):
        keys_of(values, other).check_kind("c", wanted)
    assert vocabulary.rows_of(keys_of([None, None], other)).tolist() == [0, 0]
    assert vocabulary.rows_of(keys_of([], other)).tolist() == []
    # a dictionary with entries, without a used value
    unused = pa.DictionaryArray.from_arrays(pa.array([None], pa.int8()), pa.array(["z"]))
    assert vocabulary.rows_of(read_keys(Values("c", unused, None))).tolist() == [0]


def test_an_empty_vocabulary_knows_nothing() -> None:
    for kind in ("text", "number"):
        empty = Counts().vocabulary(1, None)
        asked = {"text": ["a", None], "number": [0, None]}[kind]
        assert empty.rows_of(keys_of(asked, kind)).tolist() == [1, 0]
        assert empty.num_rows == 2


def test_texts_with_the_hash_of_a_known_text_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def lengths(texts: Any) -> Any:
        return np.array([len(text) for text in texts.to_pylist()], np.int64)

    for module in ("vocabulary", "counts"):
        monkeypatch.setattr(f"recsys.features.{module}.hash_texts", lengths)
    vocabulary = Vocabulary(pa.array(["a", "bb"], pa.large_string()))
    assert vocabulary.rows_of(keys_of(["a", "c", "bb", "cc"], "text")).tolist() == [2, 1, 3, 1]
    with pytest.raises(ValueError, match=r"must be distinct.*'cc' and 'bb'\."):
        Vocabulary(pa.array(["a", "cc", "ddd", "bb"], pa.large_string()))
    counts = Counts()
    counts.add("c", keys_of(["ddd", "ddd", "a", "bb", "bb", "cc", "b"], "text"))
    with pytest.warns(UserWarning, match="'b' is .*hash of 'a'; .*1"):
        found = counts.vocabulary(1, None)
    assert found.values.to_pylist() == ["bb", "ddd", "a"]
    assert found.rows_of(keys_of(["bb", "cc", "b", "a"], "text")).tolist() == [2, 1, 1, 4]


def test_texts_of_one_hash_do_not_end_a_fit() -> None:
    """Two known texts of one 64-bit hash: the rarer one is an unknown value."""
    first, second = "8yn0iYCKYHlIj4-BwPqk", "GReLUrM4wMqfg9yzV3KQ"
    spec = FeatureSpec([Categorical("city")])
    with pytest.warns(UserWarning, match=f"'{first}' is .*hash of '{second}'"):
        spec.fit({"city": [first, second, second, "Oslo"]})
    rows = spec.transform({"city": [first, second, "Oslo"]}).sparse_features.values()
    assert rows.tolist() == [1, 2, 3]
