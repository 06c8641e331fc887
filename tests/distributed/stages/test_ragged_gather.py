"""Blocks of rows per bag, or per id, are laid out as loops over them do, and back.

`tests/kernels/test_ragged_triton.py` has the kernels for a GPU do the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys.distributed.stages.column_gather import MeanSlot
from recsys.distributed.stages.ragged_gather import NO_PART, RaggedBatch, RaggedGather

CPU = torch.device("cpu")


class Ragged(NamedTuple):
    """A random case: what is given, and what loops make of it, in float64."""

    blocks: list[list[tuple[int, int]]]
    width: int
    slots: list[MeanSlot]
    rows_K: np.ndarray
    num_samples: int
    part_K: np.ndarray
    lengths: Tensor | None
    counts: Tensor
    buffer: Tensor
    rectangle: np.ndarray
    grad: Tensor
    spread: np.ndarray

    def batch(self, device: torch.device) -> RaggedBatch:
        gather = RaggedGather(self.blocks, self.width, device, self.slots)
        lengths = None if self.lengths is None else self.lengths.to(device)
        return RaggedBatch(gather, self.rows_K, self.num_samples, self.part_K, lengths)


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
    num_samples = 0 if seed % 7 == 6 else int(rng.integers(1, 40))  # a program has 16
    num_parts = len(blocks) + 1
    has_parts = seed % 4 != 3
    lengths = rng.integers(0, 4, (num_parts, num_samples)) * (rng.random(num_samples) < 0.7)
    # blocks take parts in any order, and leave some out
    part_K = rng.permutation(num_parts)[: len(blocks)]
    part_K[rng.random(len(blocks)) < (0.3 if has_parts else 1.0)] = NO_PART
    rows_K = np.where(
        part_K == NO_PART,
        rng.integers(0, num_samples + 1, len(blocks)),
        lengths.sum(1)[part_K],
    )
    counts = rng.integers(0, 4, (2, num_samples))
    divisors = np.ones((num_samples, width))
    for place, start, end in slots:
        divisors[:, start:end] = np.maximum(counts[place], 1)[:, None]
    sizes_K = rows_K * [sum(end - start for start, end in block) for block in blocks]
    buffer = rng.standard_normal(int(sizes_K.sum()), dtype=np.float32)
    grad = rng.standard_normal(divisors.shape, dtype=np.float32)
    rectangle, spread, at = np.zeros(divisors.shape), np.zeros(buffer.size), 0
    for block, rows, part in zip(blocks, rows_K, part_K, strict=True):
        of_rows = list(range(rows))
        if part != NO_PART:
            of_rows = [b for b in range(num_samples) for _ in range(lengths[part, b])]
        for sample in of_rows:
            for start, end in block:
                rectangle[sample, start:end] += buffer[at : at + end - start]
                spread[at : at + end - start] = (
                    grad[sample, start:end] / divisors[sample, start:end]
                )
                at += end - start
    assert at == buffer.size
    flat = torch.from_numpy(lengths.ravel()).to([torch.int32, torch.int64][seed % 2])
    given = blocks, width, slots, rows_K, num_samples, part_K, flat if has_parts else None
    found = torch.from_numpy(buffer), rectangle / divisors, torch.from_numpy(grad), spread
    return Ragged(*given, torch.from_numpy(counts), *found)


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_laid_out_and_back_as_by_loops(seed: int) -> None:
    case = ragged(seed)
    batch = case.batch(CPU)
    assert batch.num_values == case.buffer.numel()
    found = batch.collect(case.buffer, case.counts)
    np.testing.assert_allclose(found.numpy(), case.rectangle, rtol=1e-5, atol=1e-5)
    given = case.grad.clone()
    spread = batch.spread(case.grad, case.counts)
    np.testing.assert_allclose(spread.numpy(), case.spread, rtol=1e-6)
    assert torch.equal(case.grad, given)


def test_cases_have_rows_of_both_kinds() -> None:
    cases = [ragged(seed) for seed in range(40)]
    parts = [set(case.part_K != NO_PART) for case in cases]
    assert {True, False} in parts
    assert {False} in parts
    assert any(
        case.lengths is not None and case.lengths.amax() > 1 for case in cases if case.grad.numel()
    )


def test_there_may_be_no_rows() -> None:
    gather = RaggedGather([[(0, 4)], [(4, 8)]], 8, CPU)
    batch = RaggedBatch(gather, np.zeros(2, dtype=np.int64), 2, np.full(2, NO_PART))
    assert torch.equal(batch.collect(torch.empty(0)), torch.zeros(2, 8))
    assert batch.spread(torch.ones(2, 8)).shape == (0,)
