"""The folder of a training job.

A new job refuses or clears a folder that has another job. A resumed job loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from recsys.base.logs import logger
from recsys.distributed.checkpoint import CheckpointError, Stateful, load_checkpoint, newest_version
from recsys.distributed.checkpoint.versions import complete_versions, remove_versions
from recsys.distributed.ranks.agreement import run_on_all_ranks
from recsys.distributed.ranks.comm import gather_objects
from recsys.distributed.ranks.env import ShardingEnv
from recsys.optim import KeyedOptimizer


def clear_folder(folder: Path, env: ShardingEnv, *, overwrites: bool) -> None:
    """Prepare the folder of a new job; every rank calls it.

    A log of a job without checkpoints, such as one that failed at its start, is renamed to
    `log-1.jsonl`, or the next free number.

    Args:
        folder: Folder of the job.
        env: The ranks.
        overwrites: Whether to remove an older job.

    Raises:
        FileExistsError: On every rank, if there is an older job that must stay.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     clear_folder(Path(folder), ShardingEnv.default(), overwrites=False)
    """

    def clear() -> None:
        log = folder / "log.jsonl"
        if env.rank != 0:
            return
        if not (checkpoints := _checkpoints_in(folder)):
            if log.exists() and log.stat().st_size:
                names = (folder / f"log-{number}.jsonl" for number in count(1))
                log.rename(next(name for name in names if not name.exists()))
            return
        if log.exists():
            checkpoints.append(log.name)
        if not overwrites:
            raise FileExistsError(
                f"Trainer.folder must have no other job; received {folder}, which has "
                f"{', '.join(checkpoints)}. Pass resume=True to continue this job, another folder, "
                "or overwrite=True to remove these files."
            )
        print(f"Overwrites the job in {folder}: {', '.join(checkpoints)}", flush=True)
        for name in ("last", "best"):
            remove_versions(folder / name)
        log.unlink(missing_ok=True)

    run_on_all_ranks(env, "start a job", clear)


def _checkpoints_in(folder: Path) -> list[str]:
    """Return the newest checkpoints of a job, if there are any."""
    versions = (newest_version(folder / name) for name in ("last", "best"))
    return [str(version.relative_to(folder)) for version in versions if version is not None]


def load_newest(
    path: Path,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    progress: Mapping[str, Stateful],
) -> dict[str, Any]:
    """Load the newest version of a checkpoint that is not damaged; every rank calls it.

    Damaged versions are renamed to `damaged-step-N`, and named in a warning of the logger `recsys`.

    Args:
        path: Folder with at least one complete version.
        model: Receives the weights.
        optimizer: Receives its state.
        progress: Objects that continue from the state of each rank.

    Returns:
        Its `extra`.

    Raises:
        CheckpointError: No version can be loaded; the error of the newest one.
    """
    env = ShardingEnv.default()
    damaged: list[tuple[Path, CheckpointError]] = []
    for version in gather_objects(env.process_group, "resume", complete_versions(path))[0]:
        try:
            extra = load_checkpoint(version, model, optimizer, progress=progress)
        except CheckpointError as error:
            damaged.append((version, error))
            continue
        if env.rank == 0:
            for folder, cause in damaged:
                kept = folder.rename(folder.with_name(f"damaged-{folder.name}"))
                text = "%s It is now %s. Training resumes from the version before it, %s."
                logger.warning(text, cause, kept, version)
        return extra
    raise damaged[0][1]
