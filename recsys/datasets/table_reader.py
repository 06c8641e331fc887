"""`TableReader`: batches from files and tables, divided among ranks, resumable at any batch.

The rows of a rank are read in windows, each some consecutive row groups. A window is decoded and
transformed as a whole, shuffled, and split into batches. Threads do this ahead of training.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from recsys.base.arguments import MissingKeyError, flag, shown, whole
from recsys.datasets.ahead import map_ahead
from recsys.datasets.epoch_windows import (
    Position,
    UnreadWindow,
    WindowUnits,
    unread_windows,
    windows_of,
)
from recsys.datasets.lake import VersionedTables
from recsys.datasets.selection import RowSplit, Selection, Spec, check_contents, checksums_of
from recsys.datasets.sources import Source, TextSource, Unit
from recsys.datasets.utils import Batch, check_rank, rank_in_job, rank_slice
from recsys.datasets.windows import join_rows, split_rows

__all__ = ["TableReader"]

_MOST_PENDING = 64
_DIVISIONS = ("row_groups", "batches")
_MEANINGS: Mapping[str, str] = {
    "version": "version of the state",
    "files": "files (names and sizes), filter or columns of the split",
    "split": "split, part or filter",
    "batch_size": "number of rows of a step that one rank, or all ranks together, read",
    "world_size": "number of ranks and DataLoader workers",
    "rank": "rank or DataLoader worker",
    "seed": "seed",
    "shuffle": "shuffle",
    "window_rows": "window_rows",
    "drop_last": "drop_last",
}


class _Window(NamedTuple):
    """The batches of a window."""

    head: list[Batch]
    """Rows that complete the batch which the windows before began."""
    batches: list[Batch]
    """This rank's rows of full batches."""
    tail: list[Batch]
    """Rows of the batch that the next window completes."""
    first: int
    """Row of the window at which `batches` begin."""
    num_rows: int


