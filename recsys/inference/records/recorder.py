"""`Recorder`: the thread that writes the record of a `Predictor`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.base.logs import logger
from recsys.inference.packages.columns import names_of
from recsys.inference.records.rows import (
    PREDICTION,
    RECORD,
    SHADOW,
    copied,
    joined_requests,
    outputs_of,
    request_columns,
)
from recsys.inference.records.settings import RecordCounts, Recording

__all__ = ["METADATA", "Recorder", "check_recorded"]

METADATA: Final = b"recsys.record"
"""Key of the counts in the metadata of a file."""
_WAKE_S: Final = 0.5
_REST: Final = 3.0
"""Seconds of rest for each second of work, until the end."""
_CHUNK_ROWS: Final = 1024
"""Rows that are converted, and scored by the shadow, at once: a few milliseconds."""


Served: TypeAlias = tuple[str, Mapping[str, Any], int]
"""The version that answers, its manifest, and the number of its last delta."""


class _Shadow(Protocol):
    """A second `Predictor`."""

    def __call__(self, request: Any) -> Mapping[str, Any]:
        """Score a request."""

    def close(self) -> None:
        """Free the memory."""


@final
class _Item(NamedTuple):
    request: Any
    response: Mapping[str, Any]
    served: Served
    seconds: float
    rows: int


@final
class Recorder:
    """Writer of a sample of requests and answers.

    Args:
        settings: The settings.
        shadow: The second version, or None; the recorder closes it.

    Attributes:
        settings: The settings.

    Raises:
        OSError: The folder cannot be created.
    """

    def __init__(self, settings: Recording, shadow: _Shadow | None) -> None:
        self.settings = settings
        Path(settings.folder).mkdir(parents=True, exist_ok=True)
        self._state = _State(settings, shadow)
        thread = threading.Thread(target=self._state.run, name="record", daemon=True)
        thread.start()
        # also at the end of the process, without a reference to this object
        self._end = weakref.finalize(self, _end, self._state, thread)

    def add(self, request: Any, response: Mapping[str, Any], served: Served) -> None:
        """Take a request and its answer, if they are in the sample; it never waits or raises."""
        with contextlib.suppress(Exception):
            self._state.add(request, response, served)

    def counts(self) -> RecordCounts:
        """Return the numbers of rows so far."""
        return self._state.counts()

    def close(self) -> None:
        """Write the rows that wait, and end the thread."""
        self._end()


def check_recorded(settings: Recording, manifest: Mapping[str, Any]) -> None:
    """Check that a version can be recorded.

    Args:
        settings: The settings.
        manifest: The manifest of the version.

    Raises:
        ValueError: A column of its requests has a name of the record.
    """
    names = names_of(manifest["columns"]) + [entry["name"] for entry in manifest["inputs"]]
    if taken := [n for n in names if n.startswith((RECORD, PREDICTION, SHADOW))]:
        raise ValueError(
            f"A recorded package must have no columns with the prefixes {RECORD!r}, "
            f"{PREDICTION!r} and {SHADOW!r}; received {taken}. Rename them, or leave out record."
        )
    if settings.key is not None and settings.key in names:
        raise ValueError(
            "Recording.key must be a column that the model does not read; received "
            f"{settings.key!r}. Send a key in a column of its own."
        )


def _end(state: _State, thread: threading.Thread) -> None:
    state.end.set()
    thread.join()


@final
class _State:
    """State of a recorder, shared with its thread.

    Args:
        settings: The settings.
        shadow: The second version.
    """

    def __init__(self, settings: Recording, shadow: _Shadow | None) -> None:
        self.settings, self._shadow = settings, shadow
        self._folder = Path(settings.folder)
        self.end = threading.Event()
        self._lock = threading.Lock()
        self._items: deque[_Item] = deque()
        self._tables: list[Any] = []  # of the next file
        self._since = 0.0
        self._written = self._waiting = self._dropped = self._failed = self._shadow_failed = 0
        self._num_files = 0
        self._random = random.Random()

    def add(self, request: Any, response: Mapping[str, Any], served: Served) -> None:
        if self._random.random() >= self.settings.sample:
            return
        rows = len(next(iter(response.values())))
        with self._lock:
            if self._waiting + rows > self.settings.max_waiting_rows or self.end.is_set():
                self._dropped += rows
                return
            self._waiting += rows
        try:
            item = _Item(copied(request), copied(response), served, time.time(), rows)
        except Exception:
            self._fail(rows, "copy a request")
            return
        self._items.append(item)

    def counts(self) -> RecordCounts:
        with self._lock:
            return RecordCounts(
                self._written, self._waiting, self._dropped, self._failed, self._shadow_failed
            )

    def run(self) -> None:
        """Convert and write rows until the end."""
        while True:
            is_last = self.end.wait(_WAKE_S)  # before the queue is read
            while self._items:
                self._convert(self._next_chunk())
                if sum(len(table) for table in self._tables) >= self.settings.file_rows:
                    self._write()
            is_due = self._tables and time.time() - self._since >= self.settings.file_seconds
            if is_due or is_last:
                self._write()
            if is_last:
                if self._shadow is not None:
                    self._shadow.close()
                return

    def _next_chunk(self) -> list[_Item]:
        """Take requests of one version, which are converted together: it costs much less."""
        chunk, rows = [self._items.popleft()], 0
        while self._items and rows < _CHUNK_ROWS and self._items[0].served == chunk[0].served:
            chunk.append(self._items.popleft())
            rows += chunk[-1].rows
        return chunk

    def _convert(self, chunk: list[_Item]) -> None:
        begin = time.perf_counter()
        try:
            table = self._table(chunk)
        except Exception:
            if len(chunk) == 1:
                self._fail(chunk[0].rows, "convert a request")
                return
            table = None
        # the interpreter runs one thread at a time: most of the time belongs to the requests
        self.end.wait(_REST * (time.perf_counter() - begin))
        if table is None:
            half = len(chunk) // 2
            self._convert(chunk[:half])
            self._convert(chunk[half:])
            return
        if not self._tables:
            self._since = time.time()
        self._tables.append(table)

    def _table(self, chunk: list[_Item]) -> Any:
        """Return the rows of requests."""
        key, (version, manifest, delta) = self.settings.key, chunk[0].served
        names = [*names_of(manifest["columns"]), *([] if key is None else [key])]
        request = joined_requests([item.request for item in chunk])
        columns = request_columns(manifest, names, request)
        counts = [item.rows for item in chunk]
        num_rows = sum(counts)
        times = np.array([round(item.seconds * 1e6) for item in chunk]).repeat(counts)
        of_record = {
            "time": pa.array(times, pa.timestamp("us", "UTC")),
            "version": pa.repeat(pa.scalar(version, pa.large_string()), num_rows),
            "delta": pa.repeat(pa.scalar(delta, pa.int64()), num_rows),
        }
        if key is not None:
            of_record["key"] = columns.pop(key, pa.nulls(num_rows))
        responses = [item.response for item in chunk]
        outputs = {
            name: np.concatenate([response[name] for response in responses])
            for name in responses[0]
        }
        columns |= outputs_of(PREDICTION, outputs)
        if self._shadow is not None:
            shadow = self.settings.shadow
            of_record["shadow"] = pa.repeat(pa.scalar(shadow, pa.large_string()), num_rows)
            columns |= self._shadow_columns(self._shadow, request, chunk)
        return pa.table(columns | {f"{RECORD}{name}": v for name, v in of_record.items()})

    def _shadow_columns(self, shadow: _Shadow, request: Any, chunk: list[_Item]) -> dict[str, Any]:
        """Return the predictions of the shadow; none if it cannot score the rows.

        Raises:
            ValueError: It cannot score some of several requests.
        """
        if isinstance(request, dict):
            request = {name: v for name, v in request.items() if name != self.settings.key}
        try:
            return outputs_of(SHADOW, shadow(request))
        except Exception as error:
            if len(chunk) > 1:
                raise ValueError("one of several requests") from error
            with self._lock:
                is_first = not self._shadow_failed
                self._shadow_failed += chunk[0].rows
            if is_first:
                logger.warning(
                    "The shadow %s cannot score a request: %s. Further errors are only counted.",
                    self.settings.shadow,
                    error,
                )
            return {}

    def _write(self) -> None:
        """Write the rows that were converted, in one file for each type of columns."""
        tables, self._tables = self._tables, []
        for table in _joined(tables):
            self._num_files += 1
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            name = f"{stamp}-{os.getpid()}-{secrets.token_hex(4)}-{self._num_files:06}.parquet"
            part = self._folder / f".part-{name}"
            counts = self.counts()._asdict() | {"sample": self.settings.sample}
            try:
                rows = table.replace_schema_metadata({METADATA: json.dumps(counts)})
                with part.open("xb") as file:
                    pq.write_table(rows, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, self._folder / name)
            except Exception:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
                self._fail(len(table), "write a file")
                continue
            with self._lock:
                self._written += len(table)
                self._waiting -= len(table)

    def _fail(self, rows: int, action: str) -> None:
        """Count rows that are lost, and log the first error; runs in an `except`."""
        with self._lock:
            is_first = not self._failed
            self._failed += rows
            self._waiting -= rows
        if is_first:
            logger.warning(
                "The record in %s cannot %s. Further errors are only counted.",
                self._folder,
                action,
                exc_info=True,
            )


def _joined(tables: list[Any]) -> list[Any]:
    """Return the rows as one table, or as several if their types differ."""
    if not tables:
        return []
    try:
        return [pa.concat_tables(tables, promote_options="permissive")]
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        by_schema: dict[str, list[Any]] = {}
        for table in tables:
            by_schema.setdefault(str(table.schema), []).append(table)
        return [pa.concat_tables(group) for group in by_schema.values()]
