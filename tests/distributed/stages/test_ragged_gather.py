"""Blocks of rows per bag, or per id, are laid out as loops over them do, and back.

`tests/kernels/test_ragged_triton.py` has the kernels for a GPU do the same.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys.distributed.stages.column_gather import MeanSlot, Ranges
from recsys.distributed.stages.ragged_gather import (
    NO_IDS,
    NO_SEGMENT,
    RaggedBatch,
    RaggedGather,
    SplitIds,
)

CPU = torch.device("cpu")


class Ragged(NamedTuple):
    """A random case: the inputs, and the results of plain loops in float64."""

    blocks: list[Ranges]
    width: int
    slots: list[MeanSlot]
    rows_K: np.ndarray
    num_samples: int
    ids: SplitIds
    counts: Tensor
    buffer: Tensor
    rectangle: np.ndarray
    grad: Tensor
    spread: np.ndarray

    def batch(self, device: torch.device) -> RaggedBatch:
        gather, ids = RaggedGather(self.blocks, self.width, device, self.slots), self.ids
        ids = ids._replace(places=ids.places.to(device), offsets=ids.offsets.to(device))
        return RaggedBatch(gather, self.rows_K, self.num_samples, ids)


class Split(NamedTuple):
    """Ids of random bags, and where they went: the samples of each segment's, in their order."""

    lengths: list[list[int]]
    places: list[list[int]]
    samples: dict[tuple[int, int, int], list[int]]  # by round, bucket and feature


def split(rng: np.random.Generator, sizes: np.ndarray, num_samples: int) -> Split:
    """Split bags, in each round each feature into as many buckets."""
    lengths = rng.integers(0, 4, (sizes.shape[1], num_samples))
    lengths *= rng.random(lengths.shape) < rng.choice([0.2, 0.7])
    samples: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    places = []
    for round_, of_features in enumerate(sizes):
        went: dict[tuple[int, int], list[int]] = defaultdict(list)
        number = 0
        for feature, bags in enumerate(lengths):
            for sample, length in enumerate(bags):
                for _ in range(length):
                    bucket = int(rng.integers(of_features[feature]))
                    samples[round_, bucket, feature].append(sample)
                    went[bucket, feature].append(number)
                    number += 1
        order = [number for segment in sorted(went) for number in went[segment]]
        places.append(np.argsort(order).tolist())
    return Split(lengths.tolist(), places, samples)


