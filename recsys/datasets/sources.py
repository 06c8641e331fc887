"""Tables that are read in units: row groups of Parquet, blocks of lines, slices in memory.

Readers of training choose units. `fit`, `prepare` and `score` read files from the beginning to the
end, in parts: large row groups and text files are then never in memory as a whole.
"""

from __future__ import annotations

import posixpath
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple, Protocol, final

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import csv, fs

from recsys.datasets.files import File, is_text
from recsys.datasets.memory import table_of
from recsys.datasets.partitions import file_name
from recsys.datasets.tables import (
    COMPRESSED,
    are_paths,
    files_of,
    is_utf8,
    located,
    unify_types,
)

__all__ = [
    "ParquetSource",
    "Part",
    "Source",
    "TableSource",
    "TextSource",
    "Unit",
    "parts_of",
    "read_parts",
    "source_of",
]

_PART_ROWS: Final = 1 << 16
_BLOCK_BYTES: Final = 4 << 20
_SLICE_ROWS: Final = 8192
_NUM_SLICES: Final = 64


class Unit(NamedTuple):
    """The smallest piece that a rank reads."""

    source: int
    """Number of the source."""
    number: int
    """Number of the row group, block or slice in the source."""
    num_rows: int
    """Number of rows; an estimate for text."""


