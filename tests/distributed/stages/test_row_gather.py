"""Rows are where a loop over streams and ids puts them, bit for bit.

`tests/kernels/test_sequence_triton.py` has the kernels for a GPU do the same.
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys.distributed.stages.row_gather import RowGather

CPU = torch.device("cpu")


@final
class Rows(NamedTuple):
    """Rows of streams, as they arrive and as they are laid out; and gradients of the latter."""

    dim: int
    chunk: int
    streams: list[np.ndarray]
    places: np.ndarray
    buffer: Tensor
    rectangle: np.ndarray
    grad: Tensor
    spread: np.ndarray

    def gather(self, device: torch.device) -> RowGather:
        places = torch.from_numpy(self.places).to(device)
        return RowGather(self.dim, self.chunk, *self.streams, places)


def rows_of(seed: int) -> Rows:
    """Slots whose ids are here and there in a batch, each read from some streams of columns."""
    rng = np.random.default_rng(seed)
    chunk = [1, 3, 4, 32, 48, 64][seed % 6]
    per_row = 1 if seed % 7 == 0 else int(rng.integers(1, 6))
    num_slots = int(rng.integers(1, 5))
    counts = rng.integers(0, 14, num_slots) * (rng.random(num_slots) < 0.8)
    keys = rng.permutation(num_slots) if seed % 3 else np.arange(num_slots)
    unread = int(rng.integers(0, 3)) * (seed % 2)  # ids in front of each key's own
    first_of_key = np.cumsum(counts[keys] + unread) - counts[keys]
    starts = np.empty(num_slots, dtype=np.int64)
    starts[keys] = first_of_key
    shifts = np.cumsum(counts) - counts - starts
    # streams in any order: of each slot the ids on some ranks, or all, and some of the columns
    pieces = []
    for slot in range(num_slots):
        edges = np.sort(rng.choice(per_row + 1, 2)) if per_row > 1 else np.array([0, 0])
        owner = rng.integers(0, 3, counts[slot]) * int(rng.integers(0, 2))
        for low, high in zip([0, *edges], [*edges, per_row], strict=True):
            if low < high:
                for rank in range(3):
                    ids = rng.permutation(np.flatnonzero(owner == rank))
                    pieces.append((slot, low, high - low, ids))
    pieces = [pieces[i] for i in rng.permutation(len(pieces))]
    dim, num_rows = chunk * per_row, int(counts.sum())
    rectangle = rng.standard_normal((num_rows, dim), dtype=np.float32)
    grad = rng.standard_normal((num_rows, dim), dtype=np.float32)
    buffer, spread, places = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)], []
    for slot, low, width, ids in pieces:
        for i in ids:
            row = counts[:slot].sum() + i
            columns = slice(low * chunk, (low + width) * chunk)
            buffer.append(rectangle[row, columns])
            spread.append(grad[row, columns])
            places.append(starts[slot] + i)
    slots, lows, widths = np.array([piece[:3] for piece in pieces], dtype=np.int64).T
    sizes = np.array([len(ids) for *_, ids in pieces])
    return Rows(
        dim,
        chunk,
        [lows, widths, sizes, shifts[slots]],
        np.array(places, dtype=np.int64),
        torch.from_numpy(np.concatenate(buffer)),
        rectangle,
        torch.from_numpy(grad),
        np.concatenate(spread),
    )


@pytest.mark.parametrize("seed", range(42))
def test_rows_are_laid_out_and_back_as_by_loops(seed: int) -> None:
    case = rows_of(seed)
    gather = case.gather(CPU)
    found = gather.gather(case.buffer)
    assert found.shape == case.rectangle.shape
    assert np.array_equal(found.numpy(), case.rectangle)
    assert np.array_equal(gather.scatter_grad(case.grad).numpy(), case.spread)
    assert np.array_equal(gather.scatter_grad(case.grad.t().contiguous().t()).numpy(), case.spread)


def test_cases_are_of_every_kind() -> None:
    cases = [rows_of(seed) for seed in range(42)]
    assert any(not case.places.size for case in cases)
    assert any(case.dim == case.chunk and case.streams[3].any() for case in cases)
    assert any(case.dim == case.chunk and not case.streams[3].any() for case in cases)
    assert any(len(set(case.streams[1])) > 1 for case in cases)  # widths
    assert any((case.streams[2] == 0).any() and case.places.size for case in cases)
