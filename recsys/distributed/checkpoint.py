"""Checkpoints that do not depend on the plan: save on any ranks, load on any others.

State is named by table and global row. ``torch.distributed.checkpoint`` does the reading and
writing; this file adds the check that everything was set, and errors that name the file.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from recsys.distributed import comm
from recsys.distributed.lookup import LocalShard
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.sharded_table import ShardedTable
from recsys.distributed.table_shards import TableShards
from recsys.distributed.types import ShardingEnv
from recsys.optim.keyed import KeyedOptimizer


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or lacks something that was to be loaded."""


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Saves a model, sharded or not, with its optimizer.

    Every rank that the model is sharded over must call it, and no other: a model on a part of the
    ranks is saved by that part. A model that is not sharded is taken for one of all ranks.

    Args:
        path: a folder, which is created.
        model: such as a :class:`~recsys.distributed.model_parallel.DistributedModelParallel`.
        optimizer: all optimizers of the model; join the fused one and the dense one by
            :class:`~recsys.optim.keyed.CombinedOptimizer`. What a torch optimizer keeps for the
            parts of a table is saved as that of the whole table, too.
        extra: further values to keep, such as the epoch; picklable, alike on all ranks.

    Raises:
        CheckpointError: if an optimizer keeps something for a part of a table that is neither one
            value per element, nor per row of whole width, nor a single one.
    """
    env = _env_of(model)
    state: dict[str, Any] = {}
    with _raising_on_every_rank(env):
        state = _state_of(model, optimizer)
    state["extra"] = pickle.dumps(dict(extra or {}))  # one leaf: nothing in it is renamed
    writer = FileSystemWriter(str(path), overwrite=True)
    group = env.process_group
    with _without_expected_warnings():
        save(state, storage_writer=writer, process_group=group, no_dist=group is None)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    *,
    allow_partial: bool = False,
) -> dict[str, Any]:
    """Loads what :func:`save_checkpoint` saved, in place, under any plan and on any ranks.

    Every rank that the model is sharded over must call it, as for :func:`save_checkpoint`.

    Args:
        path: the folder.
        model: receives the weights.
        optimizer: receives its state.
        allow_partial: leave what the checkpoint lacks as it is, instead of raising.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: if the folder is no checkpoint, is damaged, or lacks a part of the model or
            of the optimizer's state.
    """
    env = _env_of(model)
    with _raising_on_every_rank(env):
        reader, state = _prepare_load(path, model, optimizer, allow_partial)
    planner = _CompleteLoadPlanner(allow_partial_load=allow_partial)
    group = env.process_group
    try:
        with _without_expected_warnings():
            load(
                state,
                storage_reader=reader,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        reasons = "; ".join(
            f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}"
            for rank, failure in sorted(error.failures.items())
        )
        raise CheckpointError(
            f"The checkpoint {path} cannot be loaded. Load an earlier one, or copy this one anew. "
            f"{reasons}"
        ) from error
    model.load_state_dict(state["model"])
    if optimizer is not None:
        _load_optimizer(model, optimizer, state["optimizer"])
    extra: dict[str, Any] = pickle.loads(state["extra"])
    return extra


def _prepare_load(
    path: str | Path, model: nn.Module, optimizer: KeyedOptimizer | None, allow_partial: bool
) -> tuple[FileSystemReader, dict[str, Any]]:
    """Returns where to read from and the live state to fill, names checked."""
    state = _state_of(model, optimizer)
    try:
        reader = FileSystemReader(str(path))
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a readable checkpoint: {type(error).__name__}: {error}. Give the "
            "folder that save_checkpoint wrote."
        ) from error
    if optimizer is not None and any(name.startswith("optimizer.") for name in saved):
        # a fresh optimizer has no state yet that a load could fill
        if saved.keys() - _names(state) - {"extra"}:
            optimizer.init_state()
        state = _state_of(model, optimizer)
    state["extra"] = b""
    missing = sorted(_names(state) - saved.keys())
    if missing and not allow_partial:
        raise CheckpointError(
            f"The checkpoint {path} lacks {len(missing)} of the values to load: {missing[:10]}. "
            "Pass allow_partial=True to keep what the model has for them."
        )
    elsewhere = [  # tables of which this rank holds nothing, and so keeps no torch optimizer state
        f".{name}."
        for name, value in state["model"].items()
        if isinstance(value, ShardedTable) and not value.local_shards()
    ]
    unread = sorted(
        name
        for name in saved.keys() - _names(state)
        if not name.startswith("optimizer.")
        or (optimizer is not None and not any(table in name for table in elsewhere))
    )
    if unread and not allow_partial:
        raise CheckpointError(
            f"The checkpoint {path} holds {len(unread)} values that the model or the optimizer has "
            f"no place for: {unread[:10]}. Pass allow_partial=True to leave them out."
        )
    return reader, state


def _env_of(model: nn.Module) -> ShardingEnv:
    """Returns the ranks that share the model: those it is sharded over, else all there are."""
    for module in model.modules():
        if isinstance(module, DistributedModelParallel | TableShards):
            return module.env
    return ShardingEnv.default()


@contextlib.contextmanager
def _raising_on_every_rank(env: ShardingEnv) -> Iterator[None]:
    """Raises a CheckpointError of one rank on all, so that none waits for it."""
    error: CheckpointError | None = None
    try:
        yield
    except CheckpointError as raised:
        if env.world_size == 1:
            raise
        error = raised
    try:
        comm.raise_together(env, error)
    except RuntimeError as together:
        raise CheckpointError(str(together)) from error


def _state_of(model: nn.Module, optimizer: KeyedOptimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
        state["optimizer"]["state"] = _join_parts(model, optimizer)
    return state


# -- torch optimizers of sharded tables ------------------------------------------------------------


@final
class _Part(NamedTuple):
    """A parameter that is a part of a table."""

    whole: str
    """The name that the optimizer would have for the whole table."""
    table: TableShards
    shard: LocalShard


def _parts_of(model: nn.Module, optimizer: KeyedOptimizer) -> dict[str, _Part]:
    """Returns which of the optimizer's parameters are parts of tables, by their names."""
    places = {
        id(shard.parameter): (f"_{i}" if i else "", table, shard)
        for table in model.modules()
        if isinstance(table, TableShards) and table.table.rects
        for i, shard in enumerate(table.shards)
    }
    return {
        name: _Part(name.removesuffix(places[id(param)][0]), *places[id(param)][1:])
        for name, param in optimizer.params.items()
        if id(param) in places
    }


