"""Mean loss, rate, remaining time and bar."""

from __future__ import annotations

import math
import sys
import time

import pytest
import torch

from recsys.training.progress import MeanLoss, Progress

CPU = torch.device("cpu")


def test_the_mean_counts_samples() -> None:
    mean = MeanLoss(CPU)
    assert mean.take() == {}
    losses, sizes = torch.rand(20), torch.randint(0, 9, (20,)).tolist()
    losses[3], sizes[3] = math.nan, 0  # an empty batch
    for number, (loss, size) in enumerate(zip(losses, sizes, strict=True)):
        if number == 10:  # a resume
            state, mean = mean.state_dict(), MeanLoss(CPU)
            mean.load_state_dict(state)
        mean.add(loss, size)
    expected = sum(float(x) * n for x, n in zip(losses, sizes, strict=True) if n) / sum(sizes)
    assert mean.take() == {"loss": pytest.approx(expected)}
    assert mean.take() == {}
    states = [{"sums": torch.tensor([2.0, 4.0])}, {"sums": torch.tensor([4.0, 8.0])}]
    mean.load_state_dicts(states)
    assert mean.take() == {"loss": 0.5}


def test_means_of_tasks_go_on_after_a_resume() -> None:
    torch.manual_seed(0)
    tasks, sums = ["click", "buy"], torch.rand(6, 2, 2).double()
    sums[:, :, 1] = 0  # no label of this task
    mean = MeanLoss(CPU, tasks)
    for one in sums[:3]:
        mean.add(torch.tensor(0.5), 4, one)
    state, mean = mean.state_dict(), MeanLoss(CPU, tasks)
    mean.load_state_dict(state)
    for one in sums[3:]:
        mean.add(torch.tensor(0.5), 4, one)
    whole = sums.sum(0)
    click = pytest.approx((whole[0, 0] / whole[1, 0]).item())
    assert mean.take() == {"loss": pytest.approx(0.5), "loss/click": click}
    mean.load_state_dicts([state, state])
    assert mean.take().keys() == {"loss", "loss/click"}
    other = MeanLoss(CPU)  # the tasks are new
    other.load_state_dict(state)
    assert other.take() == {"loss": pytest.approx(0.5)}


def test_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    progress = Progress(total=100, done=10, has_bar=True)  # not on a terminal
    for _ in range(5):
        now += 2.0
        progress.step(num_samples=8)
    assert progress.rate(world_size=3) == {"samples_per_second": 12.0, "seconds_left": 170.0}
    now += 50.0  # an evaluation
    progress.restart()
    now += 1.0
    progress.step(num_samples=8)
    assert progress.rate(world_size=1) == {"samples_per_second": 8.0, "seconds_left": 84.0}
    assert "seconds_left" not in Progress(total=None, done=0, has_bar=False).rate(1)


def test_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress(total=100, done=40, has_bar=True)
    progress.step(num_samples=1)
    progress.hide()
    progress.close()
    shown = capsys.readouterr().err
    assert "40/100" in shown
    assert "steps/s" in shown
    Progress(total=100, done=40, has_bar=False).close()
    assert capsys.readouterr().err == ""
