"""`ResumableBatches` yields each batch of an epoch once, wherever it is saved."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from recsys.training.batches import ResumableBatches


class Numbers(Dataset[int]):
    """The numbers below 20."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


class SetEpoch:
    """A part of a loader that knows the epoch."""

    epochs: list[int]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def train(batches: ResumableBatches, num_ahead: int, until: int | None = None) -> list[list[int]]:
    """Train until a step, or the end of the epoch, on batches that are read ahead."""
    done, read, source = [], [], iter(batches)
    while True:
        while len(read) <= num_ahead and (batch := next(source, None)) is not None:
            read.append(batch.tolist())
        if not read or batches.step == until:
            return done
        done.append(read.pop(0))
        batches.trained()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_ahead", [0, 2])
def test_a_data_loader_resumes_in_its_order(num_ahead: int, num_workers: int) -> None:
    def loader_of() -> ResumableBatches:
        loader = DataLoader(Numbers(), batch_size=3, shuffle=True, num_workers=num_workers)
        return ResumableBatches(loader, lambda step: False)

    torch.manual_seed(1)
    whole, expected = loader_of(), []
    for _ in range(2):
        expected.append(train(whole, num_ahead))
        whole.end_epoch()
    assert expected[0] != expected[1]
    torch.manual_seed(1)
    first = loader_of()
    assert train(first, num_ahead) == expected[0]
    first.end_epoch()
    found = train(first, num_ahead, until=7 + 4)
    saved, now = first.state_dict(), torch.get_rng_state()
    torch.manual_seed(99)  # of a new process
    second = loader_of()
    second.load_state_dict(saved)
    torch.set_rng_state(now)
    assert (second.step, second.epoch, second.batch) == (11, 1, 4)
    assert found + train(second, num_ahead) == expected[1]


def test_parts_of_a_data_loader_know_the_epoch() -> None:
    sampler = DistributedSampler(Numbers(), 1, 0)
    batches = ResumableBatches(DataLoader(Numbers(), 20, sampler=sampler), lambda step: False)
    orders = []
    for _ in range(2):
        orders += train(batches, 0)
        batches.end_epoch()
    assert orders[0] != orders[1]
    assert sampler.epoch == 1


def test_other_numbers_of_ranks(caplog: pytest.LogCaptureFixture) -> None:
    class Loader:
        def __init__(self) -> None:
            self.states: list[int] = []

        def __iter__(self) -> object:
            return iter([torch.tensor([n]) for n in range(4)])

        def state_dict(self) -> dict[str, int]:
            return {"read": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError("these are states of several ranks")

    saved = ResumableBatches(Loader(), lambda step: True)
    train(saved, 0, until=2)
    states = [saved.state_dict()] * 3
    with pytest.raises(ValueError, match="received a Loader without it and the states of 3 ranks"):
        ResumableBatches(Loader(), lambda step: True).load_state_dicts(states)

    class Elastic(Loader):
        def load_state_dicts(self, states: list[dict[str, int]]) -> None:
            self.states = [state["read"] for state in states]

    loader = Elastic()
    resumed = ResumableBatches(loader, lambda step: True)
    resumed.load_state_dicts(states)
    assert len(train(resumed, 0)) == 4  # it decides itself
    assert loader.states == [1, 1, 1]
    plain = ResumableBatches([torch.tensor([n]) for n in range(4)], lambda step: True)
    plain.load_state_dicts([{**state, "loader": None} for state in states])
    assert train(plain, 0) == [[2], [3]]
    assert "that 3 ranks began. Each rank skips 2 batches" in caplog.text
