"""The same table in all containers gives the same batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from recsys.datasets.utils import Batch
from recsys.features import FeatureSpec
from tests.features.tables import rows_of, spec

TEXTS = ["city", "name"]
LISTS = ["tags", "words", "films", "tag_weights", "film_weights"]
TEXT_LISTS = ["tags", "words"]
WHOLE = ["born", "died", "user", "item", "genre", "size", "seen", "click", "session"]

INT = pa.int64()

Rows = dict[str, list[Any]]


def arrow(rows: Rows, **types: pa.DataType) -> pa.Table:
    plain = pa.table(rows_of(0, 300)).schema
    fields = [pa.field(field.name, types.get(field.name, field.type)) for field in plain]
    return pa.table(rows, schema=pa.schema(fields))


def arrow_of(texts: pa.DataType, make_list: Any, whole: pa.DataType = INT) -> Any:
    def make(rows: Rows) -> pa.Table:
        kinds = dict.fromkeys(TEXTS, texts)
        kinds |= {name: make_list(pa.float64()) for name in LISTS}
        kinds |= {name: make_list(texts) for name in TEXT_LISTS}
        kinds["films"] = make_list(whole)
        return arrow(rows, **kinds)

    return make


def dictionaries(rows: Rows) -> pa.Table:
    table = arrow(rows)
    for i, name in enumerate(table.column_names):
        column = table[name].combine_chunks()
        if name in TEXT_LISTS:
            kind = pa.list_(pa.dictionary(pa.int32(), pa.string()))
            values = column.flatten().dictionary_encode()
            offsets = pa.array(
                np.concatenate([[0], np.cumsum([len(row or []) for row in rows[name]])]),
                pa.int32(),
                mask=np.array([*(row is None for row in rows[name]), False]),
            )
            column = pa.ListArray.from_arrays(offsets, values, kind)
        elif name not in LISTS:
            column = column.dictionary_encode()
            entries = column.dictionary.to_pylist()  # twice, with a missing entry between them
            codes = column.indices.to_pylist()
            moved = [c if c is None or i % 2 else c + len(entries) + 1 for i, c in enumerate(codes)]
            moved = [len(entries) if c is None and i % 3 else c for i, c in enumerate(moved)]
            column = pa.DictionaryArray.from_arrays(
                pa.array(moved, pa.int32()),
                pa.array([*entries, None, *entries], column.dictionary.type),
            )
        table = table.set_column(i, name, column)
    return table


def chunks(rows: Rows) -> pa.Table:
    table = arrow(rows)
    cuts = sorted([0, 0, min(1, len(table)), len(table) // 2, len(table)])
    return pa.concat_tables([table.slice(a, b - a) for a, b in itertools.pairwise(cuts)])


def encoded_chunks(rows: Rows) -> pa.Table:
    """Chunks with dictionaries of their own."""
    table = chunks(rows)
    for name in TEXTS:
        pieces = [chunk.dictionary_encode() for chunk in table[name].chunks]
        table = table.set_column(table.column_names.index(name), name, pa.chunked_array(pieces))
    return table


def sliced(rows: Rows) -> pa.Table:
    table = arrow(rows)
    return pa.concat_tables([arrow(rows_of(5, 3)), table, arrow(rows_of(6, 4))]).combine_chunks()[
        3 : 3 + len(table)
    ]


def views(rows: Rows) -> pa.Table:
    """List views in another order than their rows."""
    table = arrow(rows)
    for name in LISTS:
        kind = table.schema.field(name).type.value_type
        lists = [row or [] for row in rows[name]]
        starts = np.cumsum([0, *(len(row) for row in lists[::-1])])[:-1][::-1].copy()
        values = [value for row in lists[::-1] for value in row]
        column = pa.LargeListViewArray.from_arrays(
            pa.array(starts, pa.int64()),
            pa.array([len(row) for row in lists], pa.int64()),
            pa.array(values, kind),
            mask=pa.array([row is None for row in rows[name]], pa.bool_()),
        )
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def run_ends(rows: Rows) -> pa.Table:
    table = arrow(rows)
    for name in ("city", "born", "age"):
        column = pa.compute.run_end_encode(table[name].combine_chunks())
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def numpy_pandas(rows: Rows) -> pd.DataFrame:
    """NumPy's types: floats with NaN, objects with None."""
    frame = pd.DataFrame({name: pd.Series(column, dtype=object) for name, column in rows.items()})
    for name in [*WHOLE, "age", "price", "weight", "rating", "genre_weight"]:
        if name not in ("user", "item"):  # 64 bits do not fit into float64
            frame[name] = frame[name].astype(np.float64)
    return frame


def with_types(**types: str) -> Callable[[Rows], pd.DataFrame]:
    def make(rows: Rows) -> pd.DataFrame:
        frame = numpy_pandas(rows)
        for name in [*TEXTS, *WHOLE]:
            kind = types["text" if name in TEXTS else "whole"]
            frame[name] = pd.Series(rows[name], dtype=object if kind == "category" else kind)
            frame[name] = frame[name].astype(kind)
        return frame

    return make


def polars_of(text: Any, list_of: Any = pl.List) -> Callable[[Rows], pl.DataFrame]:
    def make(rows: Rows) -> pl.DataFrame:
        kind = text(rows) if callable(text) and not isinstance(text, type) else text
        kinds: dict[str, Any] = dict.fromkeys(TEXTS, kind)
        kinds |= {name: pl.List(pl.Float64) for name in LISTS} | {"films": pl.List(pl.Int16)}
        kinds |= {name: pl.List(kind) for name in TEXT_LISTS}
        kinds |= dict.fromkeys(WHOLE, pl.Int64)
        frame = pl.DataFrame({n: pl.Series(n, c, kinds.get(n)) for n, c in rows.items()})
        return pl.concat([frame[:2], frame[2:]], rechunk=False)

    return make


