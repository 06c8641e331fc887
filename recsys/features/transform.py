"""Conversion of the columns of a table to ids and dense features.

Legend: `B` rows, `N` ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa
import torch

from recsys.features.arrow import Values, read_keys, read_values, to_float32
from recsys.features.columns import (
    Categorical,
    Column,
    Hashed,
    Numeric,
    SparseColumn,
    Timestamp,
)
from recsys.features.fit import Fitted
from recsys.features.samples import read_id_weights
from recsys.features.scaling import bucket_rows, read_scaled
from recsys.features.text_hash import hash_rows
from recsys.features.times import read_parts
from recsys.sparse import KeyedJaggedTensor

__all__ = ["Bags", "jagged_of", "read_bags", "read_dense"]

_Array: TypeAlias = np.ndarray[Any, Any]


@final
class Bags(NamedTuple):
    """Ids of a feature, concatenated by row."""

    ids: _Array
    """[N] int64."""
    lengths: _Array | None
    """[B] int64; None: one id per row."""
    weights: _Array | None
    """[N] float32."""


def jagged_of(
    names: list[str], bags: Sequence[Bags], size: int, is_weighted: bool
) -> KeyedJaggedTensor:
    """Join the ids of features.

    Args:
        names: the features.
        bags: their ids.
        size: number of rows.
        is_weighted: True to give ids without weights the weight 1.
    """
    one = np.ones(size, np.int64)
    lengths = [one if bag.lengths is None else bag.lengths for bag in bags]
    weights = None
    if is_weighted:
        plain = [
            np.ones(len(bag.ids), np.float32) if bag.weights is None else bag.weights
            for bag in bags
        ]
        weights = torch.from_numpy(np.concatenate(plain))
    empty = [np.empty(0, np.int64)]
    return KeyedJaggedTensor(
        names,
        torch.from_numpy(np.concatenate([bag.ids for bag in bags] or empty)),
        weights,
        torch.from_numpy(np.concatenate(lengths or empty)),
    )


def read_bags(table: Any, column: Column, fitted: Fitted) -> list[Bags]:
    """Read the ids of the features of a column.

    Args:
        table: an Arrow table.
        column: the description; a dense column, a label, a weight and a group have no ids.
        fitted: the state of the spec.
    """
    if isinstance(column, SparseColumn):
        return [_read_ids(table, column, fitted)]
    if isinstance(column, Numeric) and column.buckets is not None:
        numbers, is_missing = read_scaled(column, _read_numbers(table, column))
        rows = bucket_rows(fitted.edges[column.name], numbers, is_missing)
        return [Bags(rows, None, None)]
    if isinstance(column, Timestamp):
        parts = read_parts(column, read_values(table, column.name, False))
        return [Bags(rows, None, None) for rows in parts]
    return []


def _read_numbers(table: Any, column: Numeric) -> Values:
    """Read a column of numbers; all are missing in an absent column that states their value."""
    if column.missing is not None and column.name not in table.column_names:
        return Values(column.name, pa.nulls(table.num_rows), None)
    return read_values(table, column.name, False)


def _read_ids(table: Any, column: SparseColumn, fitted: Fitted) -> Bags:
    values = read_values(table, column.name, column.is_list)
    keys = read_keys(values, unsigned=isinstance(column, Hashed))
    keys.check_kind(column.name, fitted.kind_of(column))
    weights = None
    if column.weights is not None:
        weights = read_id_weights(table, column, values.lengths, keys.is_missing)
    if isinstance(column, Categorical):
        ids = fitted.vocabularies[str(column.table)].rows_of(keys)
        return Bags(ids, values.lengths, weights)
    if isinstance(column, Hashed):
        ids = keys.hashed()
        if not column.growing:
            ids = hash_rows(ids, column.rows)
    else:
        if keys.texts is not None:
            raise TypeError(
                f"Column {column.name!r} must have row numbers; received texts. Describe it "
                "by Categorical or Hashed."
            )
        ids = keys.numbers
        bad = ids.view(np.uint64) >= column.rows  # negative numbers, too
        rule = f"must have row numbers from 0 to {column.rows - 1}"
        values.reject(ValueError, rule, bad, "Set rows to the size of the table.")
    return _without_missing(Bags(ids, values.lengths, weights), keys.is_missing)


def read_dense(table: Any, column: Numeric, fitted: Fitted) -> _Array:
    """Read a dense feature, [B] float32.

    Args:
        table: an Arrow table.
        column: the description.
        fitted: the state of the spec.
    """
    values = _read_numbers(table, column)
    numbers, is_missing = read_scaled(column, values)
    mean = fitted.means[column.name]
    if is_missing is not None:
        numbers = np.where(is_missing, mean, numbers)
    if column.standardize:
        numbers = (numbers - mean) / fitted.deviations[column.name]
    return to_float32(values, numbers)


def _without_missing(bags: Bags, is_missing: _Array | None) -> Bags:
    """Leave out missing ids."""
    if is_missing is None:
        return bags
    kept = ~is_missing
    lengths = kept.astype(np.int64)
    if bags.lengths is not None:
        ends = np.concatenate([[0], bags.lengths.cumsum()])
        before = np.concatenate([[0], lengths.cumsum()])
        lengths = before[ends[1:]] - before[ends[:-1]]
    weights = None if bags.weights is None else bags.weights[kept]
    return Bags(bags.ids[kept], lengths, weights)
