"""Triton moves rows of sequences as PyTorch does; cases are of the stage's test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.compiled import num_compiled
from tests.needs_triton import HAS_TRITON, NEEDS_TRITON

if not HAS_TRITON:
    pytest.skip(NEEDS_TRITON, allow_module_level=True)

from recsys.kernels.sequence_triton import gather_rows, scatter_grad_rows
from tests.distributed.stages.test_row_gather import rows_of

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 64  # values around a buffer that must stay as they are, and must not be read


@contextmanager
def guards() -> Iterator[None]:
    """Fill results of kernels with NaN, and check that the NaN around them stays."""
    kept = list[Tensor]()

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        number = int(np.prod(size))
        kept.append(torch.full((number + 2 * GUARD,), torch.nan, dtype=dtype, device=device))
        return kept[-1][GUARD : GUARD + number].view(size)

    with mock.patch("recsys.kernels.sequence_triton.torch.empty", empty):
        yield
    assert kept
    for around in kept:
        assert around[:GUARD].isnan().all()
        assert around[-GUARD:].isnan().all()


@pytest.mark.parametrize("seed", range(42))
def test_rows_are_laid_out_and_back_as_by_pytorch(seed: int) -> None:
    case = rows_of(seed)
    if not case.places.size:
        return
    twin = case.gather(CPU)
    low, widths, sizes, shifts = case.streams
    places, streams, widest, chunk = twin._streams(
        np.stack([sizes, widths, shifts, low]), torch.from_numpy(case.places).to(DEVICE)
    )
    known = places.to([torch.int64, torch.int32][seed % 2]), streams, widest, chunk
    buffer = torch.full((case.buffer.numel() + 2 * GUARD,), torch.nan, device=DEVICE)
    buffer[GUARD:-GUARD] = case.buffer
    with guards():
        found = gather_rows(buffer[GUARD:-GUARD], case.dim, *known)
        grad_of_buffer = scatter_grad_rows(case.grad.to(DEVICE), *known)
    assert torch.equal(found.cpu(), twin.gather(case.buffer))
    assert np.array_equal(found.cpu().numpy(), case.rectangle)
    assert torch.equal(grad_of_buffer.cpu(), twin.scatter_grad(case.grad))
    assert np.array_equal(grad_of_buffer.cpu().numpy(), case.spread)
    turned = case.grad.to(DEVICE).t().contiguous().t()
    everywhere = torch.tensor(0.5, device=DEVICE).expand(case.grad.shape)
    with guards():
        assert torch.equal(scatter_grad_rows(turned, *known), grad_of_buffer)
        assert (scatter_grad_rows(everywhere, *known) == 0.5).all()


COMPILES = """
for chunk in (64, 3):
    known = empty(7, torch.int32), empty((5, 4)), 2, chunk
    sequence_triton.gather_rows(empty(8 * chunk, torch.float32), 2 * chunk, *known)
    sequence_triton.scatter_grad_rows(empty((4, 2 * chunk), torch.float32), *known)
"""


def test_they_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    assert num_compiled(COMPILES, tmp_path) == 4
