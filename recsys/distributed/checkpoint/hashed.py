"""Tables with hashed ids of another size, seed or number of regions, or that had a vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.read import SavedValues, is_named
from recsys.distributed.checkpoint.state import parts_of_value, values_with_rows
from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.state.table_shards import TableShards
from recsys.kernels.hashed.index import IdIndex, geometry
from recsys.kernels.hashed.placement import choose_rows
from recsys.kernels.hashed.twin import FRACTION, locate, scores_of
from recsys.modules.ids.rows import PINNED_BATCHES
from recsys.modules.ids.table_index import TableIndex
from recsys.modules.tables.embedding_table import EmbeddingTable

_REMEDY = "Load it with the rows and the seed with which it was saved."
_BY_VALUE = "A load by value", "Leave out overflow, and give the table rows for all ids."


@final
class SavedIds(NamedTuple):
    """Ids of a table that has a vocabulary in the checkpoint, the most useful first."""

    ids: Tensor
    """int64 [K]."""
    rows: Tensor
    """int64 [K], their rows in the checkpoint."""
    unknown_row: int
    """Row of unknown values in the checkpoint."""


@final
class _Table(NamedTuple):
    """A table with hashed ids on this rank."""

    weight: str
    """Name of its weight in the state dict."""
    shards: list[tuple[int, TableIndex]]
    """First row and index of each shard."""
    values: dict[tuple[str, ...], Tensor]
    """Weight and row states that are not the index's, by their keys in the state."""
    arrays: dict[tuple[str, ...], Tensor]
    """Arrays of the index."""
    given: SavedIds | None
    """Ids of a vocabulary; None: the checkpoint has an index."""


@final
class HashedTables:
    """Tables with hashed ids that a load fills id by id instead of row by row.

    Each id has the row that the hash gives it in the new table. If a line of the table has too many
    ids, the ids with the highest scores stay, by the eviction rule of the table; of the values of a
    vocabulary, the first ones. Counters of `AtLeast` and optimizer states of rows without an id are
    reset.

    Args:
        model: The model.
        state: Its live state. The values of the tables are taken out.
        resize: Names of tables.
        given: Ids of tables that have a vocabulary in the checkpoint, by the name of the weight.
    """

    def __init__(
        self,
        model: nn.Module,
        state: dict[str, Any],
        resize: Collection[str],
        given: Mapping[str, SavedIds],
    ) -> None:
        self._state = state
        self._tables: list[_Table] = []
        for name, shards in _hashed_tables(model):
            weight = f"{name}weight"
            if weight in given or any(is_named(weight, table) for table in resize):
                for _, shard in shards:
                    try:
                        action, remedy = ("resize", _REMEDY) if weight not in given else _BY_VALUE
                        shard.rules.check_rows_in_memory(name.removesuffix("."), action, remedy)
                    except ValueError as error:
                        raise CheckpointError(str(error)) from None
                values = values_with_rows(weight, state)
                index = {key: v for key, v in values.items() if key[1].startswith(f"{name}index.")}
                for key in ("sketch", *(("steps", "init_seed") if weight in given else ())):
                    if (array := f"{name}index.{key}") in state["model"]:
                        index["model", array] = state["model"][array]
                values = {key: value for key, value in values.items() if key not in index}
                self._tables.append(_Table(weight, shards, values, index, given.get(weight)))
                for key in index:
                    del state["model"][key[1]]
                del state["model"][weight]
                states = state.get("optimizer", {}).get("state", {})
                if weight in states:
                    of_rows = {key[-1] for key in values if key[0] == "optimizer"}
                    states[weight] = {k: v for k, v in states[weight].items() if k not in of_rows}

    def names(self, resize: Collection[str]) -> list[str]:
        """Return the names of the other tables."""
        return [t for t in resize if not any(is_named(table.weight, t) for table in self._tables)]

    @torch.no_grad()
    def fill(self, saved: SavedValues) -> dict[tuple[str, int], int]:
        """Fill the tables, and put their values back into the state.

        The other values must have been loaded.

        Args:
            saved: The checkpoint, with optimizer state.

        Returns:
            Number of values of a vocabulary that have no room, by the name of the weight and the
            first row of the shard.

        Raises:
            CheckpointError: It has no ids of a table, or the table has other columns in it.
        """
        lost: dict[tuple[str, int], int] = {}
        for table in self._tables:
            lost |= _fill(table, saved)
            for key, value in (*table.values.items(), *table.arrays.items()):
                set_element(self._state, key, value)
        return lost


