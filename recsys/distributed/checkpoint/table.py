"""Weights of one table from an array or a file of any size."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recsys.base.arguments import path_of, wrong_type
from recsys.base.checked import checked_but
from recsys.distributed.checkpoint.errors import on_every_rank
from recsys.distributed.checkpoint.read import is_named
from recsys.distributed.checkpoint.state import env_of
from recsys.distributed.checkpoint.table_ids import check_ids, hashed_parts, load_ids
from recsys.distributed.checkpoint.versions import regular_file
from recsys.distributed.stages.lookup import LocalShard
from recsys.distributed.state.table_shards import TableShards

_BLOCK_BYTES = 64 << 20


@checked_but("table", "values", "ids")
def load_table(
    model: nn.Module,
    table: str,
    values: np.ndarray[Any, Any] | str | Path,
    *,
    ids: np.ndarray[Any, Any] | None = None,
) -> None:
    """Fill a table, sharded or not, with the values of an array or a `.npy` file.

    Each rank reads its own rows, 64 MiB at a time, so that a file or `np.memmap` may be larger than
    its memory. The optimizer's state does not change. Every rank that the model is sharded over
    must call it.

    Args:
        model: The model, such as a `DistributedModelParallel`.
        table: Name of the table, `t_user`. If two tables have this name: a longer part of the
            weight's name between dots, such as `user_tower.ebc.embedding_bags.t_user`.
        values: `[rows, columns]` of floating point numbers, converted to the table's dtype, or a
            file written by `np.save`. For other files pass a `np.memmap`.
        ids: A table with hashed ids: `[rows]` int64, distinct, the id of each row of the values.
            These ids get rows without admission, and count as used by the last batch. Other ids
            keep their rows while there is room. A warning has the number of given ids without room.
            Optimizer states of new rows are reset.

    Raises:
        CheckpointError: On every rank, if a file cannot be read.
        TypeError: `model` is not an nn.Module, or `table` is not text.
        ValueError: On every rank, if the model has no such table or several, or the values have
            another shape, are not of floating point, or are NaN, infinite, or too large for the
            table's dtype; or `ids` are missing, have another shape or dtype, repeat, or are given
            for a table of row numbers; or gradients of a table with hashed ids wait for a step.

    Example:
        >>> model = nn.ModuleDict({"t_user": nn.Embedding(3, 2)})
        >>> load_table(model, "t_user", np.array([[0, 1], [2, 3], [4, 5]], np.float32))
        >>> model["t_user"].weight.tolist()
        [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """
    if not isinstance(model, nn.Module):
        wrong_type("load_table.model", "an nn.Module", model)
    if not isinstance(table, str):
        wrong_type("load_table.table", "the name of a table", table)
    if isinstance(values, str | Path):
        values = path_of("load_table.values", values)

    def work() -> dict[int, int]:
        name, weight = _find_table(model, table)
        source: Any = values
        if isinstance(values, Path):
            source = np.load(regular_file(values), mmap_mode="r")
        shape: tuple[int, ...]
        shape = weight.table.shape if isinstance(weight, TableShards) else tuple(weight.shape)
        hashed = hashed_parts(model, weight)
        if ids is not None or hashed is not None:
            checked_ids = check_ids(name, ids, is_hashed=hashed is not None)
            for part in hashed or ():
                part.rows.rules.check_rows_in_memory(table, "load_table", "Call load_checkpoint.")
            if isinstance(weight, TableShards):
                weight.check_can_load()
            _check(name, (len(checked_ids), shape[1]), source)

            def read(at: np.ndarray[Any, Any]) -> Tensor:
                block = torch.from_numpy(np.array(source[at], source.dtype.newbyteorder("=")))
                return _convert(name, at, block, weight.dtype)

            return {part.first_row: load_ids(part, checked_ids, read) for part in hashed or ()}
        shards: Sequence[LocalShard] = ()
        fill: Callable[[slice, Tensor], None]
        if isinstance(weight, TableShards):
            weight.flush()
            fill, shards = weight.fill, weight.shards
            ranges = sorted({(s.rect.row_start, s.rect.row_end) for s in shards})
        else:
            fill = weight.detach().__setitem__
            ranges = [(0, len(weight))]
        _check(name, shape, source)
        for rows in _row_blocks(ranges, source):
            block = torch.from_numpy(np.array(source[rows], source.dtype.newbyteorder("=")))
            fill(rows, _convert(name, range(rows.start, rows.stop), block, weight.dtype))
        for shard in shards:
            shard.kernel.drop_cache()
        return {}

    env = env_of(model)
    lost: dict[int, int] = {}  # by the first row of a shard: column shards have the same ids
    for of_rank in on_every_rank(env, f"Loading table {table!r}", work):
        lost |= of_rank
    if sum(lost.values()) and env.rank == 0:
        warnings.warn(
            f"Table {table!r} has no room for {sum(lost.values())} of the ids: too many have the "
            "same place. Use more rows.",
            stacklevel=3,
        )


def _find_table(model: nn.Module, table: str) -> tuple[str, TableShards | Tensor]:
    """Return the full name of a table's weight, and the table."""
    tables: dict[str, TableShards | Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, TableShards):
            tables[f"{prefix}.weight"] = module
            continue
        for name, param in module.named_parameters(prefix, recurse=False):
            if param.dim() == 2:
                tables[name] = param
    names = [name for name in tables if is_named(name, table)]
    if len(names) == 1:
        return names[0], tables[names[0]]
    if names:
        raise ValueError(
            f"table must be the name of one table; received {table!r}, which is a part of {names}. "
            "Pass a longer part of one of them."
        )
    known = {part for name in tables for part in name.split(".")} - {"weight"}
    near = difflib.get_close_matches(table, sorted(known), n=5, cutoff=0.5)
    raise ValueError(
        f"table must be the name of a table; received {table!r}. "
        f"{f'Near are {near}' if near else f'The model has {list(tables)[:10]}'}."
    )


def _check(name: str, shape: tuple[int, ...], values: Any) -> None:
    if not isinstance(values, np.ndarray):
        raise ValueError(
            f"The values of {name!r} must be an array, or the path of a file of np.save; received "
            f"a {type(values).__qualname__}."
        )
    if values.shape != shape:
        raise ValueError(
            f"The values of {name!r} must have its shape, {shape}; received {values.shape}."
        )
    if values.dtype.kind != "f":
        raise ValueError(
            f"The values of {name!r} must be of floating point; received {values.dtype}. Convert "
            "them by .astype('float32')."
        )


def _convert(
    name: str, rows: range | np.ndarray[Any, Any], values: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return values of some rows in the table's dtype.

    Raises:
        ValueError: A value is NaN or infinite, or too large for the dtype.
    """
    converted = values.to(dtype)
    is_bad = ~torch.isfinite(converted)
    if bool(is_bad.any()):
        row, column = is_bad.nonzero()[0].tolist()
        raise ValueError(
            f"The values of {name!r} must be finite as {dtype}; received "
            f"{values[row, column].item()} in row {rows[row]}, column {column}. Rows before "
            "it may have been filled: correct the values and load the table again."
        )
    return converted


def _row_blocks(ranges: Sequence[tuple[int, int]], values: Any) -> Iterator[slice]:
    """Yield row blocks that cover sorted ranges, which may overlap, with each row once."""
    step = max(_BLOCK_BYTES // max(values.shape[1] * values.itemsize, 1), 1)
    done = 0
    for first, end in ranges:
        for start in range(max(first, done), end, step):
            yield slice(start, min(start + step, end))
        done = max(done, end)
