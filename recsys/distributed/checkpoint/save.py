"""Saves a model and its optimizer as a new version of a checkpoint."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save

from recsys.distributed.checkpoint.blocks import BlockWriter
from recsys.distributed.checkpoint.errors import failures_named, on_every_rank
from recsys.distributed.checkpoint.plain import check_plain, encode
from recsys.distributed.checkpoint.settings import Settings, merge, settings_of
from recsys.distributed.checkpoint.state import env_of, flat, state_of, whole_names
from recsys.distributed.checkpoint.versions import keep_newest, new_version
from recsys.optim.keyed import KeyedOptimizer


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = 2,
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
            parts of a table is saved as that of the whole table, too.
        extra: further values to keep, such as the epoch: None, numbers, text, tensors, and lists,
            tuples and dicts of those. Rank 0's are kept.
        step: N, larger than that of any complete version; the next number if None.
        keep: how many complete versions stay, this one included; None for all. The others are
            removed once this one is complete.

    Raises:
        CheckpointError: on every rank, naming path and cause, and the rank where it failed: if
            `extra`, a module's extra state or an optimizer's setting is not of that kind, an
            optimizer keeps something for a part of a table that is neither one value per element,
            nor per row of whole width, nor a single one, or the files cannot be written.
        TypeError: if `extra` is no mapping.
        ValueError: if `step` is negative or `keep` not positive.

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
    env = env_of(model)
    group = env.process_group
    what = f"Saving {path}"
    state: dict[str, Any] = {}

    def prepare() -> Settings:
        if step is not None and step < 0:
            raise ValueError(f"step must not be negative; received {step}.")
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be positive, or None for all; received {keep}.")
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"extra must be a dict; received a {type(extra).__qualname__}.")
        check_plain("extra", dict(extra or {}))
        state.update(state_of(model, optimizer))
        if optimizer is not None:
            state["optimizer"].pop("param_groups", None)  # the manifest says what they do
        for name, value in flat(state).items():
            if not isinstance(value, Tensor):
                check_plain(name, value)
        if env.rank == 0:
            state["extra"] = encode(extra or {})  # one leaf: nothing in it is renamed
        return [] if optimizer is None else settings_of(optimizer, whole_names(model, optimizer))

    settings = merge(on_every_rank(env, what, prepare))
    with contextlib.ExitStack() as until_saved:

        def claim() -> Path | None:
            if env.rank != 0:
                return None
            return until_saved.enter_context(new_version(Path(path), step))

        folder = on_every_rank(env, what, claim)[0]
        assert folder is not None
        until_saved.enter_context(
            failures_named(f"{folder} cannot be saved.", env, "save a checkpoint")
        )
        until_saved.enter_context(without_expected_warnings())
        writer = BlockWriter(folder, {"optimizer": settings})
        save(state, storage_writer=writer, process_group=group, no_dist=group is None)

    def remove_old() -> None:
        if env.rank == 0:
            keep_newest(Path(path), keep, folder)

    if keep is not None:
        on_every_rank(env, what, remove_old)


@contextlib.contextmanager
def without_expected_warnings() -> Any:
    """Hide the warning that one process is taken for one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.distributed is disabled, unavailable or unini")
        yield
