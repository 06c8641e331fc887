"""A file of a table: its rows, and whether it has changed since it was found."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import Any, Final, final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import fs

from recsys.base.arguments import MissingKeyError, shown
from recsys.datasets.partitions import Partition, constant

__all__ = ["READ_ERRORS", "File", "described", "is_text", "version_of"]

READ_ERRORS: Final = (
    pa.ArrowInvalid,
    pa.ArrowKeyError,
    pa.ArrowNotImplementedError,
    pa.ArrowTypeError,
    OSError,
)
"""Errors of pyarrow for a file that is damaged, or has values of another type than its columns."""
_END_BYTES: Final = 1 << 16


@final
@dataclass(frozen=True)
class File:
    """One of the Parquet, CSV or Arrow files that together have the rows of a table."""

    path: str
    """The path or URL, for messages."""
    fragment: Any
    """The fragment of `pyarrow.dataset`."""
    schema: Any
    """Its columns, as an Arrow schema; last the partition columns."""
    encoding: str
    """Encoding of a text file, which the fragment does not keep."""
    version: tuple[int, ...]
    """Size, time and inode of the file as it was found, as `version_of` returns them."""
    partition: Partition = field(default_factory=dict)
    """Values of the columns that the folders have and the file does not have."""
    repeated: Partition = field(default_factory=dict)
    """Values of the columns that both the folders and the file have; they must be equal."""
    has_types: bool = False
    """True if a table states the types of the columns in `partition`, which are then not inferred
    from values."""

    def checked(
        self, parts: Iterable[Any], text_of: Callable[[Exception], str] = str
    ) -> Iterator[Any]:
        """Yield the parts that are read of the file, if it is still the one that was found.

        Args:
            parts: An iterable that reads.
            text_of: Function that describes an error of Arrow.

        Raises:
            ValueError: The file has changed or is damaged, or a value does not have the type of its
                column.
        """
        self._check_version()
        try:
            for part in parts:
                self._check_version()  # after it was read
                yield part
        except READ_ERRORS as error:
            self._check_version()
            raise ValueError(f"{self.path} cannot be read: {described(text_of(error))}") from error
        self._check_version()  # a shorter file ends early

    def _check_version(self) -> None:
        if version_of(self.fragment.filesystem, self.fragment.path) != self.version:
            raise ValueError(
                f"{self.path} must not change while it is read; received another size, time or "
                "inode than at the start. Begin again, and write new data to new files."
            )

    def partition_row(self) -> Any:
        """Return a table of one row with the partition columns."""
        return self._with_partition(pa.table({"": pa.nulls(1)}), [*self.partition], lambda: 0)

    def excludes(self, rows: Any) -> bool:
        """Return whether the partition excludes all rows of a filter of `pyarrow.dataset`."""
        if not self.partition or rows is None:
            return False
        facts = [
            pc.field(name).is_null()
            if value is None
            else pc.field(name) == constant(name, value, self.schema.field(name).type, 1)[0]
            for name, value in self.partition.items()
        ]
        kind, system = self.fragment.format, self.fragment.filesystem
        fragment = kind.make_fragment(self.fragment.path, system, reduce(and_, facts))
        dataset = ds.FileSystemDataset([fragment], self.schema, kind, system)
        return not [*dataset.get_fragments(rows)]

    def completed(
        self,
        parts: Iterable[tuple[int, Any]],
        columns: Sequence[str],
        first_row: Callable[[int], int],
    ) -> Iterator[tuple[int, Any]]:
        """Yield parts with their partition columns.

        Args:
            parts: The number of each unit, and a table with its other columns, or several tables.
            columns: The columns of the results.
            first_row: Function that returns the number of rows before a unit, for messages.

        Raises:
            ValueError: A column of the file does not have the value of the folder in a row.
        """
        last, offset = -1, 0
        for number, table in parts:
            offset = offset if number == last else 0
            if not self.partition and not self.repeated:
                yield number, table
                continue
            yield (
                number,
                self._with_partition(
                    table,
                    columns,
                    lambda n=number, k=offset: k + first_row(n),  # type: ignore[misc]
                ),
            )
            last, offset = number, offset + table.num_rows

    def _with_partition(
        self, table: Any, columns: Sequence[str], first_row: Callable[[], int]
    ) -> Any:
        arrays, fields = [], []
        for name in columns:
            if name in self.repeated:
                self._check_repeated(name, table.column(name), first_row)
            is_stored = name not in self.partition
            fields.append((table.schema if is_stored else self.schema).field(name))
            value, kind = self.partition.get(name), fields[-1].type
            arrays.append(
                table.column(name) if is_stored else constant(name, value, kind, table.num_rows)
            )
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))

    def _check_repeated(self, name: str, column: Any, first_row: Callable[[], int]) -> None:
        """Check that a column of the file has the value of the folder in each row."""
        value, kind = self.repeated[name], column.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
            column = column.cast(kind)
        try:
            wanted = pa.scalar(value, pa.string()).cast(kind)
            is_equal = pc.equal(column, wanted).fill_null(False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            is_equal = pa.array([False]).take(pa.array([0] * len(column), pa.int64()))
        is_equal = is_equal if value is not None else column.is_null()
        place = pc.index(is_equal, False).as_py()
        if place >= 0:
            raise ValueError(
                f"Column {name!r} must have the value of its folder, {shown(value)}; received "
                f"{shown(column[place].as_py())} in row {first_row() + place} of {self.path}. "
                "Rename the folder, or remove the column from the file."
            )

    def checksum(self) -> int:
        """Return a checksum of the size, the first 64 KiB and the last 64 KiB or Parquet footer.

        A copy of the file has the same checksum.

        Raises:
            ValueError: The file has changed since it was found.
        """
        (ends,) = self.checked(self._ends())
        return zlib.crc32(ends)

    def _ends(self) -> Iterator[bytes]:
        footer = 0 if is_text(self) else self.fragment.metadata.serialized_size + 8
        with self.fragment.filesystem.open_input_file(self.fragment.path) as opened:
            size = opened.size()
            first = opened.read(_END_BYTES)
            opened.seek(max(0, size - max(_END_BYTES, footer)))
            yield b"%d " % size + first + opened.read()

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check that the file has columns.

        Raises:
            KeyError: It does not have one of them.
            ValueError: It has one of them several times.
        """
        columns = list(columns)
        missing = [name for name in columns if name not in self.schema.names]
        if missing:
            raise MissingKeyError(
                f"{self.path} must have the columns {missing}; it has {self.schema.names}."
            )
        twice = [name for name in columns if self.schema.names.count(name) > 1]
        if twice:
            raise ValueError(
                f"{self.path} must have one column of each name; it has several {twice}. Rename "
                "them."
            )


def version_of(system: Any, path: str) -> tuple[int, ...]:
    """Return size, time in nanoseconds and inode of a file, which another version changes.

    Args:
        system: A file system of pyarrow; other systems than the local one have no inodes.
        path: The path in it.
    """
    if isinstance(system, fs.LocalFileSystem):
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return ()
        return status.st_size, status.st_mtime_ns, status.st_ino
    info = system.get_file_info(path)
    return info.size or 0, info.mtime_ns or 0


def described(text: str) -> str:
    """Return the text of an error of Arrow with a remedy, if it is about a text file."""
    if "CSV conversion error" in text:
        return (
            f"{text}. Types are inferred from the beginning, the middle and the end of each file; "
            "pass convert_options=pyarrow.csv.ConvertOptions(column_types=...) to choose them."
        )
    if any(words in text for words in ("columns, got", "straddling object", "out of sync")):
        return (
            f"{text}. If quoted values contain newlines, pass "
            "parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True); else each line must "
            "have one value for each column."
        )
    return text


def is_text(file: File) -> bool:
    """Return whether a file is CSV or TSV."""
    return isinstance(file.fragment.format, ds.CsvFileFormat)
