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
from recsys.features.columns import Column
from recsys.features.fit import Fitted
from recsys.features.id_columns import Hashed, Ids
from recsys.features.numeric import Numeric
from recsys.features.spec import FeatureSpec

__all__ = ["check_prepared_names", "prepared_spec", "prepared_table"]

_Array: TypeAlias = np.ndarray[Any, Any]
_SMALL: Final = 2**31
_SUFFIXES: Final = {"groups": "_group", "sample_weights": "_weight"}
"""Suffixes of columns that would have the name of a feature or a label, by part of the batch."""


def prepared_spec(spec: FeatureSpec) -> FeatureSpec:
    """Return the fitted spec of the tables that `prepared_table` makes.

    Features, tables, dense features and labels have the names, sizes and order of `spec`, so a
    model of one is a model of the other. A group or a weight of samples that has the column of a
    feature or label is another column of the prepared tables, such as `user_group`.

    Args:
        spec: A fitted spec.

    Raises:
        RuntimeError: `spec` is not fitted.
        ValueError: As for `check_prepared_names`.

    Example:
        >>> from recsys.features import Categorical, FeatureSpec, Label
        >>> spec = FeatureSpec([Categorical("city"), Label("ok")])
        >>> ids, _ = prepared_spec(spec.fit({"city": ["Oslo", "Rome"], "ok": [0, 1]})).columns
        >>> type(ids).__name__, ids.name, ids.rows, ids.special_rows
        ('Ids', 'city', 4, 2)
    """
    fitted = spec.fitted
    taken = check_prepared_names(spec.columns)
    columns: list[Column] = []
    converted: list[str] = []
    for column in spec.columns:
        added = _prepared_columns(column, fitted, taken)
        columns += added
        if not _keeps_values(column) or added[0].name != column.name:
            converted += [name for one in added for name in (one.name, one.weights) if name]
    prepared = FeatureSpec(columns)
    dense = prepared.dense_names
    keys = [column.name for column in columns if column.has_keys]
    prepared.fitted = Fitted(
        fitted.num_rows,
        {},
        dict.fromkeys(dense, 0.0),
        dict.fromkeys(dense, 1.0),
        {},
        dict.fromkeys(keys, "number"),
        converted=tuple(converted),
    )
    return prepared


def prepared_table(spec: FeatureSpec, data: Any, *, labels: bool = True) -> Any:
    """Convert raw columns to row numbers, scaled numbers and labels.

    Args:
        spec: A fitted spec.
        data: As for `FeatureSpec.transform`.
        labels: As for `FeatureSpec.transform`.

    Returns:
        A `pyarrow.Table`: row numbers as int32 (int64 if they need it, or for growing tables), or
        lists of them; dense features, id weights, labels and sample weights as float32; groups as
        int64. A feature without an id, and a missing one of several labels, is null.

    Raises:
        KeyError: As for `FeatureSpec.transform`.
        TypeError: As for `FeatureSpec.transform`.
        ValueError: As for `FeatureSpec.transform`.
        RuntimeError: As for `FeatureSpec.transform`.

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
    columns: dict[str, Any] = {}
    prepared = prepared_spec(spec)
    for column in prepared.columns:
        name = column.name
        if column.part == "dense_features":
            columns[name] = np.ascontiguousarray(dense[name])
        elif column.part == "sparse_features":
            bags = jagged[name]
            lengths = bags.lengths().numpy()
            [feature] = column.features(prepared.fitted)
            is_small = not feature.growing and feature.rows <= _SMALL
            ids = bags.values().numpy().astype(np.int32 if is_small else np.int64)
            columns[name] = _bags(ids, lengths, column.is_list)
            if column.weights is not None:
                weights = bags.weights().numpy()
                columns[column.weights] = _bags(weights, lengths, column.is_list)
        elif not labels:
            continue
        elif column.part == "labels":
            is_missing = None if missing is None else missing[:, spec.label_names.index(name)]
            columns[name] = pa.array(by_label[name], mask=is_missing)
        else:
            columns[name] = getattr(batch, column.part).numpy()
    return pa.table(columns)


def _keeps_values(column: Column) -> bool:
    """Return whether the prepared column divides rows as the raw one: by numbers, or their hash."""
    is_hashed = isinstance(column, Hashed) and column.growing
    return is_hashed or isinstance(column, Ids) or column.part == "groups"


def _prepared_columns(column: Column, fitted: Fitted, taken: Sequence[str]) -> list[Column]:
    """Return the columns of prepared tables that have the features or the target of a column.

    Args:
        column: A column of raw tables.
        fitted: The state of its spec.
        taken: Names of the columns of all features and labels.
    """
    if column.part in _SUFFIXES:
        name = column.name
        while name in taken:
            name += _SUFFIXES[column.part]
        return [replace(column, name=name)]
    if column.part == "labels":
        return [column]
    fingerprints = column.fingerprints(fitted)
    if column.part == "dense_features":
        names = column.feature_names()
        return [Numeric(name, fingerprint=fingerprints.get(name)) for name in names]
    shared: dict[str, Any] = {
        "is_list": column.is_list,
        "weights": None if column.weights is None else f"{column.name}_weights",
    }
    return [
        Hashed(feature.name, rows=feature.rows, growing=True, table=feature.table, **shared)
        if feature.growing
        else Ids(
            feature.name,
            rows=feature.rows,
            table=feature.table,
            special_rows=feature.special_rows,
            fingerprint=fingerprints.get(feature.name),
            **shared,
        )
        for feature in column.features(fitted)
    ]


def check_prepared_names(columns: Sequence[Column]) -> list[str]:
    """Check that a spec can be prepared, fitted or not.

    Args:
        columns: The columns of the spec.

    Returns:
        The names of the columns of prepared features and labels.

    Raises:
        ValueError: A feature and a label, or the weights of ids, would have one name.

    Example:
        >>> from recsys.features import Hashed, Label
        >>> check_prepared_names([Hashed("user", rows=9, weights="times"), Label("ok")])
        ['user', 'user_weights', 'ok']
    """
    taken: list[str] = []
    for column in columns:
        if column.part not in _SUFFIXES:
            taken += column.feature_names() or [column.name]
            if column.weights is not None:
                taken.append(f"{column.name}_weights")
    if twice := repeated(taken):
        raise ValueError(
            f"The columns of prepared tables must have distinct names; received {twice} twice. "
            "Rename columns of the spec, or copy the column of the data under another name."
        )
    return taken


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
