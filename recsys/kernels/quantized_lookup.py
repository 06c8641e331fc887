"""One lookup over many tables of quantized rows, which TorchScript compiles.

Shapes: `R` rows, `D` columns, `N` ids, `F` features, `B` bags per feature.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import lcm
from typing import cast

import torch
from torch import Tensor, nn

from recsys.kernels.backend import OUTPUT_CODES, POOLING_CODES
from recsys.kernels.quantized import HEADER_BYTES, SPARSE_TYPES, QuantizedInTorch, row_bytes
from recsys.kernels.support import choose_backend
from recsys.kernels.types import LookupSettings, PoolingType, UpdateMode

_ROW_ALIGNMENT = {"cuda": 16}  # FBGEMM's CUDA kernels load that many bytes at a time
_ALIGNMENT = 128  # of a table's first byte, for vector loads on a GPU


def row_alignment_on(device_type: str, least: int) -> int:
    """Return the bytes that rows are stored in multiples of on a kind of device.

    Args:
        device_type: Such as "cuda".
        least: A divisor of it.

    Example:
        >>> row_alignment_on("cpu", 1), row_alignment_on("cuda", 1)
        (1, 16)
    """
    return lcm(least, _ROW_ALIGNMENT.get(device_type, 1))


class QuantizedLookup(nn.Module):
    """One lookup over many tables of quantized rows. TorchScript compiles it; so does plain Python.

    Args:
        tables: Per table its rows, as `quantize_rows` returns them.
        bits: Per table 32, 16, 8, 4 or 2.
        feature_table_map: Per feature the table it reads.
        pooling: `SUM` or `MEAN`; `NONE` for one row per id, of tables of the same dim.
        output_dtype: `torch.float32`, `torch.float16` or `torch.bfloat16`.
        row_alignment: Rows are stored in multiples of that many bytes, on CUDA at least of 16.

    Raises:
        ValueError: If there is no table, dims differ without pooling, or there is no such output.

    Example:
        >>> from recsys.kernels.quantize import quantize_rows
        >>> rows = quantize_rows(torch.tensor([[0.0, 3.0, 3.0, 0.0]]), bits=4)
        >>> lookup = QuantizedLookup([rows], [4], [0], PoolingType.SUM)
        >>> lookup(torch.tensor([0, 0]), torch.tensor([0, 2]), None)
        tensor([[0.0000, 5.9985, 5.9985, 0.0000]])
    """

    def __init__(
        self,
        tables: Sequence[Tensor],
        bits: Sequence[int],
        feature_table_map: Sequence[int],
        pooling: PoolingType,
        *,
        output_dtype: torch.dtype = torch.float32,
        row_alignment: int = 1,
    ) -> None:
        super().__init__()
        if output_dtype not in OUTPUT_CODES:
            raise ValueError(
                f"QuantizedLookup returns one of {[*OUTPUT_CODES]}; received {output_dtype}."
            )
        if pooling not in POOLING_CODES:
            raise ValueError(
                f"pooling must be one of {', '.join(p.name for p in POOLING_CODES)}; received "
                f"{pooling.name}."
            )
        dims = [  # of floats in a row
            (rows.shape[1] - HEADER_BYTES[b]) * 8 // b for rows, b in zip(tables, bits, strict=True)
        ]
        if not tables:
            raise ValueError("QuantizedLookup needs at least one table; received none.")
        self.settings = LookupSettings(
            device=tables[0].device,
            output_dtype=output_dtype,
            dims=dims,
            bits=list(bits),
            feature_table_map=list(feature_table_map),
            pooling=pooling,
            optimizer=None,
            update_mode=UpdateMode.GRADIENT,
        )
        self._least_alignment = row_alignment
        self.pooling_mode = POOLING_CODES[pooling]
        self.total_dim = sum(dims[t] for t in feature_table_map)
        self.widest = [  # as FBGEMM takes it
            max((d for d, b in zip(dims, bits, strict=True) if b == of), default=0)
            for of in (2, 4, 8, 16, 32)
        ]
        self._lay_out(tables)

    def _lay_out(self, tables: Sequence[Tensor]) -> None:
        """Store the rows as their device's kernels read them."""
        device = tables[0].device
        self.row_alignment = row_alignment_on(device.type, self._least_alignment)
        self._row_bytes = [
            -(-r.shape[1] // self.row_alignment) * self.row_alignment for r in tables
        ]
        self._num_rows = [rows.shape[0] for rows in tables]
        self.has_long_ids = max(self._num_rows) > 2**31
        self._starts, end = [], 0
        for size, num_rows in zip(self._row_bytes, self._num_rows, strict=True):
            self._starts.append(end)
            end += -(-size * num_rows // _ALIGNMENT) * _ALIGNMENT
        self.register_buffer("weights", torch.zeros(end, dtype=torch.uint8, device=device))
        for table, rows in enumerate(tables):
            self.table_rows(table).copy_(rows)
        self._describe()

    def extra_repr(self) -> str:
        """Return the tables, their types, the device and the backend."""
        settings = self.settings
        return (
            f"tables={len(settings.bits)}, features={len(settings.feature_table_map)}, "
            f"dims={sorted({*settings.dims})}, rows={self._total_rows()}, "
            f"bits={sorted({*settings.bits})}, pooling={settings.pooling.name}, "
            f"output={settings.output_dtype}, device={settings.device}, "
            f"backend={self.backend}: {self.backend_reason}"
        )

    def _total_rows(self) -> int:
        return sum(self._num_rows)

    def _describe(self) -> None:
        """Register the index tensors of FBGEMM's kernel."""
        device = cast(Tensor, self.weights).device
        self.device_type = device.type
        settings = self.settings = replace(self.settings, device=device, location=None)
        self.backend, self.backend_reason, self._kernel = choose_backend(settings, "lookup")
        # FBGEMM 1.6's CUDA kernel writes wrong float32 values for rows of 2 bits (seen on an H100).
        # It computes in float16 for every output dtype.
        self.is_widened = (
            device.type == "cuda" and settings.output_dtype is torch.float32 and 2 in settings.bits
        )
        self.output_type = OUTPUT_CODES[torch.float16 if self.is_widened else settings.output_dtype]

        def register(name: str, values: list[int], dtype: torch.dtype) -> None:
            self.register_buffer(name, torch.tensor(values, dtype=dtype, device=device), False)

        features = settings.feature_table_map
        register("table_starts", [self._starts[t] for t in features], torch.int64)
        register("table_types", [SPARSE_TYPES[settings.bits[t]] for t in features], torch.uint8)
        edges = accumulate((settings.dims[t] for t in features), initial=0)
        register("dim_offsets", list(edges), torch.int32)
        placement = 0 if device.type == "cuda" else 3  # FBGEMM's DEVICE and HOST
        register("placements", [placement] * len(features), torch.int32)
        # Without host memory and cache, FBGEMM's CUDA kernel needs empty tensors of these dtypes
        # and dims.
        register("no_host_weights", [], torch.uint8)
        register("no_cache_locations", [], torch.int32)
        no_cache = torch.zeros(0, 0, dtype=torch.uint8, device=device)
        self.register_buffer("no_cache_weights", no_cache, False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLookup:
        """Serve `to`, `cuda`, `to_empty`: another kind of device may mean another layout."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device_type = cast(Tensor, self.weights).device.type
        if row_alignment_on(device_type, self._least_alignment) != self.row_alignment:
            self._lay_out([self.table_rows(table) for table in range(len(self._num_rows))])
        else:
            self._describe()  # `to_empty` clears these tensors too
        return self

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Look up bags.

        Args:
            indices: `[N]` ids in range.
            offsets: `[F * B + 1]`, feature-major.
            weights: `[N]` fp32, or None.

        Returns:
            `[B, sum of D over features]`, or `[N, D]` without pooling, in the output dtype.
        """
        if (
            not torch.jit.is_scripting()  # type: ignore[attr-defined]
            and self.backend != "fbgemm"
            and not torch.compiler.is_compiling()  # exported programs call FBGEMM
        ):
            tables = [self.table_rows(table) for table in range(len(self._num_rows))]
            return self._look_up(tables, indices, offsets, weights)
        return self._look_up_in(self.weights, indices, offsets, weights)  # type: ignore[arg-type]

    def _look_up_in(
        self, storage: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Look up bags, by FBGEMM, in rows that are stored as this lookup stores its own."""
        if self.weights.device.type != self.device_type:  # torch.jit.load(..., map_location)
            raise RuntimeError(
                f"This program was exported for {self.device_type}; its tables are on "
                f"{self.weights.device}. Move the quantized model there, then export it."
            )
        if self.has_long_ids:
            indices, offsets = indices.long(), offsets.long()
        else:
            indices, offsets = indices.int(), offsets.int()
        output: Tensor = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
            storage,
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
            indices,
            offsets,
            self.pooling_mode,
            weights,
            self.output_type,
            self.no_cache_weights,
            self.no_cache_locations,
            self.row_alignment,
        )
        return output.float() if self.is_widened else output

    @torch.jit.unused
    def stored_tables(self) -> list[Tensor]:
        """Return all tables' rows as they are stored: live views."""
        return [self.stored_rows(table) for table in range(len(self._num_rows))]

    def stored_rows(self, table: int) -> Tensor:
        """Return a table's rows as they are stored, zeros at the end of each: a live view."""
        size, start = self._row_bytes[table], self._starts[table]
        storage: Tensor = self.weights  # type: ignore[assignment]
        return storage[start : start + size * self._num_rows[table]].view(-1, size)

    @torch.jit.unused
    def over(self, starts: list[int], storage: Tensor) -> QuantizedLookup:
        """Return this lookup over other storage with the same rows, not copied.

        Args:
            starts: The first byte of each table in the storage.
            storage: uint8, on the device of this lookup's rows.
        """
        new = copy.copy(self)
        new._buffers = {**self._buffers, "weights": storage}
        new._starts = list(starts)
        new._describe()
        return new

    @torch.jit.unused
    def table_rows(self, table: int) -> Tensor:
        """Return a table's rows as `quantize_rows` gave them: a live view."""
        settings = self.settings
        size = row_bytes(settings.dims[table], settings.bits[table])
        return self.stored_rows(table)[:, :size]

    @torch.jit.unused
    def _look_up(
        self,
        tables: list[Tensor],
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        assert issubclass(self._kernel, QuantizedInTorch)
        return self._kernel.look_up(self.settings, tables, indices, offsets, weights)
