"""Publication of a model that trains: its changed rows become deltas of a serving package.

Dense layers stay as they were packaged. They change much more slowly than rows, so that production
systems publish them about daily (Monolith: Real Time Recommendation System With Collisionless
Embedding Table, arXiv:2209.07663, section 2.2.2): write a new version by `package`.

Shapes: `K` changed rows, `D` columns of a table, `C` columns of a shard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.base.checked import checked_but
from recsys.base.contact import explained
from recsys.base.step_stages import waiting
from recsys.distributed.changed_rows import ChangedRows
from recsys.distributed.checkpoint.state import env_of
from recsys.distributed.dmp_collection import DMPCollection
from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.ranks.agreement import raise_together
from recsys.distributed.ranks.comm import broadcast_object, gather_objects
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.inference.packages.deltas import write_delta
from recsys.inference.packages.follow import upload
from recsys.inference.packages.manifest import read_manifest
from recsys.inference.quant.sources import SavedTables
from recsys.modules.hashed_ids import check_rows_in_memory
from recsys.modules.tables.fingerprints import check_fingerprints

__all__ = ["Publisher"]

_WHAT = "publish changed rows"
_ROUND_BYTES = 32 << 20
"""Bytes that a rank sends to rank 0 at once."""


@final
class Publisher:
    """Publisher of a model's changed rows, every few seconds while it trains.

    Servers that follow the folder of the version apply the deltas. All ranks that the model is
    sharded over create a publisher and call its methods in the same order; rank 0 writes.

    Create it in the same training step in which the version was written, as rows are marked from
    then on. Rows that a checkpoint load writes later count as changed, so a job that resumes can
    create the publisher before it loads.

    Args:
        model: The trained model, sharded or not. The package has quantized tables of it.
        version: The folder of the version, such as "models/movies/1"; only rank 0 reads it.
        every: Seconds between deltas.
        url: A copy of the version, such as "s3://models/movies/1", any address of fsspec: deltas
            are uploaded there, too, and the other files if it has none. None: no copy.

    Raises:
        FileNotFoundError: The folder is not a version of a package.
        ValueError: The model lacks a table of the package, is of another fit or may have rows on
            the disk; the interval is not positive, or the model is a `DMPCollection`.

    Example:
        >>> model, version = build(), "models/movies/1"  # doctest: +SKIP
        >>> publisher = Publisher(model, version, every=2.0)  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     train(model, batch)
        ...     publisher.step()
        >>> publisher.close()  # doctest: +SKIP
    """

    @checked_but("model")
    def __init__(
        self,
        model: nn.Module,
        version: str | Path,
        *,
        every: float = 5.0,
        url: str | None = None,
    ) -> None:
        if every <= 0:
            raise ValueError(f"Publisher.every must be positive; received {every}.")
        if any(isinstance(module, DMPCollection) for module in model.modules()):
            raise ValueError(
                "Publisher.model must not be a DMPCollection, whose groups of ranks hold the same "
                "rows; received one. Load its checkpoints into another job that publishes."
            )
        check_rows_in_memory(model, "A model to publish")
        self._model, self._version, self._url = model, Path(version), url
        self._every = every
        self._env: ShardingEnv = env_of(model).for_publishing()
        self._tables: dict[str, Mapping[str, Any]] = {}
        self._together(self._find_tables)
        weights = list(self._tables)
        if self._env.process_group is not None:
            weights = broadcast_object(self._env.process_group, _WHAT, weights)
        self._weights = weights
        self._changed = ChangedRows(model)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._writing: Future[Path | None] | None = None
        self._last = time.monotonic()
        self._is_due = torch.zeros((), dtype=torch.uint8)
        self._agreeing: Any = None

    def step(self) -> None:
        """Publish the changed rows if it is time; call it after each training step.

        It copies the rows and returns; a thread of rank 0 quantizes and writes them.

        Raises:
            OSError: The last delta could not be written. Its rows are part of the next delta.
            ValueError: A row of it cannot be quantized.
        """
        if self._is_time():
            self._collect()

    def publish(self) -> Path | None:
        """Publish the changed rows now, and wait until they are written.

        Returns:
            On rank 0 the file; None if no row has changed. On other ranks None.

        Raises:
            OSError: The delta could not be written.
            ValueError: A row cannot be quantized.
        """
        self._collect()
        return self._end_writing()

    def close(self) -> None:
        """Wait for the last delta, and stop marking rows. Rows since then are not published."""
        try:
            self._end_writing()
        finally:
            self._writer.shutdown()
            self._changed.close()

    def _is_time(self) -> bool:
        """Return whether it was time on rank 0 one step before: no rank waits for the answer."""
        env = self._env
        was_due = False
        if self._agreeing is not None:
            self._agreeing.wait()
            was_due = bool(self._is_due)
        elif env.world_size == 1:
            was_due = time.monotonic() - self._last >= self._every
        if env.world_size > 1:
            self._is_due.fill_(time.monotonic() - self._last >= self._every and not was_due)
            self._agreeing = dist.broadcast(
                self._is_due, group=env.process_group, group_src=0, async_op=True
            )
        return was_due

    def _collect(self) -> None:
        """Copy the changed rows to rank 0, and start to write them."""
        self._last = time.monotonic()
        self._end_writing()
        rounds: list[list[_Source]] = []
        gathered: list[_Piece] = []

        def choose() -> None:
            rounds.extend(_rounds_of(self._model, self._weights, self._changed.take()))

        def copy(number: int) -> list[_Piece]:
            return [piece.copy() for piece in rounds[number]] if number < len(rounds) else []

        try:
            self._together(choose)
            group = self._env.process_group
            for number in range(max(gather_objects(group, _WHAT, len(rounds)))):
                pieces: list[_Piece] = []
                self._together(lambda: pieces.extend(copy(number)))  # noqa: B023
                gathered += _gather(self._env, pieces)
        except Exception:
            self._changed.mark_all()  # these rows are part of the next delta
            raise
        if self._env.rank == 0:
            self._writing = self._writer.submit(self._write, gathered)

    def _end_writing(self) -> Path | None:
        """Wait for the delta that is being written; every rank raises its error."""
        writing, self._writing = self._writing, None
        written: list[Path | None] = [None]

        def wait() -> None:
            if writing is not None:
                written[0] = writing.result()

        try:
            self._together(wait)
        except Exception:
            self._changed.mark_all()
            raise
        return written[0]

    def _together(self, work: Callable[[], None]) -> None:
        """Do the work of this rank; every rank raises the error of any rank."""
        error = None
        try:
            work()
        except Exception as raised:
            error = raised
        raise_together(self._env, _WHAT, error)

    def _write(self, pieces: list[_Piece]) -> Path | None:
        """Write a delta; runs in the thread of rank 0."""
        tables = {}
        for weight, entry in self._tables.items():
            table_pieces = [piece for piece in pieces if piece.weight == weight]
            if any(piece.rows.numel() for piece in table_pieces):
                tables[entry["name"]] = _joined(table_pieces, entry)
        if not tables:
            return None
        file = write_delta(self._version, tables)
        if self._url is not None:
            upload(self._version, self._url)
        return file

    def _find_tables(self) -> None:
        """Find the weight of each table of the package; on rank 0 only."""
        if self._env.rank != 0:
            return
        names = get_unwrapped_module(self._model).state_dict()
        weights = [name for name in names if SavedTables.is_table(name)]
        for entry in read_manifest(self._version)["tables"]:
            path, _, name = entry["name"].rpartition(".")
            matches = [n for n in weights if n.split(".")[-2] in (entry["name"], name)]
            if len(matches) > 1:
                matches = [n for n in matches if n.startswith(f"{path}.")]
            if len(matches) != 1:
                raise ValueError(
                    f"Publisher.model must have the table {entry['name']!r} of {self._version} "
                    f"once; received {matches or weights}."
                )
            self._tables[matches[0]] = entry
        self._check_fit()
        if self._url is not None:
            upload(self._version, self._url)

    def _check_fit(self) -> None:
        """Check that rows of the package stand for the values of the model's rows."""
        folder = self._version / "spec"
        if not folder.is_dir():
            return
        from recsys.inference.packages.columns import load_spec  # needs pyarrow

        try:
            inner = get_unwrapped_module(self._model)
            check_fingerprints(inner, load_spec(self._version).fingerprints(), "spec")
        except ValueError as error:
            raise ValueError(
                f"Publisher.version must be of the fit of the model; rows of {self._version} stand "
                f"for other values. Write a new version of the package. ({error})"
            ) from None


