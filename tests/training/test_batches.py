"""`ResumableBatches` yields each batch of an epoch once, for a save at any batch."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from recsys.datasets import readers
from recsys.training.batches import ResumableBatches
from tests.datasets.clicks import SPEC, plain_samples, samples_of, write_clicks


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


def test_a_loader_that_has_become_shorter_is_an_error() -> None:
    batches = [torch.tensor([n]) for n in range(5)]
    saved = ResumableBatches(batches, lambda step: False)
    train(saved, 0, until=4)
    for left, found in ((5, [[4]]), (4, [])):
        resumed = ResumableBatches(batches[:left], lambda step: False)
        resumed.load_state_dict(saved.state_dict())
        assert train(resumed, 0) == found
    resumed = ResumableBatches(batches[:3], lambda step: False)
    resumed.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"the 4 batches .*epoch.*received 3"):
        next(iter(resumed))


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
    with pytest.raises(ValueError, match=r"received a Loader without it .*3"):
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


def steps_together(ranks: list[ResumableBatches], num_ahead: int, stop: int | None) -> list[Any]:
    """Train until a step or the end of the epoch; a rank without batches makes empty steps."""
    rows: list[Any] = []
    sources: list[Any] = [iter(batches) for batches in ranks]
    read: list[list[Any]] = [[] for _ in ranks]
    while ranks[0].step != stop:
        for source, waiting in zip(sources, read, strict=True):
            while len(waiting) <= num_ahead and (batch := next(source, None)) is not None:
                waiting.append(batch)
        if not any(read):
            break
        for batches, waiting in zip(ranks, read, strict=True):
            rows += samples_of(waiting.pop(0)) if waiting else []
            batches.trained()
    return rows


@pytest.mark.parametrize("divide", ["row_groups", "batches"])
def test_each_row_comes_once_on_another_number_of_ranks(tmp_path: Path, divide: Any) -> None:
    """Stopped at each step of an uneven epoch, also when a rank has no batch left."""
    wanted = Counter(plain_samples(write_clicks(tmp_path, [(7, 1, 13), (2, 6)])))

    def job(world_size: int) -> list[ResumableBatches]:
        size = 4 if world_size == 2 else 3  # a step may have another number of rows
        options: dict[str, Any] = {"world_size": world_size, "divide": divide, "shuffle": True}
        return [
            ResumableBatches(
                readers.parquet(tmp_path, SPEC, size, rank=rank, window_rows=8, **options),
                lambda step: True,
            )
            for rank in range(world_size)
        ]

    def continued(states: list[Any], world_size: int) -> list[ResumableBatches]:
        ranks = job(world_size)
        for rank, batches in enumerate(ranks):
            if len(states) == world_size:
                batches.load_state_dict(states[rank])
            else:
                batches.load_state_dicts(states)
        return ranks

    num_ended = 0
    for before, after, num_ahead in itertools.product((1, 2, 3), (1, 2, 3), (0, 2)):
        whole = job(before)
        assert Counter(steps_together(whole, num_ahead, None)) == wanted
        for stop in range(whole[0].step + 1):
            first = job(before)
            rows = steps_together(first, num_ahead, stop)
            states = [batches.state_dict() for batches in first]
            num_ended += 0 < sum(state["has_ended"] for state in states) < before
            second = continued(states, after)
            third = continued([batches.state_dict() for batches in second], 4 - after)
            rows_of_second = steps_together(second, num_ahead, None)
            assert Counter(rows + rows_of_second) == wanted
            rows += steps_together(third, num_ahead, stop + 1)
            fourth = continued([batches.state_dict() for batches in third], before)
            assert Counter(rows + steps_together(fourth, num_ahead, None)) == wanted
            for batches in second:
                batches.end_epoch()
            assert Counter(steps_together(second, num_ahead, None)) == wanted
    assert (num_ended > 5) == (divide == "row_groups")
