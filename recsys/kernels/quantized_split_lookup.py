"""A lookup of one quantized table whose rows are on several devices, which TorchScript compiles.

The quantized rows of a batch are brought together first, and only then dequantized and pooled, by
the kernel that serves whole tables: the same sums in the same order. Sums of parts would be others,
and larger to move: a row of int8 has a quarter of the bytes of its values.

Shapes: `R` rows, `N` ids, `F` features, `B` bags per feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast, final

import torch
from torch import Tensor, nn

from recsys.kernels.quantized_lookup import QuantizedLookup
from recsys.kernels.types import PoolingType


@final
class QuantizedSplitLookup(QuantizedLookup):
    """One lookup of a table that is split by rows; results equal the whole table's, bit for bit.

    Args:
        blocks: The rows of each block, in order, on the device that holds them, as `quantize_rows`
            returns them. The first one's device also pools.
        bits: 32, 16, 8, 4 or 2.
        num_features: That read the table.
        pooling: `SUM`, `MEAN` or `NONE`.
        output_dtype: As for `QuantizedLookup`.
        row_alignment: As for `QuantizedLookup`.

    Example:
        >>> from recsys.kernels.quantize import quantize_rows
        >>> rows = quantize_rows(torch.tensor([[0.0, 3.0, 3.0, 0.0], [0.0, 6.0, 0.0, 0.0]]), bits=8)
        >>> lookup = QuantizedSplitLookup([rows[:1], rows[1:]], 8, 1, PoolingType.SUM)
        >>> lookup(torch.tensor([1, 0]), torch.tensor([0, 2]), None)
        tensor([[0.0000, 8.9999, 3.0000, 0.0000]])
    """

    def __init__(
        self,
        blocks: Sequence[Tensor],
        bits: int,
        num_features: int,
        pooling: PoolingType,
        *,
        output_dtype: torch.dtype = torch.float32,
        row_alignment: int = 1,
    ) -> None:
        none = blocks[0][:0]  # it has no rows of its own; each batch brings its rows
        features = [0] * num_features
        super().__init__(
            [none], [bits], features, pooling, output_dtype=output_dtype,
            row_alignment=row_alignment,
        )  # fmt: skip
        self.blocks = nn.ModuleList(
            QuantizedLookup([rows], [bits], [0], PoolingType.NONE, row_alignment=row_alignment)
            for rows in blocks
        )
        self._first_rows = list(accumulate((len(rows) for rows in blocks[:-1]), initial=0))

    def _total_rows(self) -> int:
        return sum(cast(QuantizedLookup, block)._total_rows() for block in self.blocks)

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Look up bags, as `QuantizedLookup` does; arguments are on the first block's device."""
        rows, places = self._gather(indices)
        if (
            not torch.jit.is_scripting()  # type: ignore[attr-defined]
            and self.backend != "fbgemm"
            and not torch.compiler.is_compiling()  # exported programs call FBGEMM
        ):
            size = self.table_rows(0).shape[1]
            return self._look_up([rows[:, :size]], places, offsets, weights)
        return self._look_up_in(rows.flatten(), places, offsets, weights)

    def _gather(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored rows of ids, and the index of each id's row among them.

        The host waits for the device: it must know how many ids are of each block.
        """
        block_N = torch.zeros_like(ids)
        later: list[Tensor] = []
        for start in self._first_rows[1:]:
            is_later = ids >= start
            block_N = block_N + is_later
            later.append(is_later.sum())
        # one wait for the numbers of all blocks
        num_later: list[int] = torch.stack(later).tolist()
        num_later.append(0)
        # this sort need not be stable, since `places` inverts any order
        order = torch.sort(block_N)[1]
        sorted_ids = ids.index_select(0, order)
        parts: list[Tensor] = []
        start = 0
        for i, block in enumerate(self.blocks):
            end = ids.numel() - num_later[i]
            rows = sorted_ids[start:end] - self._first_rows[i]
            stored: Tensor = block.stored_rows(0)  # type: ignore[operator]
            parts.append(stored.index_select(0, rows.to(stored.device)).to(ids.device))
            start = end
        places = torch.empty_like(order)
        places.scatter_(0, order, torch.arange(order.numel(), device=ids.device))
        return torch.cat(parts), places

    @torch.jit.unused
    def stored_tables(self) -> list[Tensor]:
        """Return the blocks' rows as they are stored: live views."""
        return [block.stored_rows(0) for block in self.blocks]  # type: ignore[operator]