@final
class TableReader(IterableDataset[Batch]):
    """Batches from a table, made by `parquet`, `csv` and `table`.

    An iterator reads one epoch. When it ends, the next iterator reads the next epoch, in another
    order with `shuffle`. An iterator that is left early does not change the epoch: the next
    iterator begins it again.

    `state_dict()` contains the position, the versions of tables of Delta Lake and Iceberg, and a
    checksum of each file; a reader that loads it reads these versions and continues with the next
    batch. The window at this position is read again, and no other. Readers
    work with `progress=` of `recsys.distributed.checkpoint.save_checkpoint`, with a
    `torch.utils.data.DataLoader(reader, batch_size=None)`, and with torchdata's
    `StatefulDataLoader`. Each worker of a DataLoader reads row groups of its own, and yields a last
    batch of its own.

    Args:
        sources: Files or tables with the same columns.
        spec: A fitted `recsys.features.FeatureSpec`.
        batch_size: Rows of a batch of one rank.
        rank: This process, from 0; None: its rank in the process group, if there is one, else 0.
        world_size: Number of processes; None: as for `rank`, else 1.
        divide: "row_groups": each rank reads row groups of its own, and ranks may have different
            numbers of rows. "batches": all ranks read all row groups, and each takes its part of
            each batch of `world_size * batch_size` rows, so that steps do not depend on the number
            of ranks.
        shuffle: Read row groups in another order in each epoch, and shuffle the rows of each
            window.
        seed: Seed of the order; the same on all ranks.
        window_rows: Number of rows of a window, at least: row groups are joined up to it.
        num_workers: Threads that read ahead; 0: rows are read when they are asked for.
        filter: Rows to read, as an expression of `pyarrow.dataset` such as
            `pyarrow.dataset.field("age") > 18`. Row groups whose statistics exclude it are not
            read.
        split: A `recsys.datasets.Split` or `TimeSplit`. Prepared tables are divided while they are
            written, by `prepare(..., split=...)`.
        part: "train", "validation" or "test", with `split` or of tables with recorded parts.
        drop_last: Leave out the last batch of an epoch if it is not full.
        pin_memory: Yield batches in page-locked memory, from which copies to a GPU are
            asynchronous.
        labels: False for tables without labels, sample weights and groups.
        tables: The tables of Delta Lake and Iceberg that have the sources, if there are some.

    Attributes:
        epoch: Number of the epoch that the next iterator reads, from 0.
        num_rows: Rows of all ranks before filter and split; an estimate for text files.
        selection: The rows and columns that are read.

    Raises:
        KeyError: A file does not have a column.
        TypeError: An argument has another type, or a column has values of different kinds in
            different files.
        ValueError: An argument is out of its range, or there are fewer row groups than ranks.

    Example:
        >>> from recsys.datasets.sources import TableSource
        >>> from recsys.features import FeatureSpec, Ids, Label
        >>> spec = FeatureSpec([Ids("film", rows=9), Label("liked")])
        >>> data = {"film": [1, 2, 3, 4, 5], "liked": [1, 0, 0, 1, 0]}
        >>> reader = TableReader([TableSource(data)], spec, batch_size=2)
        >>> [batch.sparse_features.values().tolist() for batch in reader]
        [[1, 2], [3, 4], [5]]
        >>> batches = iter(reader)
        >>> first, state = next(batches), reader.state_dict()
        >>> reader.load_state_dict(state)
        >>> next(iter(reader)).sparse_features.values().tolist()
        [3, 4]
    """

    def __init__(
        self,
        sources: Sequence[Source],
        spec: Spec,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        divide: Literal["row_groups", "batches"] = "row_groups",
        shuffle: bool = False,
        seed: int = 0,
        window_rows: int = 1 << 16,
        num_workers: int = 0,
        filter: Any = None,
        split: RowSplit | None = None,
        part: str | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        labels: bool = True,
        tables: VersionedTables | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = whole("batch_size", batch_size)
        rank, world_size = rank_in_job(rank, world_size)
        self.rank, self.world_size = whole("rank", rank, 0), whole("world_size", world_size)
        check_rank(self.rank, self.world_size, self.batch_size)
        if divide not in _DIVISIONS:
            raise ValueError(f"divide must be 'row_groups' or 'batches'; received {shown(divide)}.")
        self.divide = divide
        self.shuffle, self.drop_last = flag("shuffle", shuffle), flag("drop_last", drop_last)
        self.pin_memory = flag("pin_memory", pin_memory)
        if pin_memory and not torch.cuda.is_available():
            raise ValueError(
                "pin_memory needs a GPU; there is none. Pass pin_memory=torch.cuda.is_available()."
            )
        self.seed = whole("seed", seed, 0)
        self.window_rows = whole("window_rows", window_rows)
        self.num_workers = whole("num_workers", num_workers, 0)
        self.selection = Selection(
            tuple(sources), spec, filter, split, part, flag("labels", labels)
        )
        self._tables = tables
        self._find_units()
        self._trail: deque[Position] = deque(maxlen=_MOST_PENDING + 1)
        self._resumes = False
        self._unread: dict[int, list[UnreadWindow]] = {}  # by epoch, if others began it
        self._move(Position(0, 0, 0))

    def _find_units(self) -> None:
        """Find the units of the sources, and their checksums."""
        self._units = self.selection.units()
        self.num_rows = sum(unit.num_rows for unit in self._units)
        if self.divide == "row_groups" and 0 < len(self._units) < self.world_size:
            raise ValueError(
                f"There must be at least one row group for each rank; received {len(self._units)} "
                f"row groups and {self.world_size} ranks. Pass divide='batches', or write smaller "
                "row groups with `python -m recsys prepare --row-group-rows`."
            )
        self._checksums = checksums_of(self.selection.sources)

    @property
    def num_batches(self) -> int | None:
        """Number of batches of the epoch `epoch` on this rank.

        None if it is unknown before they are read: with a filter, a split or text files. It is
        known for recorded parts. If another number of ranks began an epoch of row groups, only the
        remaining batches count.
        """
        chosen = self.selection
        has_estimates = any(isinstance(source, TextSource) for source in chosen.sources)
        if has_estimates or not chosen.has_whole_units:
            return None
        windows = self._windows(self.epoch)
        rows = sum(sum(unit.num_rows for unit in part.units) - part.row for part in windows)
        step = self._step_rows()
        return rows // step if self.drop_last else -(-rows // step)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with the next iterator.

        Args:
            epoch: Its number, from 0. Numbers with one order have the same seed and epoch.

        Raises:
            TypeError: `epoch` is not a whole number.
            ValueError: `epoch` is negative.
        """
        self.epoch = whole("epoch", epoch, 0)
        self._move(Position(self.epoch, 0, 0))
        self._resumes, self._unread = False, {}

    def state_dict(self, pending: int = 0) -> dict[str, Any]:
        """Return the position after the last batch, and settings and files that it depends on.

        Args:
            pending: Number of batches that were read and not trained yet, such as the batches in a
                pipeline. A reader that loads the state yields them again. At most 64, and no more
                than were yielded in this epoch since its start or the last load.

        Returns:
            Integers, and `checksums`, a list with an integer for each file; of tables of Delta Lake
            and Iceberg also `versions`, a list with an integer for each table. If another number of
            ranks began the epoch, also `unread`, a list with four integers for each window of this
            rank: the number of shares of that run, the share, the window's number in it, and the
            first unread row.

        Raises:
            ValueError: `pending` is out of its range.
        """
        most = len(self._trail) - 1
        if whole("pending", pending, 0) > most:
            raise ValueError(
                f"pending must be at most {most}, the number of batches of this epoch that the "
                f"reader knows; received {pending}."
            )
        position = self._trail[-1 - pending]
        versions = {} if self._tables is None else {"versions": [*self._tables.versions]}
        unread = self._unread.get(position.epoch)
        left = {} if unread is None else {"unread": [[*window] for window in unread]}
        checksums = {"checksums": [*self._checksums]}
        return {**position._asdict(), **self._settings(), **checksums, **versions, **left}

    def position(self) -> dict[str, int]:
        """Return the numbers of a state at which the next batch begins."""
        return self._next._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state with the next iterator.

        Tables of Delta Lake and Iceberg are read at the versions of the state.

        Args:
            state: Result of `state_dict`, of this reader or of another one with the same files and
                settings.

        Raises:
            ValueError: Files or settings differ. The message names the files that have changed, or
                the first setting.
            KeyError: The state has other keys.
        """
        if self._tables is not None and self._tables.move(state.get("versions", [])):
            self.selection = replace(self.selection, sources=tuple(self._tables.sources()))
            self._find_units()
        settings = self._settings()
        optional = {"checksums", "versions", "unread"}  # older states have no checksums
        keys = {*settings, *Position._fields, *optional}
        if {*state} | optional != keys:
            raise MissingKeyError(
                f"state must have the keys {sorted(keys)}; it has {sorted(state)}."
            )
        check_contents(self.selection.sources, state.get("checksums", ()), self._checksums)
        for name, value in settings.items():
            if state[name] != value:
                raise ValueError(
                    f"The state must be of a reader with the same {_MEANINGS[name]}; received "
                    f"{name}={state[name]} in the state and {value} in this reader. Build the "
                    "reader as for the saved run, or begin an epoch with set_epoch."
                )
        position = Position(*(int(state[name]) for name in Position._fields))
        windows = [UnreadWindow(*map(int, window)) for window in state.get("unread", ())]
        self._unread = {position.epoch: windows} if "unread" in state else {}
        self._move(position)
        self._resumes = True

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue a run on any number of ranks.

        If this number differs, `batch_size` may differ too. With `divide="row_groups"` the ranks
        then divide the unread windows of the epoch.

        Args:
            states: Result of `state_dict` of each rank.

        Raises:
            ValueError: Files or settings differ, or `states` lacks the state of a rank.
        """
        if len(states) == self.world_size:
            self.load_state_dict(states[self.rank])
        else:
            self._load_other_ranks(states)

    def _load_other_ranks(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue a run of another number of ranks."""
        own = self._settings()
        first = min(states, key=lambda state: state.get("epoch", 0))
        place = {name: own[name] for name in ("batch_size", "rank", "world_size")}
        self.load_state_dict({**first, **place})
        if first["world_size"] == own["world_size"] == 1:  # each rank reads all row groups
            return
        position = Position(self._next.epoch, 0, 0)
        units = self._ordered_units(position.epoch)

        def count(share: int, num_shares: int) -> int:
            return len(windows_of(units[share::num_shares], self.window_rows))

        unread = unread_windows(states, count)
        self._unread = {}
        if unread is not None:
            mine = unread[own["rank"] :: own["world_size"]]
            self._unread = {position.epoch: mine}
            position = position._replace(row=mine[0].row if mine else 0)
        self._move(position)

    def __iter__(self) -> Iterator[Batch]:
        if not self._resumes:
            self._move(Position(self.epoch, 0, 0))
            self._unread = {}
        self._resumes = False
        return self._batches(self._next)

    def _move(self, position: Position) -> None:
        self.epoch, self._next = position.epoch, position
        self._trail.clear()
        self._trail.append(position)

    def _settings(self) -> dict[str, int]:
        rank, world_size = self._share()
        chosen = self.selection
        marks = [source.mark() for source in chosen.sources]
        parts = [len(self._units), *marks, *chosen.columns]
        # the text of a filter is abbreviated
        filter = None if chosen.filter is None else chosen.filter.__reduce__()
        kept = None if filter is None else bytes(filter[1][0])
        part = [str(chosen.split), str(chosen.part), str(kept), self.divide]
        return {
            "version": 1,
            "files": zlib.crc32(repr(parts).encode()),
            "split": zlib.crc32(repr(part).encode()),
            "batch_size": self._step_rows(),
            "world_size": world_size,
            "rank": rank,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "window_rows": self.window_rows,
            "drop_last": int(self.drop_last),
        }

    def _share(self) -> tuple[int, int]:
        """Return the number of this share of the row groups, and the number of shares."""
        worker = get_worker_info()
        rank, count = (0, 1) if self.divide == "batches" else (self.rank, self.world_size)
        if worker is None:
            return rank, count
        return rank * worker.num_workers + worker.id, count * worker.num_workers

    def _step_rows(self) -> int:
        return self.batch_size * (self.world_size if self.divide == "batches" else 1)

    def _windows(self, epoch: int) -> list[WindowUnits]:
        """Return the windows of this rank."""
        units = self._ordered_units(epoch)
        if (unread := self._unread.get(epoch)) is not None:
            shares = {(window.share, window.num_shares) for window in unread}
            windows_by_share = {
                (share, count): windows_of(units[share::count], self.window_rows)
                for share, count in shares
            }
            return [
                WindowUnits(windows_by_share[share, count][number], number, row)
                for count, share, number, row in unread
            ]
        share, count = self._share()
        windows = windows_of(units[share::count], self.window_rows)
        return [WindowUnits(window, number, 0) for number, window in enumerate(windows)]

    def _ordered_units(self, epoch: int) -> list[Unit]:
        """Return all row groups in the order of an epoch."""
        order = list(range(len(self._units)))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order).tolist()
        return [self._units[i] for i in order]

    def _batches(self, start: Position) -> Iterator[Batch]:
        carried: list[Batch] = []
        windows = self._windows(start.epoch)
        loader = _Loader(self, start, windows)
        loaded = map_ahead(loader.load, loader.numbers, self.num_workers)
        try:
            for number, window in enumerate(loaded, start.window):
                carried += window.head
                if sum(len(part.labels) for part in carried) == self._step_rows():
                    at = Position(start.epoch, number, window.first)
                    yield self._taken(carried, at)
                    carried = []
                row = window.first
                for batch in window.batches:
                    row += self._step_rows()
                    yield self._passed(batch, Position(start.epoch, number, row))
                carried += window.tail
        finally:
            loaded.close()
        end = Position(start.epoch, len(windows), 0)
        if carried and not self.drop_last:
            yield self._taken(carried, end)
        self._next = self._trail[-1] = Position(start.epoch + 1, 0, 0)
        self.epoch = self._next.epoch

    def _taken(self, parts: list[Batch], after: Position) -> Batch:
        """Return this rank's rows of a batch in parts."""
        batch = join_rows(parts)
        if self.divide == "batches":
            count = len(batch.labels)
            mine = rank_slice(count, self.rank, self.world_size)
            batch = split_rows(batch, [0, mine.start, mine.stop, count])[1]
        return self._passed(batch.pin_memory() if self.pin_memory else batch, after)

    def _passed(self, batch: Batch, after: Position) -> Batch:
        self._next = after
        self._trail.append(after)
        return batch


