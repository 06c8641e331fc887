"""Columns of Arrow tables, as flat arrays.

Shapes: `B` rows, `N` values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.base.arguments import MissingKeyError, shown
from recsys.features.text_hash import hash_texts

__all__ = [
    "Keys",
    "Values",
    "column_of",
    "decoded",
    "key_kind",
    "lengths_of",
    "numbers_of",
    "read_integers",
    "read_keys",
    "read_numbers",
    "read_values",
    "times_of",
    "to_float32",
    "with_missing",
]

_Array: TypeAlias = np.ndarray[Any, Any]
_EXACT: Final = 2**53
"""Whole numbers below it are exact in float64."""


@final
class Values(NamedTuple):
    """Values of a column, concatenated by row."""

    name: str
    """The column, for messages."""
    array: Any
    """[N] Arrow array; nulls are missing values."""
    lengths: _Array | None
    """[B] int64, number of values of each row; None: one value per row."""
    first_row: int = 0
    """Number of the first row in the data, for messages."""

    def row_of(self, place: int) -> int:
        """Return the row of a value, from 0."""
        if self.lengths is not None:
            place = int(np.searchsorted(self.lengths.cumsum(), place, "right"))
        return self.first_row + place

    def reject(self, error: type[Exception], rule: str, bad: _Array, hint: str) -> None:
        """Raise an error that names the first bad value, if there is one.

        Args:
            error: The type of the error.
            rule: The requirement, such as "must be finite".
            bad: [N] bool.
            hint: What to do.
        """
        if bad.any():
            place = int(bad.argmax())
            raise error(
                f"Column {self.name!r} {rule}; received {_shown(self.array, place)} in row "
                f"{self.row_of(place)}. {hint}"
            )


@final
class Keys(NamedTuple):
    """Strings or whole numbers of a column."""

    numbers: _Array
    """[N] int64: the numbers, or the positions of the strings in `texts`; 0 if missing."""
    texts: Any
    """Distinct strings, a `large_string` array; None for numbers."""
    is_missing: _Array | None
    """[N] bool; None: nothing is missing."""

    @property
    def kind(self) -> str:
        """The kind of the values: "text" or "number"."""
        return "number" if self.texts is None else "text"

    def check_kind(self, name: str, wanted: str | None) -> None:
        """Check that the column has the kind of the training data.

        Args:
            name: The column, for the message.
            wanted: "text" or "number"; None: both are legal.

        Raises:
            TypeError: It has values of the other kind.
        """
        has_values = len(self.numbers) and (self.is_missing is None or not self.is_missing.all())
        if wanted not in (None, self.kind) and has_values:
            raise TypeError(
                f"Column {name!r} must have {wanted}s, as the data of fit; received {self.kind}s. "
                "Cast it."
            )

    def hashed(self) -> _Array:
        """Return [N] int64: the numbers, or the hashes of the strings."""
        if self.texts is None:
            return self.numbers
        return hash_texts(self.texts)[self.numbers] if len(self.texts) else self.numbers


def _shown(array: Any, place: int) -> str:
    """Return the text of a value, also of a time for which Python has no type."""
    try:
        return shown(array[place].as_py())
    except (OverflowError, ValueError):
        return shown(decoded(array.slice(place, 1)).cast(pa.string())[0].as_py())


def column_of(table: Any, name: str) -> Any:
    """Return a column of an Arrow table as one array.

    Raises:
        KeyError: There is no such column.
        ValueError: Several columns have the name, or the column is too large for one array.
    """
    count = table.column_names.count(name)
    if count == 0:
        raise MissingKeyError(
            f"The table must have a column {name!r}; it has {table.column_names}."
        )
    if count > 1:
        raise ValueError(f"The table must have one column {name!r}; it has {count}. Rename them.")
    column = table.column(name)
    if column.num_chunks == 1:
        return column.chunk(0)
    try:
        return column.combine_chunks()
    except pa.ArrowInvalid as error:  # offsets of 32 bits overflow
        raise ValueError(
            f"Column {name!r} must have less than 2 GiB in one table; received "
            f"{column.nbytes / 2**30:.1f} GiB. Transform slices of the table."
        ) from error


def with_missing(table: Any, columns: Iterable[str]) -> Any:
    """Return an Arrow table in which the columns that it lacks have missing values.

    Args:
        table: The table.
        columns: Names of columns.

    Example:
        >>> with_missing(pa.table({"age": [20, 30]}), ["age", "city"]).to_pydict()
        {'age': [20, 30], 'city': [None, None]}
    """
    for name in columns:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows))
    return table


def read_values(
    table: Any, name: str, is_list: bool, hint: str | None = None, separator: str | None = None
) -> Values:
    """Read a column with one value, or one list of values, per row.

    Args:
        table: An Arrow table.
        name: The column.
        is_list: True if the rows must be lists.
        hint: What to do if they are not lists, or the reverse; None: set `is_list`.
        separator: Separator of the values of lists in texts; None: texts are values.

    Raises:
        KeyError: There is no such column.
        TypeError: Rows are lists and must not be, or the reverse.
        ValueError: Bytes that are split are not UTF-8.
    """
    array = _plain(column_of(table, name))
    if separator is not None and key_kind(array.type) == "text":
        array = _split_texts(Values(name, array, None), separator)
    kind = array.type
    if pa.types.is_null(kind):  # all values are missing
        lengths = np.zeros(len(array), np.int64) if is_list else None
        return Values(name, array[:0] if is_list else array, lengths)
    has_lists = _has_lists(kind)
    if has_lists != is_list or (pa.types.is_nested(kind) and not has_lists):
        rule = "must have lists" if is_list else "must have one value per row"
        remedy = f" {hint or f'Set is_list={has_lists}.'}"
        if hint is None and key_kind(kind) == "text":
            remedy = f" Set separator to split texts, such as '|'.{remedy}"
        remedy = remedy if has_lists or not pa.types.is_nested(kind) else ""
        raise TypeError(f"Column {name!r} {rule}; received {kind}.{remedy}")
    if not is_list:
        return Values(name, array, None)
    values = _plain(array.flatten())
    if pa.types.is_nested(values.type):
        raise TypeError(
            f"Column {name!r} must have lists of values; received {kind}. Flatten the lists."
        )
    return Values(name, values, lengths_of(array))


def _split_texts(values: Values, separator: str) -> Any:
    """Return the lists of texts; an empty text, as a missing one, has no values."""
    array = values.array
    try:
        is_encoded = pa.types.is_dictionary(array.type)
        texts = (array.dictionary if is_encoded else array).cast(pa.large_string())
    except pa.ArrowInvalid:  # also if the bad entry of a dictionary is not used
        is_encoded, texts = False, _utf8(values).cast(pa.large_string())
    texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
    lists = pc.split_pattern(texts, separator)
    return lists.take(array.indices) if is_encoded else lists


def _plain(array: Any) -> Any:
    """Return an array whose nulls are its missing values.

    Extension types are replaced by their storage. Run-end encoded values, and values of a
    dictionary with a missing entry, are copied one by one.
    """
    if isinstance(array, pa.ExtensionArray) and array.type.extension_name.startswith("arrow."):
        array = array.storage
    if pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    if pa.types.is_dictionary(array.type) and array.dictionary.null_count:
        array = array.dictionary.take(array.indices)
    return array


def _has_lists(kind: Any) -> bool:
    types = pa.types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    views = (types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests + views)


def lengths_of(array: Any) -> _Array:
    """Return [B] int64, the lengths of lists; missing lists have length 0."""
    if array.null_count == 0 and (
        pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    ):
        lengths: _Array = np.diff(array.offsets.to_numpy())
        return lengths.astype(np.int64)
    list_lengths = pc.fill_null(pc.list_value_length(array), 0)
    return np.array(list_lengths.to_numpy(zero_copy_only=False), np.int64)


def read_keys(values: Values, unsigned: bool = False) -> Keys:
    """Read strings or whole numbers.

    Args:
        values: The column.
        unsigned: True to keep the 64 bits of unsigned numbers from 2^63 on.

    Raises:
        TypeError: The values have another type, or are numbers that are not whole.
        ValueError: A number does not fit into int64, or bytes are not UTF-8.
    """
    kind = values.array.type
    if _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
        return _read_texts(values)
    numbers, is_missing = read_integers(values, "strings or whole numbers", unsigned)
    return Keys(numbers, None, is_missing)


def key_kind(kind: Any) -> str | None:
    """Return the kind of the keys of an Arrow type, "text" or "number"; None for other types."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if _is_text(kind):
        return "text"
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return "number" if is_number else None


