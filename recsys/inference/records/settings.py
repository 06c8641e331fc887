"""Settings of the record of a `Predictor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

from recsys.base.arguments import finite, path_of, whole
from recsys.base.checked import check_fields

__all__ = ["RecordCounts", "Recording"]


@final
@dataclass(frozen=True, kw_only=True)
class Recording:
    """Settings of the record of requests and answers of a `Predictor`.

    A sample of the requests with an answer is copied, and a thread writes their rows as Parquet.
    Requests do not wait for the thread: while `max_waiting_rows` rows wait, further ones are
    dropped and counted. A file appears when it is whole; a process that is killed loses the rows
    that have no file yet. A forked process has no such thread: create the `Predictor` in each.

    The columns of a file: the raw columns of the request, or its ids as lists by feature;
    `prediction_NAME` for each output NAME; `record_time`, UTC; `record_version`, the folder of the
    version; `record_delta`, the number of its last delta; and `record_key`. With a shadow also
    `shadow_NAME` and `record_shadow`.

    Raises:
        TypeError: A setting has another type.
        ValueError: A setting is out of its range.

    Example:
        >>> recording = Recording(folder="records/clicks", sample=0.01, key="request_id")
        >>> predictor = Predictor("models/clicks/7", record=recording)  # doctest: +SKIP
    """

    folder: str
    """Folder of the files, which several processes may share; created if missing."""
    sample: float = 1.0
    """Share of the requests, above 0 and at most 1."""
    file_rows: int = 100_000
    """Rows of a file, at least."""
    file_seconds: float = 300.0
    """Seconds after which rows get a file, also if they are fewer."""
    key: str | None = None
    """Column of the request with a key per row, text or whole number, by which labels are joined;
    the model does not read it. None: requests have no key."""
    shadow: str | None = None
    """Folder of a second version, which scores the recorded rows in the thread, after the answer;
    None: there is none. If it cannot score rows, its predictions are missing and counted."""
    max_waiting_rows: int = 100_000
    """Rows that may wait for the thread; further requests are dropped."""

    def __post_init__(self) -> None:
        check_fields(self)
        path_of("Recording.folder", self.folder)
        if not 0 < finite("Recording.sample", self.sample) <= 1:
            raise ValueError(
                f"Recording.sample must be above 0 and at most 1; received {self.sample}."
            )
        if finite("Recording.file_seconds", self.file_seconds) <= 0:
            raise ValueError(
                f"Recording.file_seconds must be positive; received {self.file_seconds}."
            )
        whole("Recording.file_rows", self.file_rows)
        whole("Recording.max_waiting_rows", self.max_waiting_rows)


@final
class RecordCounts(NamedTuple):
    """Numbers of rows of the sampled requests with an answer."""

    written: int
    """Rows in files."""
    waiting: int
    """Rows that have no file yet."""
    dropped: int
    """Rows that were not taken, as too many rows waited."""
    failed: int
    """Rows that could not be converted or written, such as on a full disk."""
    shadow_failed: int
    """Rows without a prediction of the shadow, which raised an error."""
