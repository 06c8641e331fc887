"""Rows of 8, 4 or 2 bits with a scale and a bias each, or of floats; lookups into them.

A row is stored as FBGEMM's inference kernels read it. One of fp16 or fp32 is its values. The others
are two fp16 numbers, scale and bias, then the values, one, two or four per byte (the first in the
lowest bits). A value is ``q * scale + bias``
with ``q`` spread evenly from the row's least value to its greatest (asymmetric uniform
quantization; Guan et al., "Post-Training 4-bit Quantization on Embedding Tables", 2019).

Shape names: ``R`` rows, ``D`` columns, ``N`` ids, ``F`` features, ``B`` bags per feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from math import lcm
from typing import cast

import torch
from torch import Tensor, nn

from recsys.kernels import ops
from recsys.kernels.types import PoolingMode

OUTPUT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 5}
"""Dtypes that a lookup returns, and FBGEMM's numbers for them."""
_HEADER_BYTES = {32: 0, 16: 0, 8: 4, 4: 4, 2: 4}  # scale and bias
_SPARSE_TYPES = {32: 0, 16: 1, 8: 2, 4: 3, 2: 4}  # FBGEMM's numbers for FP32, FP16, INT8, ...
_POOLING_MODES = {PoolingMode.SUM: 0, PoolingMode.MEAN: 1, PoolingMode.NONE: 2}
_ROW_ALIGNMENT = {"cuda": 16}  # FBGEMM's CUDA kernels load that many bytes at a time
_ALIGNMENT = 128  # of a table's first byte, for vector loads on a GPU


def row_bytes(dim: int, bits: int) -> int:
    """Returns the bytes of a row of ``dim`` values.

    Raises:
        ValueError: if the values do not fill whole bytes.

    Example:
        >>> row_bytes(64, bits=8), row_bytes(64, bits=4)
        (68, 36)
    """
    if dim * bits % 8:
        raise ValueError(
            f"Rows of {bits} bits need a number of columns that is divisible by {8 // bits}; "
            f"received {dim}."
        )
    return _HEADER_BYTES[bits] + dim * bits // 8


def quantize_rows(weight_RD: Tensor, bits: int) -> Tensor:
    """Quantizes each row on its own.

    Args:
        weight_RD: ``[R, D]`` floating point; ``D`` even for 4 bits, a multiple of 4 for 2 bits.
        bits: 8, 4 or 2; 16 rounds to fp16; 32 keeps fp32.

    Returns:
        ``[R, row_bytes(D, bits)]`` uint8.

    Raises:
        ValueError: if ``bits`` is none of these, ``D`` does not fill whole bytes, or a weight has
            no value, is not finite or is too large.

    Example:
        >>> rows = quantize_rows(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), bits=8)
        >>> dequantize_rows(rows, bits=8)
        tensor([[0.0000, 1.0000, 2.0000, 3.0000]])
    """
    if bits not in _SPARSE_TYPES:
        raise ValueError(f"Rows are quantized to {[*_SPARSE_TYPES]} bits; received bits={bits}.")
    row_bytes(weight_RD.shape[1], bits)
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
    if bits == 32:
        return weight.contiguous().view(torch.uint8)
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
    if bits < 8:
        per_byte = 8 // bits
        first, *others = (values[:, i::per_byte] << (i * bits) for i in range(per_byte))
        values = reduce(torch.bitwise_or, others, first)
    header = torch.cat([scale, bias], dim=1).view(torch.uint8)
    return torch.cat([header, values], dim=1)


def dequantize_rows(rows: Tensor, bits: int) -> Tensor:
    """Returns the fp32 values of quantized rows: ``[R, D]``."""
    # copies: within a single row fp16 may start at an odd byte
    if bits >= 16:
        dtype = torch.float16 if bits == 16 else torch.float32
        return rows.clone(memory_format=torch.contiguous_format).view(dtype).float()
    size = _HEADER_BYTES[bits]
    header = rows[:, :size].clone(memory_format=torch.contiguous_format)
    header, values = header.view(torch.float16).float(), rows[:, size:]
    if bits < 8:
        levels, starts = 2**bits - 1, range(0, 8, bits)
        values = torch.stack([(values >> start) & levels for start in starts], dim=2).flatten(1)
    return values.float() * header[:, 0:1] + header[:, 1:2]