def _is_text(kind: Any) -> bool:
    types = pa.types
    of_text = (types.is_string, types.is_large_string, types.is_string_view)
    of_bytes = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(test(kind) for test in (*of_text, *of_bytes, types.is_binary_view))


def _read_texts(values: Values) -> Keys:
    """Return the distinct strings of a column, and their positions."""
    encoded = _encoded(values.array)
    if encoded is None:
        encoded = _encoded(_utf8(values))  # only unused entries of the dictionary were bad
        assert encoded is not None
    codes, texts = encoded
    is_missing = None
    if codes.null_count:
        is_missing = codes.is_null().to_numpy(zero_copy_only=False)
        codes = codes.fill_null(0)
    return Keys(codes.to_numpy(zero_copy_only=False).astype(np.int64), texts, is_missing)


def _utf8(values: Values) -> Any:
    """Return the decoded texts of a column, or raise an error that names the first bad one."""
    array = decoded(values.array)
    bad = np.array([not _is_utf8(value) for value in array.to_pylist()])
    values.reject(ValueError, "must have texts in UTF-8", bad, "Decode the bytes.")
    return array


def _encoded(array: Any) -> tuple[Any, Any] | None:
    """Return the positions of strings and the distinct strings; None if bytes are not UTF-8."""
    try:
        if not pa.types.is_dictionary(array.type):
            encoded = array.cast(pa.large_string()).dictionary_encode()
            return encoded.indices, encoded.dictionary
        # a dictionary may have equal entries
        encoded = array.dictionary.cast(pa.large_string()).dictionary_encode()
        return encoded.indices.take(array.indices), encoded.dictionary
    except pa.ArrowInvalid:
        return None


