"""A save runs while the model trains, and contains the values at the time of its call."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.checkpoint.background import _buffers
from recsys.distributed.checkpoint.blocks import BlockWriter
from recsys.optim.keyed import CombinedOptimizer
from tests.distributed.cases import whole_state
from tests.distributed.train_pipeline.test_pipelines import build, plain, samples
from tests.ranks import RankPool


def _slow_writes(until: threading.Event) -> Any:
    """Holds what writes a version until an event."""
    write = BlockWriter.write_data

    def waits(*args: Any) -> Any:
        assert until.wait(30)
        return write(*args)

    return mock.patch.object(BlockWriter, "write_data", waits)


def _all_of(kind: str) -> tuple[Any, Any, Any]:
    model, dense = build(kind)
    return model, dense, CombinedOptimizer([model.fused_optimizer, dense])


def _state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = whole_state(model)
    for name, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}.{key}"] = torch.as_tensor(whole).clone()
    return found


def _trains_meanwhile(path: str, kind: str) -> None:
    batches = [samples(dist.get_rank(), step) for step in range(1, 7)]
    model, dense, optimizer = _all_of(kind)
    plain(model, dense, batches[:2])
    expected = _state(model, optimizer)
    may_write = threading.Event()
    with _slow_writes(may_write):
        pending = save_checkpoint_async(path, model, optimizer, {"steps": 2})
        plain(model, dense, batches[2:4])  # with collectives of its own
        assert not pending.done()
        may_write.set()
        plain(model, dense, batches[4:])
        assert pending.wait() == Path(path) / "step-1"
    assert pending.done()
    trained = _state(model, optimizer)
    assert not all(torch.equal(trained[name], value) for name, value in expected.items())
    kept = {name: buffer.data_ptr() for name, buffer in _buffers[model].items()}
    assert save_checkpoint_async(path, model, optimizer).wait().name == "step-2"
    assert {n: b.data_ptr() for n, b in _buffers[model].items()} == kept  # no new memory
    other, _, fresh = _all_of(kind)
    assert load_checkpoint(f"{path}/step-1", other, fresh) == {"steps": 2}
    found = _state(other, fresh)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ["dlrm", "mixed"])
def test_values_are_those_of_the_call(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    ranks(2, _trains_meanwhile, str(tmp_path / "c"), kind)


def _fails(path: str) -> list[str]:
    model, _, optimizer = _all_of("dlrm")
    save_checkpoint(path, model, optimizer, {"steps": 1})
    write = BlockWriter.write_data

    def full(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    messages = []
    for end in ("wait", "save", "load"):
        with mock.patch.object(BlockWriter, "write_data", full):
            pending = save_checkpoint_async(path, model, optimizer)
            pending._thread.join()
        try:
            if end == "wait":
                pending.wait()
            elif end == "save":
                save_checkpoint_async(path, model, optimizer)
            else:
                load_checkpoint(path, model, optimizer)
        except CheckpointError as error:
            messages.append(str(error))
        if end == "wait":
            with pytest.raises(CheckpointError):  # once more where it was not looked at
                load_checkpoint(path, model, optimizer)
    assert load_checkpoint(path, model, optimizer) == {"steps": 1}
    save_checkpoint_async(path, model, optimizer, {"steps": 2}).wait()
    assert load_checkpoint(path, model, optimizer) == {"steps": 2}
    return messages


def test_failures_are_raised_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for messages in ranks(2, _fails, str(tmp_path / "c")):
        assert len(messages) == 3
        for message in messages:
            assert "step-2 cannot be saved. rank 1: OSError: [Errno 28] No space left" in message


def _cannot_copy(path: str) -> tuple[str, list[str]]:
    model, _, optimizer = _all_of("dlrm")
    save_checkpoint(path, model, optimizer, {"steps": 1})
    error = MemoryError("no more") if dist.get_rank() == 1 else None
    message = ""
    with mock.patch.object(save, "copy_to_host", side_effect=error, return_value={}):
        try:
            save_checkpoint_async(path, model, optimizer)
        except CheckpointError as raised:
            message = str(raised)
    dist.barrier()
    left = sorted(entry.name for entry in Path(path).iterdir())
    dist.barrier()
    save_checkpoint_async(path, model, optimizer, {"steps": 2}).wait()
    assert load_checkpoint(path, model, optimizer) == {"steps": 2}
    return message, left


def test_a_rank_without_memory_for_the_copy_is_heard_of(ranks: RankPool, tmp_path: Path) -> None:
    for message, left in ranks(2, _cannot_copy, str(tmp_path / "c")):
        assert message.startswith("On rank 1: Saving ")
        assert "MemoryError: no more" in message
        assert left == ["step-1"]  # the version that was begun is gone


def _one_at_a_time(path: str) -> list[str]:
    model, _, optimizer = _all_of("dlrm")
    pending = [save_checkpoint_async(path, model, optimizer, keep=3) for _ in range(3)]
    assert [p.done() for p in pending[:2]] == [True, True]
    names = [p.wait().name for p in pending]
    save_checkpoint(path, model, optimizer, keep=2)
    dist.barrier()
    return [*names, *sorted(entry.name for entry in Path(path).iterdir())]


def test_saves_follow_each_other(ranks: RankPool, tmp_path: Path) -> None:
    expected = ["step-1", "step-2", "step-3", "step-3", "step-4"]
    assert ranks(2, _one_at_a_time, str(tmp_path / "c")) == [expected] * 2


ENDS = """
import sys, torch
from recsys.distributed.checkpoint import save_checkpoint_async
model = torch.nn.Linear(400, 4000)
torch.nn.init.ones_(model.weight)
save_checkpoint_async(sys.argv[1], model)
"""


def test_a_process_that_ends_waits_for_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", ENDS, str(tmp_path / "c")]
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    model = nn.Linear(400, 4000)
    load_checkpoint(tmp_path / "c", model)
    assert bool((model.weight == 1).all())
