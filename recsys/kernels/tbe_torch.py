"""The `torch` backend: lookups and row gradients in plain PyTorch. Any device, any dtype, any dim.

It is also the numerical reference of the tests. The backward of a pooled lookup is itself a pooled
lookup: ids are sorted, and the gradients of the bags that mention a row are summed like the rows of
a bag, in a fixed order, in fp32, without atomics and without an [N, D] intermediate.

Shape suffixes: N ids, F features, B bags per feature, K distinct rows, D columns of one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recsys.kernels import ops
from recsys.kernels.backend import Backend
from recsys.kernels.ops import move_segments, permute_1d, swap_segments, upload
from recsys.kernels.row_update import advance_step, apply_dense_update, update_rows
from recsys.kernels.tbe_layout import DimGroup, StorageLayout
from recsys.kernels.types import LookupSettings, PoolingType


@final
class RankedBags:
    """The bags that each of R ranks has of each feature of one batch.

    Args:
        bags_FR: [F, R] int64, on the host: those of each feature stand one rank's after another's.

    Attributes:
        in_order: The batch as a kernel reads it rank by rank, kept from lookup to update.
    """

    def __init__(self, bags_FR: np.ndarray) -> None:
        self.bags_FR = bags_FR
        self.in_order: Batch | None = None

    def rows_by_rank(self, rows: Tensor, dims_F: np.ndarray) -> Tensor:
        """Return what a ragged lookup gives, flat, with the rows of one rank after another's.

        Args:
            rows: Feature by feature.
            dims_F: Columns of each feature.
        """
        return swap_segments(rows, self.bags_FR * dims_F[:, None])

    def rows_by_feature(self, rows: Tensor, dims_F: np.ndarray) -> Tensor:
        """Return what `rows_by_rank` was given, or its gradient, from what it returned."""
        return swap_segments(rows, (self.bags_FR * dims_F[:, None]).T)


class Batch(NamedTuple):
    """What is looked up."""

    indices: Tensor
    """[N] int32 or int64, in range."""
    offsets: Tensor
    """[bags of all features + 1]; bag b of feature f is `indices[offsets[f * B + b]:...]`."""
    weights: Tensor | None = None
    """[N] fp32 per-sample weights."""
    bags: np.ndarray | None = None
    """[F] int64, on the host: how many bags each feature has; None: all have B.

    With it a batch is ragged: what is pooled, and its gradient, are flat, one feature's [bags, D]
    after the other's."""
    by_rank: RankedBags | None = None
    """If the bags are those of several ranks: what is pooled stands rank by rank then, of each
    feature by feature.

    Only kernels that `takes_ranks`, and `look_up_and_update`, are given it."""


RowGradients: TypeAlias = tuple[Tensor, Tensor]
"""(rows [K] int64, ascending; gradients [K, D] fp32).

On a CPU no row repeats. On CUDA the host does not know how many rows are distinct, and does not
wait to hear of it: there is an entry per id, the first of a row has its gradient, and the others
are 0. `first_of_rows` tells them apart, `without_repeats` waits and drops them.
"""

RowStatistics: TypeAlias = tuple[Tensor, Tensor]
"""(rows [K] as in `RowGradients`; sum over the columns of the squared gradient [K] fp32)."""

Rates: TypeAlias = float | tuple[float, ...]
"""The learning rate that all tables have, or where they differ one per table."""


GroupPart: TypeAlias = tuple[DimGroup, Tensor | None, Batch]
"""The part of a batch that reads a dim group: the group; [N_group] places in the batch's ids, None
for all of them; and the ids, as rows of the group's matrix, with their bags and weights."""

_Made = TypeVar("_Made", bound=tuple[Tensor, ...])
Reduce: TypeAlias = Callable[[Tensor, int, Tensor, Tensor, Tensor | None], _Made]
"""What is made of gradients by row: see `_sum_by_row`."""


WIDEST = 2048
"""Columns of a row that Triton's kernels take."""


