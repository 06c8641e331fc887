"""Batches from tables of raw or prepared columns: Parquet, CSV and tables in memory.

The rows of a rank are read in windows, each some consecutive row groups. A window is decoded and
transformed as a whole, shuffled, and split into batches. Threads do this ahead of training.
"""

from __future__ import annotations

import posixpath
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from torch.utils.data import IterableDataset, get_worker_info

from recsys.datasets.ahead import map_ahead
from recsys.datasets.sources import Source, TableSource, TextSource, Unit, source_of
from recsys.datasets.tables import Paths, files_of, located, unify_types
from recsys.datasets.utils import Batch, check_rank, rank_slice
from recsys.datasets.windows import join_rows, split_rows
from recsys.kernels.arguments import flag, shown, whole, wrong_type

__all__ = ["PARTS", "TableReader", "csv", "parquet", "table"]

PARTS = ("train", "validation", "test")
"""Names of the parts of a split."""
_MOST_PENDING = 64
_DIVISIONS = ("row_groups", "batches")
_Array: TypeAlias = np.ndarray[Any, Any]
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
"""Settings of a state, in words."""


class Spec(Protocol):
    """A description of columns, such as `recsys.features.FeatureSpec`."""

    def column_names(self, labels: bool = True) -> list[str]:
        """Return the names of the columns that `transform` reads."""

    def transform(self, data: Any, *, labels: bool = True) -> Batch:
        """Convert a table to a batch."""


class RowSplit(Protocol):
    """A division of rows, such as `recsys.features.splits.Split`."""

    @property
    def columns(self) -> list[str]:
        """Columns that `parts_of` reads."""

    def filter_of(self, part: str, schema: Any) -> Any:
        """Return a filter of `pyarrow.dataset` that keeps at least the rows of a part, or None."""

    def parts_of(self, table: Any, file: str, rows: _Array) -> _Array:
        """Return the number of each row's part in `PARTS`."""


class _Rows(NamedTuple):
    """Rows of a unit that filter and split keep."""

    table: Any
    unit: Unit
    kept: _Array | None
    """Row numbers in the unit; None: all rows."""


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


class _Position(NamedTuple):
    """The place at which the next batch begins."""

    epoch: int
    window: int
    row: int