def _hashed_tables(model: nn.Module) -> Iterator[tuple[str, list[tuple[int, TableIndex]]]]:
    """Yield the prefix of each table with hashed ids in the state dict, and this rank's shards."""
    for path, module in get_unwrapped_module(model).named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, TableShards) and module.rules is not None:
            yield prefix, [(s.rect.row_start, s.index) for s in module.shards if s.index]
        elif isinstance(module, EmbeddingTable) and hasattr(module, "index"):
            yield prefix, [(0, module.index)]


def _fill(table: _Table, saved: SavedValues) -> dict[tuple[str, int], int]:
    prefix, given = table.weight.removesuffix("weight"), table.given
    arrays = table.arrays if given is None else ()
    names = {key: name_of(key) for key in (*table.values, *arrays)}
    for key, name in names.items():
        saved_value, value = saved.values.get(name), {**table.values, **table.arrays}[key]
        if not isinstance(saved_value, TensorStorageMetadata):
            raise CheckpointError(
                "A table with HashedIds whose ids get other rows needs its values in the "
                f"checkpoint; {saved.folder} has no {name!r}. Leave {table.weight!r} out, or load "
                "without the optimizer."
            )
        if saved_value.size[1:] != value.shape[1:]:
            raise CheckpointError(
                f"The checkpoint {saved.folder} has {name!r} of shape {tuple(saved_value.size)}; "
                f"here it has shape {tuple(value.shape)}. Only another number of rows can be "
                "loaded."
            )
    rows_of: dict[int, tuple[Tensor, Tensor]] = {}  # new and old rows, by the first row of a shard
    lost: dict[tuple[str, int], int] = {}
    for first_row, index in table.shards:
        if given is None:
            rows_of[first_row] = _place(index, saved, prefix)
        else:
            rows_of[first_row], lost[table.weight, first_row] = _place_values(index, given)
    for key, value in table.values.items():
        parts = parts_of_value(value)
        if key[0] != "model":
            for _, part in parts:
                part.zero_()
        copy_rows(saved, names[key], parts, rows_of)
    return lost


def name_of(key: Sequence[str]) -> str:
    """Return the name of a value in `SavedValues`."""
    return key[1] if key[0] == "model" else ".".join(key)


def _place(index: TableIndex, saved: SavedValues, prefix: str) -> tuple[Tensor, Tensor]:
    """Give rows of a shard to the saved ids of its regions.

    Returns:
        int64 [K] rows in the shard and, in the same order, in the checkpoint.
    """
    arrays = [name for name in ("ids", "last_used", "seen") if getattr(index, name).numel()]
    names = {name: f"{prefix}index.{name}" for name in arrays}
    shard, step, ttl = index.index, int(index.steps) + 1, index.rules.ttl
    oldest = max(min(step - ttl, step - PINNED_BATCHES + 1), 1) if ttl else 1
    rows_of_shards: list[list[Tensor]] = []
    shared: list[Tensor] = []
    num_rows = saved.values[names["ids"]].size[0]  # type: ignore[union-attr]
    of_table, num_regions = geometry(num_rows, index.rules.num_regions)
    region_rows = of_table // num_regions
    for rows in saved.row_ranges(names["ids"]):
        assert rows is not None
        read = saved.read(dict.fromkeys(names.values(), rows))
        block = [read[name] for name in names.values()]
        at = (block[1] >= oldest).nonzero().flatten()
        at = at[_are_here(shard, block[0][at]).cpu()]
        rows_of_shards.append([at + rows.start, *(values[at] for values in block)])
        starts = torch.arange(-rows.start % region_rows, len(block[0]), region_rows)
        shared.append(block[1][starts] == 0)
    old_rows, *values = [
        torch.cat(parts).to(shard.ids.device) for parts in zip(*rows_of_shards, strict=True)
    ]
    for array in (index.ids, index.last_used, index.seen, index.sketch):
        array.zero_()
    seen = values[2] if len(values) > 2 else None
    scores = scores_of(shard.settings, step, values[1], seen)
    placed, _ = choose_rows(shard, values[0], scores, step)
    has_row = placed >= 0
    new_rows, old_rows = placed[has_row], old_rows[has_row]
    for name, value in zip(arrays, values, strict=True):
        getattr(index, name)[new_rows] = value[has_row]
    if bool(torch.cat(shared).all()):  # the saved table had as many regions by the same rules
        regions = torch.arange(shard.first_region, shard.last_region, device=new_rows.device)
        old_regions = regions * num_regions // shard.num_regions
        new_rows = torch.cat([new_rows, index.shared_rows()])
        old_rows = torch.cat([old_rows, old_regions * region_rows])
    return new_rows, old_rows