@final
class FeatureParts:
    """A batch, to be taken apart by feature."""

    def __init__(self, batch: Batch, num_features: int) -> None:
        self.batch = batch
        self._lengths = batch.offsets.diff()
        if batch.bags is None:
            num_bags = self._lengths.numel() // num_features
            self._lengths = self._lengths.view(num_features, num_bags)
            self.ids_F = self._lengths.sum(1)
        else:
            self.ids_F = starts_of_features(batch.offsets, batch.bags).diff()
        self._place_N = torch.arange(batch.indices.numel(), device=batch.indices.device)

    def of(
        self, features: Tensor, num_ids: int | None = None, on_host: Sequence[int] = ()
    ) -> tuple[Tensor, Batch]:
        """Return where the ids of some features stand, and the batch of these features alone.

        Args:
            features: Their numbers.
            num_ids: How many ids they have, where the host knows it.
            on_host: Their numbers once more, needed of a ragged batch.
        """
        _, positions, _ = permute_1d(features, self.ids_F, self._place_N, None, num_ids)
        weights, bags = self.batch.weights, self.batch.bags
        if bags is None:
            lengths = self._lengths.index_select(0, features)
        else:
            order = np.array(on_host, dtype=np.int32)
            lengths, bags = move_segments(self._lengths, order, bags), bags[order]
        return positions, Batch(
            self.batch.indices.index_select(0, positions),
            functional.pad(lengths.flatten().cumsum(0), (1, 0)),
            None if weights is None else weights.index_select(0, positions),
            bags,
        )


