"""Saves a model and its optimizer as a new version of a checkpoint."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save

from recsys.base.arguments import whole
from recsys.base.checked import checked_but
from recsys.base.step_stages import long_section
from recsys.distributed.changed_rows import ChangedRows
from recsys.distributed.checkpoint.background import PendingSave, copy_to_host, end_pending
from recsys.distributed.checkpoint.blocks import BlockWriter, Files
from recsys.distributed.checkpoint.delta import (
    Chain,
    ChangedValues,
    SavedChain,
    about_delta,
    changed_values,
    keep_chain,
    saved_as,
    shapes_of,
    take_chain,
)
from recsys.distributed.checkpoint.errors import failures_named, on_every_rank
from recsys.distributed.checkpoint.export import write_safetensors
from recsys.distributed.checkpoint.rank_state import (
    Stateful,
    check_progress,
    progress_of,
    rank_key,
)
from recsys.distributed.checkpoint.read import SavedValues
from recsys.distributed.checkpoint.row_logs import SavedLogs, save_logs, tables_with_logs
from recsys.distributed.checkpoint.safe_pickle import check_plain, encode
from recsys.distributed.checkpoint.settings import Settings, merge, settings_of
from recsys.distributed.checkpoint.state import (
    checked_path,
    drop_own_values,
    env_of,
    flat,
    in_blocks,
    state_of,
    tables_without,
    whole_names,
)
from recsys.distributed.checkpoint.values import SPEC, fingerprints_of
from recsys.distributed.checkpoint.versions import keep_newest, new_version
from recsys.distributed.dmp_collection import DMPCollection
from recsys.distributed.ranks.agreement import in_words_by_name, raise_if_facts_differ
from recsys.distributed.ranks.env import ShardingEnv
from recsys.modules.hashed_ids import check_rows_in_memory
from recsys.modules.tables.fingerprints import check_spec
from recsys.optim.keyed import KeyedOptimizer

if TYPE_CHECKING:
    from recsys.features import FeatureSpec


@long_section("save_checkpoint")
@checked_but(
    "path", "model", "optimizer", "extra", "step", "keep", "progress", "full_every", "spec"
)
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
    delta: bool = False,
    full_every: int = 100,
    spec: FeatureSpec | None = None,
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
        delta: Whether to save only the rows of tables that changed since the previous version of
            this model in `path`, with their optimizer state and ids; other values are saved in
            full. A load of such a version reads the previous ones as well. The save is full if
            this process has no previous version of the model in `path`, or has loaded the model
            since. It is also full if a value has another shape, if another process has saved a
            newer version, or if the deltas would exceed half of the last full version.
        full_every: With `delta`, every so many saves one is full.
        spec: The fitted spec of the model's tables. Full saves contain it, so that a later load can
            move the rows to the values of another fit.

    Raises:
        CheckpointError: On every rank, with path, cause and failing rank: `extra`, `progress`, a
            module's extra state or an optimizer's setting has another type than listed above;
            optimizer state of a shard is not one value per element, per row of whole width, or per
            table; the files cannot be written; or the previous asynchronous save of the model
            failed.
        TypeError: An argument has another type: `step`, `keep` and `full_every` are whole numbers,
            `extra` is a mapping, and the members of `progress` have a state.
        ValueError: `step` is negative, `keep` or `full_every` is not positive, both `delta` and
            `consolidated` are set, or the model is a `DMPCollection` whose groups of ranks hold
            different tables.

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
    options = _Options(step, keep, consolidated, delta, full_every)
    job = _Save("save_checkpoint", path, model, optimizer, options)
    state = job.collect_state(extra, progress, spec)
    with contextlib.ExitStack() as until_saved:
        folder = job.create_folder(until_saved)
        job.save_logs(folder)
        job.write(job.env, folder, state)
    job.remove_old(job.env, folder)


@long_section("save_checkpoint_async")
@checked_but(
    "path", "model", "optimizer", "extra", "step", "keep", "progress", "full_every", "spec"
)
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
    delta: bool = False,
    full_every: int = 100,
    spec: FeatureSpec | None = None,
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
        delta: Whether to save only the rows that changed since the previous version.
        full_every: With `delta`, every so many saves one is full.
        spec: The fitted spec of the model's tables.

    Returns:
        The save in progress. Call its `wait()` before the job ends its process group.

    Raises:
        CheckpointError: On every rank, as for `save_checkpoint`; `wait` raises failures in the
            background, on every rank.
        TypeError: As for `save_checkpoint`.
        ValueError: As for `save_checkpoint`.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pending = save_checkpoint_async(folder, model)
        ...     pending.wait().name
        'step-1'
    """
    options = _Options(step, keep, consolidated, delta, full_every)
    job = _Save("save_checkpoint_async", path, model, optimizer, options)
    state = job.collect_state(extra, progress, spec)
    env_of_saves = job.env.for_saves()
    copied: dict[str, Any] = {}
    with contextlib.ExitStack() as until_copied:
        folder = job.create_folder(until_copied)
        on_every_rank(job.env, job.what, lambda: copied.update(copy_to_host(model, state)))
        job.save_logs(folder)
        until_saved = until_copied.pop_all()

    def work() -> Path:
        with until_saved:
            job.write(env_of_saves, folder, copied)
        job.remove_old(env_of_saves, folder)
        return folder

    return PendingSave(model, work)