def _is_utf8(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def numbers_of(values: Values, kind: Any) -> Values:
    """Convert the values of lists that were split from texts to numbers.

    Args:
        values: The column; numbers stay.
        kind: The Arrow type of the numbers.

    Raises:
        ValueError: A text is not a number of this type.
    """
    array = decoded(values.array)
    if not _is_text(array.type):
        return values
    if not _is_of(array, kind):
        bad = np.array([not _is_of(value, kind) for value in array])
        rule = "whole numbers" if pa.types.is_integer(kind) else "numbers"
        hint = "Correct the text, and write no spaces."
        values.reject(ValueError, f"must have {rule} between separators", bad, hint)
    return values._replace(array=array.cast(kind))


def _is_of(texts: Any, kind: Any) -> bool:
    """Return whether a text, or each text of an array, can be cast to a type."""
    try:
        texts.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def read_integers(
    values: Values, rule: str = "whole numbers", unsigned: bool = False
) -> tuple[_Array, _Array | None]:
    """Read whole numbers.

    Args:
        values: The column; booleans count as 0 and 1. Floats are legal if they are whole and exact,
            because pandas stores whole numbers beside missing ones as floats.
        rule: The legal values, for messages.
        unsigned: True to keep the 64 bits of unsigned numbers from 2^63 on.

    Returns:
        [N] int64, with 0 for missing numbers; and [N] bool, True for missing numbers, or None.

    Raises:
        TypeError: The values are not whole numbers.
        ValueError: A number does not fit into int64.
    """
    array = decoded(values.array)
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise TypeError(f"Column {values.name!r} must have {rule}; received {kind}. Cast it.")
    numbers, is_missing = _without_nulls(array)
    if numbers.dtype == np.uint64:
        ids = numbers.view(np.int64)
        if not unsigned:
            values.reject(ValueError, "must have numbers below 2^63", ids < 0, "Hash them.")
        return ids, is_missing
    if numbers.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(numbers) < min(_EXACT, 2 / float(np.finfo(numbers.dtype).eps)))
            wrong |= numbers != np.trunc(numbers)
        values.reject(TypeError, "must have exact whole numbers", wrong, "Cast it to int64.")
    return numbers.astype(np.int64, copy=False), is_missing