@final
class _Loader:
    """Reads and transforms the windows of an epoch; windows may be loaded by several threads."""

    def __init__(self, reader: TableReader, start: Position, windows: list[WindowUnits]) -> None:
        self._reader, self._start, self._windows = reader, start, windows
        self.numbers = range(start.window, len(windows))
        self._carried: dict[int, Future[int]] = {
            number: Future() for number in range(start.window, len(windows) + 1)
        }
        self._carried[start.window].set_result(0)

    def load(self, number: int) -> _Window:
        """Return the batches of a window.

        The number of rows that the windows before leave over decides where batches begin.
        """
        reader = self._reader
        step = reader._step_rows()
        try:
            units, number_in_share, begin = self._windows[number]
            rows = self._reader.selection.read(units)
            count = sum(part.table.num_rows for part in rows)
            begin = self._start.row if number == self._start.window else begin
            skipped = min(count, begin)
            carried = self._carried[number].result()
            self._carried[number + 1].set_result((carried + count - skipped) % step)
        except BaseException:
            self._carried[number + 1].set_result(0)
            raise
        if count == skipped:
            return _Window([], [], [], skipped, count)
        window = reader.selection.transform(rows)
        order = None
        if reader.shuffle:
            draw = np.random.default_rng([reader.seed, self._start.epoch, number_in_share, 1])
            order = draw.permutation(count)
        first = min(count, skipped + (step - carried) % step)
        last = first + (count - first) // step * step
        mine = slice(0, step)
        if reader.divide == "batches":
            mine = rank_slice(step, reader.rank, reader.world_size)
        starts = [row + mine.start for row in range(first, last, step)]
        edges = {0, skipped, first, last, count, *starts}
        edges |= {row + mine.stop for row in range(first, last, step)}
        ordered = sorted(edges)
        parts = dict(zip(ordered, split_rows(window, ordered, order), strict=False))
        batches = [parts[row].pin_memory() if reader.pin_memory else parts[row] for row in starts]
        head = [parts[skipped]] if first > skipped else []
        tail = [parts[last]] if count > last else []
        return _Window(head, batches, tail, first, count)
