"""Reads a checkpoint, or a part of it, into one process without a model or a process group."""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from recsys.base.arguments import path_of
from recsys.base.checked import checked
from recsys.distributed.checkpoint.chain import reader_of
from recsys.distributed.checkpoint.errors import CheckpointError, failures_named
from recsys.distributed.checkpoint.row_logs import logs_of, read_records, refuse_logs
from recsys.distributed.checkpoint.safe_pickle import decode
from recsys.distributed.checkpoint.versions import Manifest, open_version
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.state.sharded_table import ShardedTable

_STATE = "optimizer.state."
_SECTIONS = ("model", "optimizer", "extra", "progress")


@checked
def read_checkpoint(
    path: str | Path,
    tables: str | Iterable[str] | Mapping[str, slice] | None = None,
    *,
    optimizer: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint of any number of ranks, or some tables or rows of it, into this process.

    It needs neither a model nor a process group. For a range of rows, only the blocks (up to 64 MiB
    each) that overlap it are read. All data read is checked against the CRCs of the save.

    Args:
        path: The folder passed to `save_checkpoint`, whose newest complete version is read; or one
            of its versions; or a folder written by `torch.distributed.checkpoint`.
        tables: Names of tables, parameters or modules; a mapping gives the rows of each. A name may
            be any part of a full name between dots: `t_user` means
            `ebc.embedding_bags.t_user.weight`, and `over` a layer's weight and bias. None for all.
        optimizer: Whether to read the optimizer state of these tables, too.

    Returns:
        Tensors on the CPU by the names of the unsharded model's state dict; optimizer state as
        `optimizer.state.<parameter>.<state>`. Values that are not tensors are returned as they were
        saved. A folder of another writer keeps its own names. Rows that were on the disk are
        missing: `read_hashed_table` reads them.

    Raises:
        CheckpointError: The folder is not a checkpoint or is damaged, it has no such table, or rows
            beyond the end of a table are requested.

    Example:
        >>> import tempfile
        >>> from recsys.distributed.checkpoint import save_checkpoint
        >>> model = torch.nn.Sequential(torch.nn.Embedding(30, 2), torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder, model)
        ...     list(read_checkpoint(folder))
        ...     read_checkpoint(folder, {"0": slice(10, 20)})["0.weight"].shape
        ['0.weight', '1.weight', '1.bias']
        torch.Size([10, 2])
    """
    saved = SavedValues.find(path_of("read_checkpoint.path", path), optimizer)
    rows: dict[str, slice] = {}
    names = list(saved.values)
    if tables is not None:
        if isinstance(tables, str):
            tables = [tables]
        wanted = tables if isinstance(tables, Mapping) else dict.fromkeys(tables, slice(None))
        for table, part in wanted.items():
            rows |= dict.fromkeys(saved.named(table), part)
        names = [name for name in names if name in rows]
    return saved.read({name: saved.rows_of(name, rows.get(name, slice(None))) for name in names})


@final
class HashedRows(NamedTuple):
    """The ids of a table with hashed ids, and their rows."""

    ids: Tensor
    """int64 [K], ascending."""
    values: Tensor
    """[K, columns] weights, in the same order."""


@checked
def read_hashed_table(path: str | Path, table: str) -> HashedRows:
    """Read the ids of a table with hashed ids and their weights, without a model.

    Ids that no longer have a row are not returned, nor are the rows that unknown ids share. Rows
    that were on the disk are returned.
    `load_table(model, table, values, ids=ids)` gives them rows in another table.

    Args:
        path: As for `read_checkpoint`.
        table: Name of the table.

    Returns:
        Tensors on the CPU.

    Raises:
        CheckpointError: The folder is not a checkpoint or is damaged, it has no such table or
            several, or the table has no hashed ids.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from recsys import EmbeddingBagCollection, EmbeddingBagConfig
        >>> from recsys.distributed.checkpoint import load_table, save_checkpoint
        >>> from recsys.modules.hashed_ids import HashedIds
        >>> config = EmbeddingBagConfig(64, 1, "t", feature_names=["f"], ids=HashedIds())
        >>> model = EmbeddingBagCollection(tables=[config])
        >>> values = np.array([[1], [2]], np.float32)
        >>> load_table(model, "t", values, ids=np.array([2**62, -7]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder, model)
        ...     read_hashed_table(folder, "t")
        HashedRows(ids=tensor([                 -7, 4611686018427387904]), values=tensor([[2.],
                [1.]]))
    """
    saved = SavedValues.find(path_of("read_hashed_table.path", path))
    names = [name for name in saved.named(table) if name.endswith("index.ids")]
    if len(names) != 1:
        raise CheckpointError(
            f"table must be the name of one table with HashedIds; {saved.folder} has {names} of "
            f"{table!r}. Give a longer part of its name, or call read_checkpoint for a table of "
            "row numbers."
        )
    prefix = names[0].removesuffix("index.ids")
    index = saved.read({f"{prefix}index.{name}": None for name in ("ids", "last_used")})
    ids, last_used = index.values()
    rows = (last_used > 0).nonzero().flatten()
    weight = f"{prefix}weight"
    parts = []
    for block in saved.row_ranges(weight):
        assert block is not None
        block_rows = rows[(rows >= block.start) & (rows < block.stop)]
        parts.append(saved.read({weight: block})[weight][block_rows - block.start])
    all_ids = [ids[rows]]
    for own_ids, values in saved.logged_rows(prefix):
        all_ids.append(own_ids)
        parts.append(values)
    sorted_ids, order = torch.cat(all_ids).sort()
    return HashedRows(sorted_ids, torch.cat(parts)[order])


def is_named(name: str, part: str) -> bool:
    """Return whether a name equals another, or is a part of it between dots.

    Example:
        >>> is_named("ebc.embedding_bags.t1.weight", "t1"), is_named("ebc.t11.weight", "t1")
        (True, False)
    """
    return f".{part}." in f".{name}."


class SavedValues:
    """Values of model and optimizer in a checkpoint, read one by one.

    Args:
        folder: Folder of the version.
        manifest: Its manifest; None for a folder without one.
        optimizer: Whether to include optimizer state.

    Raises:
        CheckpointError: The metadata is missing or damaged.
    """

    def __init__(self, folder: Path, manifest: Manifest | None, optimizer: bool = False) -> None:
        self.folder, self._manifest = folder, manifest or {}
        self._reader = reader_of(folder, manifest)
        metadata = self._reader.read_metadata().state_dict_metadata
        is_ours = manifest is not None or all(name.split(".")[0] in _SECTIONS for name in metadata)
        self._saved_as = {
            name.removeprefix("model.") if is_ours else name: name
            for name in metadata
            if not is_ours
            or name.startswith("model.")
            or (optimizer and name.startswith("optimizer."))
        }
        self.values: dict[str, STORAGE_TYPES] = {
            name: metadata[saved] for name, saved in self._saved_as.items()
        }

    @classmethod
    def find(cls, path: Path, optimizer: bool = False) -> SavedValues:
        """Return the values of a path, which is as for `read_checkpoint`.

        Raises:
            CheckpointError: It is not a checkpoint, or is damaged.
        """
        return cls(*open_version(path), optimizer)

    def refuse_logs(self, action: str) -> None:
        """Raise an error if rows of a table were on the disk.

        Args:
            action: What cannot be done with such a checkpoint, for the message.

        Raises:
            CheckpointError: They were.
        """
        refuse_logs(self._manifest, self.folder, action)

    def logged_rows(self, prefix: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids and weights of rows of a table that were on the disk.

        Args:
            prefix: Start of the names of the table's values.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        for log in logs_of(self._manifest).get(prefix, ()):
            for ids, values in read_records(self.folder, log, self._manifest["files"]):
                yield ids, values["weight"]

    def fingerprint_of(self, weight: str) -> str | None:
        """Return the fingerprint of a table's fit, by the name of its weight; None: not known."""
        fingerprints: Mapping[str, str] = self._manifest.get("fingerprints") or {}
        return fingerprints.get(weight)

    def named(self, table: str) -> list[str]:
        """Return the names of the values of a table or module.

        Raises:
            CheckpointError: There are none; the error lists similar names.
        """
        names = [n for n in self.values if is_named(n.removeprefix(_STATE), table)]
        if not names:
            known = {part for name in self.values for part in (name, *name.split("."))}
            near = difflib.get_close_matches(table, sorted(known), n=5, cutoff=0.5)
            hint = f"near are {near}" if near else f"it has {list(self.values)[:10]}"
            raise CheckpointError(
                f"{self.folder} holds no {table!r}; {hint}. Give the name of a table, a parameter "
                "or a module, or any part of a full name between dots."
            )
        return names

    def rows_of(self, name: str, rows: slice) -> range | None:
        """Return the rows to read of a value; None for all, and for a scalar.

        Raises:
            CheckpointError: The value has fewer rows.
        """
        if rows == slice(None) or not (size := self._size(name)):
            return None
        if name.startswith(_STATE):  # not all state has one value per row
            param = next((n for n in self.values if name.startswith(f"{_STATE}{n}.")), None)
            if param is not None and self._size(param)[:1] != size[:1]:
                return None
        start, stop = (rows.start or 0, size[0] if rows.stop is None else rows.stop)
        if rows.step not in (None, 1) or not 0 <= start <= stop <= size[0]:
            raise CheckpointError(
                f"The rows of {name!r} must be a slice within its {size[0]} rows, with step 1; "
                f"received {rows}."
            )
        return range(start, stop)

    def _size(self, name: str) -> Sequence[int]:
        value = self.values[name]
        return value.size if isinstance(value, TensorStorageMetadata) else ()

    def row_ranges(self, name: str) -> list[range | None]:
        """Return consecutive row ranges to read a tensor by, without reading any block twice."""
        value = self.values[name]
        assert isinstance(value, TensorStorageMetadata)
        if not value.size or not value.size.numel():
            return [None]
        ranges: list[range | None] = []
        first = end = 0
        for start, size in sorted((c.offsets[0], c.sizes[0]) for c in value.chunks):
            if start >= end > first:
                ranges.append(range(first, end))
                first = start
            end = max(end, start + size)
        return [*ranges, range(first, end)]

    def read(self, names: Mapping[str, range | None]) -> dict[str, Any]:
        """Return values by name, whole or some rows each.

        Raises:
            CheckpointError: A file is damaged.
        """
        read: dict[str, Any] = {}
        state: dict[str, Any] = {}
        for name, rows in names.items():
            value = self.values[name]
            if isinstance(value, BytesStorageMetadata):
                state[self._saved_as[name]] = b""
                continue
            size, offsets = list(value.size), [0] * len(value.size)
            if rows is not None:
                size[0], offsets[0] = len(rows), rows.start
            part = read[name] = torch.empty(size, dtype=value.properties.dtype)
            shards = [(tuple(offsets), part)] if part.numel() else []
            whole = ShardedTable(value.size, shards, dtype=part.dtype, device=part.device)
            state[self._saved_as[name]] = whole
        failed = f"{self.folder} cannot be read. Read an earlier version, or copy it again."
        with failures_named(failed, ShardingEnv.from_local(), "read a checkpoint"):
            load(state, storage_reader=self._reader, planner=CompleteLoadPlanner(), no_dist=True)
        return {name: read[name] if name in read else state[self._saved_as[name]] for name in names}


class CompleteLoadPlanner(DefaultLoadPlanner):
    """Load planner that rejects incomplete checkpoints and unpickles plain data only."""

    def create_local_plan(self) -> LoadPlan:
        """Return the reads of this rank.

        Raises:
            CheckpointError: The checkpoint lacks some of the values.
        """
        plan: LoadPlan = super().create_local_plan()
        covered: dict[tuple[str, tuple[int, ...]], int] = {}
        for item in plan.items:
            key = (item.dest_index.fqn, tuple(item.dest_index.offset or ()))
            covered[key] = covered.get(key, 0) + int(prod(item.lengths))
        for name, value in self.state_dict.items():
            if not hasattr(value, "local_shards"):
                continue
            for offsets, tensor in dict(value.local_shards()).items():
                num_read = covered.get((name, offsets), 0)
                if num_read < tensor.numel() and not self.allow_partial_load:
                    raise CheckpointError(
                        f"{name}: the checkpoint holds {num_read} of the {tensor.numel()} values "
                        f"of the shard at {offsets}"
                    )
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Restore a value that is not a tensor."""
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], decode(name, value))