def read_numbers(
    values: Values, hint: str = "Write null for a missing number."
) -> tuple[_Array, _Array | None]:
    """Read numbers.

    Args:
        values: The column.
        hint: What to do with a number that is NaN or infinite.

    Returns:
        [N] float64, with 0 for missing numbers; and [N] bool, True for missing numbers, or None.

    Raises:
        TypeError: The values are not numbers.
        ValueError: A number is NaN or infinite.
    """
    array = decoded(values.array)
    kind = array.type
    if pa.types.is_decimal(kind):
        array = array.cast(pa.float64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise TypeError(f"Column {values.name!r} must have numbers; received {kind}. Cast it.")
    present, is_missing = _without_nulls(array)
    numbers = present.astype(np.float64, copy=False)
    is_finite = np.isfinite(numbers)
    if not is_finite.all():
        values.reject(ValueError, "must have finite numbers", ~is_finite, hint)
    return numbers, is_missing


def times_of(values: Values, rule: str) -> Any:
    """Return the array of a column, whose texts become times.

    Args:
        values: The column; texts are dates and times in ISO 8601, such as 2026-11-28, in UTC if
            they have no zone.
        rule: The legal values, for messages.

    Raises:
        TypeError: A text is not a time.
    """
    array = decoded(values.array)
    if not _is_text(array.type):
        return array
    texts = array.cast(pa.large_string())
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        if _is_of(texts, kind):
            return texts.cast(kind)
    place = next((i for i, value in enumerate(texts) if not _is_of(value, pa.timestamp("us"))), 0)
    raise TypeError(
        f"Column {values.name!r} must have {rule}; received {array.type} {_shown(array, place)} in "
        f"row {values.row_of(place)}. Write times, or texts such as 2026-11-28. Cast it."
    )


def to_float32(values: Values, numbers: _Array) -> _Array:
    """Convert the numbers of a column.

    Args:
        values: The column, for messages.
        numbers: [N] float64, finite.

    Returns:
        [N] float32.

    Raises:
        ValueError: A number is outside the range of float32.
    """
    with np.errstate(over="ignore"):
        converted = numbers.astype(np.float32)
    is_finite = np.isfinite(converted)
    if not is_finite.all():
        rule = "must have numbers in the range of float32"
        values.reject(ValueError, rule, ~is_finite, "Clip or scale them.")
    return converted


def decoded(array: Any) -> Any:
    """Return the values of a dictionary array; int64 for an array of nothing but nulls."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary.take(array.indices)
    return array.cast(pa.int64()) if pa.types.is_null(array.type) else array


def _without_nulls(array: Any) -> tuple[_Array, _Array | None]:
    """Return numbers, 0 for missing ones, and the places of the missing ones."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    is_missing = None
    if array.null_count:
        is_missing = array.is_null().to_numpy(zero_copy_only=False)
        if pa.types.is_float16(array.type):  # pyarrow 18 has no kernel
            return np.where(is_missing, 0, array.to_numpy(zero_copy_only=False)), is_missing
        array = array.fill_null(pa.scalar(0).cast(array.type))
    return array.to_numpy(zero_copy_only=False), is_missing
