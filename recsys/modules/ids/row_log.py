"""Rows on the disk: the log of the rows that the ids of a table lost, and its folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import re
import shutil
import uuid
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, final
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys.base.machine import machine_name
from recsys.kernels.hashed import build, native
from recsys.kernels.hashed.id_numbers import IdNumbers

__all__ = [
    "SEGMENT_BYTES",
    "RecordField",
    "RowLog",
    "SavedSegment",
    "record_bytes",
    "split_records",
]

SEGMENT_BYTES: Final = 64 << 20
"""Bytes of a file of a log; the last file has fewer."""

_ID_BYTES = 8
_THREADS = 8
_READS_OF_A_THREAD = 256  # fewer are not worth a thread


@final
class RecordField(NamedTuple):
    """A part of a record: the weights of a row, or a state of its optimizer."""

    name: str
    dtype: torch.dtype
    values: int
    """Values of a row."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return self.values * self.dtype.itemsize


@final
class SavedSegment(NamedTuple):
    """A file of a log in a checkpoint."""

    name: str
    records: int
    crc: int
    is_live: NDArray[np.bool_]
    """bool [records], whether each is valid."""


@final
@dataclass(slots=True)
class _Segment:
    """A file of a log; it is written no more once it has all its records."""

    path: Path
    is_live: NDArray[np.bool_]
    crcs: NDArray[np.uint32]
    records: int
    live: int
    crc: int
    is_synced: bool


