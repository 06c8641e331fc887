"""Gradients of table rows: sums over the ids of each row, merges, and the rows of each table.

Shapes: N ids, K rows, M bags, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from recsys.kernels import ops
from recsys.kernels.lookup_batch import sum_bags
from recsys.kernels.tbe_layout import StorageLayout

RowGradients: TypeAlias = tuple[Tensor, Tensor]
"""(rows [K] int64, ascending; gradients [K, D] fp32).

On a CPU rows are unique. On CUDA the number of unique rows is not known to the host, which does not
wait for it: there is an entry per id. The first entry of a row has its gradient, the others are 0.
`first_of_rows` finds the first entries; `without_repeats` waits and drops the others.
"""

RowStatistics: TypeAlias = tuple[Tensor, Tensor]
"""(rows [K] as in `RowGradients`; sum over the columns of the squared gradient [K] fp32)."""

Reduced = TypeVar("Reduced", bound=tuple[Tensor, ...])
Reduce: TypeAlias = Callable[[Tensor, int, Tensor, Tensor, Tensor | None], Reduced]
"""Reduction of gradients by row: see `sum_by_row`."""


WIDEST = 2048
"""The most columns of a row that Triton's kernels support."""


def merge_row_gradients(first: RowGradients, second: RowGradients, num_rows: int) -> RowGradients:
    """Add two sets of row gradients into one without duplicates."""
    rows = torch.cat([first[0], second[0]])
    grads = torch.cat([first[1], second[1]])
    source = torch.arange(rows.numel(), device=rows.device)
    return sum_by_row(rows, num_rows, grads, source, None)


def sort_rows(row_ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Sort rows [N], stably; return them, of any integer dtype, and their former positions [N]."""
    # int32 takes half the time
    return torch.sort(row_ids.int() if num_rows < 2**31 else row_ids, stable=True)


def distinct_rows(row_ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return unique rows [K] ascending, their counts [K], and the order [N] of a stable sort."""
    sorted_ids, order = sort_rows(row_ids, num_rows)
    # Waits for the device: the number of unique rows sizes all that follows.
    rows, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    return rows.long(), counts, order


def sum_by_row(
    row_ids: Tensor, num_rows: int, gradients: Tensor, source: Tensor, scale: Tensor | None
) -> RowGradients:
    """Sum `scale[i] * gradients[source[i]]` over the i of each unique row id."""
    if row_ids.is_cuda:  # an entry per id: the first entry of a row has the sum
        rows, order = sort_rows(row_ids, num_rows)
        if uses_triton(rows, gradients.shape[1]):
            from recsys.kernels import update_triton

            return update_triton.sum_by_row(rows, order, gradients, source, scale)[:2]
        place_N = torch.arange(rows.numel(), device=rows.device)
        # the first entry of a row is a bag of all its ids, followed by empty bags
        ends_N = torch.searchsorted(rows, rows, right=True)
        starts_N = torch.where(first_of_rows(rows) == place_N, place_N, ends_N)
        starts = functional.pad(starts_N, (0, 1), value=rows.numel())
    else:
        rows, counts, order = distinct_rows(row_ids, num_rows)
        starts = functional.pad(counts.cumsum(0), (1, 0))
    ordered_scale = None if scale is None else scale.index_select(0, order)
    return rows.long(), sum_bags(gradients, source.index_select(0, order), starts, ordered_scale)


def uses_triton(tensor: Tensor, dim: int) -> bool:
    """Return whether Triton's kernels sum gradients on the device of a tensor."""
    return tensor.is_cuda and ops.HAS_TRITON and dim <= WIDEST


def first_of_rows(rows: Tensor) -> Tensor:
    """Return for each of ascending rows [K] the index of its row's first entry: [K] int64."""
    return torch.searchsorted(rows, rows)


def put_rows(matrix: Tensor, rows: Tensor, grads: Tensor) -> None:
    """Write row gradients into a matrix of zeros."""
    if rows.is_cuda:  # all entries of a row but the first are 0
        matrix.index_add_(0, rows, grads)
    else:
        matrix.index_copy_(0, rows, grads)


def without_repeats(row_gradients: RowGradients) -> RowGradients:
    """Drop repeated rows; waits for the device."""
    rows, grads = row_gradients
    if not rows.is_cuda:
        return row_gradients
    kept = (first_of_rows(rows) == torch.arange(rows.numel(), device=rows.device)).nonzero()
    kept = kept.squeeze(1)
    return rows.index_select(0, kept), grads.index_select(0, kept)


def rows_per_table(
    layout: StorageLayout, found: Sequence[tuple[Tensor, Tensor]]
) -> list[list[int]]:
    """Return the number of rows of each table, by dim group; waits once for the device."""
    counts = [
        torch.searchsorted(rows, group.row_starts).diff()
        for group, (rows, _) in zip(layout.groups, found, strict=True)
    ]
    on_host = iter(torch.cat(counts).tolist())
    return [list(islice(on_host, len(group.tables))) for group in layout.groups]


def split_by_table(
    layout: StorageLayout, row_gradients: Sequence[RowGradients]
) -> list[RowGradients]:
    """Split row gradients of dim groups by table: unique rows, numbered within their table."""
    per_table: dict[int, RowGradients] = {}
    distinct = [without_repeats(of_group) for of_group in row_gradients]
    for group, (rows, grads), sizes in zip(
        layout.groups, distinct, rows_per_table(layout, distinct), strict=True
    ):
        firsts = accumulate(group.table_rows, initial=0)
        parts = zip(rows.split(sizes), grads.split(sizes), strict=True)
        for table, first, (rows_K, grads_KD) in zip(group.tables, firsts, parts, strict=False):
            per_table[table] = (rows_K - first, grads_KD)
    return [per_table[t] for t in range(len(layout.tables))]