@final
class _Piece(NamedTuple):
    """Changed rows of a shard, on the CPU."""

    weight: str
    rows: Tensor
    """int64 `[K]` row numbers of the table."""
    column: int
    """First column."""
    values: Tensor
    """`[K, C]`."""
    ids: Tensor
    """int64 `[K]` hashed ids; `[0]` for other tables."""
    is_used: Tensor
    """bool `[K]` whether a row has an id; `[0]` for other tables."""


@final
class _Source(NamedTuple):
    """Changed rows of a shard, which are not copied yet."""

    weight: str
    rows: Tensor
    """int64 `[K]` row numbers of the table."""
    at: tuple[int, ...]
    """First row and column of the shard."""
    values: Tensor
    """The shard."""
    states: tuple[Tensor, Tensor] | None
    """`ids` and `last_used` of the table; None without hashed ids."""
    rank: int

    def copy(self) -> _Piece:
        """Return copies on the CPU."""
        ids, is_used = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
        if self.states is not None:
            ids, last_used = (_rows_at(value, self.rank, self.rows) for value in self.states)
            is_used = last_used > 0
        picked = self.values.detach()[self.rows - self.at[0]].float().cpu()
        return _Piece(self.weight, self.rows.cpu(), self.at[1], picked, ids, is_used)


