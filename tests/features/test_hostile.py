"""Hostile tables: a clear error that names column, row and value, or a documented value."""

from __future__ import annotations

import datetime
import decimal
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys.features import FeatureSpec, Hashed
from tests.features.tables import rows_of, spec

SIZE = 40
DAY = datetime.date(2024, 2, 29)
# columns by the type that they read
TEXTS, NUMBERS = ["city", "name"], ["born"]
KEYS = ["user", "item", "session"]
IDS = ["genre"]
DENSE = ["age", "price", "size"]
LABELS = ["click", "rating"]
SAMPLES = [*LABELS, "weight"]
TIMES = ["seen"]
SINGLE = [*TEXTS, *NUMBERS, *KEYS, *IDS, *DENSE, *SAMPLES, *TIMES]
LISTS = ["tags", "words", "films"]
OF_LISTS = [*LISTS, "tag_weights", "film_weights"]


def one_per_row(rows: str, hint: str = "") -> str:
    return rf"must have one value per row; received {rows}.*\.{hint}$"


def each(columns: list[str], message: str | None) -> dict[str, str | None]:
    return dict.fromkeys(columns, message)


def other_type(received: str) -> dict[str, str | None]:
    """The messages of a type that no column reads."""
    keys = [*TEXTS, *NUMBERS, *KEYS, *IDS]
    return {
        **each(keys, f"must have strings or whole numbers; received {received}.* Cast it"),
        **each(DENSE + SAMPLES, f"must have numbers; received {received}.* Cast it"),
        **each(TIMES, f"must have times or whole numbers; received {received}.* Cast it"),
    }


NO_TEXT = {
    **each(TEXTS, None),
    "name": None,
    "born": "must have numbers, as the data of fit; received texts. Cast it",
    **each(KEYS, "must have numbers, as the data of fit; received texts. Cast it"),
    "genre": "must have row numbers; received texts. Describe it by Categorical or Hashed",
    **each(DENSE + SAMPLES, "must have numbers; received (large_)?string"),
    **each(TIMES, "must have times or whole numbers; received (large_)?string"),
}
NO_NUMBER = each(TEXTS, "must have texts, as the data of fit; received numbers. Cast it")
EXACT = "must have exact whole numbers; received {} in row"
FINITE = "must have finite numbers; received {} in row"


def spread(values: list[Any], kind: pa.DataType | None = None) -> Callable[[random.Random], Any]:
    """A column of these values, from the first, in random rows."""

    def make(rng: random.Random) -> Any:
        return pa.array([*rng.choices(values, k=SIZE - 1), values[0]], kind)

    return make


def half(make: Callable[[random.Random], Any]) -> Callable[[random.Random], Any]:
    return lambda rng: make(rng).dictionary_encode()


def period(rng: random.Random) -> Any:
    del rng
    frame = pd.DataFrame({"x": pd.period_range("2020", periods=SIZE, freq="D")})
    return pa.Table.from_pandas(frame)["x"]


