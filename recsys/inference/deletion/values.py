"""Values of tables, as the rows or the hashed ids that stand for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa

from recsys.base.arguments import MissingKeyError, wrong_type
from recsys.features.arrow import Values, read_keys
from recsys.features.extend import array_of
from recsys.features.id_columns import Categorical, Hashed
from recsys.features.spec import FeatureSpec
from recsys.features.vocabulary import FIRST, Vocabulary

__all__ = ["TableValues", "rows_of", "values_by_table"]

_Array: TypeAlias = np.ndarray[Any, Any]


@final
class TableValues(NamedTuple):
    """Values of a table, each once."""

    array: Any
    """An Arrow array of `large_string` or `int64`; int64 has the bits of unsigned numbers."""
    ids: _Array | None
    """int64 [N] ids of a table with `HashedIds`; None for a table with a vocabulary."""


def values_by_table(
    subject: str, values: Mapping[str, Iterable[str | int]], spec: FeatureSpec | None
) -> dict[str, TableValues]:
    """Return the values of each table.

    Args:
        subject: The function, for messages.
        values: Values by table.
        spec: A fitted spec; None: the values are ids of tables with `HashedIds`.

    Raises:
        KeyError: The spec has no such table.
        TypeError: A value has another type than the values of the table.
        ValueError: Values of the table share rows.
    """
    if not isinstance(values, Mapping):
        wrong_type(f"{subject}.values", "a dict of values by table", values)
    if spec is not None and not isinstance(spec, FeatureSpec):
        wrong_type(f"{subject}.spec", "a FeatureSpec, or None", spec)
    found = {}
    for table, of_table in values.items():
        name = f"{subject}.values[{table!r}]"
        if spec is None:
            array = array_of(name, of_table, "number", unsigned=True)
            found[table] = TableValues(array, array.to_numpy())
            continue
        columns = [column for column in spec.columns if column.table == table]
        if not columns or not isinstance(columns[0], Categorical | Hashed):
            known = {c.table for c in spec.columns if isinstance(c, Categorical | Hashed)}
            raise MissingKeyError(
                f"{subject}.values must name tables of Categorical and Hashed columns of the spec, "
                f"{sorted(map(str, known))}; received {table!r}. Other tables do not have values."
            )
        column = columns[0]
        if isinstance(column, Hashed) and not column.growing:
            raise ValueError(
                f"{subject}.values must name tables whose values have rows of their own; the "
                f"values of {table!r} share {column.rows} rows. Train a new model without them."
            )
        kinds = [kind for c in columns if (kind := c.value_kind(spec.fitted)) is not None]
        is_hashed = isinstance(column, Hashed)
        array = array_of(name, of_table, kinds[0] if kinds else None, unsigned=is_hashed)
        found[table] = TableValues(array, _ids_of(array) if is_hashed else None)
    return found


def rows_of(vocabulary: Vocabulary, array: Any) -> _Array:
    """Return the rows of the values that a vocabulary has, int64 [K], ascending.

    Args:
        vocabulary: The vocabulary.
        array: Values of any kind; a vocabulary of the other kind has none of them.
    """
    has_texts = array.type != pa.int64()
    if has_texts != (vocabulary.kind == "text"):
        return np.empty(0, np.int64)
    rows = vocabulary.rows_of_values(array)
    return np.sort(rows[rows >= FIRST])


def _ids_of(array: Any) -> _Array:
    return read_keys(Values("values", array, None)).hashed()
