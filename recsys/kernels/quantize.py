"""Quantization of rows of floats, by blocks of rows.

Each row is quantized on its own, so the size of a block changes only time and memory. A
block of 4 MiB stays in a CPU's cache while it is read several times.

FBGEMM's quantizer is used where it is faster than PyTorch's operations: for rows of 4 and 2 bits
on a CPU. Both return the same bits. For rows of 8 bits FBGEMM's fast quantizer has scales and
biases of fp32, which is another format.

Shapes: `R` rows, `D` columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple, final

import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.kernels.quantized import HEADER_BYTES, SPARSE_TYPES, row_bytes

BLOCK_VALUES = 1 << 20
"""Floats that are quantized at a time."""
_TO_WHOLE = 1.5 * 2**23
"""Added to a float, it rounds it as `torch.round` does, and leaves the whole number in the lowest
bits: rounding and converting take three times as long."""
_NARROW = 32
"""Below so many columns PyTorch reduces columns faster than rows, and FBGEMM takes longer."""


def quantize_rows(weight_RD: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Quantize each row on its own.

    Besides the result it takes memory for one block of rows, at most 16 MiB.

    Args:
        weight_RD: `[R, D]` floating point; `D` even for 4 bits, a multiple of 4 for 2 bits.
        bits: 8, 4 or 2; 16 rounds to fp16; 32 keeps fp32.
        out: `[R, row_bytes(D, bits)]` uint8 to write to, also a view; allocated if None.

    Returns:
        `[R, row_bytes(D, bits)]` uint8.

    Raises:
        ValueError: If `bits` is another number, `D` does not fill whole bytes, or a weight has no
            value, is not finite or is too large.

    Example:
        >>> from recsys.kernels.quantized import dequantize_rows
        >>> rows = quantize_rows(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), bits=8)
        >>> dequantize_rows(rows, bits=8)
        tensor([[0.0000, 1.0000, 2.0000, 3.0000]])
    """
    if bits not in SPARSE_TYPES:
        raise ValueError(f"Rows are quantized to {[*SPARSE_TYPES]} bits; received bits={bits}.")
    num_rows, dim = weight_RD.shape
    size = row_bytes(dim, bits)
    if weight_RD.is_meta:
        raise ValueError(
            "quantize_rows needs weights that have values; received a tensor on the meta device. "
            "Load the checkpoint into a model on the CPU first."
        )
    if out is None:
        out = torch.empty(num_rows, size, dtype=torch.uint8, device=weight_RD.device)
    step = max(BLOCK_VALUES // dim, 1)
    scratch = _Scratch.empty(min(step, num_rows), dim, weight_RD.device)
    for start in range(0, num_rows, step):
        block = weight_RD[start : start + step].detach().float()
        rows = out[start : start + step]
        if bits >= 16:
            rows.copy_(_as_floats(block, bits).view(torch.uint8))
        elif _has_fbgemm(block, bits):
            _check_finite(block)
            fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(
                block.contiguous(), bits
            )
            header = fused[:, -4:].view(torch.float16) + 0.0  # of two zeros, the positive one
            if not _is_finite(header):
                headers_of(row_ranges(block), bits)  # raises
            write_rows(rows, header, fused[:, :-4])
        else:
            header = headers_of(row_ranges(block), bits)
            values = values_of(block, header, bits, scratch)
            write_rows(rows, header, pack_values(values, bits))
    return out


@final
class _Scratch(NamedTuple):
    """Buffers for one block. They are reused: new memory for each block costs page faults."""

    floats: Tensor
    values: Tensor

    @staticmethod
    def empty(rows: int, cols: int, device: torch.device) -> _Scratch:
        """Allocate buffers; unwritten memory takes no space."""
        dtypes = torch.float32, torch.uint8
        return _Scratch(*(torch.empty(rows, cols, dtype=t, device=device) for t in dtypes))


def row_ranges(weight_RD: Tensor) -> Tensor:
    """Return the range of each row, so that ranges of parts of rows combine by their maximum.

    Args:
        weight_RD: `[R, D]` fp32.

    Returns:
        `[2, R]` fp32: the negated least values, and the greatest ones.

    Raises:
        ValueError: If a value is not finite.

    Example:
        >>> row_ranges(torch.tensor([[3.0, -1.0, 2.0]]))
        tensor([[1.],
                [3.]])
    """
    if weight_RD.shape[1] < _NARROW:
        columns = weight_RD.t().contiguous()
        ranges = torch.stack([-columns.amin(0), columns.amax(0)])
    else:
        ranges = torch.stack([-weight_RD.amin(1), weight_RD.amax(1)])
    _check_finite(ranges)
    return ranges


def headers_of(ranges_2R: Tensor, bits: int) -> Tensor:
    """Return the scale and bias of each row, as FBGEMM's quantizer chooses them.

    The bias is the least value, and the scale a step of the range from there, both rounded to
    fp16. A row of equal values, or of values so close that fp16 has no scale for them, has scale 1.

    Args:
        ranges_2R: As of `row_ranges`.
        bits: 8, 4 or 2.

    Returns:
        `[R, 2]` fp16.

    Raises:
        ValueError: If fp16 cannot hold a scale or a bias.
    """
    bias = (-ranges_2R[0]).half() + 0.0  # of two zeros, the positive one
    scale = ((ranges_2R[1] - bias.float()) / (2**bits - 1)).half()
    header = torch.stack([scale.masked_fill_(scale == 0, 1.0), bias], dim=1)
    if not _is_finite(header):
        low, high = -ranges_2R[0].amax(), ranges_2R[1].amax()
        raise ValueError(
            "quantize_rows keeps each row's least value and step in fp16, which ends at 65504; "
            f"received values from {float(low):.6g} to {float(high):.6g}."
        )
    return header


def values_of(
    weight_RD: Tensor, headers_R2: Tensor, bits: int, scratch: _Scratch | None = None
) -> Tensor:
    """Quantize rows or column slices to one byte per value.

    Args:
        weight_RD: `[R, D]` fp32.
        headers_R2: `[R, 2]` fp16, of the whole rows.
        bits: 8, 4 or 2.
        scratch: Buffers to use.

    Returns:
        `[R, D]` uint8; of the scratch, if there is one.
    """
    num_rows, num_cols = weight_RD.shape
    if scratch is None:
        scratch = _Scratch.empty(num_rows, num_cols, weight_RD.device)
    floats, values = (buffer[:num_rows] for buffer in scratch)
    header = headers_R2.float()
    torch.sub(weight_RD, header[:, 1:], out=floats)
    floats.mul_(1.0 / header[:, :1]).clamp_(0, 2**bits - 1).add_(_TO_WHOLE)
    return values.copy_(floats.view(torch.int32))


def pack_values(values_RD: Tensor, bits: int) -> Tensor:
    """Return quantized values as they are stored, 8 / `bits` of them in a byte.

    Args:
        values_RD: `[R, D]` uint8, contiguous.
        bits: 8, 4 or 2.

    Returns:
        `[R, D * bits / 8]`, uint8 or integers whose lowest byte counts.
    """
    if bits == 8:
        return values_RD
    if bits == 4:  # in pairs, the first in the lowest byte
        pairs = values_RD.view(torch.int16)
        return pairs | (pairs >> 4)
    fours = values_RD.view(torch.int32)
    return fours | (fours >> 6) | (fours >> 12) | (fours >> 18)


def write_rows(rows: Tensor, headers_R2: Tensor, packed: Tensor) -> None:
    """Write quantized rows as they are stored.

    Args:
        rows: `[R, bytes]` uint8 to write to.
        headers_R2: As of `headers_of`.
        packed: As of `pack_values`.
    """
    size = HEADER_BYTES[8]
    rows[:, :size].copy_(headers_R2.view(torch.uint8))
    rows[:, size : size + packed.shape[1]].copy_(packed)


def _has_fbgemm(block: Tensor, bits: int) -> bool:
    return (
        bits < 8
        and block.shape[1] >= _NARROW
        and block.shape[1] * bits % 16 == 0  # it writes the header as two numbers of 2 bytes
        and block.is_cpu
        and "cpu" in ops.FBGEMM_DEVICES
    )


def _as_floats(block: Tensor, bits: int) -> Tensor:
    _check_finite(block)
    if bits == 32:
        return block.contiguous()
    half = block.half().contiguous()
    if not _is_finite(half):
        low, high = torch.aminmax(block)
        raise ValueError(
            f"fp16 ends at 65504; received values from {float(low):.6g} to {float(high):.6g}."
        )
    return half


def _is_finite(values: Tensor) -> bool:
    # a sum is several times faster, but the sum of finite values may be infinite
    return math.isfinite(float(values.sum(dtype=torch.float32))) or bool(
        torch.isfinite(values).all()
    )


def _check_finite(values: Tensor) -> None:
    if not _is_finite(values):
        raise ValueError("quantize_rows needs finite weights; received NaN or infinity.")