@final
class RowLog:
    """Records of ids in files that are only appended to: the values of rows that ids lose.

    The newest record of an id is valid, until it is taken. The valid records of a full file are
    copied to the end, and the file is deleted, when they are less than half of it. So the files
    have at most twice the bytes of the valid records, and two files more. Memory: `IdNumbers`, and
    five bytes per record: a flag and a CRC, by which a changed record is an error.

    The files are in a folder of their own under `parent`, of another name for each log. The folder
    is deleted with the log, and at the end of the process. A process that is killed leaves it, and
    the next log that is made under `parent` on the same machine deletes it.

    Args:
        parent: Folder for the folder of the log; created if missing.
        name: Name of the table, for the folder's name and messages.
        fields: Fields of a record.
        segment_bytes: Bytes of a file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = RowLog(folder, "t", [RecordField("weight", torch.uint8, 2)])
        ...     log.append(torch.tensor([-5, 7]), torch.tensor([[1, 2], [3, 4]]).byte())
        ...     print(log.has(torch.tensor([7, 8])).tolist())
        ...     print(log.read(torch.tensor([7])).tolist(), len(log))
        [True, False]
        [[3, 4]] 2
    """

    def __init__(
        self,
        parent: str | Path,
        name: str,
        fields: Sequence[RecordField],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.name, self.parent, self.fields = name, Path(parent), tuple(fields)
        self._size = _ID_BYTES + record_bytes(fields)
        self._per_segment = max(segment_bytes // self._size, 1)
        self._numbers = IdNumbers()
        self._segments: dict[int, _Segment] = {}
        self._next = 0  # number of the next segment
        self._error: OSError | None = None
        try:
            self.folder, lock = _new_folder(self.parent, name)
        except OSError as error:
            self._fail("create its folder", error)
        # arguments without a reference to the log, which would keep it alive
        self._end = weakref.finalize(self, _remove, self.folder, lock, os.getpid())

    def __len__(self) -> int:
        return len(self._numbers)

    def check_empty(self, action: str) -> None:
        """Raise an error if the log has rows.

        Args:
            action: The subject of the message, which does not include rows on the disk.
        """
        if len(self):
            raise ValueError(
                f"{action} does not include rows on the disk; received table '{self.name}' with "
                f"{len(self)} rows in the folder of HashedIds.overflow. Call save_checkpoint, "
                "which saves them, too."
            )

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            f"A model with rows of table '{self.name}' in the folder of HashedIds.overflow cannot "
            "be copied or pickled; received one. Call save_checkpoint, and load_checkpoint into "
            "another model."
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(segment.records for segment in self._segments.values()) * self._size

    def has(self, ids: Tensor) -> Tensor:
        """Return whether each id has a record; bool [N]."""
        return self._numbers.find(ids) >= 0

    def append(self, ids: Tensor, records: Tensor) -> None:
        """Add records.

        Args:
            ids: int64 [N], distinct. Earlier records of these ids are valid no more.
            records: uint8 [N, bytes of the fields].

        Raises:
            OSError: The disk is full or cannot be written, now or earlier: the log misses rows.
        """
        self._check()
        if ids.numel():
            # a record begins with its id, so that `_compact` knows the ids of a file
            id_bytes = ids.contiguous().view(torch.uint8).view(-1, _ID_BYTES)
            self._write(ids, torch.cat([id_bytes, records], 1).numpy())

    def read(self, ids: Tensor) -> Tensor:
        """Return the records of ids, read by several threads; uint8 [N, bytes of the fields].

        Args:
            ids: int64 [N], which all have a record.

        Raises:
            OSError: The disk cannot be read, or a file was changed.
        """
        self._check()
        return self._read(self._numbers.find(ids).numpy())

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the records of ids, and remove them.

        Args:
            ids: int64 [N], distinct.

        Returns:
            bool [N], whether each id has a record, and these records, uint8
            [K, bytes of the fields].

        Raises:
            OSError: The disk cannot be read or written, or a file was changed.
        """
        self._check()
        numbers = self._numbers.take(ids)
        is_known = numbers >= 0
        numbers = numbers[is_known]
        # before `_invalidate`, which may delete the files of these records
        records = self._read(numbers.numpy())
        self._invalidate(numbers.numpy())
        return is_known, records

    def remove(self, ids: Tensor) -> int:
        """Remove the records of ids, also from the files; return their number.

        Args:
            ids: int64 [N], distinct.

        Raises:
            OSError: The disk cannot be read or written.
        """
        self._check()
        numbers = self._numbers.take(ids).numpy()
        numbers = numbers[numbers >= 0]
        self._invalidate(numbers)
        for segment in np.unique(numbers // self._per_segment).tolist():
            if segment in self._segments:
                self._compact(segment)
        return len(numbers)

    def clear(self) -> None:
        """Remove all records and files."""
        for segment in self._segments.values():
            segment.path.unlink(missing_ok=True)
        self._segments.clear()
        self._numbers = IdNumbers()
        self._error = None

    def save(self, folder: Path, prefix: str) -> list[SavedSegment]:
        """Put the files with valid records into a checkpoint, by links where the disk allows it.

        The last file is copied, as it is written further. All are flushed to the disk.

        Args:
            folder: Folder of the checkpoint.
            prefix: Start of the names of the files.

        Raises:
            OSError: A file cannot be written, or an earlier row could not.
        """
        self._check()
        saved = []
        for number, segment in self._segments.items():
            if not segment.live:
                continue
            target = folder / f"{prefix}-{number}.rows"
            # a full file never changes, and its deletion leaves the link:
            # docs/decisions/hashed_ids.md, "Rows on the disk: a log that gives them back"
            if segment.records < self._per_segment or not _link(segment.path, target):
                shutil.copyfile(segment.path, target)
                _sync(target)
            elif not segment.is_synced:
                _sync(target)
                segment.is_synced = True
            # a copy, since `_invalidate` writes to this array
            is_live = segment.is_live[: segment.records].copy()
            saved.append(SavedSegment(target.name, segment.records, segment.crc, is_live))
        return saved

    def close(self) -> None:
        """Delete the files; the log must not be used any more."""
        self._end()

    # -- files -------------------------------------------------------------------------------------

    def _read(self, numbers: NDArray[np.int64]) -> Tensor:
        """Return the records of these numbers."""
        order = np.argsort(numbers)
        records = np.empty((len(numbers), self._size), dtype=np.uint8)
        crcs = np.empty(len(numbers), dtype=np.uint32)
        segments, rows = np.divmod(numbers, self._per_segment)
        for number in np.unique(segments).tolist():
            is_here = segments == number
            crcs[is_here] = self._segments[number].crcs[rows[is_here]]
        try:
            # `reshape` returns a view, so it fills `records`
            self._read_sorted(numbers[order], records.reshape(-1))
        except OSError as error:
            self._fail("read it", error)
        self._check_records(records, crcs[order])
        in_order = torch.empty(records.shape, dtype=torch.uint8)
        in_order[torch.from_numpy(order)] = torch.from_numpy(records)
        return in_order[:, _ID_BYTES:]

    def _check_records(self, records: NDArray[np.uint8], crcs: NDArray[np.uint32]) -> None:
        """Raise an error if a record is not as it was written."""
        is_changed = _crcs_of(records) != crcs
        if is_changed.any():
            damaged = torch.from_numpy(records[is_changed])
            reason = f"the record of id {int(_ids_of(damaged)[0])} was changed on the disk"
            self._fail("read it", OSError(errno.EIO, reason))

    def _invalidate(self, numbers: NDArray[np.int64]) -> None:
        """Mark records as invalid, and compact files in which less than half are valid."""
        of_segments = numbers // self._per_segment
        for number in np.unique(of_segments).tolist():
            segment_numbers = numbers[of_segments == number] % self._per_segment
            segment = self._segments[number]
            segment.is_live[segment_numbers] = False
            segment.live -= len(segment_numbers)
            if 2 * segment.live < segment.records == self._per_segment:
                self._compact(number)

    def _write(self, ids: Tensor, records: NDArray[np.uint8], *, is_copy: bool = False) -> None:
        """Append records, which begin with their ids, or copies from a file that was removed."""
        first = 0
        while first < len(records):
            # again for each part: `_invalidate` below may compact a file and append to the last one
            number, segment = self._last()
            part = records[first : first + self._per_segment - segment.records]
            try:
                _append(segment.path, part, segment.records * self._size)
            except OSError as error:
                self._fail("write a row to it", error)
            start, segment.records = segment.records, segment.records + len(part)
            segment.is_live[start : segment.records] = True
            segment.crcs[start : segment.records] = _crcs_of(part)
            segment.live += len(part)
            segment.crc = crc32(part.data, segment.crc)
            at = number * self._per_segment + start
            part_rows = slice(first, first + len(part))
            old = self._numbers.put(ids[part_rows], torch.arange(at, at + len(part)))
            first += len(part)
            # the old places of copies are in the file that `_compact` has removed
            if not is_copy and bool((old >= 0).any()):
                self._invalidate(old[old >= 0].numpy())

    def _last(self) -> tuple[int, _Segment]:
        """Return the segment that is written to, and its number."""
        number = self._next - 1
        segment = self._segments.get(number)
        if segment is None or segment.records == self._per_segment:
            number, self._next = self._next, self._next + 1
            is_live = np.zeros(self._per_segment, dtype=np.bool_)
            crcs = np.zeros(self._per_segment, dtype=np.uint32)
            path = self.folder / f"{number}.rows"
            segment = self._segments[number] = _Segment(path, is_live, crcs, 0, 0, 0, False)
        return number, segment

    def _compact(self, number: int) -> None:
        """Copy the valid records of a segment to the end, and delete it."""
        segment = self._segments.pop(number)
        if segment.live:
            is_live = segment.is_live[: segment.records]
            try:
                content = np.fromfile(segment.path, np.uint8)
                records = content.reshape(segment.records, self._size)[is_live]
            except (OSError, ValueError) as error:  # of `reshape`: the file was truncated
                self._fail("read it", OSError(errno.EIO, str(error)))
            self._check_records(records, segment.crcs[: segment.records][is_live])
            self._write(_ids_of(torch.from_numpy(records)), records, is_copy=True)
        segment.path.unlink(missing_ok=True)

    def _read_sorted(self, numbers: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Read the records of ascending numbers; consecutive ones at once."""
        if not len(numbers):
            return
        segments, positions = np.divmod(numbers, self._per_segment)
        is_first = np.ones(len(numbers), dtype=np.bool_)
        # consecutive numbers may be in two files
        is_first[1:] = (np.diff(numbers) != 1) | (np.diff(segments) != 0)
        starts = np.flatnonzero(is_first)
        sizes = np.diff(starts, append=len(numbers))
        parts = np.stack([positions[starts], sizes, starts], 1) * self._size
        library = build.library()
        with contextlib.ExitStack() as files:
            tasks = []
            for number in np.unique(segments).tolist():
                file = os.open(self._segments[number].path, os.O_RDONLY)
                files.callback(os.close, file)
                segment_parts = parts[segments[starts] == number]
                for first in range(0, len(segment_parts), _READS_OF_A_THREAD):
                    tasks.append((file, segment_parts[first : first + _READS_OF_A_THREAD]))

            def read(task: tuple[int, NDArray[np.int64]]) -> None:
                native.read_parts(library, *task, out)

            if len(tasks) > 1:
                reads = [_threads().submit(read, task) for task in tasks]
                wait(reads)  # before the files are closed, also after an error
                for done in reads:
                    done.result()
            else:
                read(tasks[0])

    def _check(self) -> None:
        if self._error is not None:
            self._fail("use it", self._error)

    def _fail(self, action: str, error: OSError) -> NoReturn:
        """Raise the error of a log that misses rows, now and in each later call."""
        if self._error is None:
            self._error = error
        raise OSError(
            error.errno,
            f"Table '{self.name}' has its overflow in {str(self.parent)!r}, and cannot {action}: "
            f"{error.strerror or error}. Free disk space or choose another folder, and continue "
            "from the last checkpoint: rows may be missing now",
        ) from error


def record_bytes(fields: Sequence[RecordField]) -> int:
    """Return the bytes of a record, without its id."""
    return sum(field.num_bytes for field in fields)


def split_records(records: Tensor, fields: Sequence[RecordField]) -> dict[str, Tensor]:
    """Return the values of each field; [N, values].

    Args:
        records: uint8 [N, bytes of the fields].
        fields: The fields.
    """
    parts = records.split([field.num_bytes for field in fields], 1)
    return {
        field.name: part.clone(memory_format=torch.contiguous_format).view(field.dtype)
        for field, part in zip(fields, parts, strict=True)
    }


def _crcs_of(records: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return np.fromiter(map(crc32, records), np.uint32, len(records))


def _ids_of(records: Tensor) -> Tensor:
    id_bytes = records[:, :_ID_BYTES].clone(memory_format=torch.contiguous_format)
    return id_bytes.view(torch.int64)[:, 0]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="overflow")


def _append(path: Path, records: NDArray[np.uint8], offset: int) -> None:
    """Write records at the end of a file; on an error, the file may have a part of them."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        data = np.ascontiguousarray(records).reshape(-1).data
        while len(data):
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(file)


def _link(source: Path, target: Path) -> bool:
    """Link a file; return False where that is impossible, such as on another file system."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            return False
        raise
    return True


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# -- the folder of a log ---------------------------------------------------------------------------


def _new_folder(parent: Path, name: str) -> tuple[Path, int]:
    """Create the folder of a log, delete folders of dead processes; return it and its lock."""
    parent.mkdir(parents=True, exist_ok=True)
    # in ASCII, as a file system limits the bytes of a name
    host = re.sub(r"[^\w-]", "_", machine_name(), flags=re.ASCII)
    _remove_leftovers(parent, host)
    table = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:80]
    while True:
        folder = parent / f"{table}.{host}.{uuid.uuid4().hex[:12]}.overflow"
        lock = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with contextlib.suppress(BlockingIOError):  # another process takes it for a leftover
            _take_lock(lock)
            # 0 links: another process deleted the file before it was locked
            if os.fstat(lock).st_nlink:
                folder.mkdir()
                return folder, lock
        os.close(lock)


def _remove_leftovers(parent: Path, host: str) -> None:
    """Delete the folders of processes of this machine that have ended without doing so.

    Locks of other machines are not visible on every file system, so theirs are kept.
    """
    for path in parent.glob(f"*.{host}.*.overflow.lock"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # the lock file is deleted last: without it, no later log would find the folder
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink()
            finally:
                os.close(lock)


def _take_lock(lock: int) -> None:
    """Lock a file until it is closed or the process ends.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks: leftovers are not deleted there
        pass


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _remove(folder: Path, lock: int, process: int) -> None:
    """Delete the folder of a log, in the process that made it."""
    if os.getpid() != process:  # a fork has a copy of the log
        return
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
    os.close(lock)
