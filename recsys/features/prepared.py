"""Prepared tables: raw columns, converted by a fitted spec to Arrow tables of numbers.

`prepared_table` converts raw tables, in any process, and `prepared_spec` describes the result. Raw
and prepared tables give equal batches, bit for bit; prepared tables are read faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from recsys.base.arguments import repeated
from recsys.features.columns import (
    MISSING,
    PART_SIZES,
    Categorical,
    Column,
    Group,
    Hashed,
    Ids,
    Label,
    Numeric,
    SampleWeight,
    SparseColumn,
    Timestamp,
)
from recsys.features.fit import Fitted
from recsys.features.spec import FeatureSpec

__all__ = ["check_prepared_names", "prepared_spec", "prepared_table"]

_Array: TypeAlias = np.ndarray[Any, Any]
_SMALL: Final = 2**31


def prepared_spec(spec: FeatureSpec) -> FeatureSpec:
    """Return the fitted spec of the tables that `prepared_table` makes.

    Features, tables, dense features and labels have the names, sizes and order of `spec`, so a
    model of one is a model of the other. A group or a weight of samples that has the column of a
    feature or label is another column of the prepared tables, such as `user_group`.

    Args:
        spec: a fitted spec.

    Raises:
        RuntimeError: `spec` is not fitted.
        ValueError: as for `check_prepared_names`.

    Example:
        >>> from recsys.features import Categorical, FeatureSpec, Label
        >>> spec = FeatureSpec([Categorical("city"), Label("ok")])
        >>> prepared_spec(spec.fit({"city": ["Oslo", "Rome"], "ok": [0, 1]})).columns[0]
        Ids(name='city', rows=4, is_list=False, weights=None, table='city', special_rows=2)
    """
    fitted = spec.fitted
    taken = check_prepared_names(spec.columns)
    columns: list[Column] = []
    for column in spec.columns:
        if isinstance(column, Group | SampleWeight):
            columns.append(_renamed(column, taken))
        else:
            columns += _prepared_columns(spec, column)
    prepared = FeatureSpec(columns)
    dense = prepared.dense_names
    keys = [column.name for column in columns if isinstance(column, Hashed | Group)]
    prepared.fitted = Fitted(
        fitted.num_rows,
        {},
        dict.fromkeys(dense, 0.0),
        dict.fromkeys(dense, 1.0),
        {},
        dict.fromkeys(keys, "number"),
    )
    return prepared


def prepared_table(spec: FeatureSpec, data: Any, *, labels: bool = True) -> Any:
    """Convert raw columns to row numbers, scaled numbers and labels.

    Args:
        spec: a fitted spec.
        data: as for `FeatureSpec.transform`.
        labels: as for `FeatureSpec.transform`.

    Returns:
        A `pyarrow.Table`: row numbers as int32 (int64 if they need it, or for growing tables), or
        lists of them; dense features, id weights, labels and sample weights as float32; groups as
        int64. A feature without an id, and a missing one of several labels, is null.

    Raises:
        KeyError: as for `FeatureSpec.transform`.
        TypeError: as for `FeatureSpec.transform`.
        ValueError: as for `FeatureSpec.transform`.
        RuntimeError: as for `FeatureSpec.transform`.

    Example:
        >>> from recsys.features import Categorical, FeatureSpec, Label
        >>> spec = FeatureSpec([Categorical("city"), Label("ok")])
        >>> data = {"city": ["Oslo", "Rome"], "ok": [0, 1]}
        >>> prepared_table(spec.fit(data), data).to_pydict()
        {'city': [2, 3], 'ok': [0.0, 1.0]}
    """
    batch = spec.transform(data, labels=labels)
    jagged = batch.sparse_features.to_dict()
    dense = dict(zip(spec.dense_names, batch.dense_features.numpy().T, strict=True))
    targets = batch.labels.numpy()
    targets = targets[:, None] if targets.ndim == 1 else targets
    by_label = dict(zip(spec.label_names, targets.T, strict=False))
    missing = None if batch.label_mask is None else ~batch.label_mask.numpy()
    found: dict[str, Any] = {}
    for column in prepared_spec(spec).columns:
        if isinstance(column, Numeric):
            found[column.name] = np.ascontiguousarray(dense[column.name])
        elif isinstance(column, Ids | Hashed):
            bags = jagged[column.name]
            lengths = bags.lengths().numpy()
            small = isinstance(column, Ids) and column.rows <= _SMALL
            ids = bags.values().numpy().astype(np.int32 if small else np.int64)
            found[column.name] = _bags(ids, lengths, column.is_list)
            if column.weights is not None:
                weights = bags.weights().numpy()
                found[column.weights] = _bags(weights, lengths, column.is_list)
        elif not labels:
            continue
        elif isinstance(column, Label):
            number = spec.label_names.index(column.name)
            is_missing = None if missing is None else missing[:, number]
            found[column.name] = pa.array(by_label[column.name], mask=is_missing)
        elif isinstance(column, SampleWeight) and batch.sample_weights is not None:
            found[column.name] = batch.sample_weights.numpy()
        elif isinstance(column, Group) and batch.groups is not None:
            found[column.name] = batch.groups.numpy()
    return pa.table(found)


def _prepared_columns(spec: FeatureSpec, column: Column) -> list[Column]:
    if isinstance(column, Numeric):
        if column.buckets is None:
            return [Numeric(column.name)]
        rows = len(spec.fitted.edges[column.name]) + 2
        return [Ids(column.name, rows=rows, special_rows=MISSING + 1)]
    if isinstance(column, Timestamp):
        names = [(f"{column.name}_{part}", part) for part in column.parts]
        return [
            Ids(name, rows=PART_SIZES[part] + 1, special_rows=MISSING + 1) for name, part in names
        ]
    if not isinstance(column, SparseColumn):
        return [column]
    weights = None if column.weights is None else f"{column.name}_weights"
    if isinstance(column, Hashed) and column.growing:
        return [
            Hashed(
                column.name,
                rows=column.rows,
                growing=True,
                is_list=column.is_list,
                weights=weights,
                table=column.table,
            )
        ]
    if isinstance(column, Categorical):
        vocabulary = spec.fitted.vocabularies[str(column.table)]
        rows, special_rows = vocabulary.num_rows, vocabulary.num_special_rows
    else:
        rows, special_rows = column.rows, getattr(column, "special_rows", 0)
    return [
        Ids(
            column.name,
            rows=rows,
            is_list=column.is_list,
            weights=weights,
            table=column.table,
            special_rows=special_rows,
        )
    ]


def check_prepared_names(columns: Sequence[Column]) -> list[str]:
    """Check that a spec can be prepared, fitted or not.

    Args:
        columns: the columns of the spec.

    Returns:
        The names of the columns of prepared features and labels.

    Raises:
        ValueError: a feature and a label, or the weights of ids, would have one name.

    Example:
        >>> from recsys.features import Hashed, Label
        >>> check_prepared_names([Hashed("user", rows=9, weights="times"), Label("ok")])
        ['user', 'user_weights', 'ok']
    """
    taken: list[str] = []
    for column in columns:
        if isinstance(column, Timestamp):
            taken += [f"{column.name}_{part}" for part in column.parts]
        elif not isinstance(column, Group | SampleWeight):
            taken.append(column.name)
            if isinstance(column, SparseColumn) and column.weights is not None:
                taken.append(f"{column.name}_weights")
    if twice := repeated(taken):
        raise ValueError(
            f"The columns of prepared tables must have distinct names; received {twice} twice. "
            "Rename columns of the spec, or copy the column of the data under another name."
        )
    return taken


def _renamed(column: Group | SampleWeight, taken: Sequence[str]) -> Column:
    name = column.name
    while name in taken:
        name += "_group" if isinstance(column, Group) else "_weight"
    return replace(column, name=name)


def _bags(values: _Array, lengths: _Array, is_list: bool) -> Any:
    """Return a column of lists, or of single values with nulls."""
    if is_list:
        offsets = np.concatenate([[0], lengths.cumsum()])
        kind = pa.ListArray if offsets[-1] < _SMALL else pa.LargeListArray
        return kind.from_arrays(
            offsets.astype(np.int32 if offsets[-1] < _SMALL else np.int64), pa.array(values)
        )
    if len(values) == len(lengths):
        return pa.array(values)
    single = np.zeros(len(lengths), values.dtype)
    single[lengths == 1] = values
    return pa.array(single, mask=lengths == 0)