def _are_here(shard: IdIndex, ids: Tensor) -> Tensor:
    """Return whether ids belong to the regions of a shard."""
    regions = locate(shard, ids.to(shard.ids.device)).regions
    return (regions >= shard.first_region) & (regions < shard.last_region)


def _place_values(index: TableIndex, given: SavedIds) -> tuple[tuple[Tensor, Tensor], int]:
    """Give rows of a shard to values of a vocabulary, as if the last batch had them.

    Returns:
        int64 [K] rows in the shard and, in the same order, in the checkpoint; and the number of
        values of its regions without a row.
    """
    shard, step = index.index, max(index.step, 1)  # a row of step 0 is free
    for array in (index.ids, index.last_used, index.seen, index.sketch):
        array.zero_()
    index.steps.fill_(step)
    scores = torch.arange(len(given.ids), 0, -1, device=shard.ids.device)
    at = _are_here(shard, given.ids).nonzero().flatten()
    ids, old_rows = (values.to(shard.ids.device)[at] for values in given[:2])
    placed, _ = choose_rows(shard, ids, scores[at], step + 1)
    has_row = placed >= 0
    new_rows, old_rows = placed[has_row], old_rows[has_row]
    index.ids[new_rows], index.last_used[new_rows] = ids[has_row], step
    if index.seen.numel():
        index.seen[new_rows] = FRACTION if shard.settings.eviction == "lfu" else 1
    if index.rules.unknown == "shared":
        shared = index.shared_rows()
        new_rows = torch.cat([new_rows, shared])
        old_rows = torch.cat([old_rows, torch.full_like(shared, given.unknown_row)])
    return (new_rows, old_rows), int((~has_row).sum())


def copy_rows(
    saved: SavedValues,
    name: str,
    parts: Sequence[tuple[tuple[int, ...], Tensor]],
    rows_of: dict[int, tuple[Tensor, Tensor]],
) -> None:
    """Copy the rows of a saved value to their new places.

    Args:
        saved: The checkpoint.
        name: Name of the value in it.
        parts: Offsets and values of this rank's shards.
        rows_of: New rows in the shard and, in the same order, rows in the checkpoint; by the first
            row of the shard.
    """
    for rows in saved.row_ranges(name) if parts else []:
        assert rows is not None
        block: Tensor | None = None
        for offsets, part in parts:
            new_rows, old_rows = rows_of[offsets[0]]
            is_here = (old_rows >= rows.start) & (old_rows < rows.stop)
            if not bool(is_here.any()):
                continue
            if block is None:
                block = saved.read({name: rows})[name]
            values = block[(old_rows[is_here] - rows.start).cpu()]
            if len(offsets) > 1:
                values = values[:, offsets[1] : offsets[1] + part.shape[1]]
            part[new_rows[is_here]] = values.to(part.device, part.dtype)
