"""Blocks are laid out as by a plain loop, in both directions.

`tests/kernels/test_output_triton.py` has the kernels for a GPU do the same.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from recsys.distributed.stages.column_gather import ColumnGather, MeanSlot

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(5))
def test_a_gather_lays_out_blocks_and_adds_up_what_overlaps(seed: int) -> None:
    rng = random.Random(seed)
    width, batch_size = 4 * rng.randint(1, 5), rng.randint(1, 4)
    blocks: list[list[tuple[int, int]]] = [[(0, width)]]  # every column is held at least once
    for _ in range(rng.randint(0, 3)):
        edges = sorted(rng.sample(range(0, width + 1, 2), 2))
        blocks.append([(edges[0], edges[1])])
    gather = ColumnGather(blocks, width, CPU)
    parts = [
        torch.randint(-9, 9, (batch_size, sum(end - start for start, end in block))).float()
        for block in blocks
    ]
    buffer = torch.cat([part.flatten() for part in parts])
    expected = torch.zeros(batch_size, width)
    for block, part in zip(blocks, parts, strict=True):
        ((start, end),) = block
        expected[:, start:end] += part
    assert torch.equal(gather.gather(buffer, batch_size), expected)
    grad = torch.randint(-9, 9, (batch_size, width)).float()
    spread = torch.cat([grad[:, start:end].flatten() for ((start, end),) in blocks])
    assert torch.equal(gather.scatter_grad(grad)[0], spread)


def test_columns_of_averaged_slots_are_divided_both_ways() -> None:
    slots: list[MeanSlot] = [(1, 0, 3), (0, 6, 8)]
    gather = ColumnGather([[(0, 8)], [(0, 8)]], 8, CPU, slots)
    assert gather.chunk == 8  # slots end within it
    counts = torch.tensor([[4, 0, 2], [0, 5, 1]])
    divisors = np.ones((3, 8))
    divisors[:, 0:3] = np.array([[1], [5], [1]])
    divisors[:, 6:8] = np.array([[4], [1], [2]])
    buffer = torch.randn(48, generator=torch.Generator().manual_seed(0))
    found = gather.gather(buffer, 3, counts)
    expected = buffer.view(2, 3, 8).double().sum(0).numpy() / divisors
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    grad = torch.arange(24.0).view(3, 8)
    spread, sent = gather.scatter_grad(grad, counts, 0.5, 30)
    assert torch.equal(spread[:30], sent)
    expected = np.stack([grad.numpy() / divisors] * 2).reshape(-1)
    expected[:30] *= 0.5
    np.testing.assert_allclose(spread.numpy(), expected, rtol=1e-6)
    assert torch.equal(grad, torch.arange(24.0).view(3, 8))


def test_a_batch_of_no_samples_has_columns() -> None:
    gather = ColumnGather([[(0, 4)], [(2, 4)]], 4, CPU, [(0, 2, 4)])
    counts = torch.empty(1, 0, dtype=torch.int64)
    assert gather.gather(torch.empty(0), 0, counts).shape == (0, 4)
    assert gather.scatter_grad(torch.empty(0, 4), counts, 0.5, 0)[0].shape == (0,)
