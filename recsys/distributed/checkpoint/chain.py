"""Reads a version and, for a delta, the versions that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from recsys.distributed.checkpoint.blocks import BlockReader
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.versions import Manifest, chain_of

ROWS = "rows."
"""Prefix of the row numbers of a table in a delta, before the name of its weight."""


def reader_of(folder: Path, manifest: Manifest | None) -> BlockReader:
    """Return the reader of a version, or of a folder without a manifest."""
    if manifest is not None and manifest.get("kind") == "delta":
        return ChainReader(folder, manifest)
    return BlockReader(folder, manifest)


def rows_of_delta(folder: Path, manifest: Manifest, table: str) -> Tensor:
    """Return the numbers of the rows of a table that a delta has, int64 [K].

    Args:
        folder: Folder of the delta.
        manifest: Its manifest.
        table: Name of the weight.

    Raises:
        CheckpointError: The delta is damaged.
    """
    count = manifest["rows"].get(table, {"count": 0})["count"]
    if not count:
        return torch.empty(0, dtype=torch.int64)
    [rows] = _read(BlockReader(folder, manifest), [(ROWS + table, (0,), (count,))])
    return rows


@final
class _Version(NamedTuple):
    reader: BlockReader
    table_of: dict[str, str]
    """The table of each value that has rows in the delta; {} of the base."""
    counts: dict[str, int]
    """Number of saved rows of each table."""

    @classmethod
    def of(cls, folder: Path, manifest: Manifest) -> _Version:
        rows = manifest.get("rows", {})
        table_of = {name: table for table, saved in rows.items() for name in saved["values"]}
        counts = {table: saved["count"] for table, saved in rows.items()}
        return cls(BlockReader(folder, manifest), table_of, counts)


@final
class ChainReader(BlockReader):
    """Reader of a delta with all versions back to its base, as of one whole version.

    Values with rows are read from the base, and then each delta's rows are written over them in the
    order of the chain. Other values are read from the last delta.

    Args:
        folder: Folder of the delta.
        manifest: Its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        self._last = manifest
        self._versions: list[_Version] = []
        self._whole: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the whole version.

        Raises:
            CheckpointError: A version of the chain is missing or damaged, or is of another chain.
        """
        if self._whole is None:
            self._versions = [_Version.of(*v) for v in chain_of(self._folder, self._last)]
            base, last = self._versions[0].reader, self._versions[-1]
            old, new = base.read_metadata(), last.reader.read_metadata()
            for version in self._versions[1:]:
                self._check_names(version, old, last.table_of)
            values = {n: v for n, v in new.state_dict_metadata.items() if not n.startswith(ROWS)}
            values |= {name: old.state_dict_metadata[name] for name in last.table_of}
            places = {i: p for i, p in new.storage_data.items() if i.fqn not in last.table_of}
            places |= {i: p for i, p in old.storage_data.items() if i.fqn in last.table_of}
            self._whole = Metadata(values, old.planner_data, places, storage_meta=new.storage_meta)
        return self._whole

    def _check_names(self, version: _Version, base: Metadata, names: Iterable[str]) -> None:
        missing = set(names) - base.state_dict_metadata.keys()
        if missing or version.table_of.keys() != set(names):
            raise CheckpointError(
                f"{self._folder} has deltas of other values than its base has, such as "
                f"{sorted(missing or version.table_of.keys() ^ set(names))[:3]}. Load an earlier "
                "version."
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the values of a plan from the base, and write the rows of the deltas over them."""
        base, *deltas = self._versions
        last = deltas[-1]
        of_rows = [item for item in plan.items if item.storage_index.fqn in last.table_of]
        others = [item for item in plan.items if item.storage_index.fqn not in last.table_of]
        for reader, items in ((base.reader, of_rows), (last.reader, others)):
            if items:
                reader.set_up_storage_reader(reader.read_metadata(), False)
                reader.read_data(LoadPlan(items), planner)
        for delta in deltas:
            self._apply(delta, of_rows, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _apply(self, delta: _Version, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Write the rows of a delta over the values that were read by some items."""
        tables = {delta.table_of[item.storage_index.fqn] for item in items}
        used = [table for table in tables if delta.counts[table]]
        rows_of = {
            table: rows
            for table, rows in zip(
                used,
                _read(
                    delta.reader, [(ROWS + table, (0,), (delta.counts[table],)) for table in used]
                ),
                strict=True,
            )
        }
        needed: list[tuple[ReadItem, Tensor]] = []
        parts: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        for item in items:
            name, offset = item.storage_index.fqn, item.storage_index.offset
            rows = rows_of.get(delta.table_of[name])
            if rows is None or offset is None:
                continue
            first = [o + s for o, s in zip(offset, item.storage_offsets, strict=True)]
            edges = torch.tensor([first[0], first[0] + item.lengths[0]])
            start, end = torch.searchsorted(rows, edges).tolist()
            if start < end:
                needed.append((item, rows[start:end] - first[0]))
                parts.append((name, (start, *first[1:]), (end - start, *item.lengths[1:])))
        for (item, rows), values in zip(needed, _read(delta.reader, parts), strict=True):
            target = planner.resolve_tensor(item).detach()
            target.index_copy_(0, rows.to(target.device), values.to(target.device, target.dtype))
            planner.commit_tensor(item, target)


def _read(
    reader: BlockReader, parts: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
) -> list[Tensor]:
    """Return parts of values: name, offsets and sizes of each.

    Raises:
        CheckpointError: The version lacks a part, or is damaged.
    """
    metadata = reader.read_metadata()
    buffers: list[Tensor] = []
    items: list[ReadItem] = []
    owners: dict[int, int] = {}
    for number, (name, offsets, sizes) in enumerate(parts):
        saved = metadata.state_dict_metadata.get(name)
        read_items: list[ReadItem] = []
        if isinstance(saved, TensorStorageMetadata):
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            read_items = create_read_items_for_chunk_list(name, saved, [chunk])
            buffers.append(torch.empty(sizes, dtype=saved.properties.dtype))
        if sum(prod(item.lengths) for item in read_items) < prod(sizes):
            raise CheckpointError(
                f"{reader.checkpoint_id} lacks rows {offsets[0]} to {offsets[0] + sizes[0]} of "
                f"{name!r}. Load an earlier version, or copy this one again."
            )
        owners |= {id(item): number for item in read_items}
        items += read_items
    reader.set_up_storage_reader(metadata, False)
    reader.read_data(LoadPlan(items), _Buffers(buffers, owners))  # type: ignore[arg-type]
    return buffers


@final
class _Buffers:
    """Load planner of tensors in memory.

    Args:
        buffers: The tensors.
        owners: Position of the tensor of each item, by the item's identity.
    """

    def __init__(self, buffers: Sequence[Tensor], owners: dict[int, int]) -> None:
        self._buffers, self._owners = buffers, owners

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        """Return the part of a tensor that an item fills."""
        target = self._buffers[self._owners[id(item)]]
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the tensor was filled in place."""
