from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys.metrics import auc, log_loss
from recsys.training import BinaryMetrics, ProgressiveValidation
from recsys.training.job import Job
from tests.ranks import RankPool
from tests.training.job import Shuffled, trainer_of

STEPS, SIZE, WINDOW = 10, 20, 3


def outputs(
    rank: int = 0, world_size: int = 1
) -> list[tuple[tuple[Tensor, Tensor, Tensor], object]]:
    """Outputs of steps, with weights in some batches, divided among ranks."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for step in range(STEPS):
        logits = torch.randn(SIZE, generator=draw)
        labels = torch.randint(0, 2, (SIZE,), generator=draw).float()
        weights = torch.rand(SIZE, generator=draw)
        own = slice(rank, None, world_size)
        batch = SimpleNamespace(sample_weights=weights[own] if step % 2 else None)
        found.append(((torch.tensor(0.5), logits[own], labels[own]), batch))
    return found


def expected() -> list[dict[str, float]]:
    curve = []
    for first in range(0, STEPS - WINDOW + 1, WINDOW):
        window = outputs()[first : first + WINDOW]
        scores = torch.cat([output[1] for output, _ in window]).sigmoid().double()
        labels = torch.cat([output[2] for output, _ in window])
        weights = torch.cat(
            [
                torch.ones(SIZE) if batch.sample_weights is None else batch.sample_weights
                for _, batch in window
            ]
        )
        curve.append(
            {
                "auc": auc(scores, labels, weights).item(),
                "loss": log_loss(scores, labels, weights).item(),
            }
        )
    return curve


def assert_curve(found: list[dict[str, float]]) -> None:
    for one, wanted in zip(found, expected(), strict=True):
        assert {name: one[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)


def run(rank: int = 0, world_size: int = 1) -> ProgressiveValidation:
    progressive = ProgressiveValidation(WINDOW)
    for step, (output, batch) in enumerate(outputs(rank, world_size)):
        values = progressive.update(output, batch)
        assert (values is not None) == (step % WINDOW == WINDOW - 1)
    return progressive


def test_windows():
    assert_curve(run().curve)


@pytest.mark.parametrize("stop", range(STEPS))
def test_a_state_at_any_step(stop):
    progressive = ProgressiveValidation(WINDOW)
    for output, batch in outputs()[:stop]:
        progressive.update(output, batch)
    resumed = ProgressiveValidation(WINDOW)
    resumed.load_state_dict(progressive.state_dict())
    for output, batch in outputs()[stop:]:
        progressive.update(output, batch)
        resumed.update(output, batch)
    assert resumed.curve == progressive.curve
    assert_curve(resumed.curve)


def test_a_state_continues_on_another_device():
    class Devices:
        def update(self, output, batch):
            self.found = {part.device.type for part in (*output, batch.sample_weights)}

        def compute(self):
            return dict.fromkeys(self.found, 0.0)

    def output(device):
        ones = torch.ones(3, device=device)
        return (ones[0], ones, ones), SimpleNamespace(sample_weights=ones)

    saved, resumed = (ProgressiveValidation(2, lambda device: Devices()) for _ in range(2))
    saved.update(*output("cpu"))
    resumed.load_state_dict(saved.state_dict())
    assert resumed.update(*output("meta")) == {"meta": 0.0}


def on_ranks() -> list[dict[str, float]]:
    return run(dist.get_rank(), dist.get_world_size()).curve


def states_of(world_size: int, stop: int) -> list[dict]:
    states = []
    for rank in range(world_size):
        progressive = ProgressiveValidation(WINDOW)
        for output, batch in outputs(rank, world_size)[:stop]:
            progressive.update(output, batch)
        states.append(progressive.state_dict())
    return states


def resume_on_ranks(states: list[dict], stop: int) -> list[dict[str, float]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    progressive = ProgressiveValidation(WINDOW)
    progressive.load_state_dicts(states)
    for output, batch in outputs(rank, world_size)[stop:]:
        progressive.update(output, batch)
    return progressive.curve


def test_ranks_have_the_curve_of_one(ranks: RankPool):
    for curve in ranks(2, on_ranks):
        assert_curve(curve)


@pytest.mark.parametrize("num_saved", [1, 3])
def test_a_state_of_other_ranks(ranks: RankPool, num_saved: int) -> None:
    stop = 2  # within the first window, as curves of tests without a group are of one rank
    for curve in ranks(2, resume_on_ranks, states_of(num_saved, stop), stop):
        assert_curve(curve)


def test_a_trainer_scores_each_batch_before_it_trains(tmp_path, monkeypatch):
    progressive = ProgressiveValidation(window=4)
    trainer = trainer_of(tmp_path, epochs=2, progressive=progressive)
    trainer.fit(Shuffled())
    assert len(progressive.curve) == 6
    loader, plain = Shuffled(), trainer_of(tmp_path / "plain", epochs=2)
    scored = []
    forward = Job._forward

    def before(job, batch):
        loss, (output, _) = forward(job, batch)
        scored.append((output, batch))
        return loss, (output, batch)

    monkeypatch.setattr(Job, "_forward", before)
    plain.fit(loader)
    by_hand = ProgressiveValidation(window=4)
    for output, batch in scored:
        by_hand.update(output, batch)
    assert by_hand.curve == progressive.curve


def test_it_takes_less_than_a_hundredth_of_a_small_step():
    """A step of 512 samples takes 2 ms and more; the window's metrics are counted, too."""
    output = torch.tensor(0.5), torch.randn(512), torch.randint(0, 2, (512,)).float()
    batch, progressive = SimpleNamespace(), ProgressiveValidation(window=1000)
    times = []
    for _ in range(3):
        start = time.thread_time()
        for _ in range(1000):
            progressive.update(output, batch)
        times.append((time.thread_time() - start) / 1000)
    assert min(times) < 200e-6


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"ProgressiveValidation\.window"):
        ProgressiveValidation(0)
    with pytest.raises(ValueError, match="excludes save_every and progressive"):
        trainer_of(tmp_path, epochs=1, uneven="pad", progressive=ProgressiveValidation(5))


def test_missing_labels_count_in_no_window():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, SIZE, 2), torch.randint(0, 2, (6, SIZE, 2)).float()
    masks = torch.rand(6, SIZE, 2) < 0.5
    metrics = partial(BinaryMetrics, tasks=["a", "b"])
    progressive, expected = ProgressiveValidation(6, metrics), metrics(torch.device("cpu"))
    for step in range(6):
        mask = masks[step] if step % 2 else None
        output, batch = (torch.tensor(0.5), logits[step], labels[step]), SimpleNamespace()
        expected.update(output, SimpleNamespace(label_mask=mask))
        if mask is not None:
            batch.label_mask = mask
        if step == 4:
            state = progressive.state_dict()
            progressive = ProgressiveValidation(6, metrics)
            progressive.load_state_dict(state)
        found = progressive.update(output, batch)
    assert found == pytest.approx(expected.compute(), rel=1e-6)