def _rounds_of(
    model: nn.Module, weights: Iterable[str], changed: Mapping[str, Tensor]
) -> Iterator[list[_Source]]:
    """Yield the changed rows of this rank's shards in rounds of bounded size."""
    state, rank = get_unwrapped_module(model).state_dict(), env_of(model).rank
    for name in weights:
        names = [f"{name.removesuffix('weight')}index.{key}" for key in ("ids", "last_used")]
        index = (state[names[0]], state[names[1]]) if names[0] in state else None
        for at, values in _parts_of(state[name], rank):
            rows = changed[name]
            shard_rows = rows[(rows >= at[0]) & (rows < at[0] + len(values))]
            step = max(_ROUND_BYTES // (4 * values.shape[1] + 16), 1)
            for part in shard_rows.split(step) if shard_rows.numel() else ():
                yield [_Source(name, part, at, values, index, rank)]


def _parts_of(value: Tensor, rank: int) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return this rank's shards of a value; rank 0 has the values of all replicas."""
    if isinstance(value, ShardedTable):
        return [(shard.offsets, shard.tensor) for shard in value.local_shards()]
    return [((0, 0), value)] if rank == 0 else []


def _rows_at(value: Tensor, rank: int, rows: Tensor) -> Tensor:
    """Return values of rows that this rank holds."""
    gathered = torch.zeros(len(rows), dtype=value.dtype)
    for at, values in _parts_of(value, rank):
        is_here = (rows >= at[0]) & (rows < at[0] + len(values))
        gathered[is_here.cpu()] = values[rows[is_here] - at[0]].cpu()
    return gathered


def _gather(env: ShardingEnv, pieces: list[_Piece]) -> list[_Piece]:
    """Return the pieces of all ranks on rank 0, [] on other ranks."""
    if env.world_size == 1:
        return pieces
    gathered: list[list[_Piece]] | None = [[]] * env.world_size if env.rank == 0 else None
    with explained(env.process_group, _WHAT), waiting(_WHAT):
        dist.gather_object(pieces, gathered, group=env.process_group, group_dst=0)
    return [piece for rank_pieces in gathered or () for piece in rank_pieces]


def _joined(pieces: list[_Piece], entry: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the arguments of `write_delta` for a table: whole rows of all shards."""
    rows = torch.cat([piece.rows for piece in pieces]).unique()
    values = torch.zeros(len(rows), entry["dim"])
    ids, is_used = torch.zeros_like(rows), torch.zeros(len(rows), dtype=torch.bool)
    for piece in pieces:
        places = torch.searchsorted(rows, piece.rows)
        values[places, piece.column : piece.column + piece.values.shape[1]] = piece.values
        if entry["index"] is not None:
            ids[places], is_used[places] = piece.ids, piece.is_used
    if entry["index"] is None:
        return rows, values
    if entry["index"]["unknown"] == "zero":
        values[rows % (entry["rows"] // entry["index"]["regions"]) == 0] = 0
    return rows, values, ids, is_used