def ragged(seed: int) -> Ragged:
    rng = np.random.default_rng(seed)
    step, num_samples = [1, 4, 3, 16, 32][seed % 5], int(rng.integers(1, 40))  # a program has 16
    if seed % 7 == 6:
        num_samples = 0
    num_rounds, num_buckets, num_features = 1 + seed % 2, int(rng.integers(2, 8)), 3
    # a table has rows in some of the buckets, or in all
    sizes = rng.integers(1, num_buckets + 1, (num_rounds, num_features))
    found, has_ids = split(rng, sizes, num_samples), seed % 4 != 3
    stretches, slots = list[tuple[int, int]](), list[MeanSlot]()

    def stretch() -> tuple[int, int]:
        start = stretches[-1][1] if stretches else 0
        stretches.append((start, start + step * int(rng.integers(1, 4))))
        return stretches[-1]

    # with each block the samples of its rows, and the segment if it has a row per id
    given: list[tuple[Ranges, list[int], tuple[int, int, int] | None]] = [([], [], None)]

    def some_samples() -> list[int]:
        return list(range(rng.integers(0, num_samples + 1)))

    def add_whole(columns: Ranges) -> None:
        given.append((columns, some_samples(), None))

    add_whole([stretch()])
    for round_, of_features in enumerate(sizes):
        for feature in rng.permutation(num_features)[: 1 + seed % 3]:
            whole = [stretch() for _ in range(rng.integers(1, 3))]  # split by columns, too
            if rng.random() < 0.5:
                slots.append((int(rng.integers(0, 2)), whole[0][0], whole[-1][1]))
            for bucket in range(of_features[feature]):
                segment, by_bag = (round_, bucket, int(feature)), some_samples()
                goes_by_id = has_ids and rng.random() < [0.0, 0.5, 1.0][rng.integers(3)]
                rows = found.samples[segment] if goes_by_id else by_bag
                given += [([part], rows, segment if goes_by_id else None) for part in whole]
    first = stretch()
    add_whole([stretch()])
    add_whole([first, stretch()])  # as of replicas
    given = [given[i] for i in rng.permutation(len(given))]
    width = stretches[-1][1]
    counts = rng.integers(0, 4, (2, num_samples))
    divisors = np.ones((num_samples, width))
    for place, start, end in slots:
        divisors[:, start:end] = np.maximum(counts[place], 1)[:, None]
    rows_K = np.array([len(rows) for _, rows, _ in given])
    size = sum(len(rows) * sum(b - a for a, b in columns) for columns, rows, _ in given)
    # values with exact sums in any order
    buffer = (rng.integers(-64, 64, size) / 8).astype(np.float32)
    grad = (rng.integers(-64, 64, divisors.shape) / 8).astype(np.float32)
    rectangle, spread, at = np.zeros(divisors.shape), np.zeros(buffer.size), 0
    for columns, rows, _ in given:
        for sample in rows:
            for start, end in columns:
                rectangle[sample, start:end] += buffer[at : at + end - start]
                spread[at : at + end - start] = (
                    grad[sample, start:end] / divisors[sample, start:end]
                )
                at += end - start
    assert at == buffer.size
    ids = NO_IDS
    if has_ids:
        shape = num_rounds, num_buckets, num_features
        numbers = np.arange(np.prod(shape)).reshape(shape)
        counts_XWF = np.array([len(found.samples[i]) for i in np.ndindex(shape)]).reshape(shape)
        ids = SplitIds(
            np.array([NO_SEGMENT if i is None else numbers[i] for _, _, i in given]),
            counts_XWF,
            torch.tensor(
                np.concatenate(found.places), dtype=[torch.int32, torch.int64][seed % 3 % 2]
            ),
            torch.tensor(
                np.cumsum([0, *np.ravel(found.lengths)]),
                dtype=[torch.int64, torch.int32][seed % 5 % 2],
            ),
        )
    blocks = [columns for columns, _, _ in given]
    case = blocks, width, slots, rows_K, num_samples, ids, torch.from_numpy(counts)
    made = torch.from_numpy(buffer), rectangle / divisors, torch.from_numpy(grad), spread
    return Ragged(*case, *made)


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_laid_out_and_back_as_by_loops(seed: int) -> None:
    case = ragged(seed)
    batch = case.batch(CPU)
    assert batch.num_values == case.buffer.numel()
    found = batch.gather(case.buffer, case.counts)
    np.testing.assert_allclose(found.numpy(), case.rectangle, rtol=1e-6)
    given = case.grad.clone()
    spread = batch.scatter_grad(case.grad, case.counts)
    np.testing.assert_allclose(spread.numpy(), case.spread, rtol=1e-6)
    assert torch.equal(case.grad, given)


def test_cases_have_rows_of_both_kinds() -> None:
    kinds, has_several = list[tuple[bool, bool]](), False
    for seed in range(40):
        case = ragged(seed)
        # of each stretch of columns whether blocks have rows by bag, and by id
        by_columns: dict[tuple[int, int], set[bool]] = defaultdict(set)
        if case.ids is NO_IDS or not case.num_samples:
            continue
        for block, segment, rows in zip(case.blocks, case.ids.segment_K, case.rows_K, strict=True):
            for columns in block:
                by_columns[columns] |= {bool(segment != NO_SEGMENT)} if rows else set()
        kinds += [(False in found, True in found) for found in by_columns.values()]
        has_several |= bool(case.ids.offsets.diff().amax() > 1)
    assert has_several
    assert {(False, True), (True, False), (True, True)} <= set(kinds)


def test_rows_of_a_bag_are_added_up_in_the_order_of_their_blocks() -> None:
    gather = RaggedGather([[(0, 1)]] * 3, 1, CPU)
    # the first id is in the last bucket, which the first rank has
    segment_K, counts_XWF = np.array([2, 0, 1]), np.ones((1, 3, 1), dtype=np.int64)
    ids = SplitIds(segment_K, counts_XWF, torch.tensor([2, 1, 0]), torch.tensor([0, 3]))
    batch = RaggedBatch(gather, np.ones(3, dtype=np.int64), 1, ids)
    assert batch.gather(torch.tensor([1.0, 2.0**24, -(2.0**24)])).item() == 0
    batch = RaggedBatch(gather, np.ones(3, dtype=np.int64), 1, ids)
    assert batch.gather(torch.tensor([2.0**24, -(2.0**24), 1.0])).item() == 1


def test_there_may_be_no_rows() -> None:
    gather = RaggedGather([[(0, 4)], [(4, 8)]], 8, CPU)
    batch = RaggedBatch(gather, np.zeros(2, dtype=np.int64), 2)
    assert torch.equal(batch.gather(torch.empty(0)), torch.zeros(2, 8))
    assert batch.scatter_grad(torch.ones(2, 8)).shape == (0,)


def test_blocks_that_share_columns_hold_the_same() -> None:
    gather = RaggedGather([[(0, 4)], [(0, 2)], [(2, 4)]], 4, CPU)
    with pytest.raises(AssertionError):
        _ = gather.groups
