"""Reads a checkpoint, or a part of one, into one process: no model, no process group."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from recsys.distributed.checkpoint.blocks import BlockReader, Files
from recsys.distributed.checkpoint.complete import CompleteLoadPlanner
from recsys.distributed.checkpoint.errors import (
    CheckpointError,
    failures_named,
    without_expected_warnings,
)
from recsys.distributed.checkpoint.versions import MANIFEST, find_version, read_manifest
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.kernels.arguments import path_of
from recsys.kernels.checked import checked

_STATE = "optimizer.state."
_SECTIONS = ("model", "optimizer", "extra", "progress")


@checked
def read_checkpoint(
    path: str | Path,
    tables: str | Iterable[str] | Mapping[str, slice] | None = None,
    *,
    optimizer: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint of any number of ranks into this process, or some tables or rows of it.

    It needs neither a model nor a process group. Of a range of rows only the blocks (of up to 64
    MiB) that hold some of them are read; what is read is checked against the CRCs taken as it was
    saved.

    Args:
        path: the folder given to `save_checkpoint`, of which the newest complete version is read;
            or one of its versions; or a folder that `torch.distributed.checkpoint` wrote.
        tables: names of tables, parameters or modules; with a mapping, the rows of each. A name may
            be any part of a full one between dots: `t_user` means
            `ebc.embedding_bags.t_user.weight`, and `over` a layer's weight and bias. None for all.
        optimizer: also read the optimizer's state of them.

    Returns:
        Tensors on the CPU by the names of the unsharded model's state dict; the optimizer's as
        `optimizer.state.<parameter>.<state>`. What is not a tensor is returned as it was saved.
        Names of another writer's folder are as they are there.

    Raises:
        CheckpointError: if the folder is no checkpoint or is damaged, if it has no such table, or
            rows beyond its end are asked for.

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


def is_named(name: str, part: str) -> bool:
    """Return whether a name is another one's, or a part of it between dots.

    Example:
        >>> is_named("ebc.embedding_bags.t1.weight", "t1"), is_named("ebc.t11.weight", "t1")
        (True, False)
    """
    return f".{part}." in f".{name}."


class SavedValues:
    """What a checkpoint holds of model and optimizer, to be read piece by piece.

    Args:
        folder: of the version.
        files: what its manifest says; None for a folder without one.
        optimizer: whether to show the optimizer's state, too.

    Raises:
        CheckpointError: if the metadata is missing or damaged.
    """

    def __init__(self, folder: Path, files: Files | None, optimizer: bool = False) -> None:
        self.folder = folder
        self._reader = BlockReader(folder, files)
        try:
            found = self._reader.read_metadata().state_dict_metadata
        except OSError as error:
            raise CheckpointError(f"{folder} is not a readable checkpoint: {error}") from error
        has_manifest = files is not None
        is_ours = has_manifest or all(name.split(".")[0] in _SECTIONS for name in found)
        self._saved_as = {
            name.removeprefix("model.") if is_ours else name: name
            for name in found
            if not is_ours
            or name.startswith("model.")
            or (optimizer and name.startswith("optimizer."))
        }
        self.values: dict[str, STORAGE_TYPES] = {
            name: found[saved] for name, saved in self._saved_as.items()
        }

    @classmethod
    def find(cls, path: Path, optimizer: bool = False) -> SavedValues:
        """Return those of a path as `read_checkpoint` takes it.

        Raises:
            CheckpointError: if it is no checkpoint, or damaged.
        """
        folder = find_version(path)
        has_manifest = (folder / MANIFEST).exists()
        return cls(folder, read_manifest(folder)["files"] if has_manifest else None, optimizer)

    def named(self, table: str) -> list[str]:
        """Return the names of a table's or module's values.

        Raises:
            CheckpointError: if there are none; it lists names that are near.
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
        """Return the rows to read of a value; None for all, and what has none, such as a counter.

        Raises:
            CheckpointError: if the value has fewer.
        """
        if rows == slice(None) or not (size := self._size(name)):
            return None
        if name.startswith(_STATE):  # one value per row, or something else
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

    def stretches(self, name: str) -> list[range | None]:
        """Return rows that a tensor can be read by, one after the other, no block twice."""
        value = self.values[name]
        assert isinstance(value, TensorStorageMetadata)
        if not value.size or not value.size.numel():
            return [None]
        found: list[range | None] = []
        first = end = 0
        for start, size in sorted((c.offsets[0], c.sizes[0]) for c in value.chunks):
            if start >= end > first:
                found.append(range(first, end))
                first = start
            end = max(end, start + size)
        return [*found, range(first, end)]

    def read(self, names: Mapping[str, range | None]) -> dict[str, Any]:
        """Return values by name, each whole or some rows of it.

        Raises:
            CheckpointError: if a file is damaged.
        """
        read: dict[str, Any] = {}
        state: dict[str, Any] = {}
        for name, rows in names.items():
            value = self.values[name]
            if isinstance(value, BytesStorageMetadata):
                state[self._saved_as[name]] = b""
                continue
            first = 0 if rows is None else rows.start
            size = list(value.size)
            if rows is not None:
                size[0] = len(rows)
            read[name] = torch.empty(size, dtype=value.properties.dtype)
            state[self._saved_as[name]] = part_of(value.size, read[name], first)
        failed = f"{self.folder} cannot be read. Read an earlier version, or copy it anew."
        env = ShardingEnv.from_local()
        with failures_named(failed, env, "read a checkpoint"), without_expected_warnings(True):
            load(state, storage_reader=self._reader, planner=CompleteLoadPlanner(), no_dist=True)
        return {name: read[name] if name in read else state[self._saved_as[name]] for name in names}


def part_of(size: Sequence[int], values: Tensor, first_row: int) -> ShardedTable:
    """Return some rows as a part of a table, which a load of the table fills."""
    offsets = (first_row, *(0 for _ in size[1:])) if size else ()
    shards = [(offsets, values)] if values.numel() else []
    return ShardedTable(size, shards, dtype=values.dtype, device=values.device)
