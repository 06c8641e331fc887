"""Saves a model and its optimizer as a new version of a checkpoint."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save

from recsys.distributed.checkpoint.background import PendingSave, copy_to_host, end_pending
from recsys.distributed.checkpoint.blocks import BlockWriter, Files
from recsys.distributed.checkpoint.errors import (
    failures_named,
    on_every_rank,
    without_expected_warnings,
)
from recsys.distributed.checkpoint.export import write_safetensors
from recsys.distributed.checkpoint.plain import check_plain, encode
from recsys.distributed.checkpoint.progress import Stateful, check_progress, progress_of, rank_key
from recsys.distributed.checkpoint.read import SavedValues
from recsys.distributed.checkpoint.settings import Settings, merge, settings_of
from recsys.distributed.checkpoint.state import (
    checked_path,
    env_of,
    flat,
    in_blocks,
    state_of,
    tables_without,
    whole_names,
)
from recsys.distributed.checkpoint.versions import keep_newest, new_version
from recsys.distributed.dmp_collection import DMPCollection
from recsys.distributed.ranks.agreement import in_words_by_name, raise_if_facts_differ
from recsys.distributed.ranks.env import ShardingEnv
from recsys.kernels.arguments import whole
from recsys.kernels.checked import checked_but
from recsys.optim.keyed import KeyedOptimizer
from recsys.step_stages import long_section


@long_section("save_checkpoint")
@checked_but("path", "model", "optimizer", "extra", "step", "keep", "progress")
def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = 2,
    progress: Mapping[str, Stateful] | None = None,
    consolidated: bool = False,
) -> None:
    """Save a model, sharded or not, with its optimizer, as a new version in `path/step-N`.

    Whatever ends the job on the way, or a full disk, leaves the versions before as they are; a load
    of `path` takes the newest complete one. Every rank that the model is sharded over must call
    it, and no other: a model on a part of the ranks is saved by that part. A model that is not
    sharded is taken for one of all ranks. All ranks must see the same files.

    Args:
        path: a folder, which is created.
        model: such as a `DistributedModelParallel`.
        optimizer: all optimizers of the model; join the fused one and the dense one by
            `CombinedOptimizer`. Learning rates and other settings of
            its parameter groups are saved with its state. What a torch optimizer keeps for the
            parts of a table is saved as that of the whole table, too. A warning names tables with
            an optimizer whose state is not saved, because `optimizer` does not contain it.
        extra: further values to keep, such as the epoch: None, numbers, text, tensors, and lists,
            tuples and dicts of those. Rank 0's are kept.
        step: N, larger than that of any complete version; the next number if None.
        keep: how many complete versions stay, this one included; None for all. The others are
            removed once this one is complete.
        progress: what each rank keeps for itself, by names of yours: objects with `state_dict` and
            `load_state_dict`, such as a data loader that knows its position, or `RandomState()`.
        consolidated: also write the weights as one file `path/step-N/model.safetensors`, by the
            names of the unsharded model, and its checksum as `model.safetensors.sha256`. Rank 0
            copies it from the others' files, block by block, while they wait.

    Raises:
        CheckpointError: on every rank, naming path and cause, and the rank where it failed: if
            `extra`, `progress`, a module's extra state or an optimizer's setting is not of that
            kind, an optimizer keeps something for a part of a table that is neither one value per
            element, nor per row of whole width, nor a single one, or the files cannot be written;
            or an asynchronous save of the model before this one failed.
        TypeError: if an argument is of another type: `step` and `keep` are whole numbers, `extra` a
            mapping, and the members of `progress` have a state.
        ValueError: if `step` is negative or `keep` not positive, or the model is a `DMPCollection`
            whose groups of ranks hold different tables.

    Example:
        >>> import tempfile
        >>> from recsys.distributed.checkpoint import load_checkpoint
        >>> model = nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder, model, extra={"epoch": 1})
        ...     save_checkpoint(folder, model, extra={"epoch": 2})
        ...     print(sorted(version.name for version in Path(folder).iterdir()))
        ...     print(load_checkpoint(folder, model))
        ['step-1', 'step-2']
        {'epoch': 2}
    """
    path = checked_path("save_checkpoint", path, model, optimizer)
    end_pending(model)
    env = env_of(model)
    same = _in_words("save_checkpoint", optimizer, step, keep, consolidated)
    state, settings = _collect(env, path, model, optimizer, extra, step, keep, progress, same)
    with contextlib.ExitStack() as until_saved:
        folder = _claim(env, path, step, until_saved)
        _write(env, folder, state, settings, consolidated)
    _remove_old(env, path, folder, keep)


@long_section("save_checkpoint_async")
@checked_but("path", "model", "optimizer", "extra", "step", "keep", "progress")
def save_checkpoint_async(
    path: str | Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = 2,
    progress: Mapping[str, Stateful] | None = None,
    consolidated: bool = False,
) -> PendingSave:
    """Save as `save_checkpoint` does, while training goes on.

    The values of this moment are copied to host memory, which is kept for the next save, and a
    thread writes them. One save of a model is under way at a time: the next save or load of the
    model waits for it, and raises its error. Nothing is said of a version before it is complete; a
    job that is killed on the way has the versions before.

    Args:
        path: as for `save_checkpoint`, and so on.
        model: such as a `DistributedModelParallel`.
        optimizer: all optimizers of the model.
        extra: further values to keep.
        step: N of the version `path/step-N`.
        keep: how many complete versions stay.
        progress: what each rank keeps for itself.
        consolidated: also write the weights as one file of safetensors.

    Returns:
        What is under way. Call its `wait()` before the job ends its process group.

    Raises:
        CheckpointError: on every rank, as for `save_checkpoint`; what fails in the background is
            raised by `wait`, on every rank.
        TypeError: as for `save_checkpoint`.
        ValueError: if `step` is negative or `keep` not positive.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pending = save_checkpoint_async(folder, model)
        ...     pending.wait().name
        'step-1'
    """
    path = checked_path("save_checkpoint_async", path, model, optimizer)
    end_pending(model)
    env = env_of(model)
    same = _in_words("save_checkpoint_async", optimizer, step, keep, consolidated)
    state, settings = _collect(env, path, model, optimizer, extra, step, keep, progress, same)
    aside = env.aside()
    copied: dict[str, Any] = {}
    with contextlib.ExitStack() as until_copied:
        folder = _claim(env, path, step, until_copied)
        on_every_rank(env, f"Saving {path}", lambda: copied.update(copy_to_host(model, state)))
        until_saved = until_copied.pop_all()

    def work() -> Path:
        with until_saved:
            _write(aside, folder, copied, settings, consolidated)
        _remove_old(aside, path, folder, keep)
        return folder

    return PendingSave(model, work)


def _in_words(
    function: str,
    optimizer: KeyedOptimizer | None,
    step: int | None,
    keep: int | None,
    consolidated: bool,
) -> dict[str, str]:
    """Return the arguments that must be the same on all ranks, in words."""
    return in_words_by_name(
        function=function,
        optimizer="None" if optimizer is None else "given",
        step=step,
        keep=keep,
        consolidated=consolidated,
    )


def _collect(
    env: ShardingEnv,
    path: Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    extra: Mapping[str, Any] | None,
    step: int | None,
    keep: int | None,
    progress: Mapping[str, Stateful] | None,
    same: dict[str, str],
) -> tuple[dict[str, Any], Settings]:
    """Return the live values to save, and the optimizers' settings; all checked.

    `same` are the arguments that must be the same on all ranks, in words.
    """
    state: dict[str, Any] = {}

    def prepare() -> tuple[Settings, dict[str, str]]:
        if step is not None:
            whole("step", step, least=0)
        if keep is not None:
            whole("keep", keep)
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"extra must be a dict; received a {type(extra).__qualname__}.")
        check_progress(progress)
        check_plain("extra", dict(extra or {}))
        for module in model.modules():
            if isinstance(module, DMPCollection):
                module.check_averaged()
        state.update(state_of(model, optimizer))
        if env.rank == 0 and (tables := tables_without(model, optimizer)):
            warnings.warn(
                f"The checkpoint in {path} lacks the optimizer state of {len(tables)} tables, "
                f"{tables[:3]}{'...' if tables[3:] else ''}: training that resumes from it starts "
                "with fresh state. Pass an optimizer that contains the fused_optimizer of a "
                "DistributedModelParallel, which needs no other process, such as "
                "CombinedOptimizer([model.fused_optimizer, dense_optimizer]).",
                UserWarning,
                stacklevel=6,
            )
        if optimizer is not None:
            state["optimizer"].pop("param_groups", None)  # the manifest says what they do
        for name, value in flat(state).items():
            if not isinstance(value, Tensor):
                check_plain(name, value)
        if env.rank == 0:
            state["extra"] = encode(extra or {})  # one leaf: nothing in it is renamed
        if progress:
            state["progress"] = {rank_key(env.rank): encode(progress_of(progress))}
        settings: Settings = []
        if optimizer is not None:
            settings = settings_of(optimizer, whole_names(model, optimizer))
        return settings, same

    prepared = on_every_rank(env, f"Saving {path}", prepare)
    raise_if_facts_differ("save a checkpoint", [facts for _, facts in prepared])
    return state, merge([settings for settings, _ in prepared])


def _claim(
    env: ShardingEnv, path: Path, step: int | None, until_saved: contextlib.ExitStack
) -> Path:
    """Return the folder of the new version."""

    def claim() -> Path | None:
        if env.rank != 0:
            return None
        number = None if step is None else whole("step", step, least=0)
        return until_saved.enter_context(new_version(path, number))

    folder = on_every_rank(env, f"Saving {path}", claim)[0]
    assert folder is not None
    return folder


def _write(
    env: ShardingEnv, folder: Path, state: dict[str, Any], settings: Settings, consolidated: bool
) -> None:
    group = env.process_group
    failed = failures_named(f"{folder} cannot be saved.", env, "save a checkpoint")
    with failed, without_expected_warnings(group is None):
        then = _consolidate if consolidated else None
        writer = BlockWriter(folder, {"optimizer": settings}, then)
        blocks = in_blocks(state)
        save(blocks, storage_writer=writer, process_group=group, no_dist=group is None)


def _consolidate(folder: Path, files: Files) -> None:
    write_safetensors(SavedValues(folder, files), folder / "model.safetensors")


def _remove_old(env: ShardingEnv, path: Path, folder: Path, keep: int | None) -> None:
    def remove() -> None:
        if env.rank == 0:
            keep_newest(path, keep, folder)

    if keep is not None:
        on_every_rank(env, f"Saving {path}", remove)
