"""The `torch` backend: lookups and row gradients in plain PyTorch. Any device, any dtype, any dim.

It is also the numerical reference of the tests. The backward of a pooled lookup is itself a pooled
lookup: ids are sorted, and the gradients of the bags that mention a row are summed like the rows of
a bag, in a fixed order, in fp32, without atomics and without an [N, D] intermediate.

Shapes: N ids, F features, B bags per feature, K distinct rows, D columns of one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.kernels.backend import Backend
from recsys.kernels.huge_pages import new_array
from recsys.kernels.lookup_batch import (
    FeatureParts,
    LookupBatch,
    inverse_bag_length,
    row_ids_of,
    sum_bags,
)
from recsys.kernels.ops import upload
from recsys.kernels.row_gradients import (
    Reduce,
    Reduced,
    RowGradients,
    RowStatistics,
    first_of_rows,
    put_rows,
    sort_rows,
    sum_by_row,
    uses_triton,
)
from recsys.kernels.row_update import advance_step, apply_dense_update, update_rows
from recsys.kernels.tbe_layout import DimGroup, StorageLayout
from recsys.kernels.types import LookupSettings, PoolingType

Rates: TypeAlias = float | tuple[float, ...]
"""Learning rate of all tables, or one rate per table."""


GroupPart: TypeAlias = tuple[DimGroup, Tensor | None, LookupBatch]
"""Part of a batch that reads a dim group: the group; the [N_group] positions of its ids in the
batch, None for all ids; and the batch of these ids as rows of the group's matrix."""

WriteRows: TypeAlias = Callable[[DimGroup, Tensor, Tensor], object]
"""Function that writes rows of a dim group: the group; its matrix; and [k] rows of the matrix, in
the order of `DimGroup.select`."""


