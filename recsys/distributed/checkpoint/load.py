"""Loads a version of a checkpoint into a model and its optimizer, under any plan."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from recsys.base.arguments import shown, wrong_type
from recsys.base.checked import checked_but
from recsys.base.step_stages import long_section
from recsys.distributed.checkpoint.background import end_pending
from recsys.distributed.checkpoint.blocks import BlockReader
from recsys.distributed.checkpoint.chain import reader_of
from recsys.distributed.checkpoint.delta import take_chain
from recsys.distributed.checkpoint.errors import CheckpointError, failures_named, on_every_rank
from recsys.distributed.checkpoint.hashed import HashedTables
from recsys.distributed.checkpoint.rank_state import (
    Stateful,
    check_progress,
    load_progress,
    rank_key,
)
from recsys.distributed.checkpoint.read import CompleteLoadPlanner, SavedValues
from recsys.distributed.checkpoint.resize import Resized, fit_rows, restore
from recsys.distributed.checkpoint.row_logs import check_logs, load_logs, logs_of
from recsys.distributed.checkpoint.safe_pickle import decode, decode_pickle
from recsys.distributed.checkpoint.settings import (
    Settings,
    Updates,
    check_settings,
    load_settings,
)
from recsys.distributed.checkpoint.state import (
    checked_path,
    env_of,
    flat,
    load_optimizer,
    state_of,
    whole_names,
)
from recsys.distributed.checkpoint.torchrec_names import own_names
from recsys.distributed.checkpoint.values import (
    SPEC,
    MovedTables,
    NewRows,
    converted_tables,
    index_of,
)
from recsys.distributed.checkpoint.versions import Manifest, open_version
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.distributed.state.table_shards import TableShards
from recsys.optim.keyed import KeyedOptimizer

if TYPE_CHECKING:
    from recsys.features import FeatureSpec


@long_section("load_checkpoint")
@checked_but("path", "model", "optimizer", "progress", "spec", "saved_spec")
def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    *,
    allow_partial: bool = False,
    keep_settings: bool = False,
    progress: Mapping[str, Stateful] | None = None,
    resize: str | Collection[str] = (),
    spec: FeatureSpec | None = None,
    saved_spec: FeatureSpec | None = None,
    new_rows: NewRows = "init",
) -> dict[str, Any]:
    """Load the values of `save_checkpoint`, in place, under any plan and on any ranks.

    Every rank that the model is sharded over must call it, as for `save_checkpoint`. Code named in
    the files is not run. All data read is checked against the CRCs of the save.

    Args:
        path: The folder passed to `save_checkpoint`, whose newest complete version is loaded; or
            one of its versions, `path/step-N`.
        model: Receives the weights.
        optimizer: Receives its state, learning rates and other settings.
        allow_partial: Whether values that the checkpoint lacks keep their current value, instead of
            raising an error.
        keep_settings: Whether the optimizer keeps its own learning rates and other settings.
        progress: Objects that continue from the state of each rank, by the names passed to
            `save_checkpoint`. With another number of ranks than saved, they need a method
            `load_state_dicts` that takes the states of all ranks.
        resize: Names of tables that may have another number of rows than saved. Rows in both are
            loaded with their optimizer state. New rows keep the model's values; saved rows beyond
            the table's end are ignored. A table with hashed ids may also have another seed or
            `num_regions`. Its ids get new rows, with their weights and optimizer state. If there is
            no room for all, the ids with the highest scores by its eviction rule stay. Tables of a
            fitted spec need `spec` instead.
        spec: The fitted spec of the model's tables. Tables that were saved with another fit get
            each row, with its optimizer state, at the place of its value: values that both fits
            have keep their rows bit for bit, under any plan. A bucket of numbers takes the row of
            the bucket that contained its middle. Without it, a table of another fit is an error. A
            table may also have a vocabulary in one and hashed ids, `Hashed(growing=True)`, in the
            other. A value then takes the row of its hash, or the hash the row of its value. An
            expired id counts as long as its row has it. The row of unknown values is the one that
            the unknown ids of region 0 share. If there are fewer rows than values, the values of
            the last data stay, then the values that fewer extensions did not have, then the lower
            row; a warning has the number of others.
        saved_spec: The spec of the checkpoint; None for the one that was saved with it.
        new_rows: Weights of values that the checkpoint lacks: "init" keeps the model's, "mean"
            takes the mean of the saved values, "unknown" the saved row of unknown values. Their
            optimizer state is the model's. New hashed ids keep their own initial values.

    Returns:
        The saved `extra`, with tensors on the CPU.

    Raises:
        CheckpointError: On every rank, with path, cause and failing rank: the folder is not a
            checkpoint, is damaged, or lacks a part of the model, of the optimizer's state or of
            `progress`; the state is of another kind of optimizer; or a table has another shape than
            saved, or is of another fit.
        TypeError: Path, model or optimizer has another type, or a member of `progress` has no
            state.
        ValueError: On every rank, if gradients of a table with hashed ids wait for a step.
    """
    path = checked_path("load_checkpoint", path, model, optimizer)
    end_pending(model)
    take_chain(model)  # the next save of the model is full
    env = env_of(model)
    group = env.process_group
    what = f"Loading {path}"

    def choose() -> tuple[Path, Manifest | None] | None:
        # all ranks load the version of rank 0, even if another job saves meanwhile
        return open_version(path) if env.rank == 0 else None

    chosen = on_every_rank(env, what, choose)[0]
    assert chosen is not None
    folder, manifest = chosen
    subject = f"The checkpoint {folder}"
    reader = reader_of(folder, manifest)
    logs: Mapping[str, Any] = {} if manifest is None else logs_of(manifest)
    settings: Settings | None = None if manifest is None else manifest["optimizer"]
    state: dict[str, Any] = {}
    resized: Resized = []
    hashed: list[HashedTables] = []
    moved: list[MovedTables] = []
    updates: Updates = []
    tables = [resize] if isinstance(resize, str) else resize

    def prepare() -> None:
        check_progress(progress)
        for module in model.modules():
            if isinstance(module, TableShards):
                module.check_can_load()
        state.update(_state_to_fill(reader, folder, model, optimizer, allow_partial, settings))
        saved = reader.read_metadata().state_dict_metadata
        check_logs(
            folder, logs, model, optimizer=optimizer is not None, allow_partial=allow_partial
        )
        specs = spec, saved_spec
        if new_rows not in get_args(NewRows):
            raise ValueError(
                f"new_rows must be one of {list(get_args(NewRows))}; received {shown(new_rows)}."
            )
        for name, given in zip(("spec", "saved_spec"), specs, strict=True):
            if given is not None and not hasattr(given, "fingerprints"):
                wrong_type(f"load_checkpoint.{name}", "a FeatureSpec, or None", given)
        moved.append(
            MovedTables(folder, manifest, model, state, saved, specs, new_rows, allow_partial)
        )
        hashed.append(HashedTables(model, state, tables, moved[0].hashed))
        resized.extend(fit_rows(folder, state, saved, hashed[0].names(tables)))
        if progress:
            keys = _progress_keys(reader)
            rank_keys = [rank_key(env.rank)] if len(keys) == env.world_size else keys
            state["progress"] = dict.fromkeys(rank_keys, b"")
        if optimizer is not None and settings is not None:
            updates.extend(
                check_settings(
                    subject,
                    optimizer,
                    whole_names(model, optimizer),
                    settings,
                    allow_partial=allow_partial,
                    keep=keep_settings,
                )
            )

    on_every_rank(env, what, prepare)
    planner = CompleteLoadPlanner(allow_partial_load=allow_partial)
    failed = f"{subject} cannot be loaded. Load an earlier one, or copy this one again."
    with failures_named(failed, env, "load a checkpoint"):
        load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=not group)

    def finish() -> dict[tuple[str, int], int]:
        lost: dict[tuple[str, int], int] = {}
        restore(state, resized)
        if tables or moved[0].names or moved[0].hashed:
            saved_values = SavedValues(folder, manifest, optimizer=True)
            moved[0].fill(saved_values)
            lost = hashed[0].fill(saved_values)
        moved[0].finish()
        model.load_state_dict(state["model"])
        if manifest is not None:
            load_logs(folder, logs, manifest["files"], model, optimizer=optimizer is not None)
        if optimizer is not None:
            load_settings(updates)  # before the state: a warm-up then sets its rate
            load_optimizer(model, optimizer, state["optimizer"])
        if progress and (state["progress"] or not allow_partial):
            num_saved = len(_progress_keys(reader))
            saved = {key: decode(subject, data) for key, data in state["progress"].items()}
            load_progress(subject, progress, saved, num_saved, env)
        return lost

    without_room: dict[tuple[str, int], int] = {}  # shards of other columns have the same ids
    for of_rank in on_every_rank(env, what, finish):
        without_room |= of_rank
    if sum(without_room.values()) and env.rank == 0:
        full = sorted({weight for (weight, _), count in without_room.items() if count})
        warnings.warn(
            f"Tables {full[:10]} with hashed ids have no "
            f"room for {sum(without_room.values()):,} values of the checkpoint, which are new when "
            "they come again. Use more rows.",
            UserWarning,
            stacklevel=4,
        )
    if not state.get("extra"):  # a folder written by torch.distributed.checkpoint
        return {}
    read = decode if manifest is not None else decode_pickle
    extra: dict[str, Any] = read(f"The extra values of {folder}", state["extra"])
    return extra


def _state_to_fill(
    reader: BlockReader,
    folder: Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    allow_partial: bool,
    settings: Settings | None,
) -> dict[str, Any]:
    """Return the live state to fill, with names checked."""
    saved = {
        name: metadata
        for name, metadata in reader.read_metadata().state_dict_metadata.items()
        if not name.startswith("progress.") and name != SPEC
    }

    def live() -> dict[str, Any]:
        state = state_of(model, optimizer)
        groups = state.get("optimizer", {}).pop("param_groups", None)
        has_groups = any(name.startswith("optimizer.param_groups.") for name in saved)
        if groups is not None and has_groups:  # a folder without versions
            state["optimizer"]["param_groups"] = [
                {
                    key: value
                    for key, value in group.items()
                    if key == "params" or f"optimizer.param_groups.{i}.{key}" in saved
                }
                for i, group in enumerate(groups)
            ]
        return state

    state = live()
    if settings is None and (renamed := own_names(saved, flat(state).keys())):
        reader.rename(renamed)
        saved = {renamed.get(name, name): value for name, value in saved.items()}
    if optimizer is not None and any(name.startswith("optimizer.") for name in saved):
        # a fresh optimizer has no state to fill yet
        if saved.keys() - flat(state).keys() - {"extra"}:
            optimizer.init_state()
        state = live()
    if settings is not None or "extra" in saved:
        state["extra"] = b""
    # indexes of hashed ids that only the model or the checkpoint has: `MovedTables`
    indexes = tuple(f"model.{index_of(weight)}" for weight in converted_tables(model, saved))
    names, saved_names = (
        {name for name in values if not name.startswith(indexes)} for values in (flat(state), saved)
    )
    missing = sorted(names - saved_names)
    if missing and not allow_partial:
        raise CheckpointError(
            f"The checkpoint {folder} lacks {len(missing)} of the values to load: {missing[:10]}. "
            "Pass allow_partial=True to keep the current values."
        )
    elsewhere = [  # tables without a shard on this rank, and so without torch optimizer state
        f".{name}."
        for name, value in state["model"].items()
        if isinstance(value, ShardedTable) and not value.local_shards()
    ]
    unread = sorted(
        name
        for name in saved_names - names
        if not name.startswith("optimizer.")
        or (optimizer is not None and not any(table in name for table in elsewhere))
    )
    if unread and not allow_partial:
        raise CheckpointError(
            f"The checkpoint {folder} holds {len(unread)} values that the model or the optimizer "
            f"has no place for: {unread[:10]}. Pass allow_partial=True to ignore them."
        )
    return state


def _progress_keys(reader: BlockReader) -> list[str]:
    """Return the names of the ranks' progress in a checkpoint."""
    start = "progress."
    saved = reader.read_metadata().state_dict_metadata
    return [name.removeprefix(start) for name in saved if name.startswith(start)]
