"""Extended specs keep the rows of known values; other fits have other fingerprints."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys.features import Categorical, FeatureSpec, Hashed, Label, Numeric
from recsys.features.counts import TableChange

COLUMNS = [
    Categorical("city", min_count=2, max_size=4),
    Categorical("tags", is_list=True),
    Numeric("age", standardize=True),
    Numeric("price", buckets=3),
    Hashed("user", rows=100),
    Label("ok"),
]
MONDAY = {
    "city": ["Oslo"] * 3 + ["Rome"] * 2 + ["Bonn"],
    "tags": [["a"], ["a", "b"], None, ["b"], ["c"], ["a"]],
    "age": [20, 30, 40, 50, 60, 70],
    "price": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "user": ["u"] * 6,
    "ok": [0, 1, 0, 1, 0, 1],
}
TUESDAY = {
    "city": ["Bonn", "Bonn", "Lima", "Lima", "Lima", "Kiel", "Rome", None],
    "tags": [["d", None]] * 8,
    "age": [1, 2, 3, 4, 5, 6, 7, None],
    "price": [9.0, 2.0, 3.0, 4.0, 8.0, 7.0, 6.0, None],
    "user": ["v"] * 8,
    "ok": [0, 1] * 4,
}


def _values(spec: FeatureSpec, table: str) -> list[Any]:
    return spec.fitted.vocabularies[table].values.to_pylist()


def test_known_values_keep_their_rows_and_new_ones_follow() -> None:
    monday = FeatureSpec(COLUMNS).fit(MONDAY)
    fingerprints = monday.fingerprints()
    tuesday, report = monday.extend(TUESDAY)
    assert _values(tuesday, "city") == ["Oslo", "Rome", "Lima", "Bonn"]
    assert _values(tuesday, "tags") == ["a", "b", "c", "d"]
    assert tuesday.fitted.vocabularies["city"].ages.tolist() == [1, 0, 0, 0]
    assert report.tables["city"] == TableChange(
        new=2, kept=2, absent=1, retired=0, rare=1, left_out=0
    )
    assert str(report).splitlines()[:3] == [
        "city: 2 new, 2 kept (1 not in the data), 1 below min_count",
        "tags: 1 new, 3 kept (3 not in the data)",
        "city: missing 0.0% -> 12.5%, stability index 9.426",
    ]
    assert report.shifts["age"].missing == (0.0, 1 / 8)
    assert monday.fingerprints() == fingerprints, "the old spec does not change"
    changed = {
        name for name, value in tuesday.fingerprints().items() if value != fingerprints[name]
    }
    assert changed == {"city", "tags"}
    assert tuesday.fitted.means == monday.fitted.means
    assert tuesday.fitted.num_rows == 14


def test_old_values_give_their_rows_to_new_ones_if_there_is_no_room() -> None:
    spec = FeatureSpec([Categorical("x", max_size=3)]).fit({"x": ["a", "a", "b", "c"]})
    for data in (["a", "b"], ["a", "b", "b"]):
        spec, report = spec.extend({"x": data}, retire_after=2)
        assert report.tables["x"].retired == 0
    assert spec.fitted.vocabularies["x"].ages.tolist() == [0, 0, 2]
    without_new, report = spec.extend({"x": ["a"]}, retire_after=2)
    assert _values(without_new, "x") == ["a", "b", "c"], "no new value needs the row"
    spec, report = spec.extend({"x": ["d", "e", "e", "a"]}, retire_after=2)
    assert _values(spec, "x") == ["a", "b", "e"]
    assert report.tables["x"] == TableChange(new=1, kept=2, absent=1, retired=1, rare=0, left_out=1)


def test_scales_and_edges_move_by_choice() -> None:
    monday = FeatureSpec(COLUMNS).fit(MONDAY)
    moved = monday.extend(TUESDAY, refit=["age", "price"]).spec
    fresh = FeatureSpec(COLUMNS).fit(TUESDAY)
    assert moved.fitted.means == fresh.fitted.means
    assert np.array_equal(moved.fitted.edges["price"], fresh.fitted.edges["price"])
    assert moved.fingerprints()["age"] != monday.fingerprints()["age"]
    with pytest.raises(KeyError, match=r"refit must name Numeric columns, .* received \['city'\]"):
        monday.extend(TUESDAY, refit=["city"])


def test_parts_in_any_order_are_the_whole(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    columns = [Categorical("item", max_size=50), Numeric("n")]
    spec = FeatureSpec(columns).fit({"item": random.integers(0, 40, 100), "n": np.ones(100)})
    rows = pa.table({"item": random.integers(20, 90, 500), "n": np.arange(500.0)})
    whole, report = spec.extend(rows, retire_after=2)
    parts = [
        pickle.loads(pickle.dumps(spec.partial(rows.slice(i, 100)))) for i in range(0, 500, 100)
    ]
    joined = spec.extend_parts(parts[::-1], retire_after=2)
    assert joined.spec.fingerprints() == whole.fingerprints()
    assert joined.report == report
    whole.save(tmp_path / "spec")
    loaded = FeatureSpec.load(tmp_path / "spec")
    ages = [s.fitted.vocabularies["item"].ages for s in (loaded, whole)]
    assert ages[1].any()
    assert np.array_equal(*ages)
    assert FeatureSpec.from_state_dict(whole.state_dict()).fitted.digests == whole.fitted.digests
    few = spec.extend(rows, retire_after=2, limit=10).spec  # counts in files
    assert few.fingerprints() == whole.fingerprints()


def test_shifts_are_those_of_all_numbers_and_values() -> None:
    random = np.random.default_rng(4)
    before = {"n": random.normal(size=3000), "v": random.integers(0, 9, 3000).astype(str)}
    after = {"n": random.normal(0.5, size=3000), "v": random.integers(3, 15, 3000).astype(str)}
    spec = FeatureSpec([Numeric("n"), Categorical("v")]).fit(before)
    shifts = spec.extend(after).report.shifts
    edges = np.quantile(before["n"], np.arange(1, 10) / 10, method="inverted_cdf")
    values = sorted(set(before["v"]))
    shares = [
        (np.bincount(np.searchsorted(edges, data["n"], "right"), minlength=10) / 3000, [
            (data["v"] == value).mean() for value in values
        ] + [(~np.isin(data["v"], values)).mean()])
        for data in (before, after)
    ]  # fmt: skip
    for place, name in enumerate(("n", "v")):
        old, new = (np.maximum(np.array(of_data[place]), 1e-4) for of_data in shares)
        expected = ((new - old) * np.log(new / old)).sum()
        assert shifts[name].stability_index == pytest.approx(expected, rel=1e-9)
        assert shifts[name].missing == (0.0, 0.0)
    again = spec.extend({name: values[::-1] for name, values in after.items()}).report.shifts
    assert again == shifts


def test_a_day_that_comes_again_is_refused() -> None:
    monday = FeatureSpec(COLUMNS).fit(MONDAY)
    with pytest.raises(ValueError, match="counts and means of the last data"):
        monday.extend(MONDAY)
    tuesday = monday.extend(TUESDAY).spec
    with pytest.raises(ValueError, match="of the data 1 extensions before the last"):
        tuesday.extend(MONDAY)
    shuffled = {name: [*values[3:], *values[:3]] for name, values in TUESDAY.items()}
    with pytest.raises(ValueError, match="of the last data"):
        tuesday.extend(shuffled)
    again = tuesday.extend(shuffled, allow_repeated=True).spec
    assert again.fitted.vocabularies["city"].ages.tolist() == [2, 0, 0, 0]


def test_bad_days_are_named_and_change_nothing() -> None:
    monday = FeatureSpec(COLUMNS).fit(MONDAY)
    before = monday.fingerprints()
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({name: [] for name in TUESDAY}, ValueError, "extend needs at least one row"),
        ({**TUESDAY, "city": [1] * 8}, TypeError, "Table 'city' must have texts"),
        ({**TUESDAY, "user": [1] * 8}, TypeError, "'user' .* numbers after texts"),
        ({**TUESDAY, "age": [float("nan")] * 8}, ValueError, "'age'"),
        ({"city": ["a"]}, KeyError, "'tags'"),
    ]
    for data, kind, message in cases:
        with pytest.raises(kind, match=message):
            monday.extend(data)
    rare = FeatureSpec([Categorical("u", min_count=5)]).fit({"u": ["ann", "bob"]})
    assert rare.extend({"u": [1, 2, 3]}).report.tables["u"].rare == 3
    with pytest.raises(ValueError, match="retire_after"):
        monday.extend(TUESDAY, retire_after=0)
    with pytest.raises(RuntimeError, match="must be fitted"):
        FeatureSpec(COLUMNS).extend(TUESDAY)
    assert monday.fingerprints() == before


def test_all_values_new_and_a_full_vocabulary() -> None:
    spec = FeatureSpec([Categorical("x", max_size=2)]).fit({"x": ["a", "b"]})
    extended, report = spec.extend({"x": ["c", "d"]})
    assert _values(extended, "x") == ["a", "b"]
    assert report.tables["x"].left_out == 2
    empty = FeatureSpec([Categorical("x")]).fit({"x": pa.array([None, None], pa.int64())})
    assert _values(empty.extend({"x": ["c", "d"]}).spec, "x") == ["c", "d"]


def test_forgotten_values_are_gone_and_the_last_ones_take_their_rows() -> None:
    spec = FeatureSpec([Categorical("u"), Categorical("n")]).fit(
        {"u": ["a", "b", "c", "d"], "n": [1, 2, 3, 4]}
    )
    forgotten = spec.forget({"u": ["b", "a", "x", "b"], "n": [4]})
    assert _values(forgotten, "u") == ["c", "d"]
    assert _values(forgotten, "n") == [1, 2, 3]
    assert _values(spec, "u") == ["a", "b", "c", "d"]
    assert "zq@mail" in str(FeatureSpec([Categorical("u")]).fit({"u": ["zq@mail", "b"]}).fitted)
    gone = FeatureSpec([Categorical("u")]).fit({"u": ["zq@mail", "b"]}).forget({"u": ["zq@mail"]})
    assert "zq@mail" not in str(gone.state_dict()["description"])
    assert gone.fitted.profiles["u"].shares == [0.5, 0.5]
    with pytest.raises(KeyError, match=r"tables of Categorical columns, .* received 'v'"):
        spec.forget({"v": ["a"]})
    wrong: list[tuple[Any, str]] = [
        ({"n": ["a"]}, r"values\['n'\] must be numbers"),
        ({"u": "ab"}, r"values\['u'\] must be a list of values; received 'ab'"),
        ("ab", "values must be a dict of values by table; received 'ab'"),
    ]
    for values, message in wrong:
        with pytest.raises(TypeError, match=message):
            spec.forget(values)
    with pytest.raises(TypeError, match="refit"):
        FeatureSpec([Numeric("age")]).fit({"age": [1]}).extend({"age": [2]}, refit="age")


def test_fingerprints_are_those_of_the_values_in_their_order() -> None:
    fits = [
        FeatureSpec([Categorical("x")]).fit({"x": values})
        for values in (["a", "bc"], ["bc", "a"], ["ab", "c"], ["bc", "bc", "a"], [1, 2], ["1", "2"])
    ]
    found = [spec.fingerprints()["x"] for spec in fits]
    assert found[0] == found[1]
    assert len(set(found)) == 5
    sliced = FeatureSpec([Categorical("x")]).fit(pa.table({"x": ["z", "a", "bc"]}).slice(1))
    assert sliced.fingerprints()["x"] == found[0]
