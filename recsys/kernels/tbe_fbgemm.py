"""The `fbgemm` backend on a CPU: calls of FBGEMM's table-batched ops without its module.

At batch 8 the module takes 150 us instead of the 11 us of the forward op alone. The op signatures
are the same in fbgemm_gpu 1.6 and 1.8, and `has_cpu_ops` compares them with the installed ops. On
CUDA the module is used: see `tbe_fbgemm_module`.

Shapes: N ids, F features, B bags per feature, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recsys.kernels import ops
from recsys.kernels.backend import FBGEMM_LIMITS, OUTPUT_CODES, POOLING_CODES, Limits
from recsys.kernels.lookup_batch import (
    FeatureParts,
    LookupBatch,
    RankedBags,
    as_rectangle,
    flat_blocks,
    inverse_bag_length,
    row_ids_of,
    sum_bags,
)
from recsys.kernels.ops import swap_segments
from recsys.kernels.row_gradients import RowGradients, RowStatistics, distinct_rows
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.tbe_torch import TorchKernel
from recsys.kernels.types import EmbOptimType, LookupSettings, PoolingType

FUSED_ON_CPU: Mapping[EmbOptimType, str] = {
    EmbOptimType.SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
}
"""Optimizers with a fused CPU backward, and FBGEMM's name of it."""

_FORWARD = (
    "weights weights_offsets D_offsets total_D hash_size_cumsum indices offsets pooling_mode "
    "indice_weights output_dtype"
)
_OF_SUM = (  # see `Geometry.sum_of`
    "weights_offsets D_offsets max_D hash_size_cumsum total_hash_size_bits indices offsets "
    "pooling_mode indice_weights"
)
_DENSE_BACKWARD = f"grad_output host_weights {_OF_SUM} unused"
_BACKWARD = f"grad_output host_weights weights_placements {_OF_SUM} stochastic_rounding"
_STATE = " momentum1_host momentum1_placements momentum1_offsets"
_CPU_OPS: Mapping[str, str] = {
    "split_embedding_codegen_forward_cpu": _FORWARD,
    "split_embedding_codegen_grad_indice_weights_cpu": (
        "grad_output weights weights_offsets D_offsets indices offsets feature_requires_grad"
    ),
    "split_embedding_backward_codegen_dense_cpu": _DENSE_BACKWARD,
    "split_embedding_backward_codegen_sgd_cpu": _BACKWARD + " learning_rate_tensor output_dtype",
    "split_embedding_backward_codegen_adagrad_cpu": (
        _BACKWARD + _STATE + " learning_rate_tensor eps output_dtype"
    ),
    "split_embedding_backward_codegen_rowwise_adagrad_cpu": (
        _BACKWARD + _STATE + " learning_rate_tensor eps weight_decay weight_decay_mode max_norm "
        "output_dtype"
    ),
}


def has_ops(wanted: Mapping[str, str]) -> bool:
    """Return whether the installed FBGEMM has ops that begin with these arguments."""
    if not ops.FBGEMM_DEVICES:
        return False
    for name, arguments in wanted.items():
        op, passed = getattr(torch.ops.fbgemm, name, None), arguments.split()
        known = [] if op is None else op.default._schema.arguments
        if [a.name for a in known[: len(passed)]] != passed:
            return False
        if not all(a.has_default_value() for a in known[len(passed) :]):
            return False
    return True


def has_cpu_ops() -> bool:
    """Return whether the installed FBGEMM has CPU kernels with the arguments passed here."""
    return has_ops(_CPU_OPS)


def _features_are_scattered(s: LookupSettings) -> bool:
    if s.pooling is PoolingType.NONE:  # its backward is by row: see `FbgemmCpuKernel._as_sum`
        return False
    neighbours = zip(s.feature_table_map, s.feature_table_map[1:], strict=False)
    return sum(a != b for a, b in neighbours) + 1 > len(set(s.feature_table_map))


_HALF_OR_FULL = (torch.float32, torch.float16)
_CPU_LIMITS: Limits = {  # measured with fbgemm_gpu_cpu 1.8.0
    **FBGEMM_LIMITS,
    "its CPU kernels do not read tables of this dtype (only fp32 and fp16)": lambda s: (
        s.weights_dtype not in _HALF_OR_FULL
    ),
    "its CPU kernels do not write outputs of this dtype (only fp32 and fp16)": lambda s: (
        s.output_dtype not in _HALF_OR_FULL
    ),
    "its CPU kernels are wrong when the features of one table are not neighbours": (
        _features_are_scattered
    ),
    "the installed fbgemm_gpu lacks the CPU kernels": lambda s: not has_cpu_ops(),
}


