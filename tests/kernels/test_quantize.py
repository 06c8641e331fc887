"""Rows are quantized by blocks; the expected rows are computed here with numpy."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys.kernels import ops, quantize
from recsys.kernels.quantize import (
    headers_of,
    pack_values,
    quantize_rows,
    row_ranges,
    values_of,
    write_rows,
)
from recsys.kernels.quantized import row_bytes
from recsys.kernels.tbe_fbgemm import has_cpu_ops

f16, f32 = np.float16, np.float32


def by_numpy(weight: Tensor, bits: int) -> Tensor:
    """Each row by itself: a scale and a bias of fp16, and the steps from there, packed."""
    rows = []
    for row in weight.float().numpy():
        bias = f16(row.min()) + f16(0)  # of two zeros, the positive one
        scale = f16((row.max() - f32(bias)) / f32(2**bits - 1))
        scale = f16(1) if scale == 0 else scale
        steps = (row - f32(bias)) * (f32(1) / f32(scale))
        values = np.clip(np.rint(steps), 0, 2**bits - 1).astype(np.uint8)
        per_byte = 8 // bits
        packed = sum(values[i::per_byte].astype(int) << (i * bits) for i in range(per_byte))
        header = np.array([scale, bias], dtype=f16).view(np.uint8)
        rows.append(np.concatenate([header, np.asarray(packed, dtype=np.uint8)]))
    return torch.from_numpy(np.stack(rows))


def odd_weights(rows: int, dim: int) -> Tensor:
    random = torch.Generator().manual_seed(dim)
    weight = torch.randn(rows, dim, generator=random)
    weight[1::7] = weight[1::7, :1]  # equal values
    weight[2::7] *= 1e-9  # too close for a scale of fp16
    weight[3::7] = weight[3::7] * 1e-3 + 3000  # the bias is rounded by more than a step
    weight[4::7] = (weight[4::7] * 20_000).clamp(-65_000, 65_000)
    weight[5::7] = 0.0
    weight[5::14, ::2] = -0.0
    weight[6::7] *= 1e-40
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [4, 12, 32, 36, 64, 100])
@pytest.mark.parametrize("kernel", ["fbgemm", "torch"])
def test_rows_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, kernel: str, dim: int, bits: int, dtype: torch.dtype
) -> None:
    if kernel == "torch":
        monkeypatch.setattr(ops, "FBGEMM_DEVICES", frozenset())
    weight = odd_weights(70, dim).to(dtype)
    expected = by_numpy(weight, bits)
    for values in (1, 3 * dim, 1 << 20):  # of a block
        monkeypatch.setattr(quantize, "BLOCK_VALUES", values)
        assert torch.equal(quantize_rows(weight, bits), expected)
    strided = torch.empty(dim, 70, dtype=dtype).t().copy_(weight)
    assert torch.equal(quantize_rows(strided, bits), expected)


@pytest.mark.skipif(not has_cpu_ops(), reason="fbgemm_gpu is not installed")
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [8, 32, 64, 96])
def test_rows_are_those_of_fbgemm(dim: int, bits: int) -> None:
    weight = odd_weights(700, dim)
    fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weight, bits)
    expected = torch.cat([fused[:, -4:], fused[:, :-4]], dim=1)
    found = quantize_rows(weight, bits)
    zeros = weight.amin(1).half() == 0  # FBGEMM has two of them
    assert torch.equal(found[~zeros], expected[~zeros])
    assert torch.equal(found[zeros, :3], expected[zeros, :3])
    assert torch.equal(found[zeros, 4:], expected[zeros, 4:])


def test_fbgemm_serves_where_it_is_faster() -> None:
    if not has_cpu_ops():
        pytest.skip("fbgemm_gpu is not installed")
    with mock.patch.object(quantize, "values_of", side_effect=values_of) as by_torch:
        for bits in (4, 2):
            quantize_rows(torch.randn(5, 64), bits)
        assert not by_torch.called
        quantize_rows(torch.randn(5, 64), 8)
        quantize_rows(torch.randn(5, 28), 4)
        assert by_torch.call_count == 2


@pytest.mark.parametrize("bits", [32, 16, 8, 4, 2])
def test_rows_are_written_where_they_are_stored(bits: int) -> None:
    weight = torch.randn(30, 40)
    size = row_bytes(40, bits)
    stored = torch.full((30, size + 13), 7, dtype=torch.uint8)
    given = stored[:, 5 : 5 + size]
    found = quantize_rows(weight, bits, given)
    assert found.data_ptr() == given.data_ptr()
    assert torch.equal(given, quantize_rows(weight, bits))
    assert bool((stored[:, :5] == 7).all())
    assert bool((stored[:, 5 + size :] == 7).all())


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_parts_of_rows_become_the_whole(bits: int) -> None:
    weight = odd_weights(50, 24)
    parts = weight[:, :5], weight[:, 5:6], weight[:, 6:]
    ranges = row_ranges(parts[0])
    for part in parts[1:]:
        ranges = torch.maximum(ranges, row_ranges(part))
    header = headers_of(ranges, bits)
    values = torch.cat([values_of(part, header, bits) for part in parts], dim=1)
    rows = torch.empty(50, row_bytes(24, bits), dtype=torch.uint8)
    write_rows(rows, header, pack_values(values, bits))
    assert torch.equal(rows, quantize_rows(weight, bits))


@pytest.mark.parametrize("bits", [32, 16, 8, 4, 2])
@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (29, 3), (17, 7)])
def test_a_value_that_is_not_finite_is_found(
    monkeypatch: pytest.MonkeyPatch, place: tuple[int, int], value: float, dim: int, bits: int
) -> None:
    monkeypatch.setattr(quantize, "BLOCK_VALUES", 10 * dim)
    weight = torch.randn(30, dim)
    weight[place] = value
    with pytest.raises(ValueError, match="needs finite weights; received NaN"):
        quantize_rows(weight, bits)


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize("dim", [8, 64])
def test_values_beyond_fp16_are_found(bits: int, dim: int) -> None:
    weight = torch.randn(30, dim)
    weight[11, 3] = -1e5
    with pytest.raises(ValueError, match=r"ends at 65504.*from -100000 to"):
        quantize_rows(weight, bits)
    weight[11] = 65504.0
    quantize_rows(weight, bits)


def test_large_finite_values_are_kept() -> None:
    weight = torch.full((100, 64), 3e38)  # their sum is infinite
    assert torch.equal(quantize_rows(weight, 32).view(torch.float32), weight)


MEMORY = """
import sys, torch
import recsys.inference, recsys.modules.embedding_modules
from recsys.inference import quantize_inference_model
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
torch.set_num_threads(1)
pooled, dtype = sys.argv[1] == "pooled", getattr(torch, sys.argv[2])
if pooled:
    tables = [EmbeddingBagConfig(1 << 20, 64, "t", feature_names=["f"])]
    model = torch.nn.ModuleList([EmbeddingBagCollection(tables=tables)])
else:
    tables = [EmbeddingConfig(1 << 20, 64, "t", feature_names=["f"])]
    model = torch.nn.ModuleList([EmbeddingCollection(tables=tables)])
warm = torch.nn.ModuleList([EmbeddingCollection(tables=[
    EmbeddingConfig(5, 64, "t", feature_names=["f"])])])
quantize_inference_model(warm, quantization_dtype=dtype)
def memory(kind):
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith(kind)).split()[1])
before = memory("VmRSS")
quantize_inference_model(model, quantization_dtype=dtype)
most = memory("VmHWM")
result = sum(buffer.nbytes for buffer in model.buffers()) >> 10
print(most - before - result)
"""


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
@pytest.mark.parametrize("dtype", ["int8", "quint4x2", "quint2x4", "float16"])
def test_little_memory_is_taken_besides_the_result(kind: str, dtype: str) -> None:
    """In a process of its own: the most that it ever took, in KiB. The table has 256 MiB."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY, kind, dtype],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert int(done.stdout) <= 64 << 10
