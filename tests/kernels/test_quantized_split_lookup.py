from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from recsys.kernels.quantize import quantize_rows
from recsys.kernels.quantized import join_columns, take_columns
from recsys.kernels.quantized_lookup import QuantizedLookup
from recsys.kernels.quantized_split_lookup import QuantizedSplitLookup
from recsys.kernels.types import PoolingType

ENDS = [[0, 1, 20], [0, 7, 9, 20], [0, 19, 20]]


def _bags(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, offsets and weights of two features."""
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, 9, (2 * size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_ids = int(offsets[-1])
    ids = torch.randint(0, 20, (num_ids,), generator=generator)
    return ids, offsets, torch.randn(num_ids, generator=generator)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN, PoolingType.NONE])
@pytest.mark.parametrize("bits", [32, 16, 8, 4, 2])
def test_a_split_table_is_looked_up_as_the_whole(bits: int, pooling: PoolingType) -> None:
    rows = quantize_rows(torch.randn(20, 12, generator=torch.Generator().manual_seed(0)) * 9, bits)
    options: Any = {"row_alignment": 16, "output_dtype": torch.float16}
    whole = QuantizedLookup([rows], [bits], [0, 0], pooling, **options)
    for ends in ENDS:
        blocks = [rows[start:end] for start, end in pairwise(ends)]
        split = QuantizedSplitLookup(blocks, bits, 2, pooling, **options)
        scripted = torch.jit.script(split) if len(ends) == 4 else split
        for size in (5, 0, 1):
            ids, offsets, weights = _bags(size)
            weight = None if pooling is PoolingType.NONE else weights
            expected = whole(ids, offsets, weight)
            assert torch.equal(split(ids, offsets, weight), expected)
            assert torch.equal(scripted(ids.int(), offsets, weight), expected)
        for stored, block in zip(split.stored_tables(), blocks, strict=True):
            assert torch.equal(stored[:, : rows.shape[1]], block)


@pytest.mark.parametrize("bits", [32, 16, 8, 4, 2])
def test_columns_are_looked_up_as_those_of_the_whole(bits: int) -> None:
    rows = quantize_rows(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)), bits)
    ids, offsets, weights = _bags(6)
    whole = QuantizedLookup([rows], [bits], [0], PoolingType.SUM)(ids, offsets, weights)
    parts = [take_columns(rows, bits, start, end) for start, end in pairwise([0, 8, 12, 20])]
    looked_up = [
        QuantizedLookup([p], [bits], [0], PoolingType.SUM)(ids, offsets, weights) for p in parts
    ]
    assert torch.equal(torch.cat(looked_up, dim=1), whole)
    assert torch.equal(join_columns(parts, bits), rows)
    assert take_columns(rows, bits, 0, 20).data_ptr() == rows.data_ptr()