@final
class TableReader(IterableDataset[Batch]):
    """Batches from a table, made by `parquet`, `csv` and `table`.

    An iterator reads one epoch. When it ends, the next iterator reads the next epoch, in another
    order with `shuffle`. An iterator that is left early does not change the epoch: the next
    iterator begins it again.

    `state_dict()` contains the position, as integers; a reader that loads it continues with the
    next batch. The window at this position is read again, and no other. Readers work with
    `progress=` of `recsys.distributed.checkpoint.save_checkpoint`, with a
    `torch.utils.data.DataLoader(reader, batch_size=None)`, and with torchdata's
    `StatefulDataLoader`. Each worker of a DataLoader reads row groups of its own, and yields a last
    batch of its own.

    Args:
        sources: files or tables with the same columns.
        spec: a fitted `recsys.features.FeatureSpec`.
        batch_size: rows of a batch of one rank.
        rank: this process, from 0.
        world_size: number of processes.
        divide: "row_groups": each rank reads row groups of its own, and ranks may have different
            numbers of rows. "batches": all ranks read all row groups, and each takes its part of
            each batch of `world_size * batch_size` rows, so that steps do not depend on the number
            of ranks.
        shuffle: read row groups in another order in each epoch, and shuffle the rows of each
            window.
        seed: seed of the order; the same on all ranks.
        window_rows: number of rows of a window, at least: row groups are joined up to it.
        num_workers: threads that read ahead; 0: rows are read when they are asked for.
        filter: rows to read, as an expression of `pyarrow.dataset` such as
            `pyarrow.dataset.field("age") > 18`. Row groups whose statistics exclude it are not
            read.
        split: a `recsys.datasets.Split` or `TimeSplit`.
        part: "train", "validation" or "test", with `split`.
        drop_last: leave out the last batch of an epoch if it is not full.
        pin_memory: yield batches in page-locked memory, from which copies to a GPU are
            asynchronous.
        labels: False for tables without labels, sample weights and groups.

    Attributes:
        epoch: number of the epoch that the next iterator reads, from 0.
        num_rows: rows of all ranks before filter and split; an estimate for text files.

    Raises:
        KeyError: a file does not have a column.
        TypeError: an argument has another type, or a column has values of different kinds in
            different files.
        ValueError: an argument is out of its range, or there are fewer row groups than ranks.

    Example:
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
        rank: int = 0,
        world_size: int = 1,
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
    ) -> None:
        super().__init__()
        self.spec = spec
        self.batch_size = whole("batch_size", batch_size)
        self.rank, self.world_size = whole("rank", rank, 0), whole("world_size", world_size)
        check_rank(self.rank, self.world_size, self.batch_size)
        if divide not in _DIVISIONS:
            raise ValueError(f"divide must be 'row_groups' or 'batches'; received {shown(divide)}.")
        self.divide = divide
        self.shuffle, self.drop_last = flag("shuffle", shuffle), flag("drop_last", drop_last)
        self.labels, self.pin_memory = flag("labels", labels), flag("pin_memory", pin_memory)
        if pin_memory and not torch.cuda.is_available():
            raise ValueError(
                "pin_memory needs a GPU; there is none. Pass pin_memory=torch.cuda.is_available()."
            )
        self.seed = whole("seed", seed, 0)
        self.window_rows = whole("window_rows", window_rows)
        self.num_workers = whole("num_workers", num_workers, 0)
        self._split, self._part = _check_split(split, part)
        self._filter = _check_filter(filter)
        self._sources = list(sources)
        wanted = spec.column_names(self.labels)
        self._columns = list(
            dict.fromkeys(
                [
                    *wanted,
                    *(() if split is None else split.columns),
                    *_columns_of(self._filter, self._sources[0].schema),
                ]
            )
        )
        for source in self._sources:
            if missing := [name for name in self._columns if name not in source.schema.names]:
                raise KeyError(
                    f"{source.path} must have the columns {missing}; it has {source.schema.names}."
                )
        self._units = [
            Unit(i, number, rows)
            for i, source in enumerate(self._sources)
            for number, rows in source.sizes
        ]
        self.num_rows = sum(unit.num_rows for unit in self._units)
        if divide == "row_groups" and 0 < len(self._units) < self.world_size:
            raise ValueError(
                f"There must be at least one row group for each rank; received {len(self._units)} "
                f"row groups and {self.world_size} ranks. Pass divide='batches', or write smaller "
                "row groups with `python -m recsys prepare --row-group-rows`."
            )
        self._trail: deque[_Position] = deque(maxlen=_MOST_PENDING + 1)
        self._resumes = False
        self._move(_Position(0, 0, 0))

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with the next iterator.

        Args:
            epoch: its number, from 0. Numbers with one order have the same seed and epoch.

        Raises:
            TypeError: `epoch` is not a whole number.
            ValueError: `epoch` is negative.
        """
        self.epoch = whole("epoch", epoch, 0)
        self._move(_Position(self.epoch, 0, 0))
        self._resumes = False

    def state_dict(self, pending: int = 0) -> dict[str, int]:
        """Return the position after the last batch, and the settings that it depends on.

        Args:
            pending: number of batches that were read and not trained yet, such as the batches in a
                pipeline. A reader that loads the state yields them again. At most 64, and no more
                than were yielded in this epoch since its start or the last load.

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
        return {**position._asdict(), **self._settings()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state with the next iterator.

        Args:
            state: result of `state_dict`, of this reader or of another one with the same files and
                settings.

        Raises:
            ValueError: files or settings differ. The message names the first one.
            KeyError: the state has other keys.
        """
        settings = self._settings()
        keys = {*settings, *_Position._fields}
        if {*state} != keys:
            raise KeyError(f"state must have the keys {sorted(keys)}; it has {sorted(state)}.")
        for name, value in settings.items():
            if state[name] != value:
                raise ValueError(
                    f"The state must be of a reader with the same {_MEANINGS[name]}; received "
                    f"{name}={state[name]} in the state and {value} in this reader. Build the "
                    "reader as for the saved run, or begin an epoch with set_epoch."
                )
        self._move(_Position(*(int(state[name]) for name in _Position._fields)))
        self._resumes = True

    def load_state_dicts(self, states: Sequence[Mapping[str, int]]) -> None:
        """Continue from the states of all ranks of a run, with `divide="batches"` on any number.

        Args:
            states: result of `state_dict` of each rank. With `divide="batches"` they are equal.

        Raises:
            ValueError: files or settings differ, such as the number of ranks with
                `divide="row_groups"`, or the number of rows of a step.
        """
        self.load_state_dict(states[self.rank % len(states)])

    def __iter__(self) -> Iterator[Batch]:
        if not self._resumes:
            self._move(_Position(self.epoch, 0, 0))
        self._resumes = False
        return self._batches(self._next)

    def _move(self, position: _Position) -> None:
        self.epoch, self._next = position.epoch, position
        self._trail.clear()
        self._trail.append(position)

    def _settings(self) -> dict[str, int]:
        rank, world_size = self._share()
        marks = [source.mark() for source in self._sources]
        parts = [len(self._units), *marks, *self._columns]
        part = [str(self._split), str(self._part), str(self._filter), self.divide]
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

    def _windows(self, epoch: int) -> list[list[Unit]]:
        """Return the units of each window of this rank."""
        order = list(range(len(self._units)))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order).tolist()
        share, count = self._share()
        windows: list[list[Unit]] = []
        rows = self.window_rows
        for i in order[share::count]:
            if rows >= self.window_rows:
                windows.append([])
                rows = 0
            windows[-1].append(self._units[i])
            rows += self._units[i].num_rows
        return windows

    def _batches(self, start: _Position) -> Iterator[Batch]:
        carried: list[Batch] = []
        windows = self._windows(start.epoch)
        loader = _Loader(self, start, windows)
        loaded = map_ahead(loader.load, loader.numbers, self.num_workers)
        try:
            for number, window in enumerate(loaded, start.window):
                carried += window.head
                if sum(len(part.labels) for part in carried) == self._step_rows():
                    at = _Position(start.epoch, number, window.first)
                    yield self._taken(carried, at)
                    carried = []
                row = window.first
                for batch in window.batches:
                    row += self._step_rows()
                    yield self._passed(batch, _Position(start.epoch, number, row))
                carried += window.tail
        finally:
            loaded.close()
        end = _Position(start.epoch, len(windows), 0)
        if carried and not self.drop_last:
            yield self._taken(carried, end)
        self._next = self._trail[-1] = _Position(start.epoch + 1, 0, 0)
        self.epoch = self._next.epoch

    def _taken(self, parts: list[Batch], after: _Position) -> Batch:
        """Return this rank's rows of a batch in parts."""
        batch = join_rows(parts)
        if self.divide == "batches":
            count = len(batch.labels)
            mine = rank_slice(count, self.rank, self.world_size)
            batch = split_rows(batch, [0, mine.start, mine.stop, count])[1]
        return self._passed(batch.pin_memory() if self.pin_memory else batch, after)

    def _passed(self, batch: Batch, after: _Position) -> Batch:
        self._next = after
        self._trail.append(after)
        return batch


