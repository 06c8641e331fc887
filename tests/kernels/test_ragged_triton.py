"""Triton lays blocks without padding out as PyTorch does; cases are of the stage's test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys.kernels import ops

if not ops.HAS_TRITON:
    pytest.skip("needs Triton: pip install -e '.[triton]'", allow_module_level=True)

from recsys.kernels.ragged_triton import collect_ragged, spread_ragged
from tests.distributed.stages.test_ragged_gather import ragged

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GUARD = 64  # values around a buffer that must stay as they are, and must not be read


@pytest.mark.parametrize("seed", range(30))
def test_bags_are_laid_out_and_back_as_by_pytorch(seed: int) -> None:
    case, kept = ragged(seed), list[Tensor]()
    by_pytorch, on_device = case.batches(CPU), case.batches(DEVICE)
    if not on_device.num_rows:
        return
    known = *on_device._on_device, case.counts.to(DEVICE)

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        number = int(np.prod(size))
        kept.append(torch.full((number + 2 * GUARD,), torch.nan, dtype=dtype, device=device))
        return kept[-1][GUARD : GUARD + number].view(size)

    buffer = torch.full((case.buffer.numel() + 2 * GUARD,), torch.nan, device=DEVICE)
    buffer[GUARD:-GUARD] = case.buffer
    with mock.patch("recsys.kernels.ragged_triton.torch.empty", empty):
        found = collect_ragged(buffer[GUARD:-GUARD], on_device.num_rows, *known)
        # of any strides
        grad = case.grad.to(DEVICE).t().contiguous().t() if seed % 2 else case.grad.to(DEVICE)
        spread = spread_ragged(grad, case.buffer.numel(), *known) if case.spread.size else None
    assert torch.equal(found.cpu(), by_pytorch.collect(case.buffer, case.counts))
    np.testing.assert_allclose(found.cpu().numpy(), case.rectangle, rtol=1e-5, atol=1e-6)
    if spread is not None:
        assert torch.equal(spread.cpu(), by_pytorch.spread(case.grad, case.counts))
    for around in kept:
        assert around[:GUARD].isnan().all()
        assert around[-GUARD:].isnan().all()


COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from recsys.kernels.ragged_triton import _move_ragged as kernel

for collects in (True, False):
    known = {"COLLECTS": collects, "HAS_LISTS": True, "HAS_MEANS": True, "CHUNK": 64, "UNIT": 32}
    known |= {"STEPS": 3, "BLOCK_B": 16, "BLOCK_U": 4}
    arguments = "*fp32 i64 i32 *fp32 *i64 *i64 *i32 *i64 *i64 *i64 i32 i32 i32 i32 i32"
    names = [name for name in kernel.arg_names if name not in known]
    signature = dict(zip(names, arguments.split(), strict=True)) | dict.fromkeys(known, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=known)
    print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]) > 0)
"""


def test_they_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    own = {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILES],
        env=kept | own,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 2
