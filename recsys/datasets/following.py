"""`follow`: batches of files that appear while a job runs, or before it is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import pyarrow as pa
import torch.distributed as dist

from recsys.base.arguments import MissingKeyError, finite, repeated, wrong_type
from recsys.base.logs import logger
from recsys.base.step_stages import long_section
from recsys.datasets.partitions import file_name, partition_of, types_of
from recsys.datasets.readers import read_files
from recsys.datasets.selection import Spec
from recsys.datasets.table_reader import TableReader
from recsys.datasets.tables import Paths, names_of_files
from recsys.datasets.utils import Batch, rank_in_job

__all__ = ["Follower", "follow"]

_MOST_PENDING: Final = 64
_KEYS: Final = {"read", "round", "reader"}


class _Selection(NamedTuple):
    """The spec, where `spec_of` finds it."""

    spec: Spec


class _Place(NamedTuple):
    """The place at which the next batch begins."""

    number: int
    """Number of the round."""
    reader: TableReader | None
    """The reader of the round; None before the first batch of a job."""
    position: Mapping[str, int]
    """The position in its state."""


class _Round(NamedTuple):
    """Files that are read together."""

    names: list[str]
    files: dict[str, str]
    """The path of each name."""
    late: list[str]
    """The names in `names` whose partition was read before."""


@final
class Follower:
    """Batches of the files that were not read yet, made by `follow`.

    An iterator reads in rounds. A round has the unread files of one partition, the first that has
    any, so the partitions of a job that begins come one after the other. A file that appears in a
    partition that was read already is read in the next round; the logger `recsys` names it. When
    there is no such file, the iterator waits, or ends. The next iterator continues with files that
    have appeared since.

    `state_dict()` has the names of all files that were read, the files of the current round, and
    the position in it. A follower that loads it reads each further row exactly once, also if files
    appeared in between. Files are known by their names and their partition folders: a file that is
    written again under its name is not read again.

    All ranks read the rounds that rank 0 finds, and each takes its part of each batch, as a reader
    with `divide="batches"` does. So they take the same number of steps, and the number of ranks may
    change on resume.

    Args:
        paths: As for `follow`.
        spec: As for `follow`.
        batch_size: As for `follow`.
        until: As for `follow`.
        wait: As for `follow`.
        poll: As for `follow`.
        options: As for `follow`.

    Attributes:
        late_files: Names of the files that appeared in partitions that had been read.

    Example:
        >>> import tempfile
        >>> import pyarrow.parquet
        >>> from recsys.features import FeatureSpec, Ids
        >>> spec, folder = FeatureSpec([Ids("film", rows=9)]), tempfile.mkdtemp()
        >>> pyarrow.parquet.write_table(pyarrow.table({"film": [4, 5]}), f"{folder}/1.parquet")
        >>> follower = follow(folder, spec, batch_size=8)
        >>> [batch.sparse_features.values().tolist() for batch in follower]
        [[4, 5]]
        >>> pyarrow.parquet.write_table(pyarrow.table({"film": [6]}), f"{folder}/2.parquet")
        >>> [batch.sparse_features.values().tolist() for batch in follower]
        [[6]]
    """

    def __init__(
        self,
        paths: Paths,
        spec: Spec,
        batch_size: int,
        until: str | int | None,
        wait: float,
        poll: float,
        options: Mapping[str, Any],
    ) -> None:
        self.rank, self.world_size = rank_in_job(None, None)
        self.selection = _Selection(spec)
        self.late_files: list[str] = []
        self._paths, self._batch_size = paths, batch_size
        self._until = until
        self._wait, self._poll = finite("wait", wait), finite("poll", poll)
        if until is not None and not isinstance(until, str | int):
            wrong_type("until", "a value of the first partition column", until)
        if self._wait < 0 or self._poll <= 0:
            raise ValueError(
                f"wait must not be negative, and poll must be positive; received {wait} and {poll}."
            )
        if taken := sorted({"rank", "world_size", "divide"} & {*options}):
            raise ValueError(
                f"follow takes ranks from the process group and divides batches; received {taken}. "
                "Leave them out."
            )
        self._options = {**options, "rank": self.rank, "world_size": self.world_size}
        self._options["divide"] = "batches"
        # a group of its own, so that its messages do not meet messages of training
        self._group = dist.new_group(backend="gloo") if self.world_size > 1 else None
        self._rounds: list[list[str]] = []
        self._begin(_Place(0, None, {}))

    def _begin(self, place: _Place) -> None:
        self._next = place
        self._trail = deque([place], maxlen=_MOST_PENDING + 1)

    def state_dict(self, pending: int = 0) -> dict[str, Any]:
        """Return the files that were read, and the position after the last batch.

        Args:
            pending: As for `TableReader.state_dict`, also beyond the begin of a round.

        Returns:
            `read`, names of the files of earlier rounds; `round`, names of the current round; and
            `reader`, the state of its `TableReader`, or None before the first batch.

        Raises:
            ValueError: `pending` is out of its range.
        """
        if not 0 <= pending < len(self._trail):
            raise ValueError(
                f"pending must be from 0 to {len(self._trail) - 1}, the number of batches that the "
                f"follower knows; received {pending}."
            )
        place = self._trail[-1 - pending]
        read = [name for names in self._rounds[: place.number] for name in names]
        if place.reader is None:
            return {"read": read, "round": [], "reader": None}
        state = {**place.reader.state_dict(), **place.position}
        return {"read": read, "round": [*self._rounds[place.number]], "reader": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state with the next iterator.

        Args:
            state: Result of `state_dict`, of a follower with the same settings.

        Raises:
            FileNotFoundError: A file of the current round is gone.
            KeyError: The state has other keys.
            ValueError: Settings differ, or a file of the current round has changed.
        """
        self._load(state, lambda reader: reader.load_state_dict(state["reader"]))

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue a run on any number of ranks.

        Args:
            states: Result of `state_dict` of each rank.

        Raises:
            FileNotFoundError: As for `load_state_dict`.
            KeyError: As for `load_state_dict`.
            ValueError: As for `load_state_dict`.
        """
        self._load(
            states[0],
            lambda reader: reader.load_state_dicts([state["reader"] for state in states]),
        )

    def _load(self, state: Mapping[str, Any], load: Callable[[TableReader], None]) -> None:
        if {*state} != _KEYS:
            raise MissingKeyError(
                f"state must have the keys {sorted(_KEYS)}; it has {sorted(state)}."
            )
        self._rounds = [[*state["read"]]]
        place = _Place(1, None, {})
        if state["reader"] is not None:
            self._rounds.append([*state["round"]])
            reader = self._reader_of(self._rounds[1], self._found())
            load(reader)
            place = _Place(1, reader, reader.position())
        self._begin(place)

    def __iter__(self) -> Iterator[Batch]:
        number, reader, position = self._next
        if reader is not None:
            reader.load_state_dict({**reader.state_dict(), **position})
        while True:
            if reader is not None:
                for batch in reader:
                    self._next = _Place(number, reader, reader.position())
                    self._trail.append(self._next)
                    yield batch
            with long_section("the wait for new files"):
                found = self._next_round()
            if not found.names:
                break
            self._rounds.append(found.names)
            self.late_files += found.late
            reader = self._reader_of(found.names, found.files)
            number = len(self._rounds) - 1
        # all files of all rounds were read
        self._next = self._trail[-1] = _Place(len(self._rounds), None, {})

    def _reader_of(self, names: Sequence[str], files: Mapping[str, str]) -> TableReader:
        """Return the reader of a round."""
        if gone := [name for name in names if name not in files]:
            raise FileNotFoundError(
                f"The files of the current round must be there; missing: {gone[:5]}. Restore them."
            )
        paths = [files[name] for name in names]
        return read_files(paths, None, self.selection.spec, self._batch_size, dict(self._options))

    def _found(self) -> dict[str, str]:
        """Return the paths of all files, by their names with partition folders."""
        try:
            paths = names_of_files(self._paths)
        except FileNotFoundError:
            return {}
        names = [*map(file_name, paths)]
        if twice := repeated(names):
            raise ValueError(
                f"Files that are followed must have distinct names in their partition; received "
                f"several {twice!r}. Rename them, such as by the time when they were written."
            )
        return dict(zip(names, paths, strict=True))

    def _next_round(self) -> _Round:
        """Return the next round, the same on all ranks, or one without names at the end.

        Raises:
            FileNotFoundError: There was no file at all.
            ValueError: `until` is not a value of the partitions, or two files have one name.
        """
        deadline = time.monotonic() + self._wait
        while True:
            message: list[Any] = [None]
            if self.rank == 0:
                left = deadline - time.monotonic()
                try:
                    message = [self._look(is_last=left <= 0)]
                except Exception as error:  # all ranks raise it
                    message = [error]
                if message == [None]:
                    time.sleep(min(self._poll, left))
            if self._group is not None:
                dist.broadcast_object_list(message, 0, self._group)
            if isinstance(message[0], Exception):
                raise message[0]
            if message[0] is not None:
                return _Round(*message[0])

    def _look(self, is_last: bool) -> _Round | None:
        """Return the next round; None to look again later.

        Args:
            is_last: True if the time to wait is over.
        """
        files, read = self._found(), {name for names in self._rounds for name in names}
        if self._until is not None and not all(map(partition_of, files)):
            raise ValueError(
                f"until needs files in folders such as dt=2026-11-28; received {[*files][:3]}."
            )
        values = {name: next(iter(partition_of(name).values()), None) for name in files}
        order = _order_of([*values.values()])
        limit = None if self._until is None else order(str(self._until))
        wanted = [
            name
            for name in files
            if name not in read and (limit is None or order(values[name]) <= limit)
        ]
        if not wanted:
            if is_last and not files and not read:
                raise FileNotFoundError(f"{self._paths} must have a file to follow; it has none.")
            is_over = limit is not None and any(order(v) >= limit for v in values.values())
            return _Round([], {}, []) if is_last or is_over else None
        value = min((values[name] for name in wanted), key=order)
        names = sorted(name for name in wanted if values[name] == value)
        is_late = value is not None and any(
            order(values[name]) >= order(value) for name in files if name in read
        )
        if is_late:
            logger.warning(
                "follow reads %s late files of a partition that was read before, such as %s.",
                len(names), names[0],
            )  # fmt: skip
        return _Round(names, {name: files[name] for name in names}, names if is_late else [])


def _order_of(values: Sequence[str | None]) -> Callable[[str | None], tuple[bool, Any]]:
    """Return the key that sorts values of a partition column, as numbers if all are whole."""
    is_whole = types_of([{"": value} for value in values]).get("") == pa.int64()

    def order(value: str | None) -> tuple[bool, Any]:
        try:
            return value is not None, int(value or 0) if is_whole else value or ""
        except ValueError as error:
            raise ValueError(
                f"until must be a value of the partitions, which are whole numbers; received "
                f"{value!r}."
            ) from error

    return order


def follow(
    paths: Paths,
    spec: Spec,
    batch_size: int,
    *,
    until: str | int | None = None,
    wait: float = 0.0,
    poll: float = 30.0,
    **options: Any,
) -> Follower:
    """Read files that were not read yet, also files that appear while the job runs.

    Args:
        paths: Folders, globs or URLs of Parquet or text files, or a list of them, which may have
            partitions such as `dt=2026-11-28`. Writers must give a file its name when it is
            complete; names that begin with "_" or "." are not read.
        spec: A fitted `recsys.features.FeatureSpec`. Only its columns are read.
        batch_size: Rows of a batch of one rank.
        until: The last partition to read, a value of the first partition column, such as
            "2026-11-30". The iterator ends when it has read this partition, or a later one exists.
        wait: Seconds without a new file after which the iterator ends; 0: it reads the files that
            are there.
        poll: Seconds between two looks for new files.
        options: Keyword arguments of `TableReader`, without `rank`, `world_size` and `divide`. With
            `drop_last` the last rows of each round are left out.

    Returns:
        The batches.

    Raises:
        FileNotFoundError: There is no file when the time to wait is over.
        KeyError: As for `recsys.datasets.parquet`.
        TypeError: As for `recsys.datasets.parquet`.
        ValueError: As for `recsys.datasets.parquet`; a number is out of its range; two files of a
            partition have one name; the files have no partitions for `until`; or `paths` are a
            table of Delta Lake or Iceberg, whose files are written again.

    Example:
        >>> for batch in follow("clicks", spec, 256, until="2026-11-30", wait=3600):
        ...     train(batch)  # doctest: +SKIP
    """
    return Follower(paths, spec, batch_size, until, wait, poll, options)