@final
class _Loader:
    """Reads and transforms the windows of an epoch; windows may be loaded by several threads."""

    def __init__(self, reader: TableReader, start: _Position, windows: list[list[Unit]]) -> None:
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
            rows = self._read(number)
            count = sum(part.table.num_rows for part in rows)
            skipped = min(count, self._start.row) if number == self._start.window else 0
            carried = self._carried[number].result()
            self._carried[number + 1].set_result((carried + count - skipped) % step)
        except BaseException:
            self._carried[number + 1].set_result(0)
            raise
        if count == skipped:
            return _Window([], [], [], skipped, count)
        window = self._transform(rows)
        order = None
        if reader.shuffle:
            draw = np.random.default_rng([reader.seed, self._start.epoch, number, 1])
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

    def _read(self, number: int) -> list[_Rows]:
        reader = self._reader
        found = []
        units = self._windows[number]
        start = 0
        while start < len(units):  # one opening for units of one file
            source = units[start].source
            stop = start
            while stop < len(units) and units[stop].source == source:
                stop += 1
            numbers = [unit.number for unit in units[start:stop]]
            tables = reader._sources[source].read(numbers, reader._columns)
            for unit, table in zip(units[start:stop], tables, strict=True):
                found.append(self._select(table, unit))
            start = stop
        return [rows for rows in found if rows.table.num_rows]

    def _select(self, table: Any, unit: Unit) -> _Rows:
        reader = self._reader
        is_kept: _Array | None = None
        if reader._filter is not None:
            scanner = ds.dataset(table).scanner(columns={"kept": reader._filter}, use_threads=False)
            column = scanner.to_table()["kept"].fill_null(False)
            is_kept = column.to_numpy(zero_copy_only=False)
        if reader._split is not None:
            source = reader._sources[unit.source]
            first = (
                unit.number << 32
                if isinstance(source, TextSource)
                else source.first_row(unit.number)
            )
            rows = np.arange(first, first + table.num_rows)
            try:
                parts = reader._split.parts_of(table, posixpath.basename(source.path), rows)
            except (KeyError, TypeError, ValueError) as error:
                raise _located(error, [_Rows(table, unit, None)], reader._sources) from error
            mine = parts == PARTS.index(str(reader._part))
            is_kept = mine if is_kept is None else mine & is_kept
        if is_kept is None or is_kept.all():
            return _Rows(table, unit, None)
        kept = np.flatnonzero(is_kept)
        return _Rows(table.filter(pa.array(is_kept)), unit, kept)

    def _transform(self, rows: list[_Rows]) -> Batch:
        reader = self._reader
        batches = []
        start = 0
        while start < len(rows):
            stop = start
            schema = rows[start].table.schema
            while stop < len(rows) and rows[stop].table.schema.equals(schema):
                stop += 1
            table = pa.concat_tables([part.table for part in rows[start:stop]])
            try:
                batches.append(reader.spec.transform(table, labels=reader.labels))
            except (KeyError, TypeError, ValueError) as error:
                raise _located(error, rows[start:stop], reader._sources) from error
            start = stop
        return join_rows(batches)


