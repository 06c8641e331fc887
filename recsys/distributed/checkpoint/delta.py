"""Delta saves: the rows that changed since the previous version, and the chain of versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn

from recsys.distributed.changed_rows import ChangedRows
from recsys.distributed.checkpoint.errors import on_every_rank
from recsys.distributed.checkpoint.state import parts_of_value, values_with_rows
from recsys.distributed.checkpoint.versions import identity_of, newest_version, read_manifest
from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.distributed.state.table_shards import TableShards

_MOST_OF_BASE = 0.5  # the deltas of a chain may have this share of the bytes of its base

_chains: WeakKeyDictionary[nn.Module, Chain] = WeakKeyDictionary()


@final
@dataclass(frozen=True, kw_only=True)
class Chain:
    """The newest version of a model's checkpoint, which the next delta continues.

    Attributes:
        path: Folder of the checkpoint.
        changed: Rows that changed since this version.
        shapes: Name, shape and dtype of each value of the model and its optimizer.
        saved: Rank 0: the version on the disk.
    """

    path: Path
    changed: ChangedRows
    shapes: frozenset[Any]
    saved: SavedChain | None

    def can_continue(
        self, path: Path, shapes: frozenset[Any], full_every: int, env: ShardingEnv
    ) -> bool:
        """Return whether this rank can save a delta on the version.

        Args:
            path: Folder of the checkpoint.
            shapes: Current values.
            full_every: Every so many saves, one is full.
            env: The ranks.
        """
        if self.path != path.resolve() or self.shapes != shapes:
            return False
        if env.rank != 0:
            return True
        saved, newest = self.saved, newest_version(path)
        return (
            saved is not None
            and newest is not None
            and newest.name == f"step-{saved.newest['step']}"
            and identity_of(newest) == saved.newest
            and saved.num_deltas + 1 < full_every
            and saved.delta_bytes <= _MOST_OF_BASE * saved.base_bytes
        )


@final
class SavedChain(NamedTuple):
    """The newest version of a chain, and the sizes of the chain's versions."""

    newest: dict[str, Any]
    base: dict[str, Any]
    base_bytes: int
    delta_bytes: int
    num_deltas: int


def take_chain(model: nn.Module) -> Chain | None:
    """Return and forget the chain of a model; without one, the next save is full."""
    return _chains.pop(model, None)


def keep_chain(model: nn.Module, chain: Chain) -> None:
    """Remember the chain of a model until its next save or load."""
    _chains[model] = chain