# For each type: values, and the message of each column; None: the column reads them.
TYPES: dict[str, tuple[Callable[[random.Random], Any], dict[str, str | None]]] = {
    "structs": (spread([{"a": 1}]), each(SINGLE, one_per_row("struct"))),
    "maps": (
        spread([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        each(SINGLE, one_per_row("map")),
    ),
    "lists": (spread([[1]]), each(SINGLE, one_per_row("list", r" Set is_list=True\."))),
    "lists of lists": (spread([[["a"]]]), each(SINGLE, one_per_row("list"))),
    "unions": (
        lambda _: pa.UnionArray.from_sparse(
            pa.array([0] * SIZE, pa.int8()), [pa.array(range(SIZE))]
        ),
        each(SINGLE, one_per_row("sparse_union")),
    ),
    "decimals": (
        spread([decimal.Decimal("0.5"), None]),
        {k: v for k, v in other_type("decimal").items() if k not in DENSE + SAMPLES}
        | each([*DENSE, *LABELS], None)
        | {"weight": "must have no missing value; received None in row"},
    ),
    "wide decimals": (
        spread([decimal.Decimal("1e30"), None], pa.decimal256(60, 2)),
        {"size": None, "age": None, "click": "must have (labels|no missing)"},
    ),
    "booleans": (spread([True, False]), each(SINGLE, None) | NO_NUMBER),
    "dates": (spread([DAY, None]), other_type("date32") | each(TIMES, None)),
    "timestamps": (
        spread([datetime.datetime(1960, 5, 1), None]),
        other_type("timestamp") | each(TIMES, None),
    ),
    "dates as categories": (half(spread([DAY])), other_type("date32") | each(TIMES, None)),
    "times of day": (spread([datetime.time(3)]), other_type("time64")),
    "durations": (spread([datetime.timedelta(3)]), other_type("duration")),
    "intervals": (
        spread([pa.MonthDayNano([1, 2, 3])]),
        other_type("month_day_nano_interval"),
    ),
    "periods": (period, other_type(r"extension<pandas\.period")),
    "texts": (spread(["a", "zz", "never seen"]), NO_TEXT),
    "texts as categories": (half(spread(["a", "never seen", ""])), NO_TEXT),
    "bytes": (
        spread([b"a\xff", "é".encode()]),
        each([*TEXTS, *KEYS], r"must have texts in UTF-8; received b'a\\xff' in row \d+. Decode"),
    ),
    "bytes as categories": (
        half(spread([b"a\xff", "é".encode()])),
        each([*TEXTS, *KEYS], r"must have texts in UTF-8; received b'a\\xff' in row \d+. Decode"),
    ),
    "bytes of one size": (
        spread([b"ab", b"\xff\xfe"], pa.binary(2)),
        each([*TEXTS, *KEYS], r"must have texts in UTF-8; received b'\\xff\\xfe' in row \d+"),
    ),
    "nulls": (
        lambda _: pa.nulls(SIZE),
        each([*TEXTS, *NUMBERS, *IDS, *DENSE, *LABELS, *TIMES], None)
        | {"weight": "must have no missing value; received None in row 0. Remove"}
        | {"session": "must have no missing key; received None in row 0. Remove"},
    ),
    "typed nulls": (
        lambda _: pa.nulls(SIZE, pa.string()),
        {"city": None, "born": None, "name": None, "user": None}
        | {"session": "must have no missing key; received None in row 0"}
        | each([*DENSE, *SAMPLES], "must have numbers; received string"),
    ),
    "fractions": (
        spread([0.5, 0.0, 1.0]),
        each([*NUMBERS, *KEYS, *IDS, *TIMES, *TEXTS], EXACT.format("0.5"))
        | each(DENSE + SAMPLES, None),
    ),
    "NaN": (
        spread([float("nan"), 1.0]),
        each([*NUMBERS, *KEYS, *IDS, *TIMES, *TEXTS], EXACT.format("nan"))
        | each(DENSE + SAMPLES, FINITE.format("nan") + r" \d+. (Write null|$)"),
    ),
    "infinity": (
        spread([float("-inf"), 1.0]),
        each([*NUMBERS, *KEYS, *IDS, *TIMES, *TEXTS], EXACT.format("-inf"))
        | each(DENSE + SAMPLES, FINITE.format("-inf")),
    ),
    "infinity and its opposite": (
        spread([float("inf"), float("-inf")], pa.float32()),
        each(DENSE + SAMPLES, FINITE.format("(-)?inf")),
    ),
    "half floats": (
        spread([np.float16(1), np.float16(0), None], pa.float16()),
        each([*NUMBERS, *IDS, *DENSE, *TIMES], None),
    ),
    "negative zero": (spread([-0.0]), each(SINGLE, None) | NO_NUMBER),
    "floats beyond 2^53": (
        spread([2.0**53, 1.0]),
        each([*NUMBERS, *KEYS, *IDS, *TIMES], EXACT.format("9007199254740992.0"))
        | each(DENSE, None),
    ),
    "large numbers": (
        spread([1e300, 1.0]),
        {"price": None, "age": None, "size": "must have numbers in the range of float32"}
        | {"click": r"must have labels from 0 to 1; received 1e\+300 in row \d+. Set low and"},
    ),
    "2^63": (
        spread([2**63, 1], pa.uint64()),
        each([*NUMBERS, *IDS, *TIMES], "must have numbers below 2.63; received 9223372036854775808")
        | each([*KEYS, *DENSE], None)
        | {"click": "must have labels from 0 to 1; received 9223372036854775808 in row"},
    ),
    "-2^63": (
        spread([-(2**63), 2**63 - 1]),
        each([*NUMBERS, *KEYS], None)
        | {"genre": "must have row numbers from 0 to 3; received (-)?92233720368547758.* in row"}
        | {"seen": "must have times of the years 1 to 9999; received (-)?92233720368547758.* in r"}
        | {"weight": "must have weights from 0; received -9223372036854775808 in row"}
        | {"price": "must have numbers above -1 for log1p; received -9223372036854775808 in row"},
    ),
    "negative numbers": (
        spread([-1, 0]),
        {"genre": "must have row numbers from 0 to 3; received -1 in row", "seen": None}
        | {"price": "must have numbers above -1 for log1p; received -1 in row"}
        | {"click": "must have labels from 0 to 1; received -1 in row"},
    ),
}

LIST_TYPES: dict[str, tuple[Callable[[random.Random], Any], dict[str, str | None]]] = {
    "single values": (
        spread([1]),
        each(OF_LISTS, r"must have lists; received int64. Set is_list=False\."),
    ),
    "structs": (spread([{"a": 1}]), each(OF_LISTS, r"must have lists; received struct.*\.$")),
    "maps": (
        spread([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        each(OF_LISTS, r"must have lists; received map.*\.$"),
    ),
    "lists of lists": (
        spread([[["a"]], [], None]),
        each(OF_LISTS, "must have lists of values; received list<.*>. Flatten the lists"),
    ),
    "lists of structs": (
        spread([[{"a": 1}], []]),
        each(OF_LISTS, "must have lists of values; received list<.*>. Flatten the lists"),
    ),
    "lists of dates": (
        spread([[DAY], []]),
        each(LISTS, "must have strings or whole numbers; received date32"),
    ),
    "lists of NaN": (
        spread([[float("nan")], []]),
        each(["words", "films"], EXACT.format("nan")),
    ),
    "lists of bytes": (
        spread([[b"a", b"\xff"], [], None]),
        each(["tags", "words"], r"must have texts in UTF-8; received b'\\xff' in row"),
    ),
    "lists of large numbers": (
        spread([[1, 2**63], [], None], pa.list_(pa.uint64())),
        {"films": "must have numbers below 2.63; received 9223372036854775808 in r"}
        | {"words": "must have texts, as the data of fit; received numbers"},
    ),
    "lists of row numbers": (
        spread([[None, 30], [1], None]),
        {"films": "must have row numbers from 0 to 29; received 30 in row"}
        | each(["tags", "words"], "must have texts, as the data of fit; received numbers"),
    ),
}


@pytest.fixture(scope="module")
def fitted() -> FeatureSpec:
    return spec().fit(rows_of(1, 400))


def check(run: Callable[[], Any], name: str, message: str | None) -> None:
    """Run, and compare the error, if there is one, with a message about a column."""
    if message is None:
        run()
        return
    with pytest.raises((TypeError, ValueError, KeyError)) as caught:
        run()
    assert caught.type in (TypeError, ValueError, KeyError)  # none of Arrow's own
    text = str(caught.value.args[0])
    assert re.search(rf"^Column '{name}'.*{message}", text), text


def without_weights(rows: dict[str, Any], name: str) -> dict[str, Any]:
    """Columns whose weights have the lengths of the lists."""
    for ids, weights in (("tags", "tag_weights"), ("films", "film_weights")):
        if name == ids:
            lists = rows[name].to_pylist()
            rows[weights] = pa.array(
                [v and [0.5] * len(v) if isinstance(v, list) else None for v in lists],
                pa.list_(pa.float64()),
            )
    if name == "genre":
        rows["genre_weight"] = [1.0] * SIZE
    return rows


TABLES = [(kind, name) for kind, (_, messages) in TYPES.items() for name in messages]
LIST_TABLES = [(kind, name) for kind, (_, messages) in LIST_TYPES.items() for name in messages]
assert len(TABLES) + len(LIST_TABLES) > 300


@pytest.mark.parametrize("kind", TYPES)
def test_columns_of_other_types(kind: str, fitted: FeatureSpec) -> None:
    make, messages = TYPES[kind]
    for seed, (name, message) in enumerate(messages.items()):
        rows = rows_of(seed, SIZE) | {name: make(random.Random(seed))}
        table = pa.table(without_weights(rows, name))
        check(lambda table=table: fitted.transform(table), name, message)
        found = table.slice(0, 0)  # without rows only the type can be wrong
        if message is None or " in row" in message:
            assert len(fitted.transform(found).labels) == 0


@pytest.mark.parametrize("kind", LIST_TYPES)
def test_lists_of_other_types(kind: str, fitted: FeatureSpec) -> None:
    make, messages = LIST_TYPES[kind]
    for seed, (name, message) in enumerate(messages.items()):
        rows = rows_of(seed, SIZE) | {name: make(random.Random(seed))}
        table = pa.table(without_weights(rows, name))
        check(lambda table=table: fitted.transform(table), name, message)


@pytest.mark.filterwarnings("ignore:Numeric 'size' has")
@pytest.mark.parametrize("kind", [*TYPES, *LIST_TYPES])
def test_fit_refuses_what_transform_refuses(kind: str) -> None:
    make, messages = (TYPES | LIST_TYPES)[kind]
    for name, message in messages.items():
        of_fit = message is not None and "as the data of fit" not in message
        if name in ("city", "born", "tags", "age", "price", "size"):
            rows = rows_of(0, SIZE) | {name: make(random.Random(0))}
            table = pa.table(rows)
            made = FeatureSpec([column for column in spec().columns if column.name == name])
            check(lambda made=made, table=table: made.fit(table), name, message if of_fit else None)


@pytest.mark.parametrize("seed", range(20))
def test_a_bad_value_is_named_by_its_row(seed: int, fitted: FeatureSpec) -> None:
    rng = random.Random(seed)
    name, value = rng.choice(
        [
            ("age", float("nan")),
            ("price", float("inf")),
            ("genre", 4),
            ("click", 2.5),
            ("weight", -1.0),
            ("user", 0.5),
            ("films", [30, 0]),
            ("film_weights", None),
            ("city", b"\xff"),
        ]
    )
    rows = rows_of(seed, SIZE, gaps=False)
    row = rng.randrange(SIZE)
    if name == "film_weights":
        rows["films"][row], value = [1, 2], [1.0, float("-inf")]
    elif name == "films":
        rows["film_weights"][row] = [1.0, 1.0]
    elif name == "user":
        rows["user"] = [float(i) for i in range(SIZE)]
    elif name == "city":
        rows["city"] = [text.encode() for text in rows["city"]]
    rows[name][row] = value
    for table in (rows, pa.table(rows)):
        with pytest.raises((TypeError, ValueError)) as caught:
            fitted.transform(table)
        shown = repr(max(value, key=abs) if isinstance(value, list) else value)
        assert re.search(
            rf"^Column '{name}' .*received {re.escape(shown)} in row {row}\. ", str(caught.value)
        ), caught.value


def test_values_outside_the_vocabulary_and_missing_ones(fitted: FeatureSpec) -> None:
    made = FeatureSpec([c for c in fitted.columns if c.name in ("born", "city")])
    made.fit({"born": [1, 1, None], "city": ["a", "a", "b"]})
    batch = made.transform({"born": [1, 2, None, 1], "city": ["a", "b", None, "c"]})
    assert batch.sparse_features["born"].values().tolist() == [2, 1, 0, 2]
    assert batch.sparse_features["city"].values().tolist() == [2, 1, 0, 1]


@pytest.mark.parametrize("name", [*SINGLE, *OF_LISTS, "genre_weight", "died"])
def test_missing_and_repeated_columns(name: str, fitted: FeatureSpec) -> None:
    table = pa.table(rows_of(0, 5))
    without = table.drop_columns([name])
    if name == "price":  # it states its value where it is missing
        nulls = without.append_column(name, pa.nulls(5, pa.float64()))
        found, expected = fitted.transform(without), fitted.transform(nulls)
        assert torch.equal(found.dense_features, expected.dense_features)
    else:
        with pytest.raises(KeyError, match=f"must have a column '{name}'; it"):
            fitted.transform(without)
    twice = table.append_column(name, table[name])
    with pytest.raises(ValueError, match=rf"one column '{name}'; it has 2\."):
        fitted.transform(twice)


def test_a_spec_fitted_on_another_kind_of_value() -> None:
    rows = rows_of(0, 50)
    others = {"city": [7] * 50, "born": ["x"] * 50, "died": ["y"] * 50}
    swapped = spec().fit(rows | others)
    with pytest.raises(TypeError, match="'city' must have numbers, as the"):
        swapped.transform(rows | others | {"city": rows["city"]})
    with pytest.raises(TypeError, match="'born' must have texts, as the"):
        swapped.transform(rows | others | {"born": rows["born"]})
    # columns of one table
    with pytest.raises(TypeError, match=r"'died' must have .*numbers after texts"):
        spec().fit(rows | {"born": ["x"] * 50})


def write(folder: Path, tables: list[Any]) -> Path:
    for i, table in enumerate(tables):
        pq.write_table(table, folder / f"{i}.parquet")
    return folder


def test_types_that_change_between_files(tmp_path: Path) -> None:
    table = pa.table(rows_of(0, 30))
    of = {name: table.schema.get_field_index(name) for name in table.column_names}
    texts = table.set_column(of["born"], "born", pa.array(["x"] * 30))
    with pytest.raises(TypeError, match=r"'born' must have .*numbers in .*0\.parquet"):
        spec().fit(write(tmp_path, [table, texts]))
    floats = table.set_column(of["born"], "born", table["born"].cast(pa.float64()))
    nulls = table.set_column(of["born"], "born", pa.nulls(30))
    codes = table.set_column(of["city"], "city", table["city"].dictionary_encode())
    empty = table.slice(0, 0)
    found = spec().fit(write(tmp_path, [table, floats, nulls, codes, empty])).fitted
    expected = spec().fit([table, table, nulls, table]).fitted
    for name, vocabulary in expected.vocabularies.items():
        assert found.vocabularies[name].values.equals(vocabulary.values)
    assert found.num_rows == 120
    less = table.drop_columns(["age"])
    with pytest.raises(KeyError, match=r"1\.parquet must have the columns \['age'\]"):
        spec().fit(write(tmp_path, [table, less]))


@pytest.mark.parametrize("seed", range(10))
def test_truncated_and_damaged_files(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    folder = write(tmp_path, [pa.table(rows_of(0, 3000)) for _ in range(2)])
    path = folder / "1.parquet"
    data = path.read_bytes()
    path.write_bytes(b"" if seed == 0 else data[: rng.randrange(len(data))])
    with pytest.raises(ValueError, match=r"1\.parquet cannot be read"):
        spec().fit(folder)
    with pytest.raises(FileNotFoundError, match=r"none\.parquet must be a file"):
        spec().fit(tmp_path / "none.parquet")


def test_empty_lists_of_any_type(fitted: FeatureSpec) -> None:
    rows: dict[str, Any] = rows_of(0, 3)
    for kind in (pa.list_(pa.null()), pa.large_list(pa.float64()), pa.list_(pa.int64(), 0)):
        lists = pa.array([[], None, []], kind)
        for name in OF_LISTS:
            rows[name] = lists
        batch = fitted.transform(pa.table(rows))
        assert batch.sparse_features["films"].lengths().tolist() == [0, 0, 0]
    nothing = pa.array([[None], None, [None, None]])
    batch = fitted.transform(pa.table(rows | dict.fromkeys(OF_LISTS, nothing)))
    assert batch.sparse_features["tags"].lengths().tolist() == [1, 0, 2]
    assert batch.sparse_features["tags"].values().tolist() == [0, 0, 0]
    assert batch.sparse_features["films"].lengths().tolist() == [0, 0, 0]
    np.testing.assert_array_equal(batch.sparse_features["tags"].weights(), [0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        ([1, "a"], TypeError, "'x' must .*one type; received .*'a'"),
        ([[1], 2], TypeError, "'x' must .*one type; received .*list"),
        ([object()], TypeError, "'x' must .*one type; received .*object"),
        (np.zeros(1, complex), TypeError, "'x' must have values of one"),
        (np.zeros((1, 2, 2)), TypeError, "'x' must .*one type; .*1-dimensional"),
        (torch.zeros(1, dtype=torch.bfloat16), TypeError, "'x' must .*BFloat16"),
        (torch.tensor(3), TypeError, "'x' must have values of one"),
        (3, TypeError, "'x' must be an array.*received 3"),
        ("a", TypeError, "'x' must be an array.*received 'a'"),
        (None, TypeError, "'x' must be an array.*received None"),
        ({"a": 1}, TypeError, "'x' must be an array.*received {'a'"),
        ([2**64], ValueError, "'x' must have numbers .*64 bits"),
        ([2**63, -1], ValueError, "'x' must have numbers .*64 bits"),
        ([1, 2], ValueError, "received {'x': 2, 'y': 1}"),
    ],
)
def test_dicts_of_other_values(column: Any, error: type[Exception], message: str) -> None:
    made = FeatureSpec([Hashed("x", rows=9), Hashed("y", rows=9)])
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        made.transform({"x": column, "y": [1]})
    assert caught.type is error


def test_python_numbers_of_64_bits() -> None:
    made = FeatureSpec([Hashed("x", rows=9, growing=True)])
    found = made.transform({"x": [2**63, None, 2**64 - 1, 5]}).sparse_features.values()
    assert found.tolist() == [-(2**63), -1, 5]