@final
class FbgemmCpuKernel(TorchKernel):
    """FBGEMM's CPU kernels on our own storage, with the row gradients of `TorchKernel`.

    The features of one table must be neighbours. Otherwise FBGEMM's CPU backward treats them as
    features of several tables, and computes wrong Adagrad updates or raises an error.
    """

    name = "fbgemm"
    device_types = ("cpu",)
    update_limits: ClassVar[Limits] = {
        **_CPU_LIMITS,
        "its CPU kernels fuse only SGD, Adagrad and row-wise Adagrad": lambda s: (
            s.fused is not None and s.fused.algorithm not in FUSED_ON_CPU
        ),
        "its CPU kernels ignore weight decay": lambda s: (
            s.fused is not None and s.fused.weight_decay != 0
        ),
        "its CPU kernels ignore stochastic rounding": lambda s: (
            s.fused is not None and s.fused.stochastic_rounding
        ),
    }
    lookup_limits: ClassVar[Limits] = {
        **_CPU_LIMITS,
        "its CPU kernels round means differently from PyTorch, which updates": lambda s: (
            s.pooling is PoolingType.MEAN and FbgemmCpuKernel.refusal(s, "update") is not None
        ),
    }

    def _prepare(self) -> None:
        layout = self.layout
        self._geometry = Geometry.of(layout, range(layout.num_features))
        self._one_table = Geometry.of_one_table(layout)
        self._learning_rate = torch.zeros(1, device="cpu")
        self._parts: dict[float, tuple[Tensor, Geometry]] = {}  # the features of each rate

    def use_rates(self, rates: float | tuple[float, ...]) -> None:
        """Set the learning rates from the next update on; FBGEMM's kernel runs once per rate."""
        super().use_rates(rates)
        features_of: dict[float, list[int]] = {}
        if isinstance(rates, tuple):
            for feature, table in enumerate(self.layout.feature_table_map):
                features_of.setdefault(rates[table], []).append(feature)
        self._parts = {
            rate: (torch.tensor(features), Geometry.of(self.layout, features))
            for rate, features in features_of.items()
        }

    @property
    def takes_ranks(self) -> bool:
        """True if bags can be read in any order: see `_in_rows`."""
        is_one = self._one_table is not None and not self.layout.shares_tables
        return is_one and isinstance(self.rates, float)

    def lookup(self, batch: LookupBatch) -> Tensor:
        """Look up rows, pooled or not; no autograd. [B, total_dim], or [N, D] without pooling."""
        if self.pooling is PoolingType.NONE:
            return super().lookup(batch)  # as fast as FBGEMM's
        geometry = self._geometry
        if batch.bags is not None:
            if self._one_table is None:
                return flat_blocks(self.lookup(as_rectangle(batch)), batch.bags, self.layout)
            geometry, batch = self._of_one_table(batch)
        indices = batch.indices
        # A missing `indice_weights` must be None: an empty tensor would be read out of bounds.
        pooled: Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            self.storage,
            geometry.weights_offsets,
            geometry.dim_offsets,
            geometry.total_dim,
            geometry.row_cumsum,
            indices,
            batch.offsets.to(indices.dtype),
            POOLING_CODES[self.pooling],
            batch.weights,
            OUTPUT_CODES[self.output_dtype],
        )
        return pooled if batch.bags is None else pooled.view(-1)

    def weight_gradients(self, grad: Tensor, batch: LookupBatch) -> Tensor:
        """Return the gradient of the per-sample weights: [N] fp32."""
        if batch.bags is not None:
            grad, batch = self._in_rows(grad, batch, batch.bags)
        geometry = self._geometry
        if batch.bags is not None:
            geometry, batch = self._of_one_table(batch)
        indices = batch.indices
        values: Tensor = torch.ops.fbgemm.split_embedding_codegen_grad_indice_weights_cpu(
            grad,
            self.storage,
            geometry.weights_offsets,
            geometry.dim_offsets,
            indices,
            batch.offsets.to(indices.dtype),
            geometry.ones,
        )
        if self.pooling is PoolingType.MEAN:
            values = values * inverse_bag_length(batch.offsets, batch.indices.numel())
        return values.float()

    def dense_gradients(self, grad: Tensor, batch: LookupBatch) -> Tensor:
        """Return the gradient of the whole storage, fp32 in its layout."""
        if batch.indices.numel() == 0:
            return torch.zeros_like(self.storage, dtype=torch.float32)
        if batch.bags is not None:
            grad, batch = self._in_rows(grad, batch, batch.bags)
        geometry, batch = self._as_sum(batch)
        flat: Tensor = torch.ops.fbgemm.split_embedding_backward_codegen_dense_cpu(
            grad.float(), self.storage, *geometry.sum_of(batch)
        )
        return flat

    def update(self, grad: Tensor, batch: LookupBatch) -> None:
        """Make one optimizer step in place, from the gradient of the output."""
        if not batch.indices.numel():
            return
        if batch.bags is not None:
            grad, batch = self._in_rows(grad, batch, batch.bags)
        geometry, as_sum = self._as_sum(batch)
        if isinstance(self.rates, float):
            self._update_at(self.rates, geometry, grad, as_sum)
            return
        parts = FeatureParts(batch._replace(weights=as_sum.weights), self.layout.num_features)
        pooled = geometry is self._geometry  # else bags of one id
        columns = grad.split(list(self.layout.feature_dims), 1) if pooled else ()
        # FBGEMM takes one rate per call
        # docs/decisions/optimizers.md, "Tables of one lookup have their own learning rates"
        for rate, (features, own_geometry) in self._parts.items():
            positions, part_batch = parts.of(features)
            if not part_batch.indices.numel():
                continue
            if pooled:
                own_grad = torch.cat([columns[f] for f in features.tolist()], 1)
                part_batch = part_batch._replace(
                    offsets=part_batch.offsets.to(part_batch.indices.dtype)
                )
            else:
                own_geometry, own_grad = geometry, grad.index_select(0, positions)
                part_batch = LookupBatch(
                    as_sum.indices.index_select(0, positions), torch.arange(len(positions) + 1)
                )
            self._update_at(rate, own_geometry, own_grad, part_batch)

    def _update_at(self, rate: float, geometry: Geometry, grad: Tensor, batch: LookupBatch) -> None:
        spec = self.optimizer
        assert spec is not None
        self._learning_rate.fill_(rate)
        placements = geometry.host_placement
        offsets = {"element": geometry.weights_offsets, "row": geometry.row_state_offsets}
        state = [
            argument
            for name, kind in spec.rule.state.items()
            for argument in (self.states[name], placements, offsets[kind])
        ]
        update = f"split_embedding_backward_codegen_{FUSED_ON_CPU[spec.algorithm]}_cpu"
        getattr(torch.ops.fbgemm, update)(
            grad,
            self.storage,
            placements,
            *geometry.sum_of(batch),
            _ROUND_STOCHASTICALLY,
            *state,
            self._learning_rate,
            *([spec.eps] if "eps" in spec.rule.settings else ()),
        )

    def row_statistics(
        self, grad: Tensor, batch: LookupBatch
    ) -> tuple[list[RowStatistics], list[RowGradients] | None] | None:
        """Return the statistics of each dim group; sums gradients of repeated ids only."""
        spec = self.optimizer
        assert spec is not None
        is_fused = spec.algorithm is EmbOptimType.EXACT_ROWWISE_ADAGRAD
        if not is_fused or spec.weight_decay or spec.stochastic_rounding:
            return None  # the fused update takes no row moments
        return self._by_group(_statistics_by_row, grad, batch), None

    def update_by_moments(
        self,
        grad: Tensor,
        batch: LookupBatch,
        statistics: Sequence[RowStatistics],
        row_moments: Sequence[Tensor],
    ) -> None:
        """Update by a batch with the given row moments [K] of each dim group.

        The kernel adds the moment of its own columns to the state. So that moment is subtracted
        before, and the exact state is written afterwards.

        If the gradients of a row cancel out, rounding errors are all that is left. The kernel may
        then add less than was subtracted, and divide by the root of a tiny or negative state. Such
        a row has no gradient and keeps its weights.
        """
        # row gradients and an update in PyTorch take longer
        # docs/decisions/optimizers.md, "Column shards keep the fused row-wise Adagrad"
        final, in_danger = [], []
        for group, (rows, statistic), moment in zip(
            self.layout.groups, statistics, row_moments, strict=True
        ):
            state = group.rows(self.states["sum"])
            wanted = state.index_select(0, rows).add_(moment)
            lowered = wanted.sub(statistic, alpha=1.0 / group.dim)
            state.index_copy_(0, rows, lowered)
            final.append((state, rows, wanted))
            below_zero = (lowered < 0).nonzero().flatten()
            if below_zero.numel():
                at, matrix = rows.index_select(0, below_zero), group.matrix(self.storage)
                # a sound row ends near `wanted`: a quarter leaves room for rounding
                least = wanted.index_select(0, below_zero) / 4
                in_danger.append((state, at, least, matrix, matrix.index_select(0, at)))
        self.update(grad, batch)
        for state, at, least, matrix, weights in in_danger:
            cancelled = state.index_select(0, at) < least
            matrix.index_copy_(0, at[cancelled], weights[cancelled])
        for state, rows, wanted in final:
            state.index_copy_(0, rows, wanted)

    def _in_rows(
        self, grad: Tensor, batch: LookupBatch, bags_F: np.ndarray
    ) -> tuple[Tensor, LookupBatch]:
        """Convert the flat gradient of a ragged batch to rows, and return the batch of these rows.

        Tables are read as one table if `takes_ranks`. Other batches are padded to a rectangle:
        tables differ in dim or rate, or features share a table, for which FBGEMM would add up
        gradients in another order. With two dims and 64 bags the rectangle takes a third of the
        time of `TorchKernel`.
        """
        dims = self.layout.feature_dims
        if self.takes_ranks:
            return grad.view(-1, dims[0]), batch
        longest = int(bags_F.max())
        blocks = grad.split((bags_F * self.layout.dims_F).tolist())
        padded = [
            functional.pad(block.view(count, dim), (0, 0, 0, longest - count))
            for block, count, dim in zip(blocks, bags_F.tolist(), dims, strict=True)
        ]
        return torch.cat(padded, 1), as_rectangle(batch)

    def _of_one_table(self, batch: LookupBatch) -> tuple[Geometry, LookupBatch]:
        """Return the geometry of all tables as one, and a batch whose ids are its rows."""
        assert self._one_table is not None
        ranked = batch.by_rank
        if ranked is not None and ranked.in_order is not None:
            return self._one_table, ranked.in_order
        batch = batch._replace(indices=row_ids_of(self.layout.used_groups[0], batch))
        if ranked is not None:
            batch = ranked.in_order = _rank_by_rank(batch, ranked)
        return self._one_table, batch

    def _as_sum(self, batch: LookupBatch) -> tuple[Geometry, LookupBatch]:
        """Convert the batch to a sum-pooled lookup, the fastest backward of FBGEMM."""
        geometry = self._geometry
        if batch.bags is not None or self.pooling is PoolingType.NONE:
            geometry, batch = self._of_one_table(batch)
        indices, offsets, weights = batch[:3]
        if self.pooling is PoolingType.NONE:
            # Bags of one id in one table: half the time of FBGEMM's own sequence backward.
            return geometry, LookupBatch(indices, torch.arange(indices.numel() + 1))
        if self.pooling is PoolingType.MEAN:
            # FBGEMM's kernel ignores the bag length of a weighted lookup.
            inverse = inverse_bag_length(offsets, indices.numel())
            weights = inverse if weights is None else weights * inverse
        return geometry, LookupBatch(indices, offsets.to(indices.dtype), weights)