def shapes_of(values: Mapping[str, Any]) -> frozenset[Any]:
    """Return names, shapes and dtypes of flat state."""
    return frozenset(
        (name, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else name
        for name, value in values.items()
    )


def saved_as(folder: Path, before: SavedChain | None) -> SavedChain:
    """Return the chain on the disk after a version was saved.

    Args:
        folder: The complete version.
        before: The chain, if the version is a delta.
    """
    files = read_manifest(folder)["files"]
    size = sum(length for blocks in files.values() for length, _ in blocks)
    newest = identity_of(folder)
    if before is None:
        return SavedChain(newest, newest, size, 0, 0)
    return before._replace(
        newest=newest,
        delta_bytes=before.delta_bytes + size,
        num_deltas=before.num_deltas + 1,
    )


def about_delta(folder: Path, before: SavedChain, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a delta's manifest.

    Args:
        folder: Folder of the delta.
        before: The chain that it continues.
        rows: Saved rows, of `ChangedValues`.
    """
    return {
        "kind": "delta",
        "step": int(folder.name.removeprefix("step-")),
        "previous": before.newest,
        "base": before.base,
        "rows": rows,
    }


@final
class ChangedValues(NamedTuple):
    """The values of a delta."""

    state: dict[str, Any]
    """State to save: of values with rows the changed rows, and other values in full."""
    rows: dict[str, Any]
    """Number of rows, and names of the values that have them, by table."""


def changed_values(
    chain: Chain, model: nn.Module, state: dict[str, Any], env: ShardingEnv, what: str
) -> ChangedValues | None:
    """Return the values that changed since the newest version of a chain.

    Every rank must call it.

    Args:
        chain: The chain.
        model: The model.
        state: State of the model and its optimizer.
        env: The ranks.
        what: Start of errors.

    Returns:
        None if the chain's deltas would exceed half of its base: save all values.
    """
    tables: dict[str, _Table] = {}

    def find() -> tuple[dict[str, Any], int]:
        taken = chain.changed.take()
        edges = _edges_of(model)
        for name, weight in state["model"].items():
            if name in edges or name in taken:
                at = edges.get(name, [0, weight.shape[0]])
                tables[name] = _Table.of(name, at, taken.get(name), state)
        free = 0
        if chain.saved is not None:
            free = int(_MOST_OF_BASE * chain.saved.base_bytes) - chain.saved.delta_bytes
        return {name: table.summary() for name, table in tables.items()}, free

    changes = on_every_rank(env, what, find)
    size = 0
    rows: dict[str, Any] = {}
    for name, table in tables.items():
        summaries = [of_rank[name] for of_rank, _ in changes]
        table.agree([parts for parts, _ in summaries])
        names = sorted({value for _, values in summaries for value in values})
        size += table.num_rows * max(sum(values.values()) for _, values in summaries)
        rows[name] = {"count": table.num_rows, "values": names}
    if size > changes[0][1]:
        return None
    changed = _copied(state)
    changed["rows"] = {}
    for name, table in tables.items():
        for place in table.places:
            *path, key = place
            holder = changed
            for part in path:
                holder = holder[part]
            value = holder.pop(key)
            if table.num_rows:
                holder[key] = table.pack(value)
        if table.num_rows:
            changed["rows"][name] = table.row_numbers(state["model"][name])
    return ChangedValues(changed, rows)


_Summary = tuple[dict[int, tuple[int, int]], dict[str, int]]
"""Number and CRC of the changed rows of each row block on a rank; names and bytes per row of the
values."""


@final
class _Table:
    """Changed rows of one table on this rank.

    Row blocks are the parts of the table's rows that no shard splits.

    Args:
        edges: First row of each block, and the end.
        rows: Changed rows of this rank, ascending; None without a shard.
        owned: Blocks of this rank.
        places: Keys in the state of the values with rows.
        values: Bytes per row of each, by its flat name.
    """

    def __init__(
        self,
        edges: list[int],
        rows: Tensor | None,
        owned: set[int],
        places: list[tuple[str, ...]],
        values: dict[str, int],
    ) -> None:
        self._edges, self.places, self._values = edges, places, values
        self._parts: dict[int, Tensor] = {}
        if rows is not None:
            at = torch.searchsorted(rows, torch.tensor(edges, device=rows.device)).tolist()
            for block in owned:
                self._parts[block] = rows[at[block] : at[block + 1]]
        self._starts: list[int] = []  # first saved row of each block, and the end

    @classmethod
    def of(cls, name: str, edges: list[int], rows: Tensor | None, state: dict[str, Any]) -> _Table:
        """Return the table of a weight's name in the state."""
        weight = state["model"][name]
        places = values_with_rows(name, state)
        values = {
            ".".join(place): value.shape[1:].numel() * value.dtype.itemsize
            for place, value in places.items()
        }
        ranges = [(o[0], o[0] + len(part)) for o, part in parts_of_value(weight)]
        owned = {
            block
            for block, (start, end) in enumerate(pairwise(edges))
            if any(first <= start and end <= last for first, last in ranges)
        }
        return cls(edges, rows, owned, list(places), values)

    def summary(self) -> _Summary:
        """Return what other ranks must know."""
        parts = {
            block: (rows.numel(), crc32(rows.cpu().numpy().tobytes()))
            for block, rows in self._parts.items()
        }
        return parts, self._values

    def agree(self, parts_of_ranks: Sequence[dict[int, tuple[int, int]]]) -> None:
        """Set the rows to save; all rows of blocks whose owners have marked different rows."""
        counts = []
        for block, (start, end) in enumerate(pairwise(self._edges)):
            distinct = {parts[block] for parts in parts_of_ranks if block in parts}
            if len(distinct) > 1 and block in self._parts:
                device = self._parts[block].device
                self._parts[block] = torch.arange(start, end, device=device)
            counts.append(end - start if len(distinct) > 1 else sum(count for count, _ in distinct))
        self._starts = list(accumulate(counts, initial=0))

    @property
    def num_rows(self) -> int:
        """Rows to save, of all ranks."""
        return self._starts[-1]

    def pack(self, value: Tensor) -> Tensor:
        """Return the changed rows of a value, in the order of the row numbers."""
        shape = (self.num_rows, *value.shape[1:])
        packed = []
        for offsets, part in parts_of_value(value):
            first, rows = self._rows_in(offsets[0], len(part))
            if rows.numel():
                values = part.index_select(0, (rows - offsets[0]).to(part.device))
                packed.append(((first, *offsets[1:]), values))
        if not isinstance(value, ShardedTable):
            return packed[0][1]
        return ShardedTable(shape, packed, dtype=value.dtype, device=value.device)

    def row_numbers(self, weight: Tensor) -> Tensor:
        """Return the numbers of the changed rows, like a value of the table."""
        numbers = {}
        for offsets, part in parts_of_value(weight):
            first, rows = self._rows_in(offsets[0], len(part))
            if rows.numel():
                numbers[first] = rows
        if not isinstance(weight, ShardedTable):
            return numbers[0]
        parts = [((first,), rows) for first, rows in numbers.items()]
        return ShardedTable((self.num_rows,), parts, dtype=torch.int64, device=weight.device)

    def _rows_in(self, start: int, length: int) -> tuple[int, Tensor]:
        """Return the changed rows of a range of whole blocks, and the first's position."""
        first, last = self._edges.index(start), self._edges.index(start + length)
        rows = [self._parts[block] for block in range(first, last)]
        return self._starts[first], torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)


def _edges_of(model: nn.Module) -> dict[str, list[int]]:
    """Return the first rows of the row blocks of each sharded table, and the end."""
    edges_of_tables = {}
    for path, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, TableShards):
            rects = module.table.rects or [module.table.whole]
            edges = {edge for rect in rects for edge in (rect.row_start, rect.row_end)}
            edges_of_tables[f"{path}.weight"] = sorted(edges)
    return edges_of_tables


def _copied(value: Any) -> Any:
    """Return nested state with dicts of its own, and the same tensors."""
    if isinstance(value, dict):
        return {key: _copied(member) for key, member in value.items()}
    return value
