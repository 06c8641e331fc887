"""Tables in memory, as Arrow tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.base.arguments import wrong_type

__all__ = ["table_of"]


def table_of(data: Any) -> Any:
    """Convert a table to Arrow.

    Args:
        data: A Table or RecordBatch of Arrow, a DataFrame of pandas or polars, a `Dataset` of
            Hugging Face, or a dict of columns (arrays, tensors or lists). NaN is a missing value in
            a DataFrame of pandas, and an error elsewhere.

    Returns:
        A `pyarrow.Table`.

    Raises:
        TypeError: It is not a table, or a column contains values of several types.
        ValueError: Columns of a dict have different numbers of rows, or numbers that do not fit
            into 64 bits.

    Example:
        >>> table_of({"age": [31, None], "tags": [["a"], []]}).column_names
        ['age', 'tags']
    """
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    try:
        if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas
            return pa.Table.from_pandas(data, preserve_index=False)
        if hasattr(data, "to_arrow") and hasattr(data, "columns"):  # polars
            for name, kind in zip(data.columns, data.dtypes, strict=True):
                if str(kind) == "Object":  # Arrow receives addresses
                    raise TypeError(
                        f"Column {name!r} must have values of one type; received Python objects. "
                        "Convert the column."
                    )
            return data.to_arrow()
        if hasattr(data, "with_format"):  # Hugging Face
            return data.with_format("arrow")[:]
        if isinstance(data, Mapping):
            return _from_columns({str(name): _array_of(name, data[name]) for name in data})
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise TypeError(
            f"A column must have values of one type; received {error}. Convert the column."
        ) from error
    wrong_type(
        "data", "a table of Arrow, pandas, polars or Hugging Face, or a dict of columns", data
    )


def _from_columns(columns: Mapping[str, Any]) -> Any:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"Columns must have the same number of rows; received {lengths}.")
    return pa.table(dict(columns))


def _arrow_of(column: Any) -> Any:
    try:
        return pa.array(column)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        if not isinstance(column, list | tuple):
            raise
        return pa.array(_without_na(column))


def _without_na(values: Any) -> Any:
    """Return lists with None for `pandas.NA`, which Arrow knows in columns of pandas only."""
    if type(values).__name__ == "NAType":
        return None
    return [*map(_without_na, values)] if isinstance(values, list | tuple) else values


def _array_of(name: object, column: Any) -> Any:
    if hasattr(column, "to_arrow") or isinstance(column, pa.Array | pa.ChunkedArray):
        return column.to_arrow() if hasattr(column, "to_arrow") else column
    if isinstance(column, str | bytes | set | Mapping) or not hasattr(column, "__len__"):
        wrong_type(f"Column {name!r}", "an array, a tensor or a list", column)
    try:
        if hasattr(column, "detach"):  # a tensor
            column = column.detach().cpu().numpy()
        if isinstance(column, np.ndarray) and column.ndim == 2:
            column = list(column)
        try:
            return _arrow_of(column)
        except OverflowError:  # Python's numbers from 2^63 on
            return pa.array(column, pa.uint64())
    except OverflowError as error:
        raise ValueError(
            f"Column {name!r} must have numbers of 64 bits; received others: {error}. Hash them."
        ) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError) as error:
        raise TypeError(
            f"Column {name!r} must have values of one type; received {error}. Convert the column."
        ) from error