def _statistics_by_row(
    row_ids: Tensor, num_rows: int, gradients: Tensor, source: Tensor, scale: Tensor | None
) -> RowStatistics:
    """Return |sum of scale[i] * gradients[source[i]] over the i of a row|^2 of each unique row."""
    rows, counts, order = distinct_rows(row_ids, num_rows)
    starts = counts.cumsum(0).sub_(counts)
    first = order.index_select(0, starts)
    norms = torch.linalg.vector_norm(gradients, dim=1).index_select(
        0, source.index_select(0, first)
    )
    if scale is not None:
        norms *= scale.index_select(0, first)
    repeated = (counts > 1).nonzero().squeeze(1)
    if repeated.numel():
        lengths = counts.index_select(0, repeated)
        offsets = ops.complete_cumsum(lengths)
        shift = starts.index_select(0, repeated) - offsets[:-1]
        ids = torch.arange(int(offsets[-1])).add_(shift.repeat_interleave(lengths))
        ids = order.index_select(0, ids)
        sums = sum_bags(
            gradients,
            source.index_select(0, ids),
            offsets,
            None if scale is None else scale.index_select(0, ids),
        )
        norms.index_copy_(0, repeated, torch.linalg.vector_norm(sums, dim=1))
    return rows, norms.square_()


