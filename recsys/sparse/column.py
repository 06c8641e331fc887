"""Columns of a table: tensors, NumPy arrays, lists, and columns of pandas, Arrow and polars.

The libraries are not imported; a column is recognized by its attributes.

Shapes: `B` rows, `N` values.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from numbers import Integral, Number, Real
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from recsys.sparse.value_checks import FINITE, check_values

__all__ = ["ColumnBags", "read_bags", "read_ids", "read_numbers", "read_weights"]

_Array: TypeAlias = np.ndarray[Any, Any]
_MIN_ID: Final = torch.iinfo(torch.int64).min
_MAX_ID: Final = torch.iinfo(torch.int64).max
_MAX_SHOWN: Final = 300


@final
class ColumnBags(NamedTuple):
    """Values of a column, concatenated by row."""

    values: Tensor | _Array
    """[N]; an array of objects if some values are not plain numbers."""
    lengths: Tensor
    """[B] int64, number of values of each row; 0 for a missing value or list."""
    has_lists: bool
    """True if rows are lists instead of single values."""


@final
class _Rule(NamedTuple):
    error: type[Exception]
    text: str
    hint: str


_NUMBER_TEXTS: Final = (
    "Number the texts: with a dictionary that training and serving share or, for one table, "
    "with .astype('category') in pandas or .dictionary_encode() in Arrow."
)
_NUMBERS: Final = _Rule(TypeError, "must hold numbers", "Convert them to float32.")
_WHOLE: Final = _Rule(TypeError, "must hold whole numbers", "Convert them to int64.")
_THERE: Final = _Rule(
    ValueError, "must not hold a missing value (None, NaN) in a list", "Remove it."
)
_INT64: Final = _Rule(
    ValueError,
    "must hold ids that fit into int64",
    "Hash them, or keep all 64 bits with .view('int64') of NumPy and call hash_ids.",
)


def _exact(limit: int, dtype: object) -> _Rule:
    return _Rule(
        TypeError,
        f"must hold exact ids, and {dtype} rounds those from {limit} on",
        "Convert them to int64, or to 'Int64' of pandas if ids are missing.",
    )


def read_bags(
    subject: str, column: Any, padding: int | None = None, *, as_codes: bool = False
) -> ColumnBags:
    """Read a column with one value, or one list of values, per row.

    Args:
        subject: Name of the column, for messages.
        column: See `recsys.sparse.from_columns`.
        padding: The value that fills unused places of a matrix.
        as_codes: True to read categories that are not numbers as their codes.

    Returns:
        The values.

    Raises:
        TypeError: `column` is not a column.
        ValueError: An array does not have one or two dimensions, or a list of Arrow has a missing
            value.
    """
    kind = type(column)
    if hasattr(kind, "to_arrow"):  # polars
        return _of_arrow(subject, column.to_arrow(), as_codes)
    if hasattr(kind, "drop_null"):
        return _of_arrow(subject, column, as_codes)
    if hasattr(kind, "isna") and hasattr(kind, "dtype"):
        return _of_pandas(subject, column, as_codes)
    if isinstance(column, np.ndarray):
        plain = _plain(column)
        column = plain if isinstance(plain, Tensor) else list(column)
    if isinstance(column, Tensor):
        return _of_tensor(subject, column, padding)
    if isinstance(column, str | bytes | Mapping) or not np.iterable(column):
        raise TypeError(
            f"{subject} must be a list, an array or a column of a table; received {_shown(column)}."
        )
    return _of_lists(column)


def read_ids(subject: str, bags: ColumnBags) -> Tensor:
    """Convert the values of a column to ids.

    Args:
        subject: Name of the column, for messages.
        bags: The column.

    Returns:
        [N] int64.

    Raises:
        TypeError: A value is not an integer, or is a float too large to be exact.
        ValueError: An id does not fit into int64, or a list has a missing value.
    """
    values = bags.values
    if not isinstance(values, Tensor):
        return torch.tensor(_each(subject, bags, _id_of), dtype=torch.int64)
    if values.dtype is torch.uint64:
        ids = values.view(torch.int64)
        _check(subject, bags, ids < 0, _INT64)
        return ids
    if values.dtype is torch.bool or values.is_complex():
        _check(subject, bags, torch.ones_like(values, dtype=torch.bool), _WHOLE)
    if values.is_floating_point():
        limit = int(2 / torch.finfo(values.dtype).eps)
        _check(subject, bags, values.isnan(), _THERE)
        _check(subject, bags, values.isinf() | (values != values.trunc()), _WHOLE)
        _check(subject, bags, values.abs() >= limit, _exact(limit, values.dtype))
    return values.long()


def read_weights(subject: str, bags: ColumnBags) -> Tensor:
    """Convert the values of a column to weights of ids.

    Args:
        subject: Name of the column, for messages.
        bags: The column.

    Returns:
        [N] float32.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is NaN or infinite, or a list has a missing value.
    """
    values = _numeric(subject, bags)
    if values.dtype is torch.bool:
        _check(subject, bags, torch.ones_like(values), _NUMBERS)
    return _finite(subject, values, bags.lengths)


def read_numbers(subject: str, column: Any) -> Tensor:
    """Read a column with one number per row, such as a dense feature or a label.

    Args:
        subject: Name of the column, for messages.
        column: See `recsys.sparse.from_columns`.

    Returns:
        [B] float32. Missing numbers are NaN if value checks are off.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is missing, NaN or infinite, or rows are lists.
    """
    if isinstance(column, Tensor):  # no mask, which would wait for a GPU
        lengths = torch.ones(column.shape[:1], dtype=torch.int64)
        bags = ColumnBags(column, lengths, column.dim() != 1)
    else:
        bags = read_bags(subject, column)
    if bags.has_lists:
        raise ValueError(
            f"{subject} must hold one number per row; received lists or a matrix. Split it into "
            "columns."
        )
    values = _numeric(subject, bags)
    if len(values) < len(bags.lengths):
        numbers, values = values.double(), torch.full(bags.lengths.shape, torch.nan).double()
        values[bags.lengths > 0] = numbers
    return _finite(subject, values, torch.ones_like(bags.lengths))


# -- columns to bags ---------------------------------------------------------------------------


def _of_tensor(subject: str, values: Tensor, padding: int | None) -> ColumnBags:
    if values.dim() not in (1, 2):
        raise ValueError(
            f"{subject} must be [samples] or [samples, ids]; received shape {tuple(values.shape)}."
        )
    if values.dtype in (torch.uint16, torch.uint32):
        values = values.long()
    is_uint64 = values.dtype is torch.uint64
    if padding is None or (is_uint64 and padding < 0):
        is_there = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    else:
        is_there = (values.view(torch.int64) if is_uint64 else values) != padding
    if values.dim() == 1:
        if values.is_floating_point():
            is_there = is_there & ~values.isnan()
        return ColumnBags(values[is_there], is_there.long(), False)
    return ColumnBags(values[is_there], is_there.sum(1), True)


def _of_lists(column: Iterable[Any]) -> ColumnBags:
    rows = list(column)
    kinds = {getattr(row, "dtype", None) for row in rows}
    if len(kinds) == 1 and all(isinstance(row, np.ndarray) and row.ndim == 1 for row in rows):
        lengths = torch.tensor([len(row) for row in rows])
        return ColumnBags(_plain(np.concatenate(rows)), lengths, True)
    if set(map(type, rows)) in ({int}, {float}):
        values = _of_values(rows)
        if isinstance(values, Tensor):
            return _of_tensor("", values, None)
    parts: list[list[Any]] = []
    has_lists = False
    for row in rows:
        if type(row) is list:
            parts.append(row)
            has_lists = True
            continue
        if isinstance(row, Tensor | np.ndarray):
            row = row.tolist()
        if _is_missing(row):
            parts.append([])
        elif isinstance(row, str | bytes | Mapping) or not np.iterable(row):
            parts.append([row])
        else:
            parts.append(list(row))
            has_lists = True
    lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    return ColumnBags(_of_values(list(itertools.chain.from_iterable(parts))), lengths, has_lists)


def _of_arrow(subject: str, column: Any, as_codes: bool) -> ColumnBags:
    if hasattr(column, "unify_dictionaries"):
        column = column.unify_dictionaries()
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    if hasattr(column, "dictionary"):
        names = column.dictionary
        if as_codes and not _are_numbers(names.to_numpy(zero_copy_only=False)):
            is_there = column.indices.is_valid().to_numpy(zero_copy_only=False)
            codes = column.indices.fill_null(0).to_numpy()  # may be unsigned
            is_null = np.append(names.is_null().to_numpy(zero_copy_only=False), True)
            is_there = is_there & ~is_null[codes]
            return _masked(_first_equal(names)[codes] if len(names) else codes, is_there)
        column = column.dictionary_decode()
    if hasattr(column, "value_lengths"):
        inside = _of_arrow(subject, column.flatten(), as_codes)
        if inside.has_lists:
            raise TypeError(
                f"{subject} must hold numbers or lists of numbers; received nested lists."
            )
        lengths = torch.tensor(column.value_lengths().fill_null(0).to_numpy()).long()
        missing = ColumnBags(np.full(len(inside.lengths), None), lengths, True)
        _check(subject, missing, inside.lengths == 0, _THERE)
        return ColumnBags(inside.values, lengths, True)
    is_there = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.drop_null().to_numpy(zero_copy_only=False)
    if values.dtype.kind == "f":
        is_number = ~np.isnan(values)
        values, is_there = values[is_number], is_there.copy()
        is_there[is_there] = is_number
    return ColumnBags(_plain(values), torch.from_numpy(is_there).long(), False)


def _first_equal(names: Any) -> _Array:
    """Return, for each entry of a dictionary, the position of the first entry with the same value.

    Arrow permits equal entries.
    """
    numbers = names.dictionary_encode().indices.fill_null(0).to_numpy()
    _, firsts, places = np.unique(numbers, return_index=True, return_inverse=True)
    codes: _Array = firsts[places]
    return codes


def _of_pandas(subject: str, column: Any, as_codes: bool) -> ColumnBags:
    if hasattr(column.dtype, "pyarrow_dtype"):
        return _of_arrow(subject, getattr(column, "array", column).__arrow_array__(), as_codes)
    names = getattr(column.dtype, "categories", None)
    if as_codes and names is not None and not _are_numbers(np.asarray(names)):
        codes = np.asarray(getattr(column, "cat", column).codes)
        return _masked(codes, codes >= 0)
    if column.dtype == object:
        return _of_lists(column.to_numpy())
    is_there = ~np.asarray(column.isna())
    return ColumnBags(_plain(column[is_there].to_numpy()), torch.from_numpy(is_there).long(), False)


def _masked(values: _Array, is_there: _Array) -> ColumnBags:
    return ColumnBags(_plain(values[is_there]), torch.from_numpy(is_there).long(), False)


def _are_numbers(values: _Array) -> bool:
    if values.dtype.kind == "O":
        return all(isinstance(value, Number) and not isinstance(value, bool) for value in values)
    return values.dtype.kind in "iuf"


def _plain(values: _Array) -> Tensor | _Array:
    """Copy to a tensor, or to an array of objects if torch has no such dtype."""
    if values.dtype.kind in "biuf" and values.dtype.itemsize <= 8:
        # a copy: memory of Arrow is read-only
        return torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    # one by one: NumPy would convert dates to numbers
    return np.fromiter(values, dtype=object, count=len(values))


def _of_values(values: list[Any]) -> Tensor | _Array:
    """Convert Python numbers to a tensor if they have one type and fit, else to an array."""
    kinds = set(map(type, values))
    if kinds == {float}:
        return torch.tensor(values, dtype=torch.float64)
    if kinds == {bool}:
        return torch.tensor(values)
    if kinds <= {int}:
        with contextlib.suppress(OverflowError):
            return torch.from_numpy(np.array(values, dtype=np.int64))
    return np.fromiter(values, dtype=object, count=len(values))


def _is_missing(value: object) -> bool:
    is_nan = isinstance(value, float | np.floating) and bool(value != value)
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")  # pandas


# -- values to ids and numbers -----------------------------------------------------------------


def _numeric(subject: str, bags: ColumnBags) -> Tensor:
    values = bags.values
    if not isinstance(values, Tensor):
        return torch.tensor(_each(subject, bags, _number_of), dtype=torch.float64)
    if values.is_complex():
        _check(subject, bags, torch.ones_like(values, dtype=torch.bool), _NUMBERS)
    return values


def _finite(subject: str, values: Tensor, lengths: Tensor) -> Tensor:
    def place_of(place: int) -> str:
        return f"in row {_row_of(lengths, place)}"

    return check_values(values.float(), FINITE, subject, place_of, shown=values)


def _id_of(value: Any) -> int | _Rule:
    if isinstance(value, bool) or not _is_number(value):
        return _WHOLE
    if not isinstance(value, Integral):
        if not math.isfinite(value) or value != int(value):
            return _WHOLE
        if isinstance(value, float | np.floating):
            limit = int(2 / np.finfo(type(value)).eps)
            if abs(float(value)) >= limit:
                return _exact(limit, type(value).__name__)
    number: int = int(value)
    return number if _MIN_ID <= number <= _MAX_ID else _INT64


def _is_number(value: object) -> bool:
    # np.timedelta64 is registered as an integer
    return isinstance(value, Real | Decimal) and not isinstance(value, np.timedelta64)


def _number_of(value: Any) -> float | _Rule:
    if not _is_number(value) and not isinstance(value, np.bool_):
        return _NUMBERS
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _each(subject: str, bags: ColumnBags, convert: Callable[[Any], Any]) -> list[Any]:
    """Convert the values one by one."""
    converted = []
    for place, value in enumerate(bags.values):
        result = _THERE if _is_missing(value) else convert(value)
        if isinstance(result, _Rule):
            _refuse(subject, bags, place, result)
        converted.append(result)
    return converted


def _check(subject: str, bags: ColumnBags, is_bad: Tensor, rule: _Rule) -> None:
    """Raise an error for the first invalid value, if there is one."""
    if bool(is_bad.any()):
        _refuse(subject, bags, int(is_bad.nonzero()[0, 0]), rule)


def _refuse(subject: str, bags: ColumnBags, place: int, rule: _Rule) -> NoReturn:
    value = bags.values[place]
    if isinstance(value, Tensor):
        value = value.item()
    hint = _NUMBER_TEXTS if isinstance(value, str | bytes) else rule.hint
    row = _row_of(bags.lengths, place)
    raise rule.error(f"{subject} {rule.text}; received {_shown(value)} in row {row}. {hint}")


def _row_of(lengths: Tensor, place: int) -> int:
    return int(torch.searchsorted(lengths.cumsum(0), place, right=True))


def _shown(value: object) -> str:
    if isinstance(value, np.generic) and not isinstance(value, np.datetime64 | np.timedelta64):
        value = value.item()
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... of {len(text)} letters"
