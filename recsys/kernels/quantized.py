"""Rows of 8, 4 or 2 bits with a scale and a bias each, or of floats; the backends that read them.

A row is stored as FBGEMM's inference kernels read it. A row of fp16 or fp32 has only its values.
The other rows have two fp16 numbers, scale and bias, then the values, one, two or four per byte
(the first in the lowest bits). A value is `q * scale + bias` with `q` spread evenly from the row's
least value to its greatest (asymmetric uniform quantization; Guan et al., "Post-Training
4-bit Quantization on Embedding Tables", 2019).

Shapes: `R` rows, `D` columns, `N` ids, `F` features, `B` bags per feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.kernels.backend import FBGEMM_LIMITS, Backend, Limits
from recsys.kernels.types import LookupSettings, PoolingType

HEADER_BYTES = {32: 0, 16: 0, 8: 4, 4: 4, 2: 4}
"""Bytes of scale and bias, by bits."""
SPARSE_TYPES = {32: 0, 16: 1, 8: 2, 4: 3, 2: 4}
"""FBGEMM's numbers for FP32, FP16, INT8, ..., by bits."""


def row_bytes(dim: int, bits: int) -> int:
    """Return the bytes of a row of `dim` values.

    Raises:
        ValueError: If the values do not fill whole bytes.

    Example:
        >>> row_bytes(64, bits=8), row_bytes(64, bits=4)
        (68, 36)
    """
    if dim * bits % 8:
        raise ValueError(
            f"Rows of {bits} bits need a number of columns that is divisible by {8 // bits}; "
            f"received {dim}."
        )
    return HEADER_BYTES[bits] + dim * bits // 8


def dequantize_rows(rows: Tensor, bits: int) -> Tensor:
    """Return the fp32 values of quantized rows: `[R, D]`."""
    # copies: within a single row fp16 may start at an odd byte
    if bits >= 16:
        dtype = torch.float16 if bits == 16 else torch.float32
        return rows.clone(memory_format=torch.contiguous_format).view(dtype).float()
    size = HEADER_BYTES[bits]
    header = rows[:, :size].clone(memory_format=torch.contiguous_format)
    header, values = header.view(torch.float16).float(), rows[:, size:]
    if bits < 8:
        levels, starts = 2**bits - 1, range(0, 8, bits)
        values = torch.stack([(values >> start) & levels for start in starts], dim=2).flatten(1)
    return values.float() * header[:, 0:1] + header[:, 1:2]


def take_columns(rows: Tensor, bits: int, start: int, end: int) -> Tensor:
    """Return rows of some columns of a table: values keep the scale and bias of their row.

    Args:
        rows: `[R, row_bytes(D, bits)]`, as `quantize_rows` returns them.
        bits: Of a value.
        start: The first column; a multiple of 4.
        end: After the last column.

    Returns:
        `[R, row_bytes(end - start, bits)]`; all columns are a view.

    Example:
        >>> from recsys.kernels.quantize import quantize_rows
        >>> rows = quantize_rows(torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]), bits=8)
        >>> dequantize_rows(take_columns(rows, 8, 4, 6), bits=8)
        tensor([[3.9999, 4.9999]])
    """
    header = HEADER_BYTES[bits]
    # `start` is a multiple of 4: whole bytes for any number of bits
    first, last = header + start * bits // 8, row_bytes(end - start, bits) + start * bits // 8
    if first == header and last == rows.shape[1]:
        return rows
    return torch.cat([rows[:, :header], rows[:, first:last]], dim=1)


def join_columns(parts: Sequence[Tensor], bits: int) -> Tensor:
    """Concatenate the columns of rows that `take_columns` returned, in order."""
    first, *others = parts
    return torch.cat([first, *(rows[:, HEADER_BYTES[bits] :] for rows in others)], dim=1)


class QuantizedInTorch(Backend):
    """Looks quantized rows up in plain PyTorch, on any device."""

    reads_quantized = True
    update_limits: ClassVar[Limits] = {"quantized tables are not trained": lambda s: True}

    @staticmethod
    def look_up(
        settings: LookupSettings,
        tables: Sequence[Tensor],
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Look up bags.

        Args:
            settings: Of the lookup.
            tables: Per table its rows, as `quantize_rows` returns them.
            indices: `[N]` ids in range.
            offsets: `[F * B + 1]`, feature-major.
            weights: `[N]` fp32, or None.
        """
        pooling, features = settings.pooling, settings.feature_table_map
        is_pooled = pooling is not PoolingType.NONE
        num_bags = (offsets.numel() - 1) // len(features)
        if num_bags == 0:
            width = sum(settings.dims[t] for t in (features if is_pooled else features[:1]))
            return torch.empty(0, width, dtype=settings.output_dtype, device=offsets.device)
        # rows of different widths: each feature's ids by themselves, so the host reads their counts
        lengths_FB = offsets.diff().view(-1, num_bags)
        ids_per_feature = lengths_FB.sum(1).tolist()
        of_feature = indices.long().split(ids_per_feature)
        weight_of = [None] * len(of_feature) if weights is None else weights.split(ids_per_feature)
        pieces = []
        for table, ids, weight, lengths in zip(
            features, of_feature, weight_of, lengths_FB, strict=True
        ):
            values = dequantize_rows(tables[table][ids], settings.bits[table])
            if weight is not None:
                values = values * weight.unsqueeze(1)
            if is_pooled:
                bag_of = torch.repeat_interleave(lengths, output_size=len(ids))
                values = values.new_zeros(num_bags, values.shape[1]).index_add_(0, bag_of, values)
            if pooling is PoolingType.MEAN:
                values /= lengths.clamp(min=1).unsqueeze(1)
            pieces.append(values.to(settings.output_dtype))
        return torch.cat(pieces, dim=1 if is_pooled else 0)


@final
class QuantizedInFbgemm(QuantizedInTorch):
    """FBGEMM's inference kernels, as `QuantizedLookup.forward` has them for TorchScript."""

    name = "fbgemm"
    device_types = ("cpu", "cuda")
    lookup_limits: ClassVar[Limits] = {
        **FBGEMM_LIMITS,
        "the installed fbgemm_gpu has no kernels for this device": lambda s: (
            s.device.type not in ops.FBGEMM_DEVICES
        ),
    }