def _located(error: Exception, rows: Sequence[_Rows], sources: Sequence[Source]) -> Exception:
    """Return an error of a window with the file, and the row in the file."""

    def place_of(row: int) -> tuple[str, int]:
        for part in rows:
            if row < part.table.num_rows:
                break
            row -= part.table.num_rows
        source = sources[part.unit.source]
        if part.kept is not None:
            row = int(part.kept[row])
        return source.path, row + source.first_row(part.unit.number)

    return located(error, place_of)


def _check_split(split: RowSplit | None, part: str | None) -> tuple[RowSplit | None, str | None]:
    if split is None and part is None:
        return None, None
    if not callable(getattr(split, "parts_of", None)):
        wrong_type("split", "a Split or TimeSplit of recsys.datasets", split)
    if part not in PARTS:
        raise ValueError(
            f"part must be 'train', 'validation' or 'test' with split; received {shown(part)}."
        )
    return split, part


def _check_filter(filter: Any) -> Any:
    if filter is not None and not isinstance(filter, ds.Expression):
        wrong_type("filter", "an expression such as pyarrow.dataset.field('age') > 18", filter)
    return filter


def _columns_of(filter: Any, schema: Any) -> list[str]:
    """Return the columns of a filter: those without which it cannot be computed."""
    if filter is None:
        return []
    found = []
    for i, name in enumerate(schema.names):
        rest = schema.remove(i).empty_table()
        try:
            ds.dataset(rest).scanner(columns={"kept": filter}).to_table()
        except (pa.ArrowInvalid, KeyError):
            found.append(name)
    try:
        ds.dataset(schema.empty_table()).scanner(columns={"kept": filter}).to_table()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError) as error:
        raise ValueError(
            f"filter must be an expression of the columns {schema.names}; received {filter}: "
            f"{error}"
        ) from error
    return found


def _read_files(
    paths: Paths,
    format: str | None,
    spec: Spec,
    batch_size: int,
    options: dict[str, Any],
    **text_options: Any,
) -> TableReader:
    split, filter = options.get("split"), _check_filter(options.get("filter"))
    files = files_of(paths, format, **text_options)
    names = [*spec.column_names(options.get("labels", True)), *(split.columns if split else ())]
    names += _columns_of(filter, files[0].schema)
    files = unify_types(files, dict.fromkeys(names))
    sources = []
    for file in files:
        rows = filter
        if split is not None and options.get("part") in PARTS:
            wanted = split.filter_of(options["part"], file.schema)
            rows = wanted if rows is None else rows if wanted is None else rows & wanted
        sources.append(source_of(file, rows))
    return TableReader(sources, spec, batch_size, **options)


