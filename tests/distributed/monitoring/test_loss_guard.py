"""Bad losses are raised or skipped, and their batches saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from recsys.distributed.monitoring import loss_guard
from recsys.distributed.monitoring.loss_guard import BadLossError, LossGuard
from recsys.distributed.train_pipeline import TrainPipelineSparseDist
from recsys.sparse import KeyedJaggedTensor, kjt_is_equal, set_value_checks
from tests.distributed.cases import whole_state
from tests.distributed.train_pipeline.test_pipelines import CPU, build, samples
from tests.ranks import RankPool


@dataclass
class Batch:
    features: KeyedJaggedTensor
    labels: torch.Tensor


def _batch() -> Batch:
    lengths = torch.tensor([2, 0, 1])
    return Batch(
        KeyedJaggedTensor(["film"], torch.tensor([1, 2, 3]), lengths=lengths), torch.zeros(3)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_raised_with_its_batch(tmp_path: Path, value: float) -> None:
    guard, batch = LossGuard(tmp_path / "bad"), _batch()
    assert not guard.check(torch.tensor(1.0), None)
    assert not (tmp_path / "bad").exists()
    path = tmp_path / "bad" / "step-2-rank-0.pt"
    with pytest.raises(BadLossError, match=rf"2 on rank 0.*{value}\. .*in {path}"):
        guard.check(torch.tensor([1.0, value]), batch)
    saved = torch.load(path, weights_only=False)
    assert (saved["step"], saved["rank"]) == (2, 0)
    assert saved["loss"] == value or math.isnan(value)
    assert kjt_is_equal(saved["batch"].features, batch.features)
    assert saved["batch"].labels.equal(batch.labels)


def test_a_spike_is_above_the_median_and_does_not_move_it(tmp_path: Path) -> None:
    guard = LossGuard(tmp_path, spike=3, window=11)
    for number in range(10):  # too few to know
        assert not guard.check(torch.tensor(100.0 if number == 4 else 2.0), None)
    assert not guard.check(torch.tensor(5.9), None)
    for _ in range(3):
        with pytest.raises(BadLossError, match=r"6\.1, 3\.0 times.*the last 11 \(2"):
            guard.check(torch.tensor(6.1), None)
    for _ in range(11):  # the limit follows the recent losses
        guard.check(torch.tensor(5.0), None)
    assert not guard.check(torch.tensor(14.9), None)


def test_without_spike_a_jump_is_no_error(tmp_path: Path) -> None:
    guard = LossGuard(tmp_path)
    for value in [*[1.0] * 20, 1e30]:
        assert not guard.check(torch.tensor(value), None)


def test_what_cannot_be_saved_does_not_hide_the_loss(tmp_path: Path) -> None:
    guard = LossGuard(tmp_path / "file")
    (tmp_path / "file").touch()
    with pytest.raises(BadLossError, match=r"is nan\. .*cannot be saved.*file"):
        guard.check(torch.tensor(math.nan), None)


class Event:
    """An event of a device that is behind."""

    def __init__(self) -> None:
        self.is_done = False
        self.waits = 0

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.waits += not self.is_done


class OnDevice(torch.Tensor):
    """A tensor whose flags claim another device than the CPU."""

    is_cpu = False  # type: ignore[assignment]


def test_on_a_device_the_host_reads_a_step_later(tmp_path: Path) -> None:
    events: list[Event] = []

    def copy_aside(value: torch.Tensor) -> tuple[torch.Tensor, Event]:
        events.append(Event())
        return torch.Tensor(value), events[-1]

    def check(value: float) -> None:
        guard.check(torch.tensor(value).as_subclass(OnDevice), torch.tensor(value))

    guard = LossGuard(tmp_path)
    with mock.patch.object(loss_guard, "_copy_aside", copy_aside):
        check(1.0)
        events[0].is_done = True
        check(math.nan)  # its own loss is not read yet
        events[1].is_done = True
        with pytest.raises(BadLossError, match=r"step 2 on rank 0.*nan"):
            check(2.0)
        assert torch.load(tmp_path / "step-2-rank-0.pt")["batch"].isnan()
        assert not any(event.waits for event in events)
        for value in (3.0, 4.0, 5.0):  # the device is far behind
            check(value)
        assert [event.waits for event in events] == [0, 0, 1, 0, 0, 0]
        check(math.inf)
        with pytest.raises(BadLossError, match=r"step 7 on rank 0.*inf"):
            guard.finish()


def _skips(folder: Path) -> tuple[list[bool], int]:
    guard, rank = LossGuard(folder, skip=True, most=3), dist.get_rank()
    losses = [1.0, math.nan if rank else 1.0, 1.0, math.inf, 1.0]
    skipped = [guard.check(torch.tensor(value), rank) for value in losses]
    for _ in range(3):
        assert guard.check(torch.tensor(math.nan if rank else 1.0), rank)
    with pytest.raises(BadLossError, match=r"At most 3 steps .*received 4"):
        guard.check(torch.tensor(math.nan if rank else 1.0), rank)
    return skipped, len(list(folder.glob(f"*-rank-{rank}.pt")))


def test_all_ranks_skip_or_none(ranks: RankPool, tmp_path: Path) -> None:
    (first, saved), (second, other_saved) = ranks(2, _skips, tmp_path)
    assert first == second == [False, True, False, True, False]
    assert (saved, other_saved) == (1, 3)  # not more than `most`
    assert torch.load(tmp_path / "step-2-rank-1.pt")["batch"] == 1


def _trains_through_a_pipeline(folder: Path) -> bool:
    """Return True if the tables have their values from before the bad batch."""
    model, optimizer = build("dlrm")
    guard = LossGuard(folder)
    batches = [samples(dist.get_rank(), step) for step in (0, 1, 0, 1)]
    batches[2].dense.fill_(math.nan)
    set_value_checks(False)  # the model would refuse the batch
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU, custom_model_fwd=guard.around(model))
    source = iter(batches)
    for _ in range(2):
        pipeline.progress(source)
    before = whole_state(model)
    with pytest.raises(BadLossError, match=r"step 3 on rank \d.*nan"):
        pipeline.progress(source)
    pipeline.reset()
    set_value_checks(True)
    return all(value.equal(before[name]) for name, value in whole_state(model).items())


def test_a_pipeline_raises_before_tables_learn(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, _trains_through_a_pipeline, tmp_path) == [True, True]
    assert len(list(tmp_path.iterdir())) == 2


def test_bad_settings(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"LossGuard\.folder must be a folder that"):
        LossGuard(tmp_path / "file" / "bad")
    with pytest.raises(TypeError, match=r"LossGuard\.folder must be a path"):
        LossGuard(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"LossGuard\.spike must be a number"):
        LossGuard(tmp_path, spike="10")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"LossGuard\.spike must be above 1.*1"):
        LossGuard(tmp_path, spike=1)
    with pytest.raises(ValueError, match=r"LossGuard\.window"):
        LossGuard(tmp_path, window=0)
    with pytest.raises(ValueError, match="received skip=True"):
        LossGuard(tmp_path, skip=True).around(torch.nn.Linear(1, 1))
