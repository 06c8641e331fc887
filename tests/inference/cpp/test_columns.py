"""Raw columns of requests in the C++ core."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.features.vocabulary import Vocabulary
from recsys.inference.packages.columns import Texts, raw_request
from recsys.inference.packages.manifest import sha256_of
from tests.inference.cpp import fake_package
from tests.inference.cpp.test_core import opened, pytestmark, row_of

__all__ = ["pytestmark"]

TEXTS = pa.list_(pa.string())
ONE = torch.tensor([1])
CITIES = fake_package.CITIES


@given(
    num_rows=st.lists(st.integers(0, 20), min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1)
)
@settings(max_examples=60, deadline=None)
def test_raw_columns_are_converted(
    library: Path, tmp_path_factory: pytest.TempPathFactory, num_rows: list[int], seed: int
) -> None:
    """Against plain Python, with missing values and columns, one by one and merged."""
    folder = tmp_path_factory.getbasetemp() / "raw" / "1"
    core = opened(library, folder if folder.exists() else fake_package.write_raw(folder))
    random = np.random.default_rng(seed)
    wanted: list[list[float]] = []
    cities: list[list[int]] = []
    requests: list[dict[str, torch.Tensor | Texts]] = []
    for count in num_rows:
        scores = [0.0] * count
        columns = {
            "age": [_maybe(random, random.normal(0, 4)) for _ in range(count)],
            "pay": [_maybe(random, random.exponential(9)) for _ in range(count)],
            "code": [_maybe(random, int(random.integers(-(2**63), 2**63))) for _ in range(count)],
        }
        lists = {
            "city": [[_maybe(random, random.choice([*fake_package.CITIES, "Bonn"]))
                      for _ in range(random.integers(0, 4))] for _ in range(count)],
            "any": [[_maybe(random, random.choice(["x", "yy"]))
                     for _ in range(random.integers(0, 4))] for _ in range(count)],
            "who": [[_maybe(random, int(random.integers(0, 100)))
                     for _ in range(random.integers(0, 4))] for _ in range(count)],
        }  # fmt: skip
        shares = [[0.25 * float(random.integers(0, 9)) for _ in ids] for ids in lists["who"]]
        if random.random() < 0.3:
            columns["pay"] = [None] * count
        for row in range(count):
            age, pay, code = (columns[name][row] for name in ("age", "pay", "code"))
            scores[row] += np.float32(0 if age is None else (min(max(age, -3), 4) - 1.5) / 2)
            scores[row] += np.float32(np.log1p(7 if pay is None else pay))
            scores[row] += 0 if code is None else 3 * (_mixed(code) % 5)
            scores[row] += sum(map(_city_row, lists["city"][row]))
            known = [row_of(fake_package.text_hash(one)) for one in lists["any"][row] if one]
            scores[row] += 5 * sum(known)
            pairs = zip(lists["who"][row], shares[row], strict=True)
            scores[row] += sum(share * id for id, share in pairs if id is not None)
        request = {name: values for name, values in columns.items() if name != "pay" or any(values)}
        types: Any = {"code": pa.int64(), "city": TEXTS, "any": TEXTS, "who": pa.list_(pa.int64())}
        table = pa.table(
            {
                name: pa.array(values, types.get(name, pa.float64()))
                for name, values in {**request, **lists}.items()
            }
        ).append_column("share", pa.array(shares, pa.list_(pa.float64())))
        requests.append(raw_request(fake_package.COLUMNS, table))
        wanted.append(scores)
        cities.append([_city_row(one) for names in lists["city"] for one in names])
    merged = core.run(requests)
    for request, found, scores, rows in zip(requests, merged, wanted, cities, strict=True):
        assert isinstance(found, dict), found
        np.testing.assert_allclose(found["score"].flatten().numpy(), scores, rtol=1e-5, atol=1e-5)
        assert found["rows.values"][:, 0].tolist() == rows
        [alone] = core.run([request])
        assert isinstance(alone, dict)
        assert torch.equal(alone["score"], found["score"])
    core.close()


def test_optional_columns_may_be_absent(library: Path, tmp_path: Path) -> None:
    """All their values are missing then, alone and beside requests that have the columns."""
    version = fake_package.write_optional(tmp_path / "1")
    columns = json.loads((version / "manifest.json").read_text())["columns"]
    core, strict = opened(library, version), opened(library, fake_package.write_raw(tmp_path / "2"))
    who = {"who": pa.array([[7], [8, 9]]), "share": pa.array([[1.0], [0.5, 2.0]])}
    types = {"age": pa.float64(), "pay": pa.float64(), "code": pa.int64(), "city": TEXTS}
    nulls = pa.table({**who, **{n: pa.nulls(2, t) for n, t in {**types, "any": TEXTS}.items()}})
    whole, lacking = (raw_request(columns, table) for table in (nulls, pa.table(who)))
    assert {*lacking} == {"who", "who.lengths", "share"}
    wanted = strict.run([raw_request(fake_package.COLUMNS, nulls)])[0]
    for found in [*core.run([lacking]), *core.run([whole, lacking, whole])]:
        assert torch.equal(found["score"], wanted["score"])
    refused = [core.run([whole_request(2)])[0], strict.run([lacking])[0]]
    assert "must have a column" not in str(refused[0])  # who.lengths states that it is empty
    assert "A request must have a column 'age'; it is missing" in str(refused[1])
    core.close()
    strict.close()


def _maybe(random: np.random.Generator, value: Any) -> Any:
    return None if random.random() < 0.2 else value


def _city_row(city: str | None) -> int:
    if city is None:
        return 0
    return fake_package.CITIES.index(city) + 2 if city in fake_package.CITIES else 1


def _mixed(number: int) -> int:
    """The output function of SplitMix64, without the sign bit."""
    found = number % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        found = (found ^ found >> shift) * factor % 2**64
    return found % 2**63


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"age": torch.ones(1, 1)}, "age must have the shape"),
        (
            {"who": ONE, "share": torch.ones(1), "who.lengths": 2 * ONE},
            "who.lengths must add up to the number of values, 1; received 2",
        ),
        (
            {"age": torch.ones(2), "age.missing": torch.tensor([True])},
            "age.missing must have one entry per value of age, 2; received 1",
        ),
    ],
)
def test_bad_tensors_of_raw_columns_are_named(
    library: Path, tmp_path: Path, request_: dict[str, torch.Tensor], message: str
) -> None:
    core = opened(library, fake_package.write_raw(tmp_path / "1"))
    good, others = (
        whole_request(1),
        whole_request(max(len(request_.get(n, ONE)) for n in ("age", "pay"))),
    )
    for name in request_:
        others.pop(f"{name}.lengths", None)
    bad, fine = core.run([{**others, **request_}, good])
    assert message in str(bad)
    assert isinstance(fine, dict)
    core.close()


def whole_request(num_rows: int) -> dict[str, torch.Tensor]:
    """A request with all columns but `pay`, which states the value of missing numbers."""
    none = torch.zeros(num_rows, dtype=torch.int64)
    lists = dict.fromkeys(("city.lengths", "any.lengths", "who.lengths"), none)
    return {"age": torch.ones(num_rows), "code": none, **lists}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cities.offsets", np.array([0, 4, 99, 99], np.int64)),
        ("cities.offsets", np.array([0, 9, 4, 11], np.int64)),
        ("cities.offsets", np.array([0, 4], np.int64)),
        ("cities.rows", np.array([2, 3], np.int64)),
        ("cities.hashes", np.array([1, 2, 3], np.int32)),
    ],
)
def test_a_damaged_vocabulary_is_refused(
    library: Path, tmp_path: Path, name: str, values: np.ndarray
) -> None:
    version = fake_package.write_raw(tmp_path / "1", **{name: values})
    with pytest.raises(ValueError, match="column 'city' has no whole vocabulary"):
        opened(library, version)


TEXTS_OF_ITEMS = ["Oslo", "", "Zürich 北 \U0001f600", "x" * 1024, "a\0b"]
NUMBERS_OF_ITEMS = [5, -(2**63), 2**63 - 1, 0, -1]


def recommended(items: list[list[int]]) -> dict[str, torch.Tensor]:
    """A request to which the program returns these rows."""
    lengths = torch.tensor([len(rows) for rows in items], dtype=torch.int64)
    rows = torch.tensor([row for one in items for row in one], dtype=torch.int64)
    return {
        **whole_request(len(items)), "who": rows, "who.lengths": lengths,
        "share": torch.ones(len(rows)),
    }  # fmt: skip


@pytest.mark.parametrize("values", [TEXTS_OF_ITEMS, NUMBERS_OF_ITEMS], ids=["texts", "numbers"])
def test_recommended_rows_have_values(library: Path, tmp_path: Path, values: list[Any]) -> None:
    """Values of Python, one by one and merged, with special rows and fewer items than wanted."""
    kind = pa.large_string() if isinstance(values[0], str) else pa.int64()
    vocabulary = Vocabulary(pa.array(values, kind))
    core = opened(library, fake_package.write_recommender(tmp_path / "1", values))
    cases = [[[2, 3, 4, 5], [6]], [], [[0, 1, 5, 0], [], [4, 4]], [[3, 2, 1, 6]]]
    requests = [recommended(case) for case in cases]
    merged = core.run(requests)
    for case, request, found in zip(cases, requests, merged, strict=True):
        wanted = [[values[row - 2] if row > 1 else None for row in rows] for rows in case]
        [alone] = core.run([request])
        for one in (found, alone):
            assert isinstance(one, dict), one
            assert list(one) == ["score", "rows.values", "rows.lengths", "items", "values"]
            assert one["values"].dtype == object
            assert one["values"].shape == (len(case), 4)
            answer = one["values"].tolist()
            assert answer == [[*rows, *[None] * (4 - len(rows))] for rows in wanted]
            assert answer == vocabulary.values_of(one["items"].numpy()).tolist()
            assert {type(value) for rows in answer for value in rows} <= {
                type(values[0]),
                type(None),
            }
    core.close()


def test_callers_without_values_get_the_same_outputs(library: Path, tmp_path: Path) -> None:
    """Values are a function of their own in C, also for rows without values."""
    for version, num_outputs, num_values in (
        (fake_package.write_raw(tmp_path / "raw"), 3, 0),
        (fake_package.write_recommender(tmp_path / "items", CITIES), 4, 2),
    ):
        core = opened(library, version)
        codes = []

        def read(responses: Any, i: int, core: Any = core, codes: list[Any] = codes) -> None:
            outputs, values, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int32(7)
            call = core._library.recsys_response_values
            pointers = ctypes.byref(values), ctypes.byref(count)
            codes.append(core._library.recsys_response_outputs(responses, i, ctypes.byref(outputs)))
            codes.append((call(responses, i, *pointers), count.value))
            codes.append((call(responses, i, *pointers), count.value))  # is kept
            codes.append((call(responses, 1, *pointers), count.value))
            codes.append((call(None, 0, *pointers), count.value))
            codes.append(call(responses, i, None, None))

        core._response = read  # type: ignore[method-assign, assignment]
        core.run([recommended([[2]])])
        values = (0, num_values)
        assert codes == [num_outputs, values, values, (1, 0), (1, 0), 1]
        core.close()


@pytest.mark.parametrize("rows", [[2, 2, 4], [1, 2, 3], [3, 4, 5], [-1, 2, 3], [2, 3, 2**62]])
def test_rows_of_a_damaged_vocabulary_are_refused(
    library: Path, tmp_path: Path, rows: list[int]
) -> None:
    version = fake_package.write_recommender(
        tmp_path / "1", CITIES, **{"cities.rows": np.array(rows, np.int64)}
    )
    with pytest.raises(ValueError, match="each row from 2 to 4"):
        opened(library, version)


def test_every_cut_of_the_vocabularies_is_refused(library: Path, tmp_path: Path) -> None:
    version = fake_package.write_recommender(tmp_path / "1", CITIES)
    path, about = version / "columns.safetensors", version / "manifest.json"
    whole, manifest = path.read_bytes(), json.loads(about.read_text())
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"columns\.safetensors' is damaged"):
            opened(library, version)
        entry = {"bytes": size, "sha256": sha256_of(path)}
        files = {**manifest["files"], path.name: entry}
        about.write_text(json.dumps({**manifest, "files": files}))
        with pytest.raises(ValueError, match="must have a description of its"):
            opened(library, version)
        about.write_text(json.dumps(manifest))
    path.write_bytes(whole)
    opened(library, version).close()


@pytest.mark.slow
def test_random_raw_columns_under_address_sanitizer(
    build: Callable[[str], Path], tmp_path: Path
) -> None:
    raw = fake_package.write_recommender(tmp_path / "1", fake_package.CITIES)
    command = [build("fuzz"), raw, "10000", "0", "raw"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    answers, _, refusals, _, texts, _ = done.stdout.split()
    assert min(int(answers), int(refusals), int(texts)) > 1000, done.stdout


def test_lists_in_texts_are_split(library: Path, tmp_path: Path) -> None:
    """Texts without lengths have the scores of their lists, which Python splits."""
    core = opened(library, fake_package.write_separated(tmp_path / "1"))
    separated = [
        {**one, "separator": ", "} if one["name"] in ("city", "any") else one
        for one in fake_package.COLUMNS
    ]
    city = [f"{CITIES[0]}, {CITIES[1]}", "", None, "Bonn, , x", ", ", f" {CITIES[0]}", CITIES[1]]
    other = ["x, yy", "yy", None, "", "x,yy", "x, ", ", x, "]
    rest: dict[str, Any] = {
        "age": [1.0] * 7,
        "code": [3] * 7,
        "who": pa.array([[1]] * 7, pa.list_(pa.int64())),
        "share": [[1.0]] * 7,
    }
    lists = raw_request(separated, pa.table({"city": city, "any": other, **rest}))
    single = {"city": {"is_list": False}, "any": {"is_list": False}}
    whole = [{**one, **single.get(one["name"], {})} for one in fake_package.COLUMNS]
    texts = raw_request(whole, pa.table({"city": city, "any": other, **rest}))
    assert "city.lengths" in lists
    assert "city.lengths" not in texts
    found, wanted = core.run([texts, lists])
    assert isinstance(found, dict), found
    assert isinstance(wanted, dict), wanted
    assert torch.equal(found["score"], wanted["score"])
    plain = [[] if text in (None, "") else str(text).split(", ") for text in city]
    rows = [_city_row(one) for names in plain for one in names]
    assert found["rows.values"][:, 0].tolist() == rows
    assert found["rows.lengths"].tolist() == [len(names) for names in plain]
    core.close()
