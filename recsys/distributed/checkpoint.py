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
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from recsys.distributed.model_parallel import DistributedModelParallel
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
            :class:`~recsys.optim.keyed.CombinedOptimizer`.
        extra: further values to keep, such as the epoch; picklable, alike on all ranks.
    """
    state = _state_of(model, optimizer)
    state["extra"] = pickle.dumps(dict(extra or {}))  # one leaf: nothing in it is renamed
    writer = FileSystemWriter(str(path), overwrite=True)
    group = _env_of(model).process_group
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
    unread = sorted(
        name
        for name in saved.keys() - _names(state)
        if optimizer is not None or not name.startswith("optimizer.")
    )
    if unread and not allow_partial:
        raise CheckpointError(
            f"The checkpoint {path} holds {len(unread)} values that the model or the optimizer has "
            f"no place for: {unread[:10]}. Pass allow_partial=True to leave them out."
        )
    planner = _CompleteLoadPlanner(allow_partial_load=allow_partial)
    group = _env_of(model).process_group
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
        optimizer.load_state_dict(state["optimizer"])
    extra: dict[str, Any] = pickle.loads(state["extra"])
    return extra


def _env_of(model: nn.Module) -> ShardingEnv:
    """Returns the ranks that share the model: those it is sharded over, else all there are."""
    for module in model.modules():
        if isinstance(module, DistributedModelParallel | TableShards):
            return module.env
    return ShardingEnv.default()


def _state_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    return state


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
