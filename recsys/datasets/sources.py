"""Tables that are read in units: row groups of Parquet, blocks of lines, slices in memory."""

from __future__ import annotations

import posixpath
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv, fs

from recsys.datasets.files import File, conversion_of, is_text
from recsys.datasets.memory import table_of
from recsys.datasets.tables import is_utf8

__all__ = ["ParquetSource", "Source", "TableSource", "TextSource", "Unit", "source_of"]

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

    def read(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[Any]:
        """Yield an Arrow table for each unit.

        Raises:
            ValueError: the file is damaged, or a value does not have the type of its column.
        """

    def first_row(self, number: int) -> int:
        """Return the number of rows before a unit. Blocks of text are counted by reading."""

    def mark(self) -> int:
        """Return a checksum of name and size, which does not depend on the folder."""

    def checksum(self) -> int:
        """Return `File.checksum` of a file; 0 of a table in memory."""


def source_of(file: File, rows: Any = None) -> Source:
    """Return the source of a file.

    Args:
        file: the file.
        rows: a filter of `pyarrow.dataset`. Row groups whose statistics exclude it are left out;
            rows are not filtered.
    """
    return TextSource(file) if is_text(file) else ParquetSource(file, rows)


@final
class ParquetSource:
    """A Parquet file; units are its row groups.

    Args:
        file: the file.
        rows: a filter, as for `source_of`.
    """

    def __init__(self, file: File, rows: Any = None) -> None:
        self.path, self.schema, self._file = file.path, file.schema, file
        fragment = file.fragment
        self._metadata = fragment.metadata
        counts = [
            self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)
        ]
        self._starts = [0]
        for count in counts:
            self._starts.append(self._starts[-1] + count)
        kept = fragment if rows is None else fragment.subset(rows, schema=file.schema)
        self.sizes = [(group.id, counts[group.id]) for group in kept.row_groups]
        self.sizes = [size for size in self.sizes if size[1]]

    def read(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[Any]:
        """Yield an Arrow table for each row group."""
        yield from self._file.checked(self._row_groups(numbers, columns))

    def _row_groups(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[Any]:
        system = self._file.fragment.filesystem
        is_remote = not isinstance(system, fs.LocalFileSystem)
        texts = [name for name in columns if _is_plain_text(self.schema.field(name).type)]
        with system.open_input_file(self._file.fragment.path) as opened:
            file = pq.ParquetFile(
                opened, metadata=self._metadata, read_dictionary=texts, pre_buffer=is_remote
            )
            for number in numbers:
                table = file.read_row_group(number, columns=list(columns), use_threads=False)
                yield table.select(columns)

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

    A block has the lines that start in its 4 MiB. Compressed files, and files whose values may
    contain newlines, are one unit.

    Args:
        file: the file.
    """

    def __init__(self, file: File) -> None:
        self.path, self.schema, self._file = file.path, file.schema, file
        self._format = file.fragment.format
        options = self._format.default_fragment_scan_options
        self._reading, self._conversion = options.read_options, options.convert_options
        system, path = file.fragment.filesystem, file.fragment.path
        self._size = system.get_file_info(path).size
        compressed = fs_compression(path)
        self._is_whole = (
            bool(compressed)
            or self._format.parse_options.newlines_in_values
            or not is_utf8(file.encoding)
        )
        count = 1 if self._is_whole else max(1, -(-self._size // _BLOCK_BYTES))
        with system.open_input_stream(path, compression="detect") as stream:
            sample = stream.read(1 << 16)
        rows = max(1, self._size * sample.count(b"\n") // (max(1, len(sample)) * count))
        self.sizes = [(i, rows) for i in range(count)]

    def read(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[Any]:
        """Yield an Arrow table for each block."""
        number = 0

        def blocks() -> Iterator[Any]:
            nonlocal number
            for number in numbers:
                yield self._parse(number, columns)

        def text_of(error: Exception) -> str:
            text = str(error)
            if (found := re.search(r"Row #(\d+)", text)) is not None:
                line = self._lines_before(number) + int(found[1])
                text = f"{text[: found.start()]}line {line}{text[found.end() :]}"
            return text

        yield from self._file.checked(blocks(), text_of)

    def first_row(self, number: int) -> int:
        """Return the number of rows before a block."""
        name = self.schema.names[0]
        counts: list[int] = [table.num_rows for table in self.read(range(number), [name])]
        total: int = sum(counts)
        return total

    def mark(self) -> int:
        """Return a checksum of name and size."""
        return _mark(self.path, [self._size])

    def checksum(self) -> int:
        """Return the checksum of the file."""
        return self._file.checksum()

    def _lines_before(self, number: int) -> int:
        system, path = self._file.fragment.filesystem, self._file.fragment.path
        if number == 0:
            return 0
        with system.open_input_file(path) as opened:
            return sum(_lines(opened, n, self._size).count(b"\n") for n in range(number))

    def _parse(self, number: int, columns: Sequence[str]) -> Any:
        system, path = self._file.fragment.filesystem, self._file.fragment.path
        if self._is_whole:
            with system.open_input_stream(path, compression="detect") as stream:
                data = stream.read()
        else:
            with system.open_input_file(path) as opened:
                data = _lines(opened, number, self._size)
        is_first = number == 0
        reading = csv.ReadOptions(
            use_threads=False,
            block_size=max(1, len(data)),
            skip_rows=self._reading.skip_rows if is_first else 0,
            skip_rows_after_names=self._reading.skip_rows_after_names if is_first else 0,
            column_names=self._reading.column_names if is_first else self.schema.names,
            autogenerate_column_names=is_first and self._reading.autogenerate_column_names,
            encoding=self._file.encoding,
        )
        if not data.strip():
            return pa.schema([self.schema.field(name) for name in columns]).empty_table()
        table = csv.read_csv(
            pa.BufferReader(data),
            read_options=reading,
            parse_options=self._format.parse_options,
            convert_options=conversion_of(self._conversion, self.schema, columns),
        )
        return table.combine_chunks()


@final
class TableSource:
    """A table in memory, or a memory-mapped `Dataset` of Hugging Face; units are slices.

    Args:
        data: as for `recsys.datasets.memory.table_of`.
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

    def read(self, numbers: Sequence[int], columns: Sequence[str]) -> Iterator[Any]:
        """Yield an Arrow table for each slice."""
        for number in numbers:
            table = self._slice(number * self._step, self._step)
            yield table.select(columns)

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


def fs_compression(path: str) -> str | None:
    """Return the compression of a text file, by its suffix."""
    suffix = posixpath.splitext(path)[1]
    return {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}.get(suffix)


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
    base = posixpath.basename(name.replace("\\", "/"))
    return zlib.crc32(repr((base, list(sizes))).encode())
