"""Blocks without padding are laid out as loops over them do, and back.

`tests/kernels/test_ragged_triton.py` has the kernels for a GPU do the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys.distributed.stages.column_gather import MeanSlot
from recsys.distributed.stages.ragged_gather import RaggedBatches, RaggedGather

CPU = torch.device("cpu")


class Ragged(NamedTuple):
    """A random case: what is given, and what loops make of it, in float64."""

    blocks: list[list[tuple[int, int]]]
    width: int
    slots: list[MeanSlot]
    bags_GK: np.ndarray
    rows_G: np.ndarray
    counts: Tensor
    buffer: Tensor
    rectangle: np.ndarray
    grad: Tensor
    spread: np.ndarray

    def batches(self, device: torch.device) -> RaggedBatches:
        gather = RaggedGather(self.blocks, self.width, device, self.slots)
        return RaggedBatches(gather, self.bags_GK, self.rows_G)


def ragged(seed: int) -> Ragged:
    rng = np.random.default_rng(seed)
    step, number = [1, 4, 3, 16, 32][seed % 5], int(rng.integers(1, 6))
    stretches = [(i * step, i * step + step) for i in range(number)]
    blocks = [[stretch] for stretch in stretches]
    if seed % 2:  # columns that several blocks hold, and a block that holds none
        blocks += [[], [stretches[0]], stretches[-2:]]
    width, slots = number * step, list[MeanSlot]()
    if seed % 3:
        slots = [(int(rng.integers(0, 2)), *stretches[-1])]
    num_batches = 1 + seed % 4
    rows_G = rng.integers(0, 20, num_batches)
    rows_G[seed % num_batches] = 0 if seed % 7 == 1 else 17  # more than a program has
    bags_GK = np.stack([rng.integers(0, rows + 1, len(blocks)) for rows in rows_G])
    bags_GK[:, 0] = rows_G
    counts = rng.integers(0, 4, (2, int(rows_G.sum())))
    divisors = np.ones((len(counts[0]), width))
    for place, start, end in slots:
        divisors[:, start:end] = np.maximum(counts[place], 1)[:, None]
    sizes_GK = bags_GK * [sum(end - start for start, end in block) for block in blocks]
    buffer = rng.standard_normal(int(sizes_GK.sum()), dtype=np.float32)
    grad = rng.standard_normal(divisors.shape, dtype=np.float32)
    rectangle, spread, at, first = np.zeros(divisors.shape), np.zeros(buffer.size), 0, 0
    for bags_K, rows in zip(bags_GK, rows_G, strict=True):
        for block, bags in zip(blocks, bags_K, strict=True):
            for row in range(first, first + bags):
                for start, end in block:
                    rectangle[row, start:end] += buffer[at : at + end - start]
                    own = grad[row, start:end] / divisors[row, start:end]
                    spread[at : at + end - start] = own
                    at += end - start
        first += rows
    assert at == buffer.size
    given = blocks, width, slots, bags_GK, rows_G, torch.from_numpy(counts)
    values = torch.from_numpy(buffer), rectangle / divisors, torch.from_numpy(grad), spread
    return Ragged(*given, *values)


@pytest.mark.parametrize("seed", range(30))
def test_bags_are_laid_out_and_back_as_by_loops(seed: int) -> None:
    case = ragged(seed)
    batches = case.batches(CPU)
    assert sum(batches.sizes_G) == case.buffer.numel()
    found = batches.collect(case.buffer, case.counts)
    np.testing.assert_allclose(found.numpy(), case.rectangle, rtol=1e-5, atol=1e-6)
    given = case.grad.clone()
    spread = batches.spread(case.grad, case.counts)
    np.testing.assert_allclose(spread.numpy(), case.spread, rtol=1e-6)
    assert torch.equal(case.grad, given)


@pytest.mark.parametrize("bags", [[[0, 0]], [[0, 0], [0, 0]]])
def test_there_may_be_no_bags(bags: list[list[int]]) -> None:
    gather = RaggedGather([[(0, 4)], [(4, 8)]], 8, CPU)
    batches = RaggedBatches(gather, np.array(bags), np.full(len(bags), 2))
    assert torch.equal(batches.collect(torch.empty(0)), torch.zeros(2 * len(bags), 8))
    assert batches.spread(torch.ones(2 * len(bags), 8)).shape == (0,)


def test_a_rank_may_look_up_nothing() -> None:
    none = RaggedGather([], 0, CPU)
    batches = RaggedBatches(none, np.zeros((2, 0), dtype=np.int64), np.array([3, 1]))
    assert batches.sizes_G == [0, 0]
    assert batches.collect(torch.empty(0)).shape == (4, 0)
    assert batches.spread(torch.empty(4, 0)).shape == (0,)
