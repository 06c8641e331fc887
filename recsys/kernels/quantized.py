"""Rows of 8 or 4 bits with a scale and a bias each, or of fp16; lookups into them, for inference.

A row is stored as FBGEMM's inference kernels read it. One of fp16 is its values. The others are two
fp16 numbers, scale and bias, then the values, one per byte or two per byte (the first in the low
bits). A value is ``q * scale + bias``
with ``q`` spread evenly from the row's least value to its greatest (asymmetric uniform
quantization; Guan et al., "Post-Training 4-bit Quantization on Embedding Tables", 2019).

Shape names: ``R`` rows, ``D`` columns, ``N`` ids, ``F`` features, ``B`` bags per feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.kernels import ops
from recsys.kernels.types import PoolingMode

_HEADER_BYTES = {16: 0, 8: 4, 4: 4}  # scale and bias
_SPARSE_TYPES = {16: 1, 8: 2, 4: 3}  # FBGEMM's numbers for FP16, INT8 and INT4
_ROW_ALIGNMENT = {"cuda": 16}  # FBGEMM's CUDA kernels load that many bytes at a time
_ALIGNMENT = 128  # of a table's first byte, for vector loads on a GPU


def quantize_rows(weight_RD: Tensor, bits: int) -> Tensor:
    """Quantizes each row on its own.

    Args:
        weight_RD: ``[R, D]`` floating point; ``D`` even for 4 bits.
        bits: 8 or 4; 16 rounds to fp16.

    Returns:
        ``[R, 4 + D * bits / 8]`` uint8; ``[R, 2 * D]`` for fp16.

    Raises:
        ValueError: if ``bits`` is neither, ``D`` does not fill whole bytes, or a weight has no
            value, is not finite or is too large.

    Example:
        >>> rows = quantize_rows(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), bits=8)
        >>> dequantize_rows(rows, bits=8)
        tensor([[0.0000, 1.0000, 2.0000, 3.0000]])
    """
    if bits not in _SPARSE_TYPES:
        raise ValueError(f"Rows are quantized to 16, 8 or 4 bits; received bits={bits}.")
    if weight_RD.shape[1] * bits % 8:
        raise ValueError(
            f"Rows of {bits} bits need an even number of columns; received {weight_RD.shape[1]}."
        )
    if weight_RD.is_meta:
        raise ValueError(
            "quantize_rows needs weights that have values; received a tensor on the meta device. "
            "Load the checkpoint into a model on the CPU first."
        )
    weight = weight_RD.detach().float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("quantize_rows needs finite weights; received NaN or infinity.")
    if bits == 16:
        half = weight.half()
        if not bool(torch.isfinite(half).all()):
            raise ValueError(
                f"fp16 ends at 65504; received values from {float(weight.min()):.6g} to "
                f"{float(weight.max()):.6g}."
            )
        return half.contiguous().view(torch.uint8)
    levels = 2**bits - 1
    low, high = torch.aminmax(weight, dim=1, keepdim=True)
    bias = low.half()
    scale = ((high - bias.float()) / levels).half()
    if not bool((torch.isfinite(bias) & torch.isfinite(scale)).all()):
        raise ValueError(
            "quantize_rows keeps each row's least value and step in fp16, which ends at 65504; "
            f"received values from {float(low.min()):.6g} to {float(high.max()):.6g}."
        )
    # a row of equal values, or so close that fp16 has no scale for them, is all bias
    step = torch.where(scale > 0, scale.float(), 1.0)
    values = ((weight - bias.float()) / step).round_().clamp_(0, levels).to(torch.uint8)
    if bits == 4:
        values = values[:, 0::2] | (values[:, 1::2] << 4)
    header = torch.cat([scale, bias], dim=1).view(torch.uint8)
    return torch.cat([header, values], dim=1)


def dequantize_rows(rows: Tensor, bits: int) -> Tensor:
    """Returns the fp32 values of quantized rows: ``[R, D]``."""
    # copies: within a single row fp16 may start at an odd byte
    if bits == 16:
        return rows.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
    size = _HEADER_BYTES[bits]
    header = rows[:, :size].clone(memory_format=torch.contiguous_format)
    header, values = header.view(torch.float16).float(), rows[:, size:]
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], dim=2).flatten(1)
    return values.float() * header[:, 0:1] + header[:, 1:2]


class QuantizedLookup(nn.Module):
    """One lookup over many tables of quantized rows. TorchScript compiles it; so does plain Python.

    Args:
        tables: per table its rows, as :func:`quantize_rows` returns them.
        bits: per table 16, 8 or 4.
        feature_table_map: per feature the table it reads.
        pooling: ``SUM`` or ``MEAN``.

    Raises:
        ValueError: if the pooling is not supported or there is no table.

    Example:
        >>> rows = quantize_rows(torch.tensor([[0.0, 3.0, 3.0, 0.0]]), bits=4)
        >>> lookup = QuantizedLookup([rows], [4], [0], PoolingMode.SUM)
        >>> lookup(torch.tensor([0, 0]), torch.tensor([0, 2]), None)
        tensor([[0.0000, 5.9985, 5.9985, 0.0000]])
    """

    def __init__(
        self,
        tables: Sequence[Tensor],
        bits: Sequence[int],
        feature_table_map: Sequence[int],
        pooling: PoolingMode,
    ) -> None:
        super().__init__()
        if pooling is PoolingMode.NONE or not tables:
            raise ValueError(
                f"QuantizedLookup pools by SUM or MEAN and needs a table; received {pooling} and "
                f"{len(tables)} tables."
            )
        dims = [
            (rows.shape[1] - _HEADER_BYTES[b]) * 8 // b
            for rows, b in zip(tables, bits, strict=True)
        ]
        self._dims = dims
        self._bits = list(bits)
        self._feature_table_map = list(feature_table_map)
        self.pools_mean = pooling is PoolingMode.MEAN
        self.total_dim = sum(dims[t] for t in feature_table_map)
        widest = {
            b: max(d for d, other in zip(dims, bits, strict=True) if other == b) for b in bits
        }
        self.max_int4_dim, self.max_int8_dim = widest.get(4, 0), widest.get(8, 0)
        self.max_fp16_dim = widest.get(16, 0)
        self.use_fbgemm = ops.HAS_FBGEMM
        self._lay_out(tables)

    def _lay_out(self, tables: Sequence[Tensor]) -> None:
        """Stores the rows, and what says where they are, as their device's kernels read them."""
        device = tables[0].device
        self.device_type = device.type
        self.row_alignment = _ROW_ALIGNMENT.get(device.type, 1)
        tables = [functional.pad(rows, (0, -rows.shape[1] % self.row_alignment)) for rows in tables]
        self._starts, end = [], 0
        for rows in tables:
            self._starts.append(end)
            end += -(-rows.numel() // _ALIGNMENT) * _ALIGNMENT
        storage = torch.zeros(end, dtype=torch.uint8, device=device)
        for start, rows in zip(self._starts, tables, strict=True):
            storage[start : start + rows.numel()] = rows.reshape(-1)
        self.register_buffer("weights", storage)
        self._row_bytes = [rows.shape[1] for rows in tables]
        self._num_rows = [rows.shape[0] for rows in tables]

        def register(name: str, values: list[int], dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.tensor(values, dtype=dtype, device=device), False)

        features = self._feature_table_map
        register("table_starts", [self._starts[t] for t in features], torch.int64)
        register("table_types", [_SPARSE_TYPES[self._bits[t]] for t in features], torch.uint8)
        edges = accumulate((self._dims[t] for t in features), initial=0)
        register("dim_offsets", list(edges), torch.int32)
        placement = 0 if device.type == "cuda" else 3  # FBGEMM's DEVICE and HOST
        register("placements", [placement] * len(features), torch.int32)
        # There is neither host memory nor a cache, which FBGEMM's CUDA kernel wants to be told in
        # tensors of these dtypes and dims.
        register("no_host_weights", [], torch.uint8)
        register("no_cache_locations", [], torch.int32)
        no_cache = torch.zeros(0, 0, dtype=torch.uint8, device=device)
        self.register_buffer("no_cache_weights", no_cache, False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLookup:
        """Serves `to`, `cuda`, `to_empty`: another kind of device means another layout."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if cast(Tensor, self.weights).device.type != self.device_type:
            self._lay_out([self.table_rows(table) for table in range(len(self._dims))])
        return self

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Looks up bags.

        Args:
            indices: ``[N]`` ids in range.
            offsets: ``[F * B + 1]``, feature-major.
            weights: ``[N]`` fp32, or None.

        Returns:
            ``[B, sum of D over features]`` fp32.
        """
        if not torch.jit.is_scripting() and not self.use_fbgemm:  # type: ignore[attr-defined]
            return self._look_up_in_torch(indices, offsets, weights)
        if self.weights.device.type != self.device_type:  # torch.jit.load(..., map_location)
            raise RuntimeError(
                f"This program was exported for {self.device_type}; its tables are on "
                f"{self.weights.device}. Move the quantized model there, then export it."
            )
        pooled: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            self.weights,
            self.no_host_weights,
            self.placements,
            self.table_starts,
            self.table_types,
            self.dim_offsets,
            self.total_dim,
            0,
            self.max_int4_dim,
            self.max_int8_dim,
            self.max_fp16_dim,
            0,
            indices.int(),
            offsets.int(),
            1 if self.pools_mean else 0,
            weights,
            0,  # fp32 output
            self.no_cache_weights,
            self.no_cache_locations,
            self.row_alignment,
        )
        return pooled

    @torch.jit.unused
    def table_rows(self, table: int) -> Tensor:
        """Returns a table's rows as :func:`quantize_rows` gave them: a live view."""
        size, start = self._row_bytes[table], self._starts[table]
        storage = cast(Tensor, self.weights)
        rows = storage[start : start + size * self._num_rows[table]].view(-1, size)
        bits = self._bits[table]
        return rows[:, : _HEADER_BYTES[bits] + self._dims[table] * bits // 8]

    @torch.jit.unused
    def _look_up_in_torch(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        num_bags = (offsets.numel() - 1) // len(self._feature_table_map)
        if num_bags == 0:
            return torch.empty(0, self.total_dim, device=offsets.device)
        # rows of different widths: each feature's ids by themselves, so the host reads their counts
        lengths_FB = offsets.diff().view(-1, num_bags)
        ids_per_feature = lengths_FB.sum(1).tolist()
        of_feature = indices.long().split(ids_per_feature)
        weight_of = [None] * len(of_feature) if weights is None else weights.split(ids_per_feature)
        pieces = []
        for table, ids, weight, lengths in zip(
            self._feature_table_map, of_feature, weight_of, lengths_FB, strict=True
        ):
            values = dequantize_rows(self.table_rows(table)[ids], self._bits[table])
            if weight is not None:
                values = values * weight.unsqueeze(1)
            bag_of = torch.repeat_interleave(lengths, output_size=len(ids))
            pooled = values.new_zeros(num_bags, values.shape[1]).index_add_(0, bag_of, values)
            if self.pools_mean:
                pooled /= lengths.clamp(min=1).unsqueeze(1)
            pieces.append(pooled)
        return torch.cat(pieces, dim=1)
