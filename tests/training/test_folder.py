"""Folders of jobs: the files that count as a job, and the files that are removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from recsys.distributed.checkpoint import save_checkpoint
from recsys.distributed.types import ShardingEnv
from recsys.training.folder import clear_folder


def test_only_files_of_a_job_are_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env, model, job = ShardingEnv.default(), nn.Linear(1, 1), tmp_path / "job"
    clear_folder(job, env, overwrites=False)  # it need not exist
    (job / "bad_batches").mkdir(parents=True)
    (job / "log.jsonl").touch()
    clear_folder(job, env, overwrites=False)  # nothing was recorded
    for name in ("last", "best", "mine"):
        save_checkpoint(job / name, model)
    (job / "last" / "notes").touch()
    (job / "last" / "step-9").symlink_to(job / "mine" / "step-1")
    (job / "log.jsonl").write_text("{}\n")
    with pytest.raises(FileExistsError, match=r"which has last/step-9, best/step-1, log\.jsonl\."):
        clear_folder(job, env, overwrites=False)
    (job / "last" / "step-9").unlink()
    assert capsys.readouterr().out == ""
    clear_folder(job, env, overwrites=True)
    assert capsys.readouterr().out == (
        f"Overwrites the job in {job}: last/step-1, best/step-1, log.jsonl\n"
    )
    assert sorted(path.name for path in job.rglob("*") if path.is_dir()) == [
        *("bad_batches", "best", "last", "mine", "step-1")
    ]
    assert (job / "last" / "notes").exists()
    clear_folder(job, env, overwrites=False)