class TorchKernel(Backend):
    """Lookup, gradients and update on one flat storage, in PyTorch: any device, every setting.

    Other backends extend it, override what they do better, and say in their limits what they do
    not do. One may serve the lookup and another the update of the same tables.

    Args:
        layout: Geometry of the tables.
        settings: What is served.
        storage: [num_elements] weights; changed in place by `update`. None: allocated here.
        states: Flat optimizer state by name (see `UpdateRule.state`); None: allocated here.

    Attributes:
        rates: The learning rates of the next update.
    """

    has_own_graph: ClassVar[bool] = False

    @property
    def takes_ranks(self) -> bool:
        """Whether it serves batches with `Batch.by_rank`, in `lookup` and in `update`."""
        return False

    def __init__(
        self,
        layout: StorageLayout,
        settings: LookupSettings,
        storage: Tensor | None = None,
        states: Mapping[str, Tensor] | None = None,
    ) -> None:
        if storage is None:
            storage = torch.empty(
                layout.num_elements, dtype=settings.weights_dtype, device=layout.device
            )
        self.layout, self.settings, self.storage = layout, settings, storage
        self.pooling, self.output_dtype = settings.pooling, settings.output_dtype
        self.optimizer = settings.optimizer
        self.states = layout.new_states(settings.owned) if states is None else states
        self.rates: Rates = 0.0 if self.optimizer is None else self.optimizer.learning_rate
        self._prepare()

    def _prepare(self) -> None:
        """Prepare what a backend of its own needs; comes last when a kernel is made."""

    # -- what a backend may do better -----------------------------------------------------------

    def lookup(self, batch: Batch) -> Tensor:
        """Rows or pooled rows; no autograd. [B, total_dim], or [N, D] without pooling.

        Of a ragged batch flat: [sum of the features' bags * dim].
        """
        layout, is_ragged = self.layout, batch.bags is not None
        num_bags = (batch.offsets.numel() - 1) // layout.num_features
        if self.pooling is PoolingType.NONE:
            (group,) = layout.groups
            row_ids = row_ids_of(group, batch)
            return group.matrix(self.storage).index_select(0, row_ids).to(self.output_dtype)
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

    def weight_gradients(self, grad: Tensor, batch: Batch) -> Tensor:
        """Gradient with respect to per-sample weights: [N] fp32."""
        out = torch.empty(batch.indices.numel(), dtype=torch.float32, device=grad.device)
        if not batch.indices.numel():
            return out
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

    def row_gradients(self, grad: Tensor, batch: Batch) -> list[RowGradients]:
        """Return the row gradients of each dim group, rows of the group's matrix ascending."""
        return self._by_group(_sum_by_row, grad, batch)

    def dense_gradients(self, grad: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of the whole storage, fp32 in its layout."""
        out = torch.zeros_like(self.storage, dtype=torch.float32)
        if _triton_sums(out, max(self.layout.feature_dims)):
            from recsys.kernels.update_triton import sum_into

            for group, given in self._sorted_parts(grad, batch):
                sum_into(group.matrix(out), *given)
            return out
        found = self.row_gradients(grad, batch)
        for group, (rows, grads) in zip(self.layout.groups, found, strict=True):
            put_rows(group.matrix(out), rows, grads)
        return out

    def update(self, grad: Tensor, batch: Batch) -> None:
        """One optimizer step from the gradient of the output, in place."""
        self.apply(self.row_gradients(grad, batch))

    def look_up_and_update(self, batch: Batch) -> Tensor | None:
        """Look up so that its own graph makes the update in backward, where `has_own_graph`.

        It serves every batch, also those with `Batch.by_rank`, or returns None.
        """
        return None

    def use_rates(self, rates: Rates) -> None:
        """Learning rates from the next update on."""
        self.rates = rates

    def prefetch(self, batch: Batch) -> None:
        """Bring the rows of a batch to come to where they are looked up."""

    def flush(self) -> None:
        """Write rows that a cache holds back to the storage."""

    def drop_cache(self) -> None:
        """Forget rows that a cache holds, after storage or states were written."""

    def reset_rows(self, table: int, rows: Tensor, values: Tensor) -> None:
        """Make rows of a table new: other weights [K, D], and optimizer state as at first."""
        self.flush()
        self.layout.table_views(self.storage)[table].index_copy_(
            0, rows, values.to(self.storage.dtype)
        )
        for state in self.layout.split_states(self.settings.owned, self.states)[table].values():
            if state.dim():  # a table's counter of updates goes on
                state.index_fill_(0, rows, 0.0)
        self.drop_cache()

    # -- what all backends share ----------------------------------------------------------------

    def apply(
        self,
        row_gradients: Sequence[RowGradients],
        row_moments: Sequence[Tensor] | None = None,
    ) -> None:
        """One optimizer step from the row gradients of each dim group, in place."""
        assert self.optimizer is not None
        advance_step(self.states)
        for i, (group, (rows, grads)) in enumerate(
            zip(self.layout.groups, row_gradients, strict=True)
        ):
            moment = None if row_moments is None else row_moments[i]
            self._apply_to(group, rows, grads, moment, repeats=rows.is_cuda)

    def apply_dense(self, gradients: Tensor, touched: Tensor | None = None) -> None:
        """One optimizer step from the gradient of the whole storage, in place.

        Args:
            gradients: [elements], laid out as the storage.
            touched: [rows], not 0 for those to update; needed where the optimizer
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
        if touched is not None:
            advance_step(self.states)
        for group in groups:
            matrix, states = self._views(group)
            grads = group.matrix(gradients)
            if touched is None:
                rate = self._rate_of_rows(group, None)
                apply_dense_update(spec, matrix, states, grads, rate)
                continue
            # without the host knowing which: all are updated, and the others get back what they had
            live = [matrix, *states.values()]
            old = [tensor.clone() for tensor in live]
            self._apply_to(group, torch.arange(group.num_rows, device=grads.device), grads)
            is_kept_R = group.rows(touched) == 0
            for tensor, before in zip(live, old, strict=True):
                is_kept = is_kept_R.view(-1, *[1] * (tensor.dim() - 1))
                tensor.copy_(torch.where(is_kept, before, tensor))

    def row_statistics(
        self, grad: Tensor, batch: Batch
    ) -> tuple[list[RowStatistics], list[RowGradients] | None] | None:
        """Return the statistics of each dim group; None: row gradients are needed for them.

        Beside them come the row gradients, if they were made on the way.
        """
        return None

    def update_by_moments(
        self,
        grad: Tensor,
        batch: Batch,
        statistics: Sequence[RowStatistics],
        row_moments: Sequence[Tensor],
    ) -> None:
        """`update` of a batch with the given row moments [K] of each dim group."""
        raise NotImplementedError

    def drop_frozen(
        self, row_gradients: list[RowGradients], trained: Sequence[bool]
    ) -> list[RowGradients]:
        """Leave only the rows of tables for which `trained` holds."""
        kept = []
        for group, (rows, grads) in zip(self.layout.groups, row_gradients, strict=True):
            keep_T = torch.tensor([trained[t] for t in group.tables], device=rows.device)
            keep = keep_T.index_select(0, group.table_of_row(rows))
            # waits for the device, as frozen tables among trained ones are rare
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
        """Update rows of a dim group; of those that repeat, ascending, the first entry counts."""
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
        """Return the rate of a dim group, or where its tables differ all of theirs, on the host."""
        if isinstance(self.rates, float):
            return self.rates
        own = [self.rates[t] for t in group.tables]
        return own[0] if len(set(own)) == 1 else torch.tensor(own)

    def _rate_of_rows(self, group: DimGroup, rows: Tensor | None) -> float | Tensor:
        rate = self._rate_of_tables(group)
        return self._of_rows(rate, group, rows) if isinstance(rate, Tensor) else rate

    def _step_of_rows(self, group: DimGroup, rows: Tensor) -> Tensor | None:
        steps = self.states.get("step")
        if steps is None or len(group.tables) == 1:
            return steps if steps is None else steps[group.tables[0]]
        return self._of_rows(steps[list(group.tables)], group, rows)

    def _of_rows(self, values_T: Tensor, group: DimGroup, rows: Tensor | None) -> Tensor:
        """Return what each table has one of, on the host, for rows of its matrix: [K, 1]."""
        device = self.storage.device
        if rows is None:
            rows = torch.arange(group.num_rows, device=device)
        return upload(values_T, device).index_select(0, group.table_of_row(rows)).unsqueeze(1)

    def _group_parts(self, batch: Batch) -> list[GroupPart]:
        """Each dim group that some feature reads, with its part of a batch."""
        used = self.layout.used_groups
        if len(used) == 1:
            return [(used[0], None, batch._replace(indices=row_ids_of(used[0], batch)))]
        parts = FeatureParts(batch, self.layout.num_features)
        ids_per_group = parts.ids_F.new_zeros(len(self.layout.groups))
        # one wait for the device, for all groups
        ids_per_group.index_add_(0, self.layout.group_of_feature, parts.ids_F)
        num_ids = ids_per_group.tolist()
        result: list[GroupPart] = []
        for group in used:
            positions, part = parts.of(group.feature_numbers, num_ids[group.number], group.features)
            result.append((group, positions, part._replace(indices=row_ids_of(group, part))))
        return result

    def _sorted_parts(
        self, grad: Tensor, batch: Batch
    ) -> Iterator[tuple[DimGroup, tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]]:
        """Yield each dim group that ids are of, with what `_sum_by_row` adds up, sorted."""
        for group, _, part in self._group_parts(batch) if batch.indices.numel() else ():
            of_ids = self._gradient_of_ids(grad, batch, group, part)
            yield group, (*sort_rows(part.indices, group.num_rows), *of_ids)

    def _by_group(self, reduce: Reduce[_Made], grad: Tensor, batch: Batch) -> list[_Made]:
        """Return what is made by row of each dim group's gradients."""
        found = {}
        for group, _, part in self._group_parts(batch) if batch.indices.numel() else ():
            given = self._gradient_of_ids(grad, batch, group, part)
            found[group.number] = reduce(part.indices, group.num_rows, *given)
        none = torch.empty(0, dtype=torch.int64, device=grad.device)
        return [
            found.get(g.number)
            or reduce(none, g.num_rows, grad.new_empty(0, g.dim).float(), none, None)
            for g in self.layout.groups
        ]

    def _pool(self, matrix: Tensor, batch: Batch) -> Tensor:
        """Pool rows of a matrix bag by bag, in fp32: [bags, D]."""
        if self.pooling is PoolingType.SUM:
            return sum_bags(matrix, *batch[:3])
        if self.pooling is PoolingType.MEAN:
            return sum_bags(matrix, *batch[:3]) / batch.offsets.diff().clamp_(min=1).unsqueeze(1)
        raise NotImplementedError(f"TorchKernel does not pool by {self.pooling}.")

    def _gradient_of_ids(
        self, grad: Tensor, batch: Batch, group: DimGroup, part: Batch
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return where the gradient of each id of a dim group's part of a batch stands.

        Returns:
            [M, D] fp32 gradients of bags; [N] the row of them that is each id's; and [N] its factor
            in the bag, None for 1.
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
        if batch.bags is not None:  # they stand in the order of the input
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


def merge_row_gradients(first: RowGradients, second: RowGradients, num_rows: int) -> RowGradients:
    """Add two sets of row gradients into one without duplicates."""
    rows = torch.cat([first[0], second[0]])
    grads = torch.cat([first[1], second[1]])
    source = torch.arange(rows.numel(), device=rows.device)
    return _sum_by_row(rows, num_rows, grads, source, None)


def row_ids_of(group: DimGroup, batch: Batch) -> Tensor:
    """Ids of the tables -> rows of the group's matrix: [N] int64."""
    indices, offsets = batch.indices, batch.offsets
    if group.row_base_F.numel() == 1:  # the base of a single feature may still be non-zero
        return indices.long() + group.row_base_F
    if not indices.numel():
        return indices.long()
    if batch.bags is not None:  # all ids of a feature as one bag
        offsets = starts_of_features(offsets, batch.bags)
    num_bags = (offsets.numel() - 1) // group.row_base_F.numel()
    if indices.is_cuda and ops.HAS_TRITON:
        from recsys.kernels.ops_triton import row_ids

        return row_ids(indices, offsets, group.row_base_F)
    base = group.row_base_F.repeat_interleave(
        offsets[::num_bags].diff(), output_size=indices.numel()
    )
    return base.add_(indices)


def starts_of_features(offsets: Tensor, bags_F: np.ndarray) -> Tensor:
    """Where the ids of each feature of a ragged batch begin, and the end: [F + 1]."""
    starts = np.zeros(len(bags_F) + 1, dtype=np.int64)
    np.cumsum(bags_F, out=starts[1:])
    return offsets.index_select(0, upload(starts, offsets.device))


def inverse_bag_length(offsets: Tensor, num_ids: int) -> Tensor:
    """1 / (number of ids of its bag) for each id: [N] fp32."""
    lengths = offsets.diff()
    return lengths.float().reciprocal_().repeat_interleave(lengths, output_size=num_ids)


def sort_rows(row_ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Rows [N] ascending, of any integer dtype, and where they stood [N], ties in order."""
    # in int32 it takes half the time
    return torch.sort(row_ids.int() if num_rows < 2**31 else row_ids, stable=True)


def distinct_rows(row_ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [K] ascending, how often each occurs [K], and where they stood [N], ties in order."""
    sorted_ids, order = sort_rows(row_ids, num_rows)
    # Waits for the device: how many rows are distinct sizes all that follows.
    rows, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
    return rows.long(), counts, order


def sum_bags(matrix: Tensor, row_ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Sum of the (weighted) rows of each bag, in fp32: [bags, D]."""
    if row_ids.numel() == 0:
        return matrix.new_zeros(offsets.numel() - 1, matrix.shape[1], dtype=torch.float32)
    if matrix.dtype is not torch.float32:
        # embedding_bag would accumulate in, and round to, the dtype of the table.
        matrix = matrix.index_select(0, row_ids).float()
        row_ids = torch.arange(row_ids.numel(), device=row_ids.device)
    return functional.embedding_bag(
        row_ids,
        matrix,
        offsets.long(),
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=True,
    )


def _sum_by_row(
    row_ids: Tensor, num_rows: int, gradients: Tensor, source: Tensor, scale: Tensor | None
) -> RowGradients:
    """Sum `scale[i] * gradients[source[i]]` over the i of each distinct row id."""
    if row_ids.is_cuda:  # an entry per id: a row's sum stands where the row comes up first
        rows, order = sort_rows(row_ids, num_rows)
        if _triton_sums(rows, gradients.shape[1]):
            from recsys.kernels.update_triton import sum_by_row

            return sum_by_row(rows, order, gradients, source, scale)[:2]
        place_N = torch.arange(rows.numel(), device=rows.device)
        # a row's first entry is a bag of all its ids, the others are empty ones behind it
        ends_N = torch.searchsorted(rows, rows, right=True)
        starts_N = torch.where(first_of_rows(rows) == place_N, place_N, ends_N)
        starts = functional.pad(starts_N, (0, 1), value=rows.numel())
    else:
        rows, counts, order = distinct_rows(row_ids, num_rows)
        starts = functional.pad(counts.cumsum(0), (1, 0))
    ordered_scale = None if scale is None else scale.index_select(0, order)
    return rows.long(), sum_bags(gradients, source.index_select(0, order), starts, ordered_scale)


def _triton_sums(tensor: Tensor, dim: int) -> bool:
    """Return whether Triton's kernels add up gradients where a tensor is."""
    return tensor.is_cuda and ops.HAS_TRITON and dim <= WIDEST


def first_of_rows(rows: Tensor) -> Tensor:
    """For each of ascending rows [K] the place of the first entry of that row: [K] int64."""
    return torch.searchsorted(rows, rows)


def put_rows(matrix: Tensor, rows: Tensor, grads: Tensor) -> None:
    """Write row gradients into a matrix of zeros."""
    if rows.is_cuda:  # the entries of a row that repeats are 0 but one
        matrix.index_add_(0, rows, grads)
    else:
        matrix.index_copy_(0, rows, grads)


def without_repeats(row_gradients: RowGradients) -> RowGradients:
    """Each row once; waits for the device."""
    rows, grads = row_gradients
    if not rows.is_cuda:
        return row_gradients
    kept = (first_of_rows(rows) == torch.arange(rows.numel(), device=rows.device)).nonzero()
    kept = kept.squeeze(1)
    return rows.index_select(0, kept), grads.index_select(0, kept)


def rows_per_table(
    layout: StorageLayout, found: Sequence[tuple[Tensor, Tensor]]
) -> list[list[int]]:
    """Return how many of each dim group's rows each table has: one wait for the device, for all."""
    counts = [
        torch.searchsorted(rows, group.row_starts).diff()
        for group, (rows, _) in zip(layout.groups, found, strict=True)
    ]
    on_host = iter(torch.cat(counts).tolist())
    return [list(islice(on_host, len(group.tables))) for group in layout.groups]


def split_by_table(
    layout: StorageLayout, row_gradients: Sequence[RowGradients]
) -> list[RowGradients]:
    """Row gradients of dim groups -> of tables, each row once, counted from the table's start."""
    per_table: dict[int, RowGradients] = {}
    found = [without_repeats(of_group) for of_group in row_gradients]
    for group, (rows, grads), sizes in zip(
        layout.groups, found, rows_per_table(layout, found), strict=True
    ):
        firsts = accumulate(group.table_rows, initial=0)
        parts = zip(rows.split(sizes), grads.split(sizes), strict=True)
        for table, first, (rows_K, grads_KD) in zip(group.tables, firsts, parts, strict=False):
            per_table[table] = (rows_K - first, grads_KD)
    return [per_table[t] for t in range(len(layout.tables))]