def enum(rows: Rows) -> pl.Enum:
    found = {value for name in TEXT_LISTS for row in rows[name] for value in row or []}
    return pl.Enum(sorted((found | {*rows["city"], *rows["name"]}) - {None}))


def record_batch(rows: Rows) -> pa.RecordBatch:
    table = arrow(rows).combine_chunks()
    return pa.RecordBatch.from_arrays(
        [column.combine_chunks() for column in table.columns], schema=table.schema
    )


CONTAINERS: dict[str, Callable[[Rows], Any]] = {
    "dict of lists": lambda rows: rows,
    "Arrow": arrow,
    "record batch": record_batch,
    "large": arrow_of(pa.large_string(), pa.large_list),
    "views of texts": arrow_of(pa.string_view(), pa.list_, pa.int8()),
    "bytes": arrow_of(pa.binary(), pa.large_list, pa.uint64()),
    "large bytes": arrow_of(pa.large_binary(), pa.list_, pa.uint8()),
    "views of bytes": arrow_of(pa.binary_view(), pa.list_, pa.float32()),
    "dictionaries": dictionaries,
    "chunks": chunks,
    "chunks with dictionaries": encoded_chunks,
    "slices": sliced,
    "list views": views,
    "runs": run_ends,
    "pandas": numpy_pandas,
    "pandas, nullable": with_types(text="string", whole="Int64"),
    "pandas, categories": with_types(text="category", whole="category"),
    "pandas, Arrow": with_types(text="string[pyarrow]", whole="int64[pyarrow]"),
    "polars": polars_of(pl.String),
    "polars, categories": polars_of(pl.Categorical),
    "polars, enum": polars_of(enum),
}


def check_equal(found: Batch, expected: Batch) -> None:
    assert found.sparse_features.keys() == expected.sparse_features.keys()
    pairs = [
        (found.dense_features, expected.dense_features),
        (found.labels, expected.labels),
        (found.sample_weights, expected.sample_weights),
        (found.groups, expected.groups),
        *(
            (getattr(found.sparse_features, name)(), getattr(expected.sparse_features, name)())
            for name in ("values", "lengths", "weights")
        ),
    ]
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)


@pytest.fixture(scope="module")
def fitted() -> FeatureSpec:
    return spec().fit(rows_of(1, 400))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_give_equal_batches(kind: str, fitted: FeatureSpec) -> None:
    for seed, size in enumerate([1, 60, 200]):
        rows = rows_of(seed + 50, size)
        check_equal(fitted.transform(CONTAINERS[kind](rows)), fitted.transform(arrow(rows)))
    nothing = {name: [None] * 3 for name in rows}
    nothing |= {name: [1] * 3 for name in ("click", "rating", "weight", "session")}
    check_equal(fitted.transform(CONTAINERS[kind](nothing)), fitted.transform(arrow(nothing)))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_give_equal_fits(kind: str, fitted: FeatureSpec) -> None:
    other = spec().fit(CONTAINERS[kind](rows_of(1, 400))).fitted
    for name, vocabulary in fitted.fitted.vocabularies.items():
        assert other.vocabularies[name].values.equals(vocabulary.values)
    assert (other.means, other.deviations) == (fitted.fitted.means, fitted.fitted.deviations)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_without_rows(kind: str, fitted: FeatureSpec) -> None:
    batch = fitted.transform(CONTAINERS[kind](rows_of(0, 0)))
    assert batch.labels.shape == (0, 2)
    assert batch.dense_features.shape == (0, 2)
    assert batch.sparse_features.values().numel() == 0


def test_arrays_and_tensors_of_numbers(fitted: FeatureSpec) -> None:
    rows = rows_of(3, 50, gaps=False)
    expected = fitted.transform(rows)
    arrays: dict[str, Any] = {
        name: column if name in LISTS else np.array(column) for name, column in rows.items()
    }
    check_equal(fitted.transform(arrays), expected)
    arrays["films"] = [np.array(row, np.int32) for row in rows["films"]]
    arrays["born"] = pd.Series(rows["born"])
    arrays["city"] = pl.Series(rows["city"])
    arrays["age"] = pa.array(rows["age"])
    for name in WHOLE:
        arrays[name] = torch.tensor(rows[name])
    check_equal(fitted.transform(arrays), expected)


def test_lists_of_one_size(fitted: FeatureSpec) -> None:
    rows = rows_of(3, 40) | {"films": [[i % 30, (7 * i) % 30] for i in range(40)]}
    rows["film_weights"] = [[0.5, i / 64] for i in range(40)]
    expected = fitted.transform(rows)
    table = arrow(rows, films=pa.list_(pa.int64(), 2), film_weights=pa.list_(pa.float32(), 2))
    check_equal(fitted.transform(table), expected)
    later = pa.concat_tables([table, table]).combine_chunks()[40:]
    check_equal(fitted.transform(later), expected)
    matrix: dict[str, Any] = rows | {"films": np.array(rows["films"])}
    check_equal(fitted.transform(matrix), expected)
    matrix["films"] = torch.tensor(rows["films"])
    check_equal(fitted.transform(matrix), expected)
    frame = pl.DataFrame(rows, schema_overrides={"films": pl.Array(pl.Int64, 2)}, strict=False)
    check_equal(fitted.transform(frame), expected)
    gaps = rows | {name: [None, *rows[name][1:]] for name in ("films", "film_weights")}
    table = arrow(gaps, films=pa.list_(pa.int64(), 2), film_weights=pa.list_(pa.float32(), 2))
    check_equal(fitted.transform(table), fitted.transform(gaps))