@final
class _Options(NamedTuple):
    """Arguments of a save; see `save_checkpoint`."""

    step: int | None
    keep: int | None
    consolidated: bool
    delta: bool
    full_every: int

    def check(self) -> None:
        """Raise TypeError or ValueError unless they are valid."""
        if self.step is not None:
            whole("step", self.step, least=0)
        if self.keep is not None:
            whole("keep", self.keep)
        whole("full_every", self.full_every)
        if self.delta and self.consolidated:
            raise ValueError(
                "consolidated must be False with delta=True, which saves a part of the rows; "
                "received True. Leave it out, and call export_safetensors(path, file)."
            )


@final
class _Save:
    """Steps of one save. Every rank calls them in order: state, folder, write, remove.

    Args:
        function: Name of the public function, for messages.
        path: Folder of the checkpoint.
        model: The model.
        optimizer: All optimizers of the model.
        options: Further arguments.
    """

    def __init__(
        self,
        function: str,
        path: str | Path,
        model: nn.Module,
        optimizer: KeyedOptimizer | None,
        options: _Options,
    ) -> None:
        self._path = checked_path(function, path, model, optimizer)
        end_pending(model)
        self.env = env_of(model)
        self.what = f"Saving {self._path}"
        self._model, self._optimizer, self._options = model, optimizer, options
        self._settings: Settings = []
        # a save that fails leaves no chain, so that the next one is full
        self._chain = take_chain(model)
        self._shapes: frozenset[Any] = frozenset()
        self._fingerprints: dict[str, str] = {}
        self._changed: ChangedValues | None = None
        self._marks: ChangedRows | None = None
        self._logs = SavedLogs({}, {})
        self._same = in_words_by_name(
            function=function,
            optimizer="None" if optimizer is None else "given",
            **options._asdict(),
        )

    def collect_state(
        self,
        extra: Mapping[str, Any] | None,
        progress: Mapping[str, Stateful] | None,
        spec: FeatureSpec | None,
    ) -> dict[str, Any]:
        """Return the live values to save, checked on all ranks."""
        state: dict[str, Any] = {}
        model, optimizer, rank = self._model, self._optimizer, self.env.rank

        def prepare() -> tuple[Settings, dict[str, str], bool]:
            self._options.check()
            for name in ("delta", "consolidated"):
                if getattr(self._options, name):
                    check_rows_in_memory(model, f"A checkpoint with {name}=True")
            if extra is not None and not isinstance(extra, Mapping):
                raise TypeError(f"extra must be a dict; received a {type(extra).__qualname__}.")
            check_progress(progress)
            check_plain("extra", dict(extra or {}))
            if spec is not None:
                check_spec("save_checkpoint.spec", spec, model)
            self._fingerprints = fingerprints_of(model)
            for module in model.modules():
                if isinstance(module, DMPCollection):
                    module.check_averaged()
            state.update(state_of(model, optimizer))
            if rank != 0:
                drop_own_values(model, state)
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
            values = flat(state)
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    check_plain(name, value)
            # a delta continues the spec and the fingerprints of its base
            fits = spec is not None, *self._fingerprints.items()
            self._shapes = shapes_of(values) | {("fits", *fits)}
            is_delta = (
                self._options.delta
                and self._chain is not None
                and self._chain.can_continue(
                    self._path, self._shapes, self._options.full_every, self.env
                )
            )
            if rank == 0:
                state["extra"] = encode(extra or {})  # one leaf: its members are not renamed
                if spec is not None:
                    state[SPEC] = encode(spec.state_dict())
            if progress:
                state["progress"] = {rank_key(rank): encode(progress_of(progress))}
            settings = (
                [] if optimizer is None else settings_of(optimizer, whole_names(model, optimizer))
            )
            prints = {f"fingerprint of {name}": of for name, of in self._fingerprints.items()}
            return settings, self._same | prints, is_delta

        prepared = on_every_rank(self.env, self.what, prepare)
        raise_if_facts_differ("save a checkpoint", [facts for _, facts, _ in prepared])
        self._settings = merge([settings for settings, _, _ in prepared])
        if self._chain is not None and all(is_delta for _, _, is_delta in prepared):
            self._changed = changed_values(self._chain, model, state, self.env, self.what)
        if self._changed is not None:
            self._changed.state.pop(SPEC, None)
        self._start_marks()
        return state if self._changed is None else self._changed.state

    def _start_marks(self) -> None:
        """Mark rows from here on if the next save may be a delta on this one."""
        chain = self._chain
        if chain is not None and (self._options.delta or chain.path == self._path.resolve()):
            self._marks = chain.changed
            if self._changed is None:
                self._marks.take()  # all rows are saved
        elif self._options.delta:
            self._marks = ChangedRows(self._model)

    def create_folder(self, until_saved: contextlib.ExitStack) -> Path:
        """Return the folder of the new version."""

        def create() -> Path | None:
            if self.env.rank != 0:
                return None
            return until_saved.enter_context(new_version(self._path, self._options.step))

        folder = on_every_rank(self.env, self.what, create)[0]
        assert folder is not None
        return folder

    def save_logs(self, folder: Path) -> None:
        """Put rows that are on the disk into the folder of the version."""
        if not any(tables_with_logs(self._model)):  # the same on all ranks
            return
        saved = on_every_rank(self.env, self.what, lambda: save_logs(self._model, folder))
        self._logs = SavedLogs.joined(saved)

    def write(self, env: ShardingEnv, folder: Path, state: dict[str, Any]) -> None:
        """Write values; `env` has the process group to use."""

        def consolidate(folder: Path, files: Files) -> None:
            write_safetensors(SavedValues(folder, {"files": files}), folder / "model.safetensors")

        group = env.process_group
        before: SavedChain | None = None
        about: dict[str, Any] = {"optimizer": self._settings, "fingerprints": self._fingerprints}
        if self._changed is not None and self._chain is not None:
            before = self._chain.saved
            if before is not None:
                about |= about_delta(folder, before, self._changed.rows)
        with failures_named(f"{folder} cannot be saved.", env, "save a checkpoint"):
            then = consolidate if self._options.consolidated else None
            about |= self._logs.about()
            writer = BlockWriter(folder, about, self._logs.files, then)
            save(in_blocks(state), storage_writer=writer, process_group=group, no_dist=not group)

        self._keep_chain(folder, before)

    def _keep_chain(self, folder: Path, before: SavedChain | None) -> None:
        """Remember the version that was saved, for the next delta."""
        if self._marks is not None:
            path, marks = self._path.resolve(), self._marks
            saved = saved_as(folder, before) if self.env.rank == 0 else None
            chain = Chain(path=path, changed=marks, shapes=self._shapes, saved=saved)
            keep_chain(self._model, chain)
        elif self._chain is not None:  # of another path
            keep_chain(self._model, self._chain)

    def remove_old(self, env: ShardingEnv, folder: Path) -> None:
        """Remove older versions than those to keep."""
        keep = self._options.keep
        if keep is not None:

            def remove() -> None:
                if env.rank == 0:
                    keep_newest(self._path, keep, folder)

            on_every_rank(env, self.what, remove)