def _join_parts(model: nn.Module, optimizer: KeyedOptimizer) -> dict[str, dict[str, Any]]:
    """Returns the optimizer's state, that of the parts of a table as the whole table's; live."""
    state = optimizer.state_dict()["state"]
    parts = _parts_of(model, optimizer)
    joined = {name: values for name, values in state.items() if name not in parts}
    held: dict[tuple[str, str], list[tuple[tuple[int, ...], Tensor]]] = {}
    sizes: dict[tuple[str, str], tuple[int, ...]] = {}
    for name, (whole, table, shard) in parts.items():
        for key, value in state.get(name, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                joined.setdefault(whole, {})[key] = value
                continue
            is_of_rows = value.dim() == 1 and shard.rect.num_cols == table.table.dim
            dims = 1 if is_of_rows else 2
            if value.shape != shard.parameter.shape[:dims]:
                raise CheckpointError(
                    f"State {key!r} of {name!r} must have one value per element, or per row of "
                    f"whole width, to be saved for the whole table; received shape "
                    f"{tuple(value.shape)} for a part of shape {tuple(shard.parameter.shape)}. "
                    "Save without the optimizer, or attach one by apply_optimizer_in_backward."
                )
            offsets = (shard.rect.row_start, shard.rect.col_start)[:dims]
            held.setdefault((whole, key), []).append((offsets, value))
            sizes[whole, key] = (table.table.num_rows, table.table.dim)[:dims]
    for (whole, key), shards in held.items():
        joined.setdefault(whole, {})[key] = ShardedTable(
            sizes[whole, key], shards, dtype=shards[0][1].dtype, device=shards[0][1].device
        )
    return joined


def _load_optimizer(model: nn.Module, optimizer: KeyedOptimizer, loaded: dict[str, Any]) -> None:
    """Takes over what was loaded; tensors that were joined have been filled in place."""
    state = optimizer.state_dict()["state"]
    parts = _parts_of(model, optimizer)
    wholes = {part.whole for part in parts.values()}
    filled = {n: values for n, values in loaded["state"].items() if n not in wholes}
    for name in parts.keys() & state.keys():
        values = loaded["state"][parts[name].whole]
        filled[name] = {
            key: state[name][key] if isinstance(value, ShardedTable) else value
            for key, value in values.items()
        }
    optimizer.load_state_dict({**loaded, "state": filled})


def _names(state: Mapping[str, Any]) -> set[str]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return set(flatten_state_dict(dict(state))[0])


@contextlib.contextmanager
def _without_expected_warnings() -> Iterator[None]:
    """Hides the warnings that one process is taken for one, and that an overwrite is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.distributed is disabled, unavailable or unini")
        warnings.filterwarnings("ignore", "Detected an existing checkpoint in .*, overwriting")
        yield


class _CompleteLoadPlanner(DefaultLoadPlanner):
    """Refuses a checkpoint whose parts do not cover what this rank loads."""

    def create_local_plan(self) -> LoadPlan:
        plan: LoadPlan = super().create_local_plan()
        covered: dict[tuple[str, tuple[int, ...]], int] = {}
        for item in plan.items:
            key = (item.dest_index.fqn, tuple(item.dest_index.offset or ()))
            covered[key] = covered.get(key, 0) + int(prod(item.lengths))
        for name, value in self.state_dict.items():
            if not hasattr(value, "local_shards"):
                continue
            for offsets, tensor in dict(value.local_shards()).items():
                found = covered.get((name, offsets), 0)
                if found < tensor.numel() and not self.allow_partial_load:
                    raise CheckpointError(
                        f"{name}: the checkpoint holds {found} of the {tensor.numel()} values of "
                        f"the part at {offsets}"
                    )
        return plan