class TorchKernel(Backend):
    """Lookup, gradients and update on one flat storage, in PyTorch: any device, every setting.

    Other backends extend it, override the methods for which they have faster kernels, and list
    their limits. One backend may serve the lookup and another the update of the same tables.

    Args:
        layout: Geometry of the tables.
        settings: Settings of the lookup.
        storage: [num_elements] weights; changed in place by `update`. None: allocated here.
        states: Flat optimizer state by name (see `UpdateRule.state`); None: allocated here.

    Attributes:
        rates: The learning rates of the next update.
    """

    has_own_graph: ClassVar[bool] = False

    @property
    def takes_ranks(self) -> bool:
        """True if `lookup` and `update` support `LookupBatch.by_rank`."""
        return False

    def __init__(
        self,
        layout: StorageLayout,
        settings: LookupSettings,
        storage: Tensor | None = None,
        states: Mapping[str, Tensor] | None = None,
    ) -> None:
        if storage is None:
            storage = new_array(layout.num_elements, settings.weights_dtype, layout.device)
        self.layout, self.settings, self.storage = layout, settings, storage
        self.pooling, self.output_dtype = settings.pooling, settings.output_dtype
        self.optimizer = settings.optimizer
        self.states = layout.new_states(settings.owned) if states is None else states
        self.rates: Rates = 0.0 if self.optimizer is None else self.optimizer.learning_rate
        self._prepare()

    def _prepare(self) -> None:
        """Initialize a backend; called at the end of the constructor."""

    # -- methods that a backend may override ----------------------------------------------------

    def lookup(self, batch: LookupBatch) -> Tensor:
        """Look up rows, pooled or not; no autograd.

        Returns:
            [B, total_dim], or [N, D] without pooling, or for a ragged batch flat: [sum of the
            features' bags * dim].
        """
        layout, is_ragged = self.layout, batch.bags is not None
        num_bags = (batch.offsets.numel() - 1) // layout.num_features
        if self.pooling is PoolingType.NONE:
            # one group: `LookupSettings` refuses different dims without pooling
            (group,) = layout.groups
            row_ids = row_ids_of(group, batch)
            return group.matrix(self.storage).index_select(0, row_ids).to(self.output_dtype)
        # `view(-1, 0, dim)` of the pooled rows would be ambiguous
        if num_bags == 0 and not is_ragged:
            return batch.indices.new_empty(0, layout.total_dim, dtype=self.output_dtype)
        pieces: list[Tensor | None] = [None] * layout.num_features
        for group, _, part in self._group_parts(batch):
            pooled = self._pool(group.matrix(self.storage), part).to(self.output_dtype)
            is_alone = len(group.features) == layout.num_features
            blocks: Sequence[Tensor]
            if part.bags is not None:
                pooled = pooled.view(-1)
                if is_alone:
                    return pooled
                blocks = pooled.split((part.bags * group.dim).tolist())
            else:
                pooled_FBD = pooled.view(-1, num_bags, group.dim)
                if is_alone:
                    return pooled_FBD.transpose(0, 1).reshape(num_bags, layout.total_dim)
                blocks = pooled_FBD.unbind(0)
            for feature, block in zip(group.features, blocks, strict=True):
                pieces[feature] = block
        return torch.cat([piece for piece in pieces if piece is not None], 0 if is_ragged else 1)

    def weight_gradients(self, grad: Tensor, batch: LookupBatch) -> Tensor:
        """Return the gradient of the per-sample weights: [N] fp32."""
        out = torch.empty(batch.indices.numel(), dtype=torch.float32, device=grad.device)
        if not batch.indices.numel():
            return out
        # the gradient of a weight does not contain the weight
        for group, positions, part in self._group_parts(batch._replace(weights=None)):
            gradients, source, scale = self._gradient_of_ids(grad, batch, group, part)
            rows = group.matrix(self.storage).index_select(0, part.indices).float()
            values = (rows * gradients.index_select(0, source)).sum(1)
            if scale is not None:
                values *= scale
            if positions is None:
                return values
            out.index_copy_(0, positions, values)
        return out

    def row_gradients(self, grad: Tensor, batch: LookupBatch) -> list[RowGradients]:
        """Return the row gradients of each dim group, rows of the group's matrix ascending."""
        return self._by_group(sum_by_row, grad, batch)

    def dense_gradients(self, grad: Tensor, batch: LookupBatch) -> Tensor:
        """Return the gradient of the whole storage, fp32 in its layout."""
        out = torch.zeros_like(self.storage, dtype=torch.float32)
        if uses_triton(out, max(self.layout.feature_dims)):
            from recsys.kernels.update_triton import sum_into

            for group, part in self._sorted_parts(grad, batch):
                sum_into(group.matrix(out), *part)
            return out
        gradients = self.row_gradients(grad, batch)
        for group, (rows, grads) in zip(self.layout.groups, gradients, strict=True):
            put_rows(group.matrix(out), rows, grads)
        return out

    def update(self, grad: Tensor, batch: LookupBatch) -> None:
        """Make one optimizer step in place, from the gradient of the output."""
        self.apply(self.row_gradients(grad, batch))

    def look_up_and_update(self, batch: LookupBatch) -> Tensor | None:
        """Look up with an autograd graph of the backend that updates the tables in backward.

        Returns:
            The output, also of batches with `LookupBatch.by_rank`. None without `has_own_graph`.
        """
        return None

    def use_rates(self, rates: Rates) -> None:
        """Set the learning rates from the next update on."""
        self.rates = rates

    def prefetch(self, batch: LookupBatch) -> None:
        """Prefetch the rows of a later batch into the cache, if there is one."""

    def flush(self) -> None:
        """Write cached rows back to the storage."""

    def drop_cache(self) -> None:
        """Drop cached rows, after the storage or states were written."""

    def reset_rows(self, sizes: Sequence[int], rows: Tensor, write: WriteRows) -> None:
        """Set new weights of rows, and reset their optimizer state.

        Args:
            sizes: Number of rows of each table.
            rows: [K] int64 rows of their tables, ordered by table, without duplicates.
            write: Writes the new weights; called for each dim.
        """
        # `drop_cache` does not write back the rows that were trained in the cache
        self.flush()
        kinds = {} if self.settings.owned is None else self.settings.owned.rule.state
        for group in self.layout.groups:
            group_sizes = [sizes[t] for t in group.tables]
            starts = np.repeat(group.first_rows, group_sizes)
            if not starts.size:
                continue
            rows_k = group.select(rows, sizes) + upload(starts, rows.device)
            write(group, group.matrix(self.storage), rows_k)
            # `step` is a number of the table, which a reset row keeps
            for name, kind in kinds.items():
                if kind == "element":
                    group.matrix(self.states[name]).index_fill_(0, rows_k, 0.0)
                elif kind == "row":
                    group.rows(self.states[name]).index_fill_(0, rows_k, 0.0)
        self.drop_cache()

    # -- shared by all backends -------------------------------------------------------------------

    def apply(
        self,
        row_gradients: Sequence[RowGradients],
        row_moments: Sequence[Tensor] | None = None,
    ) -> None:
        """Make one optimizer step in place, from the row gradients of each dim group."""
        assert self.optimizer is not None
        advance_step(self.states)
        for i, (group, (rows, grads)) in enumerate(
            zip(self.layout.groups, row_gradients, strict=True)
        ):
            moment = None if row_moments is None else row_moments[i]
            # on CUDA there is an entry per id
            # docs/decisions/exchange.md, "The host waits for the device once per step"
            self._apply_to(group, rows, grads, moment, repeats=rows.is_cuda)

    def apply_dense(self, gradients: Tensor, touched: Tensor | None = None) -> None:
        """Make one optimizer step in place, from the gradient of the whole storage.

        Args:
            gradients: [elements], in the layout of the storage.
            touched: [rows], not 0 for rows to update; required if the optimizer
                `moves_without_gradient`. None: all rows.
        """
        spec, groups = self.optimizer, self.layout.groups
        assert spec is not None
        if touched is not None and not touched.is_cuda:
            rows = [group.rows(touched).nonzero().squeeze(1) for group in groups]
            self.apply(
                [
                    (r, g.matrix(gradients).index_select(0, r))
                    for g, r in zip(groups, rows, strict=True)
                ]
            )
            return
        # `apply` counts a step, `_apply_to` does not; without `touched`, optimizers have no steps
        if touched is not None:
            advance_step(self.states)
        for group in groups:
            matrix, states = self._views(group)
            grads = group.matrix(gradients)
            if touched is None:
                rate = self._rate_of_rows(group, None)
                apply_dense_update(spec, matrix, states, grads, rate)
                continue
            # the host does not know which: all rows are updated, and the others are restored
            # docs/decisions/exchange.md, "The host waits for the device once per step"
            live = [matrix, *states.values()]
            old = [tensor.clone() for tensor in live]
            self._apply_to(group, torch.arange(group.num_rows, device=grads.device), grads)
            is_kept_R = group.rows(touched) == 0
            for tensor, before in zip(live, old, strict=True):
                is_kept = is_kept_R.view(-1, *[1] * (tensor.dim() - 1))
                tensor.copy_(torch.where(is_kept, before, tensor))

    def row_statistics(
        self, grad: Tensor, batch: LookupBatch
    ) -> tuple[list[RowStatistics], list[RowGradients] | None] | None:
        """Return the statistics of each dim group, and the row gradients if these were computed.

        None: the statistics must be computed from row gradients.
        """
        return None

    def update_by_moments(
        self,
        grad: Tensor,
        batch: LookupBatch,
        statistics: Sequence[RowStatistics],
        row_moments: Sequence[Tensor],
    ) -> None:
        """Update by a batch with the given row moments [K] of each dim group."""
        raise NotImplementedError

    def drop_frozen(
        self, row_gradients: list[RowGradients], trained: Sequence[bool]
    ) -> list[RowGradients]:
        """Keep only the rows of tables with `trained`."""
        kept = []
        for group, (rows, grads) in zip(self.layout.groups, row_gradients, strict=True):
            keep_T = torch.tensor([trained[t] for t in group.tables], device=rows.device)
            keep = keep_T.index_select(0, group.table_of_row(rows))
            # waits for the device; a mix of frozen and trained tables is rare
            kept.append((rows[keep], grads[keep]))
        return kept

    def _apply_to(
        self,
        group: DimGroup,
        rows: Tensor,
        grads: Tensor,
        moment: Tensor | None = None,
        *,
        repeats: bool = False,
    ) -> None:
        """Update rows of a dim group, ascending if they repeat; the first entry of a row counts."""
        assert self.optimizer is not None
        first = first_of_rows(rows) if repeats else None
        rate, step = self._rate_of_rows(group, rows), self._step_of_rows(group, rows)
        update_rows(self.optimizer, *self._views(group), rows, grads, rate, step, moment, first)

    def _views(self, group: DimGroup) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the matrix of a dim group, and its optimizer state."""
        assert self.optimizer is not None
        views = {"row": group.rows, "element": group.matrix}
        return group.matrix(self.storage), {
            name: views[kind](self.states[name])
            for name, kind in self.optimizer.rule.state.items()
            if kind != "table"
        }

    def _rate_of_tables(self, group: DimGroup) -> float | Tensor:
        """Return the rate of a dim group, or its tables' rates, on the host, if they differ."""
        if isinstance(self.rates, float):
            return self.rates
        rates = [self.rates[t] for t in group.tables]
        return rates[0] if len(set(rates)) == 1 else torch.tensor(rates)

    def _rate_of_rows(self, group: DimGroup, rows: Tensor | None) -> float | Tensor:
        rate = self._rate_of_tables(group)
        return self._of_rows(rate, group, rows) if isinstance(rate, Tensor) else rate

    def _step_of_rows(self, group: DimGroup, rows: Tensor) -> Tensor | None:
        steps = self.states.get("step")
        if steps is None or len(group.tables) == 1:
            return steps if steps is None else steps[group.tables[0]]
        return self._of_rows(steps[list(group.tables)], group, rows)

    def _of_rows(self, values_T: Tensor, group: DimGroup, rows: Tensor | None) -> Tensor:
        """Expand one value per table, on the host, to rows of the matrix: [K, 1]."""
        device = self.storage.device
        if rows is None:
            rows = torch.arange(group.num_rows, device=device)
        return upload(values_T, device).index_select(0, group.table_of_row(rows)).unsqueeze(1)

    def _group_parts(self, batch: LookupBatch) -> list[GroupPart]:
        """Return each dim group that a feature reads, with its part of a batch."""
        used = self.layout.used_groups
        if len(used) == 1:
            return [(used[0], None, batch._replace(indices=row_ids_of(used[0], batch)))]
        parts = FeatureParts(batch, self.layout.num_features)
        ids_per_group = parts.ids_F.new_zeros(len(self.layout.groups))
        # waits for the device once for all groups
        ids_per_group.index_add_(0, self.layout.group_of_feature, parts.ids_F)
        num_ids = ids_per_group.tolist()
        result: list[GroupPart] = []
        for group in used:
            positions, part = parts.of(group.feature_numbers, num_ids[group.number], group.features)
            result.append((group, positions, part._replace(indices=row_ids_of(group, part))))
        return result

    def _sorted_parts(
        self, grad: Tensor, batch: LookupBatch
    ) -> Iterator[tuple[DimGroup, tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]]:
        """Yield each dim group that has ids, with the sorted arguments of `sum_by_row`."""
        for group, _, part in self._group_parts(batch) if batch.indices.numel() else ():
            of_ids = self._gradient_of_ids(grad, batch, group, part)
            yield group, (*sort_rows(part.indices, group.num_rows), *of_ids)

    def _by_group(self, reduce: Reduce[Reduced], grad: Tensor, batch: LookupBatch) -> list[Reduced]:
        """Reduce the gradients of each dim group by row."""
        reduced = {}
        for group, _, part in self._group_parts(batch) if batch.indices.numel() else ():
            id_gradients = self._gradient_of_ids(grad, batch, group, part)
            reduced[group.number] = reduce(part.indices, group.num_rows, *id_gradients)
        # an entry for each group, with or without ids: callers zip results with the layout's groups
        none = torch.empty(0, dtype=torch.int64, device=grad.device)
        return [
            reduced.get(g.number)
            or reduce(none, g.num_rows, grad.new_empty(0, g.dim).float(), none, None)
            for g in self.layout.groups
        ]

    def _pool(self, matrix: Tensor, batch: LookupBatch) -> Tensor:
        """Pool rows of a matrix bag by bag, in fp32: [bags, D]."""
        if self.pooling is PoolingType.SUM:
            return sum_bags(matrix, *batch[:3])
        if self.pooling is PoolingType.MEAN:
            return sum_bags(matrix, *batch[:3]) / batch.offsets.diff().clamp_(min=1).unsqueeze(1)
        raise NotImplementedError(f"TorchKernel does not pool by {self.pooling}.")

    def _gradient_of_ids(
        self, grad: Tensor, batch: LookupBatch, group: DimGroup, part: LookupBatch
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradient of each id of a dim group's part of a batch.

        Returns:
            [M, D] fp32 gradients of bags; [N] the row of each id's gradient in them; and [N] the
            factor of the id in its bag, None for 1.
        """
        num_ids = part.indices.numel()
        device = part.indices.device
        if self.pooling is PoolingType.NONE:
            return grad.float(), torch.arange(num_ids, device=device), part.weights
        num_features, axis, sizes_F = len(group.features), 1, self.layout.dims_F
        if batch.bags is not None:
            axis, sizes_F = 0, batch.bags * sizes_F
        if num_features < self.layout.num_features:
            pieces = torch.split(grad, sizes_F.tolist(), axis)
            grad = torch.cat([pieces[f] for f in group.features], axis)
        # bag (f, b) of the input is row b * F + f of the gradients
        if batch.bags is not None:  # gradients are in the order of the input
            num_features = 1
        if device.type == "cuda" and num_ids and ops.HAS_TRITON:
            from recsys.kernels.ops_triton import places_of_bags

            source = places_of_bags(part.offsets, num_ids, num_features)
        else:
            bags = torch.arange(part.offsets.numel() - 1, device=device).view(-1, num_features)
            bags = bags.t().reshape(-1)
            source = bags.repeat_interleave(part.offsets.diff(), output_size=num_ids)
        scale = part.weights
        if self.pooling is PoolingType.MEAN:
            inverse = inverse_bag_length(part.offsets, num_ids)
            scale = inverse if scale is None else scale * inverse
        return grad.reshape(-1, group.dim).float(), source, scale
