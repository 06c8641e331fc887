"""Quantized collections on a GPU equal those on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from recsys.inference import quantize_embeddings
from tests.inference.quant.test_modules import BITS, _batch, _flat, _pooled, _sequence


@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("make", [_pooled, _sequence])
def test_looks_up_as_on_the_cpu(make: Any, dtype: torch.dtype, output: torch.dtype) -> None:
    reference: Any = quantize_embeddings(make(), dtype, output_dtype=output)
    moved = copy.deepcopy(reference).to("cuda")
    for size in (5, 1, 0):
        expected = _flat(reference(_batch(size)))
        received = _flat(moved(_batch(size).to(torch.device("cuda"))))
        assert received.is_cuda
        torch.testing.assert_close(received.cpu(), expected, rtol=2**-7, atol=1e-4)
    back = moved.to("cpu")
    for name, rows in reference.state_dict().items():
        assert torch.equal(back.state_dict()[name], rows)
    assert torch.equal(_flat(back(_batch())), _flat(reference(_batch())))