def _rank_by_rank(batch: LookupBatch, ranked: RankedBags) -> LookupBatch:
    """Sort the bags of a batch on the CPU by rank, then by feature."""
    bags_FR, weights = ranked.bags_FR, batch.weights
    edges = np.concatenate([[0], np.cumsum(bags_FR)])
    ids_FR = np.diff(batch.offsets.numpy()[edges]).astype(np.int64).reshape(bags_FR.shape)
    return LookupBatch(
        swap_segments(batch.indices, ids_FR),
        ops.complete_cumsum(swap_segments(batch.offsets.diff(), bags_FR)),
        None if weights is None else swap_segments(weights, ids_FR),
        batch.bags,
    )


_ROUND_STOCHASTICALLY = False  # ignored: see `FbgemmCpuKernel.update_limits`


@final
class Geometry:
    """Index tensors for FBGEMM's kernels, with one entry per feature.

    Args:
        dims: Columns of each feature.
        elements: First element of each feature's table in the storage.
        rows: First row of the table in row-wise state.
        row_cumsum: Rows of the tables before each table, and of all tables.
        device: Device of the tensors.
    """

    def __init__(
        self,
        dims: Sequence[int],
        elements: Sequence[int],
        rows: Sequence[int],
        row_cumsum: Sequence[int],
        device: torch.device,
    ) -> None:
        self.weights_offsets = torch.tensor(elements, device=device)
        self.row_cumsum = torch.tensor(row_cumsum, device=device)
        self.row_state_offsets = torch.tensor(rows, device=device)
        self.dim_offsets = torch.tensor([0, *accumulate(dims)], dtype=torch.int32, device=device)
        self.total_dim, self.max_dim = sum(dims), max(dims)
        self.hash_bits = int(math.log2(row_cumsum[-1])) + 1
        self.host_placement = torch.zeros(len(dims), dtype=torch.int32, device=device)
        self.ones = torch.ones(len(dims), dtype=torch.int32, device=device)

    def sum_of(self, batch: LookupBatch) -> tuple[object, ...]:
        """Return the arguments of a sum-pooled lookup's backward, from the tables' arguments on."""
        return (
            self.weights_offsets,
            self.dim_offsets,
            self.max_dim,
            self.row_cumsum,
            self.hash_bits,
            *batch[:2],
            POOLING_CODES[PoolingType.SUM],
            batch.weights,
        )

    @classmethod
    def of_one_table(cls, layout: StorageLayout) -> Geometry | None:
        """Return the geometry of all tables concatenated to one; None if dims differ.

        FBGEMM's kernels need the same number of bags for each table. As one table they can read a
        ragged batch.
        """
        if len(layout.used_groups) > 1:
            return None
        (group,) = layout.used_groups
        rows = [0, max(group.num_rows, 1)]
        return cls([group.dim], [group.first_element], [group.first_row], rows, layout.device)

    @classmethod
    def of(cls, layout: StorageLayout, features: Sequence[int]) -> Geometry:
        """Return the geometry of some features of a layout."""
        tables = [layout.feature_table_map[f] for f in features]
        # Cumulative row counts only identify the tables here: an empty table counts as one row, and
        # the order is the features' order, not the storage's.
        distinct = list(dict.fromkeys(tables))
        *firsts, end = accumulate((max(layout.tables[t].num_rows, 1) for t in distinct), initial=0)
        first_of_table = dict(zip(distinct, firsts, strict=True))
        return cls(
            [layout.feature_dims[f] for f in features],
            [layout.first_element[t] for t in tables],
            [layout.first_row[t] for t in tables],
            [*(first_of_table[t] for t in tables), end],
            layout.device,
        )
