"""Fingerprints of fitted values, and the rows that values have in another fit."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from recsys.base.arguments import MissingKeyError

if TYPE_CHECKING:
    from recsys.features.spec import FeatureSpec

__all__ = ["fingerprint_of", "hashed_values", "row_sources"]

_Array: TypeAlias = np.ndarray[Any, Any]


def fingerprint_of(kind: str, *arrays: _Array) -> str:
    """Return the fingerprint of arrays: the first 32 digits of the SHA-256 of their bytes.

    Args:
        kind: Kind of the values, such as "text"; values of two kinds have two fingerprints.
        arrays: int64, float64 or uint8.

    Example:
        >>> fingerprint_of("number", np.array([7, 9]))
        'd49d54f974a64c585adeb7235639ad41'
    """
    digest = hashlib.sha256(kind.encode())
    for array in arrays:
        digest.update(b" %d " % array.nbytes)
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:32]


def row_sources(spec: FeatureSpec, before: FeatureSpec, table: str) -> _Array:
    """Return the rows that the values of a table had in an earlier fit.

    Missing and unknown values keep their rows. A bucket of numbers takes the row of the bucket that
    contained its middle, or its only edge if it is the first or the last one.

    Args:
        spec: A fitted spec.
        before: The earlier spec.
        table: A table of a `Categorical` column, or of a `Numeric` column with buckets.

    Returns:
        int64 [rows of the table], the row in the earlier table; -1 for a new value.

    Raises:
        KeyError: A spec has no fitted values of the table.
        TypeError: The values are texts in one and numbers in the other.

    Example:
        >>> from recsys.features import Categorical, FeatureSpec
        >>> old = FeatureSpec([Categorical("city")]).fit({"city": ["Oslo", "Rome", "Rome"]})
        >>> new = FeatureSpec([Categorical("city")]).fit({"city": ["Oslo", "Oslo", "Bonn"]})
        >>> row_sources(new, old, "city").tolist()
        [0, 1, 3, -1]
    """
    fitted, old = spec.fitted, before.fitted
    if table in fitted.vocabularies and table in old.vocabularies:
        return fitted.vocabularies[table].rows_in(old.vocabularies[table])
    if table not in fitted.edges or table not in old.edges:
        raise MissingKeyError(
            f"Both specs must have fitted values of table {table!r}; it is in neither, in one, or "
            "another kind of column. Prepared tables have no values: pass the spec of the raw "
            "columns, `features` beside the files."
        )
    edges, old_edges = fitted.edges[table], old.edges[table]
    middles = np.concatenate([np.nextafter(edges[:1], -np.inf), (edges[1:] + edges[:-1]) / 2])
    if len(edges):
        middles = np.concatenate([middles, edges[-1:]])
    else:  # one bucket of all numbers
        middles = old_edges[len(old_edges) // 2 :][:1] if len(old_edges) else np.zeros(1)
    return np.concatenate([[0], np.searchsorted(old_edges, middles, "right") + 1])


def hashed_values(spec: FeatureSpec, hashed: FeatureSpec, table: str) -> tuple[_Array, _Array]:
    """Return the values of a vocabulary as ids of a table with hashed ids, and their rows.

    The values of the last data come first, then the values that fewer extensions did not have, then
    the lower row.

    Args:
        spec: A fitted spec with the vocabulary.
        hashed: A spec whose `Hashed` columns have the table, with `growing=True`.
        table: The table.

    Returns:
        int64 [V] 64-bit ids, and int64 [V] rows.

    Raises:
        KeyError: A spec has another kind of table.
        TypeError: The values are texts in one and numbers in the other.

    Example:
        >>> from recsys.features import Categorical, FeatureSpec, Hashed
        >>> old = FeatureSpec([Categorical("user")]).fit({"user": [7, -8, 7]})
        >>> new = FeatureSpec([Hashed("user", rows=100, growing=True)])
        >>> [array.tolist() for array in hashed_values(old, new, "user")]
        [[7, -8], [2, 3]]
    """
    growing = {entry.name for entry in hashed.features() if entry.table == table and entry.growing}
    vocabulary = spec.fitted.vocabularies.get(table)
    if vocabulary is None or not growing:
        raise MissingKeyError(
            f"One spec must have table {table!r} by Categorical, and the other by "
            "Hashed(..., growing=True)."
        )
    for column in hashed.columns:
        kind = column.value_kind(hashed.fitted) if column.name in growing else None
        if len(vocabulary.values) and kind not in (None, vocabulary.kind):
            raise TypeError(
                f"The values of a table must have one kind; received {vocabulary.kind}s of the "
                f"vocabulary and hashed {kind}s. Cast the column."
            )
    ids, rows = vocabulary.by_hash()
    order = np.lexsort((rows, vocabulary.ages[rows - vocabulary.num_special_rows]))
    return ids[order], rows[order]
