"""Triton lays blocks without padding out as PyTorch does; cases are of the stage's test."""

from __future__ import annotations

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

from recsys.kernels.ragged_triton import gather_ragged, scatter_grad_ragged
from tests.distributed.stages.test_ragged_gather import ragged

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 64  # values around a buffer that must stay as they are, and must not be read


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_laid_out_and_back_as_by_pytorch(seed: int) -> None:
    case, kept = ragged(seed), list[Tensor]()
    by_pytorch, on_device = case.batch(CPU), case.batch(DEVICE)
    if not case.num_samples:
        return
    known = on_device._on_device, case.counts.to(DEVICE)

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        number = int(np.prod(size))
        kept.append(torch.full((number + 2 * GUARD,), torch.nan, dtype=dtype, device=device))
        return kept[-1][GUARD : GUARD + number].view(size)

    buffer = torch.full((case.buffer.numel() + 2 * GUARD,), torch.nan, device=DEVICE)
    buffer[GUARD:-GUARD] = case.buffer
    with mock.patch("recsys.kernels.ragged_triton.torch.empty", empty):
        found = gather_ragged(buffer[GUARD:-GUARD], case.num_samples, *known)
        # of any strides
        grad = case.grad.to(DEVICE).t().contiguous().t() if seed % 2 else case.grad.to(DEVICE)
        grad_of_buffer = (
            scatter_grad_ragged(grad, case.buffer.numel(), *known) if case.spread.size else None
        )
    assert torch.equal(found.cpu(), by_pytorch.gather(case.buffer, case.counts))
    np.testing.assert_allclose(found.cpu().numpy(), case.rectangle, rtol=1e-5, atol=1e-5)
    if grad_of_buffer is not None:
        assert torch.equal(grad_of_buffer.cpu(), by_pytorch.scatter_grad(case.grad, case.counts))
    for around in kept:
        assert around[:GUARD].isnan().all()
        assert around[-GUARD:].isnan().all()


COMPILES = """
columns = output_triton.GatherColumns(empty((4, 4)), None, empty(8, torch.int32), 256, 64, 32)
counts = empty((3, 5), torch.int32)
for ids in (ragged_triton.RaggedIds(empty(60), empty(41, torch.int32), 2, 3, 8), None):
    batch = ragged_triton.Ragged(columns, empty((4, 4)), empty(99), 2, ids)
    ragged_triton.gather_ragged(empty(500, torch.float32), 5, batch, counts)
    ragged_triton.scatter_grad_ragged(empty((5, 256), torch.float32).t().t(), 500, batch, counts)
"""


def test_they_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    assert num_compiled(COMPILES, tmp_path) == 4
