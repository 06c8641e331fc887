"""DEFERRED mode: gradients of tables, kept from backward until a step applies them.

Shapes: T tables, K touched rows, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from recsys.kernels.lookup_batch import LookupBatch
from recsys.kernels.row_gradients import (
    RowGradients,
    RowStatistics,
    merge_row_gradients,
    put_rows,
    rows_per_table,
    split_by_table,
)
from recsys.kernels.row_marks import RowMarks
from recsys.kernels.row_update import row_statistic
from recsys.kernels.tbe_torch import TorchKernel


@final
class DeferredGradients:
    """Gradients of the tables of one lookup, accumulated over backward passes.

    Args:
        kernel: Kernel that computes and applies them.
        marks: Marks of the rows that a step changes.
        keeps_batch: Keep the output gradient and the batch of a backward pass until the step, which
            can then be fused. The memory of the batch's ids must not change until then.
    """

    def __init__(self, kernel: TorchKernel, marks: RowMarks, *, keeps_batch: bool) -> None:
        self.keeps_batch, self._marks = keeps_batch, marks
        self._kernel, self._layout = kernel, kernel.layout
        optimizer = kernel.optimizer
        self._counts_rows = optimizer is not None and optimizer.moves_without_gradient
        # of one backward pass: the output gradient and the batch; of several: row gradients
        self._held: tuple[Tensor, LookupBatch] | None = None
        self._pending: list[RowGradients] | None = None
        self._statistics: list[RowStatistics] = []
        self._ids_of_tables: list[int] | None = None  # of the pending gradients, if known

    @property
    def exist(self) -> bool:
        """True if gradients are pending since the last step."""
        return self._held is not None or self._pending is not None

    @property
    def by_table(self) -> list[RowGradients] | list[None]:
        """(rows [K] ascending, grads [K, D] fp32) of each table; None before the first backward."""
        self._reduce()
        if self._pending is None:
            return [None] * len(self._layout.tables)
        return split_by_table(self._layout, self._pending)

    @property
    def values(self) -> list[Tensor]:
        """[K, D] fp32 per dim, without the rows; live, so that it can be scaled."""
        self._reduce()
        return [grads for _, grads in self._pending or ()]

    def add(
        self,
        grad: Tensor,
        batch: LookupBatch,
        trained: Sequence[bool],
        ids_of_tables: Sequence[int] | None,
    ) -> None:
        """Accumulate the gradients of one backward pass.

        Args:
            grad: Gradient of the output.
            batch: Batch of the lookup.
            trained: [T] whether each table is trained.
            ids_of_tables: [T] number of ids of each table, if the host knows them.
        """
        known = self._ids_of_tables if self.exist else [0] * len(self._layout.tables)
        if known is not None and ids_of_tables is not None and all(trained):
            self._ids_of_tables = [a + b for a, b in zip(known, ids_of_tables, strict=True)]
        else:  # known only if all batches have it
            self._ids_of_tables = None
        # one pass at most is kept as a batch: an earlier one becomes row gradients
        self._reduce()
        if all(trained):
            self._held = (grad, batch)
            # rows at once, instead of a batch that stays in memory until the step
            # docs/decisions/optimizers.md, "Deferred tables hold row gradients"
            if not self.keeps_batch or self._pending is not None:
                self._reduce()
        else:
            fresh = self._kernel.row_gradients(grad, batch)
            self._collect(self._kernel.drop_frozen(fresh, trained))

    def row_statistics(self) -> list[Tensor]:
        """Return the `row_statistic` [K] of each table's row gradients, see `RowGradients`.

        Raises:
            ValueError: The optimizer has no such statistic.
        """
        layout, optimizer = self._layout, self._kernel.optimizer
        assert optimizer is not None
        # from the kept batch, without row gradients if the kernel needs none
        # docs/decisions/optimizers.md, "Column shards keep the fused row-wise Adagrad"
        made = None if self._held is None else self._kernel.row_statistics(*self._held)
        if made is not None:
            fresh, sums = made
            if sums is not None:
                # the kernel has summed the rows already: the batch is not needed any more
                self._held, self._pending = None, sums
        else:
            self._reduce()
            groups = zip(layout.groups, self._pending or (), strict=False)
            fresh = [
                (rows, row_statistic(optimizer, grads, group.matrix(self._kernel.storage), rows))
                for group, (rows, grads) in groups
            ]
        self._statistics = fresh
        statistics = [torch.empty(0, device=layout.device)] * len(layout.tables)
        if not self._statistics:
            return statistics
        ids = self._ids_of_tables
        # known numbers of ids are the sizes, without a wait
        # docs/decisions/exchange.md, "The host waits for the device once per step"
        if layout.device.type == "cuda" and ids is not None:  # there is an entry per id
            sizes = [[ids[table] for table in group.tables] for group in layout.groups]
        else:
            sizes = rows_per_table(layout, self._statistics)
        for group, (_, statistic), of_table in zip(
            layout.groups, self._statistics, sizes, strict=True
        ):
            for table, part in zip(group.tables, statistic.split(of_table), strict=True):
                statistics[table] = part
        return statistics

    def take_dense(self) -> list[Tensor]:
        """Return and drop the gradient of the whole storage.

        Returns:
            [elements of all tables] fp32, in the layout of the storage; and, if the optimizer
            `moves_without_gradient`, [rows of all tables] fp32, 1 for each row with a gradient.
        """
        layout, counts_rows = self._layout, self._counts_rows
        if self._held is not None and self._pending is None and not counts_rows:
            held, self._held = self._held, None
            return [self._kernel.dense_gradients(*held)]
        self._reduce()
        summed = torch.zeros(layout.num_elements, device=layout.device)
        touched = torch.zeros(layout.num_rows if counts_rows else 0, device=layout.device)
        pending, self._pending = self._pending or (), None
        for group, (rows, grads) in zip(layout.groups, pending, strict=False):
            put_rows(group.matrix(summed), rows, grads)
            if counts_rows:
                group.rows(touched).index_fill_(0, rows, 1.0)
        return [summed, touched] if counts_rows else [summed]

    def step_dense(self, summed: Tensor, touched: Tensor | None = None) -> None:
        """Apply the tables' optimizer to the result of `take_dense`.

        Args:
            summed: [elements of all tables], such as the mean over replicas.
            touched: [rows of all tables]; rows with 0 keep weights and optimizer state. Required
                if the optimizer `moves_without_gradient`.
        """
        with self._marks.writes():
            self._kernel.apply_dense(summed, touched)
            self._marks.mark_changed(summed, touched)
        self.drop()

    def step(self, row_moments: Sequence[Tensor] | None = None) -> None:
        """Apply the tables' optimizer to the row gradients, and drop them.

        Args:
            row_moments: Per table [K], aligned with `row_statistics`: the mean of g*g over all
                columns of a row, for row-wise optimizers on tables split by columns. None:
                computed here.
        """
        grouped = None
        if row_moments is not None:
            grouped = [
                torch.cat([row_moments[t] for t in group.tables]) for group in self._layout.groups
            ]
        if grouped is not None and self._held is not None and self._statistics:
            with self._marks.writes(self._held[1]):
                self._kernel.update_by_moments(*self._held, self._statistics, grouped)
        else:
            self._reduce()
            if self._pending is not None:
                with self._marks.writes(by_group=self._pending):
                    self._kernel.apply(self._pending, grouped)
        self.drop()

    def drop(self) -> None:
        """Drop the gradients."""
        self._held = self._pending = self._ids_of_tables = None
        self._statistics = []

    def _reduce(self) -> None:
        """Reduce the kept output gradient to row gradients, and add it to the others."""
        if self._held is not None:
            held, self._held = self._held, None
            self._collect(self._kernel.row_gradients(*held))

    def _collect(self, fresh: list[RowGradients]) -> None:
        if self._pending is not None:
            fresh = [
                merge_row_gradients(old, new, group.num_rows)
                for group, old, new in zip(self._layout.groups, self._pending, fresh, strict=True)
            ]
        self._pending = fresh
