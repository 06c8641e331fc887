"""Epochs of loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from recsys.base.loaders import begin_epoch, epoch_length
from recsys.training.progress import total_steps


class Counted:
    """Remembers the epochs that are begun."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Numbers(Counted, Dataset[int]):
    def __getitem__(self, place: int) -> int:
        return place

    def __len__(self) -> int:
        return 6


class Batches(Counted, BatchSampler):
    def __init__(self, sampler: Any) -> None:
        Counted.__init__(self)
        BatchSampler.__init__(self, sampler, 2, drop_last=False)


def test_all_parts_of_a_loader_begin_an_epoch() -> None:
    data, rows = Numbers(), DistributedSampler([0] * 6, 1, 0)
    batches = Batches(rows)
    begin_epoch(DataLoader(data, sampler=rows), 3)
    begin_epoch(DataLoader(data, batch_sampler=batches), 4)
    begin_epoch([1, 2], 5)
    assert (data.epochs, rows.epoch, batches.epochs) == ([3, 4], 3, [4])


def test_lengths_of_loaders() -> None:
    class OfUsers(list[int]):
        def num_batches(self) -> int:
            raise AssertionError("a method of the user's loader")

    class Reader:
        num_batches: int | None = 5

        def __iter__(self) -> Iterator[int]:
            return iter(())

    reader = Reader()
    assert [epoch_length(OfUsers([1, 2])), epoch_length(reader), total_steps(reader, 3)] == [
        2,
        5,
        15,
    ]
    reader.num_batches = None
    assert epoch_length(reader) is None
    assert total_steps(reader, 3) is None
