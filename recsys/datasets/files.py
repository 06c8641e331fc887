"""A file of a table: its rows, and whether it has changed since it was found."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from recsys.base.arguments import MissingKeyError

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
    """Its columns, as an Arrow schema."""
    encoding: str
    """Encoding of a text file, which the fragment does not keep."""
    version: tuple[int, ...]
    """Size, time and inode of the file as it was found, as `version_of` returns them."""

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