class Source(Protocol):
    """A file or a table in memory."""

    path: str
    """The path, URL or kind of table, for messages."""
    schema: Any
    """Columns, as an Arrow schema."""
    sizes: list[tuple[int, int]]
    """Number and number of rows of each unit; estimates for text."""

    def read(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the number of each unit and an Arrow table of its rows, or several tables.

        Raises:
            ValueError: The file is damaged or has changed since it was found, or a value does not
                have the type of its column.
        """

    def first_row(self, number: int) -> int:
        """Return the number of rows before a unit. Blocks of text are counted by reading."""

    def mark(self) -> int:
        """Return a checksum of name, partition and size, which does not depend on other folders."""

    def checksum(self) -> int:
        """Return `File.checksum` of a file; 0 of a table in memory."""


def source_of(
    file: File, rows: Any = None, *, in_parts: bool = False, is_excluded: bool = False
) -> Source:
    """Return the source of a file.

    Args:
        file: The file.
        rows: A filter of `pyarrow.dataset`. Row groups whose statistics exclude it are left out,
            and files whose partition excludes it; rows are not filtered.
        in_parts: True to yield several tables of a large unit, at most some 64 thousand rows each,
            and to read text files as one unit, in tables of a mebibyte of text.
        is_excluded: True to leave out all units.
    """
    is_excluded = is_excluded or file.excludes(rows)
    if is_text(file):
        return TextSource(file, in_parts, is_excluded)
    return ParquetSource(file, rows, in_parts, is_excluded)


@final
class ParquetSource:
    """A Parquet file; units are its row groups.

    Args:
        file: The file.
        rows: A filter, as for `source_of`.
        in_parts: As for `source_of`.
        is_excluded: As for `source_of`.
    """

    def __init__(
        self, file: File, rows: Any = None, in_parts: bool = False, is_excluded: bool = False
    ) -> None:
        self.path, self.schema, self._file = file.path, file.schema, file
        self._in_parts = in_parts
        fragment = file.fragment
        self._metadata = fragment.metadata
        groups = range(self._metadata.num_row_groups)
        self._counts = [self._metadata.row_group(i).num_rows for i in groups]
        self._starts: list[int] = [0, *accumulate(self._counts)]
        kept = fragment if rows is None else fragment.subset(rows, schema=file.schema)
        chosen = [] if is_excluded else [group.id for group in kept.row_groups]
        self.sizes = [(number, self._counts[number]) for number in chosen if self._counts[number]]

    def read(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the number and the rows of each row group, texts as a dictionary if in one part."""
        stored = [name for name in columns if name not in self._file.partition]
        groups = self._row_groups(numbers, stored)
        if columns and not stored:  # pyarrow yields nothing without columns
            groups = ((n, pa.table({"": pa.nulls(self._counts[n])})) for n in numbers)
        yield from self._file.checked(self._file.completed(groups, columns, self.first_row))

    def _row_groups(self, numbers: Sequence[int], columns: list[str]) -> Iterator[tuple[int, Any]]:
        system = self._file.fragment.filesystem
        is_remote = not isinstance(system, fs.LocalFileSystem)
        texts = [] if self._in_parts else columns
        texts = [name for name in texts if _is_plain_text(self.schema.field(name).type)]
        # `Fragment.to_batches` reads ahead without a limit, up to the whole file.
        with system.open_input_file(self._file.fragment.path) as opened:
            file = pq.ParquetFile(
                opened, metadata=self._metadata, read_dictionary=texts, pre_buffer=is_remote
            )
            for number in numbers:
                most = _PART_ROWS if self._in_parts else self._counts[number]
                for batch in file.iter_batches(most, [number], columns, use_threads=False):
                    yield number, pa.Table.from_batches([batch.select(columns)])

    def first_row(self, number: int) -> int:
        """Return the number of rows before a row group."""
        return self._starts[number]

    def mark(self) -> int:
        """Return a checksum of name and size."""
        return _mark(self.path, self._starts)

    def checksum(self) -> int:
        """Return the checksum of the file."""
        return self._file.checksum()


@final
class TextSource:
    """A CSV or TSV file; units are blocks of lines.

    A block has the lines that start in its 4 MiB. Compressed files, files whose values may contain
    newlines, and files that are read in parts are one unit.

    Args:
        file: The file.
        in_parts: As for `source_of`.
        is_excluded: As for `source_of`.
    """

    def __init__(self, file: File, in_parts: bool = False, is_excluded: bool = False) -> None:
        self.path, self.schema, self._file = file.path, file.schema, file
        self._names = [name for name in file.schema.names if name not in file.partition]
        self._in_parts = in_parts
        self._format = file.fragment.format
        options = self._format.default_fragment_scan_options
        self._reading, self._conversion = options.read_options, options.convert_options
        self._size = file.version[0]
        self.is_whole = (
            posixpath.splitext(file.fragment.path)[1] in COMPRESSED
            or self._format.parse_options.newlines_in_values
            or not is_utf8(file.encoding)
        )
        self.sizes: list[tuple[int, int]] = [(0, 0)]
        if is_excluded or not in_parts:
            self.sizes = [] if is_excluded else self._estimated_sizes()

    def _estimated_sizes(self) -> list[tuple[int, int]]:
        count = 1 if self.is_whole else max(1, -(-self._size // _BLOCK_BYTES))
        with self._stream() as stream:
            sample = stream.read(1 << 16)
        rows = max(1, self._size * sample.count(b"\n") // (max(1, len(sample)) * count))
        return [(i, rows) for i in range(count)]

    def _stream(self) -> Any:
        fragment = self._file.fragment
        return fragment.filesystem.open_input_stream(fragment.path, compression="detect")

    def read(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the number and the rows of each block."""
        stored = [name for name in columns if name not in self._file.partition]
        stored = stored or self._names[:1]  # for the number of rows
        number = 0

        def blocks() -> Iterator[tuple[int, Any]]:
            nonlocal number
            for number in numbers:
                for batch in self._parse(number, stored):
                    yield number, pa.Table.from_batches([batch])

        def text_of(error: Exception) -> str:
            text = str(error)
            if (match := re.search(r"Row #(\d+)", text)) is not None:
                line = int(match[1]) + sum(self._data(n).count(b"\n") for n in range(number))
                text = f"{text[: match.start()]}line {line}{text[match.end() :]}"
            return text

        completed = self._file.completed(blocks(), columns, self.first_row)
        yield from self._file.checked(completed, text_of)

    def first_row(self, number: int) -> int:
        """Return the number of rows before a block."""
        name = self.schema.names[0]
        counts: list[int] = [table.num_rows for _, table in self.read(range(number), [name])]
        total: int = sum(counts)
        return total

    def mark(self) -> int:
        """Return a checksum of name and size."""
        return _mark(self.path, [self._size])

    def checksum(self) -> int:
        """Return the checksum of the file."""
        return self._file.checksum()

    def _data(self, number: int) -> bytes:
        """Return the text of a block."""
        if self.is_whole:
            with self._stream() as stream:
                data: bytes = stream.read()
                return data
        fragment = self._file.fragment
        with fragment.filesystem.open_input_file(fragment.path) as opened:
            return _lines(opened, number, self._size)

    def _parse(self, number: int, columns: Sequence[str]) -> Iterator[Any]:
        """Yield the rows of a block as Arrow batches."""
        reading, conversion = copy(self._reading), copy(self._conversion)
        reading.encoding = self._file.encoding
        if self._in_parts:
            stream = self._stream()
        else:
            data = self._data(number)
            if not data.strip():
                return
            stream = pa.BufferReader(data)
            reading.use_threads, reading.block_size = False, len(data)
        if number:  # the first block has the names
            reading.skip_rows = reading.skip_rows_after_names = 0
            reading.autogenerate_column_names, reading.column_names = False, self._names
        types = {name: self.schema.field(name).type for name in columns}
        conversion.column_types = {**conversion.column_types, **types}
        conversion.include_columns = columns
        with stream:
            yield from csv.open_csv(stream, reading, self._format.parse_options, conversion)


@final
class TableSource:
    """A table in memory, or a memory-mapped `Dataset` of Hugging Face; units are slices.

    Args:
        data: As for `recsys.datasets.memory.table_of`.
    """

    def __init__(self, data: Any) -> None:
        self.path = f"The {type(data).__name__}"
        self._slice: Callable[[int, int], Any]
        if hasattr(data, "with_format") and hasattr(data, "num_rows"):  # Hugging Face
            arrow = data.with_format("arrow")
            self._num_rows = data.num_rows
            self.schema = arrow[:0].schema
            self._slice = _HuggingFaceSlices(arrow)
        else:
            table = table_of(data)
            self._num_rows, self.schema, self._slice = table.num_rows, table.schema, table.slice
        self._step: int = max(1, min(_SLICE_ROWS, -(-self._num_rows // _NUM_SLICES)))
        starts = range(0, self._num_rows, self._step)
        self.sizes = [
            (i, min(self._step, self._num_rows - start)) for i, start in enumerate(starts)
        ]

    def read(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the number and the rows of each slice."""
        for number in numbers:
            rows = self._slice(number * self._step, self._step)
            yield number, rows.select([name for name in columns if name in self.schema.names])

    def first_row(self, number: int) -> int:
        """Return the number of rows before a slice."""
        return number * self._step

    def mark(self) -> int:
        """Return a checksum of columns and size."""
        return _mark(",".join(self.schema.names), [self._num_rows])

    def checksum(self) -> int:
        """Return 0: the values of a table in memory are not compared."""
        return 0


@final
class _HuggingFaceSlices:
    def __init__(self, data: Any) -> None:
        self._data = data

    def __call__(self, start: int, count: int) -> Any:
        return self._data[start : start + count]


@final
class Part(NamedTuple):
    """Consecutive rows of data that are read from the beginning to the end."""

    table: Any
    """The rows, an Arrow table."""
    path: str
    """Path or URL of the file; empty for a table in memory."""
    first: int
    """Row in the file of the first row."""
    place: int = 0
    """Number of the first row that `Split` hashes: the row in the file; in a text file that is read
    in blocks, the block times 2^32 plus the row in the block."""
    rows: Any = None
    """[B] int64, rows in the file of chosen rows; None: consecutive rows from `first`."""

    def slice(self, start: int, count: int) -> Part:
        """Return at most `count` rows from `start`."""
        rows = None if self.rows is None else self.rows[start : start + count]
        table = self.table.slice(start, count)
        return Part(table, self.path, self.first + start, self.place + start, rows)

    def located(self, counted: int = 0) -> AbstractContextManager[None]:
        """Return a context that names the file, and the row in the file, in errors.

        Args:
            counted: Number of the first row in messages of errors.
        """

        def place_of(row: int) -> tuple[str, int]:
            is_chosen = self.rows is not None and 0 <= row - counted < len(self.rows)
            row = int(self.rows[row - counted]) if is_chosen else self.first + row - counted
            return self.path, row

        return located(place_of)


def read_parts(file: File, columns: Sequence[str], *, in_blocks: bool = False) -> Iterator[Part]:
    """Yield all rows of a file in parts, in bounded memory.

    Args:
        file: The file.
        columns: The columns to read.
        in_blocks: True to read text files in the blocks of readers, so that `Part.place` is the
            place of readers.

    Raises:
        ValueError: As for `Source.read`.
    """
    source, first, last, offset = source_of(file, in_parts=True), 0, 0, 0
    if in_blocks and isinstance(source, TextSource) and not source.is_whole:
        source = TextSource(file)
    for number, table in source.read([number for number, _ in source.sizes], columns):
        offset = offset if number == last else 0
        place = (number << 32) + offset if isinstance(source, TextSource) else first
        yield Part(table, file.path, first, place)
        first, last, offset = first + table.num_rows, number, offset + table.num_rows


def parts_of(
    data: Any,
    columns: Sequence[str],
    kinds: Mapping[str, str | None],
    optional: Sequence[str] = (),
) -> Iterator[Part]:
    """Yield parts of data that may be larger than memory.

    Args:
        data: A path, glob, folder or URL, or a list of them; a table as for `table_of`; parts; or
            an iterable of tables or parts.
        columns: The columns to read of files. Before their rows comes a part without rows, with
            the types of all columns.
        kinds: Columns of keys in files, as for `unify_types`.
        optional: Columns that may be absent, as for `unify_types`; tables are left as they are.

    Raises:
        TypeError: `data` is not one of these.
        KeyError: A table does not have a column.
        ValueError: A file is damaged, empty or of an unknown format.
    """
    tables: Iterable[Any] = [data]
    if isinstance(data, Part):
        yield data
        return
    if are_paths(data):
        for file in unify_types(files_of(data), columns, kinds, optional):
            yield Part(file.schema.empty_table(), file.path, 0)
            yield from read_parts(file, columns)
        return
    if isinstance(data, ds.Dataset):
        absent = {*optional} - {*data.schema.names}
        read = [name for name in columns if name not in absent]
        tables = chain([data.schema.empty_table()], data.to_batches(columns=read))
    elif hasattr(data, "with_format"):  # Hugging Face
        tables = data.with_format("arrow").iter(batch_size=_PART_ROWS)
    elif isinstance(data, Iterable) and not (isinstance(data, Mapping) or hasattr(data, "columns")):
        for part in data:
            yield from parts_of(part, columns, kinds, optional)
        return
    for table in tables:
        yield Part(table_of(table), "", 0)


def _lines(opened: Any, number: int, size: int) -> bytes:
    """Return the lines that start in a block."""
    start, stop = number * _BLOCK_BYTES, min((number + 1) * _BLOCK_BYTES, size)
    first = max(0, start - 1)  # with the byte before, which may be a newline
    opened.seek(first)
    data: bytes = opened.read(stop - first)
    if start:
        cut = data.find(b"\n")
        data = b"" if cut < 0 else data[cut + 1 :]
        if cut < 0 or first + cut + 1 >= stop:
            return b""  # one line fills the block, and starts before it
    pieces = [data]
    while stop < size and not pieces[-1].endswith(b"\n"):
        more = opened.read(min(1 << 16, size - stop))
        cut = more.find(b"\n")
        stop += len(more)
        pieces.append(more if cut < 0 else more[: cut + 1])
        if cut >= 0 or not more:
            break
    return b"".join(pieces)


def _is_plain_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _mark(name: str, sizes: Sequence[int]) -> int:
    return zlib.crc32(repr((file_name(name), list(sizes))).encode())