class QuantizedLookup(nn.Module):
    """One lookup over many tables of quantized rows. TorchScript compiles it; so does plain Python.

    Args:
        tables: per table its rows, as :func:`quantize_rows` returns them.
        bits: per table 32, 16, 8, 4 or 2.
        feature_table_map: per feature the table it reads.
        pooling: ``SUM`` or ``MEAN``; ``NONE`` for one row per id, of tables of the same dim.
        output_dtype: ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``.
        row_alignment: rows are stored in multiples of that many bytes, on CUDA at least of 16.

    Raises:
        ValueError: if there is no table, dims differ without pooling, or there is no such output.

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
        *,
        output_dtype: torch.dtype = torch.float32,
        row_alignment: int = 1,
    ) -> None:
        super().__init__()
        if output_dtype not in OUTPUT_TYPES:
            raise ValueError(
                f"QuantizedLookup returns one of {[*OUTPUT_TYPES]}; received {output_dtype}."
            )
        dims = [
            (rows.shape[1] - _HEADER_BYTES[b]) * 8 // b
            for rows, b in zip(tables, bits, strict=True)
        ]
        self._is_pooled = pooling is not PoolingMode.NONE
        if not tables or (not self._is_pooled and len(set(dims)) > 1):
            raise ValueError(
                "QuantizedLookup needs a table, and without pooling tables of the same dim; "
                f"received {pooling} and tables of the dims {dims}."
            )
        self._dims = dims
        self._bits = list(bits)
        self._feature_table_map = list(feature_table_map)
        self._pooling = pooling
        self._output_dtype = output_dtype
        self._least_alignment = row_alignment
        self.pooling_mode = _POOLING_MODES[pooling]
        self.output_type = OUTPUT_TYPES[output_dtype]
        self.total_dim = sum(dims[t] for t in feature_table_map)
        self.widest = [  # as FBGEMM takes it
            max((d for d, b in zip(dims, bits, strict=True) if b == of), default=0)
            for of in (2, 4, 8, 16, 32)
        ]
        self.use_fbgemm = ops.HAS_FBGEMM
        self._lay_out(tables)

    def _lay_out(self, tables: Sequence[Tensor]) -> None:
        """Stores the rows as their device's kernels read them."""
        device = tables[0].device
        self.row_alignment = self._alignment_on(device)
        self._row_bytes = [
            -(-r.shape[1] // self.row_alignment) * self.row_alignment for r in tables
        ]
        self._num_rows = [rows.shape[0] for rows in tables]
        self._starts, end = [], 0
        for size, num_rows in zip(self._row_bytes, self._num_rows, strict=True):
            self._starts.append(end)
            end += -(-size * num_rows // _ALIGNMENT) * _ALIGNMENT
        self.register_buffer("weights", torch.zeros(end, dtype=torch.uint8, device=device))
        for table, rows in enumerate(tables):
            self.table_rows(table).copy_(rows)
        self._describe()

    def _alignment_on(self, device: torch.device) -> int:
        return lcm(self._least_alignment, _ROW_ALIGNMENT.get(device.type, 1))

    def _describe(self) -> None:
        """Stores what says where the rows are, beside them."""
        device = cast(Tensor, self.weights).device
        self.device_type = device.type

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
        """Serves `to`, `cuda`, `to_empty`: another kind of device may mean another layout."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._alignment_on(cast(Tensor, self.weights).device) != self.row_alignment:
            self._lay_out([self.table_rows(table) for table in range(len(self._dims))])
        else:
            self._describe()  # `to_empty` empties what is not learned, too
        return self

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Looks up bags.

        Args:
            indices: ``[N]`` ids in range.
            offsets: ``[F * B + 1]``, feature-major.
            weights: ``[N]`` fp32, or None.

        Returns:
            ``[B, sum of D over features]``, or ``[N, D]`` without pooling, in the output dtype.
        """
        if not torch.jit.is_scripting() and not self.use_fbgemm:  # type: ignore[attr-defined]
            return self._look_up_in_torch(indices, offsets, weights)
        if self.weights.device.type != self.device_type:  # torch.jit.load(..., map_location)
            raise RuntimeError(
                f"This program was exported for {self.device_type}; its tables are on "
                f"{self.weights.device}. Move the quantized model there, then export it."
            )
        found: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            self.weights,
            self.no_host_weights,
            self.placements,
            self.table_starts,
            self.table_types,
            self.dim_offsets,
            self.total_dim,
            self.widest[0],
            self.widest[1],
            self.widest[2],
            self.widest[3],
            self.widest[4],
            indices.int(),
            offsets.int(),
            self.pooling_mode,
            weights,
            self.output_type,
            self.no_cache_weights,
            self.no_cache_locations,
            self.row_alignment,
        )
        return found

    @torch.jit.unused
    def stored_rows(self, table: int) -> Tensor:
        """Returns a table's rows as they are stored, zeros at the end of each: a live view."""
        size, start = self._row_bytes[table], self._starts[table]
        storage = cast(Tensor, self.weights)
        return storage[start : start + size * self._num_rows[table]].view(-1, size)

    @torch.jit.unused
    def table_rows(self, table: int) -> Tensor:
        """Returns a table's rows as :func:`quantize_rows` gave them: a live view."""
        return self.stored_rows(table)[:, : row_bytes(self._dims[table], self._bits[table])]

    @torch.jit.unused
    def _look_up_in_torch(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        num_bags = (offsets.numel() - 1) // len(self._feature_table_map)
        if num_bags == 0:
            width = self.total_dim if self._is_pooled else self._dims[0]
            return torch.empty(0, width, dtype=self._output_dtype, device=offsets.device)
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
            if self._is_pooled:
                bag_of = torch.repeat_interleave(lengths, output_size=len(ids))
                values = values.new_zeros(num_bags, values.shape[1]).index_add_(0, bag_of, values)
            if self._pooling is PoolingMode.MEAN:
                values /= lengths.clamp(min=1).unsqueeze(1)
            pieces.append(values.to(self._output_dtype))
        return torch.cat(pieces, dim=1 if self._is_pooled else 0)
