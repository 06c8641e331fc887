"""Saves a model and its optimizer as a new version of a checkpoint."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save

from recsys.distributed.checkpoint.background import PendingSave, copy_to_host, end_pending
from recsys.distributed.checkpoint.blocks import BlockWriter, Files
from recsys.distributed.checkpoint.errors import failures_named, on_every_rank
from recsys.distributed.checkpoint.export import write_safetensors
from recsys.distributed.checkpoint.rank_state import (
    Stateful,
    check_progress,
    progress_of,
    rank_key,
)
from recsys.distributed.checkpoint.read import SavedValues
from recsys.distributed.checkpoint.safe_pickle import check_plain, encode
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

    If the job dies or the disk is full, earlier versions stay intact; a load of `path` uses the
    newest complete one. All ranks that the model is sharded over must call it, and no others: a
    model on some of the ranks is saved by these. A model that is not sharded belongs to all ranks.
    All ranks must see the same files.

    Args:
        path: A folder, created if missing.
        model: The model, such as a `DistributedModelParallel`.
        optimizer: All optimizers of the model; join the fused one and the dense one by
            `CombinedOptimizer`. Learning rates and other settings of its parameter groups are saved
            with its state. State that a torch optimizer keeps for shards of a table is saved for
            the whole table. A warning names tables with an optimizer whose state is not saved
            because `optimizer` does not contain it.
        extra: Further values to save, such as the epoch: None, numbers, text, tensors, and lists,
            tuples and dicts of these. The values of rank 0 are saved.
        step: Number N, larger than in any complete version; the next number if None.
        keep: Number of complete versions to keep, including this one; None for all. Older versions
            are removed once this one is complete.
        progress: State of each rank, by any names: objects with `state_dict` and `load_state_dict`,
            such as a data loader that knows its position, or `RandomState()`.
        consolidated: Whether to write the weights also as one file `path/step-N/model.safetensors`,
            by the names of the unsharded model, and its checksum as `model.safetensors.sha256`.
            Rank 0 copies it block by block from the files of all ranks while the other ranks wait.

    Raises:
        CheckpointError: On every rank, with path, cause and failing rank: `extra`, `progress`, a
            module's extra state or an optimizer's setting has another type than listed above;
            optimizer state of a shard is not one value per element, per row of whole width, or per
            table; the files cannot be written; or the previous asynchronous save of the model
            failed.
        TypeError: An argument has another type: `step` and `keep` are whole numbers, `extra` is a
            mapping, and the members of `progress` have a state.
        ValueError: `step` is negative or `keep` is not positive, or the model is a `DMPCollection`
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
    job = _Save("save_checkpoint", path, model, optimizer, step, keep, consolidated)
    state = job.collect_state(extra, progress)
    with contextlib.ExitStack() as until_saved:
        folder = job.create_folder(until_saved)
        job.write(job.env, folder, state)
    job.remove_old(job.env, folder)


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
    """Save as `save_checkpoint` does, while training continues.

    The current values are copied to host memory, which is reused by the next save, and a thread
    writes them. A model has one save in progress: the next save or load of the model waits for it,
    and raises its error. A version is visible once it is complete; if the job is killed before,
    earlier versions stay intact.

    Args:
        path: A folder, as for `save_checkpoint`.
        model: The model, such as a `DistributedModelParallel`.
        optimizer: All optimizers of the model.
        extra: Further values to save.
        step: Number N of the version `path/step-N`.
        keep: Number of complete versions to keep.
        progress: State of each rank.
        consolidated: Whether to write the weights also as one file of safetensors.

    Returns:
        The save in progress. Call its `wait()` before the job ends its process group.

    Raises:
        CheckpointError: On every rank, as for `save_checkpoint`; `wait` raises failures in the
            background, on every rank.
        TypeError: As for `save_checkpoint`.
        ValueError: `step` is negative or `keep` is not positive.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pending = save_checkpoint_async(folder, model)
        ...     pending.wait().name
        'step-1'
    """
    job = _Save("save_checkpoint_async", path, model, optimizer, step, keep, consolidated)
    state = job.collect_state(extra, progress)
    env_of_saves = job.env.for_saves()
    copied: dict[str, Any] = {}
    with contextlib.ExitStack() as until_copied:
        folder = job.create_folder(until_copied)
        on_every_rank(job.env, job.what, lambda: copied.update(copy_to_host(model, state)))
        until_saved = until_copied.pop_all()

    def work() -> Path:
        with until_saved:
            job.write(env_of_saves, folder, copied)
        job.remove_old(env_of_saves, folder)
        return folder

    return PendingSave(model, work)


@final
class _Save:
    """Steps of one save. Every rank calls them in order: state, folder, write, remove.

    Args:
        function: Name of the public function, for messages.
        path: Folder of the checkpoint.
        model: The model.
        optimizer: All optimizers of the model.
        step: Number of the version.
        keep: Number of complete versions to keep.
        consolidated: Whether to write a file of safetensors.
    """

    def __init__(
        self,
        function: str,
        path: str | Path,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        step: int | None,
        keep: int | None,
        consolidated: bool,
    ) -> None:
        self._path = checked_path(function, path, model, optimizer)
        end_pending(model)
        self.env = env_of(model)
        self.what = f"Saving {self._path}"
        self._model, self._optimizer = model, optimizer
        self._step, self._keep, self._consolidated = step, keep, consolidated
        self._settings: Settings = []
        self._same = in_words_by_name(
            function=function,
            optimizer="None" if optimizer is None else "given",
            step=step,
            keep=keep,
            consolidated=consolidated,
        )

    def collect_state(
        self, extra: Mapping[str, Any] | None, progress: Mapping[str, Stateful] | None
    ) -> dict[str, Any]:
        """Return the live values to save, checked on all ranks."""
        state: dict[str, Any] = {}
        model, optimizer, rank = self._model, self._optimizer, self.env.rank

        def prepare() -> tuple[Settings, dict[str, str]]:
            if self._step is not None:
                whole("step", self._step, least=0)
            if self._keep is not None:
                whole("keep", self._keep)
            if extra is not None and not isinstance(extra, Mapping):
                raise TypeError(f"extra must be a dict; received a {type(extra).__qualname__}.")
            check_progress(progress)
            check_plain("extra", dict(extra or {}))
            for module in model.modules():
                if isinstance(module, DMPCollection):
                    module.check_averaged()
            state.update(state_of(model, optimizer))
            if rank == 0 and (tables := tables_without(model, optimizer)):
                warnings.warn(
                    f"The checkpoint in {self._path} lacks the optimizer state of {len(tables)} "
                    f"tables, {tables[:3]}{'...' if tables[3:] else ''}: training that resumes "
                    "from it starts with fresh state. Pass an optimizer that contains the "
                    "fused_optimizer of a DistributedModelParallel, which needs no other process, "
                    "such as CombinedOptimizer([model.fused_optimizer, dense_optimizer]).",
                    UserWarning,
                    stacklevel=6,
                )
            if optimizer is not None:
                state["optimizer"].pop("param_groups", None)  # the manifest contains the settings
            for name, value in flat(state).items():
                if not isinstance(value, Tensor):
                    check_plain(name, value)
            if rank == 0:
                state["extra"] = encode(extra or {})  # one leaf: its members are not renamed
            if progress:
                state["progress"] = {rank_key(rank): encode(progress_of(progress))}
            if optimizer is None:
                return [], self._same
            return settings_of(optimizer, whole_names(model, optimizer)), self._same

        prepared = on_every_rank(self.env, self.what, prepare)
        raise_if_facts_differ("save a checkpoint", [facts for _, facts in prepared])
        self._settings = merge([settings for settings, _ in prepared])
        return state

    def create_folder(self, until_saved: contextlib.ExitStack) -> Path:
        """Return the folder of the new version."""

        def create() -> Path | None:
            if self.env.rank != 0:
                return None
            return until_saved.enter_context(new_version(self._path, self._step))

        folder = on_every_rank(self.env, self.what, create)[0]
        assert folder is not None
        return folder

    def write(self, env: ShardingEnv, folder: Path, state: dict[str, Any]) -> None:
        """Write values; `env` has the process group to use."""

        def consolidate(folder: Path, files: Files) -> None:
            write_safetensors(SavedValues(folder, {"files": files}), folder / "model.safetensors")

        group = env.process_group
        with failures_named(f"{folder} cannot be saved.", env, "save a checkpoint"):
            then = consolidate if self._consolidated else None
            writer = BlockWriter(folder, {"optimizer": self._settings}, then)
            save(in_blocks(state), storage_writer=writer, process_group=group, no_dist=not group)

    def remove_old(self, env: ShardingEnv, folder: Path) -> None:
        """Remove older versions than those to keep."""
        keep = self._keep
        if keep is not None:

            def remove() -> None:
                if env.rank == 0:
                    keep_newest(self._path, keep, folder)

            on_every_rank(env, self.what, remove)