def parquet(paths: Paths, spec: Spec, batch_size: int, **options: Any) -> TableReader:
    """Read Parquet files.

    Args:
        paths: a file, folder, glob or URL, or a list of them.
        spec: a fitted `recsys.features.FeatureSpec`. Only its columns are read.
        batch_size: rows of a batch of one rank.
        options: keyword arguments of `TableReader`.

    Returns:
        The batches.

    Raises:
        FileNotFoundError: a path has no file.
        KeyError: a file does not have a column.
        TypeError: as for `TableReader`.
        ValueError: a file is damaged, or as for `TableReader`.

    Example:
        >>> import tempfile
        >>> import pyarrow.parquet
        >>> from recsys.features import FeatureSpec, Ids, Label
        >>> path = f"{tempfile.mkdtemp()}/clicks.parquet"
        >>> pyarrow.parquet.write_table(pa.table({"film": [4, 5], "liked": [1, 0]}), path)
        >>> spec = FeatureSpec([Ids("film", rows=9), Label("liked")])
        >>> [batch.labels.tolist() for batch in parquet(path, spec, batch_size=8)]
        [[1.0, 0.0]]
    """
    return _read_files(paths, "parquet", spec, batch_size, options)


def csv(
    paths: Paths,
    spec: Spec,
    batch_size: int,
    *,
    format: Literal["csv", "tsv"] | None = None,
    read_options: Any = None,
    parse_options: Any = None,
    convert_options: Any = None,
    **options: Any,
) -> TableReader:
    r"""Read CSV and TSV files, by lines: blocks of 4 MiB take the place of row groups.

    An empty field is a missing value. Types are inferred as `recsys.datasets.tables` describes;
    files must have the same kind of values in a column. A compressed file is one block, which must
    fit into memory: convert large ones by `python -m recsys prepare`.

    Args:
        paths: a file, folder, glob or URL, or a list of them.
        spec: a fitted `recsys.features.FeatureSpec`. Only its columns are read.
        batch_size: rows of a batch of one rank.
        format: "csv" or "tsv"; None: by the suffix of each file.
        read_options: `pyarrow.csv.ReadOptions`, such as `column_names` of files without a header.
        parse_options: `pyarrow.csv.ParseOptions`, such as the delimiter.
        convert_options: `pyarrow.csv.ConvertOptions`, such as `column_types` or `null_values`.
        options: keyword arguments of `TableReader`.

    Returns:
        The batches.

    Raises:
        FileNotFoundError: a path has no file.
        KeyError: a file does not have a column.
        TypeError: as for `TableReader`.
        ValueError: a file is empty or damaged, a value does not have the type of its column, or as
            for `TableReader`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from recsys.features import FeatureSpec, Ids, Label
        >>> path = Path(tempfile.mkdtemp(), "clicks.csv")
        >>> _ = path.write_text("film,liked\n4,1\n,0\n")
        >>> spec = FeatureSpec([Ids("film", rows=9), Label("liked")])
        >>> [batch.sparse_features.lengths().tolist() for batch in csv(path, spec, batch_size=8)]
        [[1, 0]]
    """
    given = {
        "read_options": read_options,
        "parse_options": parse_options,
        "convert_options": convert_options,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return _read_files(paths, format, spec, batch_size, options, **given)


def table(data: Any, spec: Spec, batch_size: int, **options: Any) -> TableReader:
    """Read a table in memory.

    Args:
        data: a table of Arrow, pandas or polars, a `Dataset` of Hugging Face, which stays on disk,
            or a dict of columns.
        spec: a fitted `recsys.features.FeatureSpec`.
        batch_size: rows of a batch of one rank.
        options: keyword arguments of `TableReader`. Slices of the table take the place of row
            groups.

    Returns:
        The batches.

    Raises:
        KeyError: the table does not have a column.
        TypeError: `data` is not a table, or as for `TableReader`.
        ValueError: as for `TableReader`.

    Example:
        >>> from recsys.features import FeatureSpec, Ids, Label
        >>> spec = FeatureSpec([Ids("film", rows=9), Label("liked")])
        >>> reader = table({"film": [4, 5], "liked": [1, 0]}, spec, batch_size=1)
        >>> [batch.labels.tolist() for batch in reader]
        [[1.0], [0.0]]
    """
    return TableReader([TableSource(data)], spec, batch_size, **options)
