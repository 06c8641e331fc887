"""The `fbgemm` backend on a CPU: FBGEMM's table-batched kernels, called as the plain ops they are.

FBGEMM's module around them costs ten times the forward itself at batch 8 (150 us against 11).
The op signatures are the same in fbgemm_gpu 1.6 and 1.8, and `has_cpu_ops` compares them with
what is installed. On CUDA the module is used: see `tbe_fbgemm_module`.

Shape suffixes: N ids, F features, B bags per feature, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from recsys.kernels.ops import USE_FBGEMM, complete_cumsum
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.tbe_torch import (
    Rates,
    RowStatistics,
    TorchKernel,
    distinct_rows,
    inverse_bag_length,
    row_ids_of,
    sum_bags,
)
from recsys.kernels.types import (
    EmbOptimType,
    OptimizerSpec,
    PoolingMode,
)

__all__ = [
    "FUSED_ON_CPU",
    "FbgemmCpuKernel",
    "has_cpu_ops",
    "has_cuda_ops",
]

FUSED_ON_CPU: Mapping[EmbOptimType, str] = {
    EmbOptimType.SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "rowwise_adagrad",
}
"""Optimizers that have a fused CPU backward, with FBGEMM's name for it."""

_OUTPUT_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 5}

_FORWARD = (
    "weights weights_offsets D_offsets total_D hash_size_cumsum indices offsets pooling_mode "
    "indice_weights output_dtype"
)
_BACKWARD = (
    "grad_output host_weights weights_placements weights_offsets D_offsets max_D hash_size_cumsum "
    "total_hash_size_bits indices offsets pooling_mode indice_weights stochastic_rounding"
)
_DENSE_BACKWARD = (
    "grad_output host_weights weights_offsets D_offsets max_D hash_size_cumsum "
    "total_hash_size_bits indices offsets pooling_mode indice_weights unused"
)
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


def has_cpu_ops() -> bool:
    """Whether the installed FBGEMM has the CPU kernels with the arguments this file passes."""
    if not USE_FBGEMM:
        return False
    for name, arguments in _CPU_OPS.items():
        op = getattr(torch.ops.fbgemm, name, None)
        if op is None or [a.name for a in op.default._schema.arguments] != arguments.split():
            return False
    return True


def has_cuda_ops() -> bool:
    """Whether the installed FBGEMM was built for CUDA; a CPU build may sit beside a CUDA torch."""
    op = "fbgemm::asynchronous_complete_cumsum"
    return USE_FBGEMM and torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")


@final
class FbgemmCpuKernel(TorchKernel):
    """FBGEMM's CPU kernels over our own storage; row gradients stay those of `TorchKernel`.

    The features of one table must be neighbours: FBGEMM's CPU backward takes features of one
    table for two tables otherwise, and computes wrong Adagrad updates, or raises.
    """

    def __init__(
        self,
        layout: StorageLayout,
        storage: Tensor,
        pooling: PoolingMode,
        output_dtype: torch.dtype,
        optimizer: OptimizerSpec | None,
        states: Mapping[str, Tensor],
    ) -> None:
        super().__init__(layout, storage, pooling, output_dtype, optimizer, states)
        self._geometry = _geometry_of(layout, tuple(range(layout.num_features)))
        self._geometries: dict[tuple[int, ...], _Geometry] = {}  # of some of the features
        self._columns_at = [0, *accumulate(layout.feature_dims)]
        self._parts: tuple[Rates, list[_RatePart]] | None = None
        group = next(g for g in layout.groups if g.features)
        self._one_table = _Geometry(
            weights_offsets=torch.tensor([group.first_element]),
            dims=(group.dim,),
            row_cumsum=torch.tensor([0, max(group.num_rows, 1)]),
            row_state_offsets=torch.tensor([group.first_row]),
        )
        self._learning_rate = torch.zeros(1)

    def lookup(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Rows or pooled rows; no autograd. [B, total_dim], or [N, D] without pooling."""
        if self.pooling is PoolingMode.NONE:
            return super().lookup(indices, offsets, weights)  # as fast as FBGEMM's
        geometry = self._geometry
        offsets = offsets.to(indices.dtype)
        # A missing `indice_weights` must be None: an empty tensor would be read out of bounds.
        pooled: Tensor = _ops().split_embedding_codegen_forward_cpu(
            self.storage,
            geometry.weights_offsets,
            geometry.dim_offsets,
            geometry.total_dim,
            geometry.row_cumsum,
            indices,
            offsets,
            _SUM if self.pooling is PoolingMode.SUM else _MEAN,
            weights,
            _OUTPUT_CODE[self.output_dtype],
        )
        return pooled

    def weight_gradients(self, grad: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """Gradient with respect to per-sample weights: [N] fp32."""
        geometry = self._geometry
        offsets = offsets.to(indices.dtype)
        values: Tensor = _ops().split_embedding_codegen_grad_indice_weights_cpu(
            grad,
            self.storage,
            geometry.weights_offsets,
            geometry.dim_offsets,
            indices,
            offsets,
            geometry.ones,
        )
        if self.pooling is PoolingMode.MEAN:
            values = values * inverse_bag_length(offsets, indices.numel())
        return values.float()

    def dense_gradients(
        self, grad: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """The gradient of the whole storage, fp32 in its layout."""
        if indices.numel() == 0:
            return torch.zeros_like(self.storage, dtype=torch.float32)
        geometry, indices, offsets, weights = self._as_sum(indices, offsets, weights)
        flat: Tensor = _ops().split_embedding_backward_codegen_dense_cpu(
            grad.float(),
            self.storage,
            geometry.weights_offsets,
            geometry.dim_offsets,
            geometry.max_dim,
            geometry.row_cumsum,
            geometry.hash_bits,
            indices,
            offsets,
            _SUM,
            weights,
        )
        return flat

    def update(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        rates: Rates,
    ) -> None:
        """One optimizer step from the gradient of the output, in place; a rate per table."""
        if indices.numel() == 0:
            return
        if isinstance(rates, tuple):
            parts = self._parts_of(rates)
            if len(parts) > 1:
                # FBGEMM's kernel takes one rate, so it runs once for each, on the ids of its own
                for rate, batch in self._split(parts, grad, indices, offsets, weights):
                    self._update_at(rate, *batch)
                return
            rates = parts[0].rate
        self._update_at(rates, *self._as_sum(indices, offsets, weights), grad)

    def _parts_of(self, rates: tuple[float, ...]) -> list[_RatePart]:
        """The features of each rate; the same from one batch to the next."""
        if self._parts is None or self._parts[0] != rates:
            features_of: dict[float, list[int]] = {}
            for feature, table in enumerate(self.layout.feature_table_map):
                features_of.setdefault(rates[table], []).append(feature)
            parts = [
                _RatePart(rate, tuple(_runs(features)), self._geometry_of(tuple(features)))
                for rate, features in features_of.items()
            ]
            self._parts = rates, parts
        return self._parts[1]

    def _split(
        self,
        parts: Sequence[_RatePart],
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Iterator[tuple[float, _SumBatch]]:
        """Yields each rate with the part of the batch that is looked up at it."""
        num_bags = (offsets.numel() - 1) // self.layout.num_features
        ids_at = offsets[::num_bags].tolist()  # where each feature's ids begin, and the end
        geometry, indices, offsets, weights = self._as_sum(indices, offsets, weights)
        pooled = geometry is self._geometry  # else the gradients are those of the ids
        for rate, runs, own_geometry in parts:
            pieces = []
            for first, last in runs:
                ids = slice(ids_at[first], ids_at[last])
                if pooled:
                    bags = offsets[first * num_bags : last * num_bags + 1]
                    rows = grad[:, self._columns_at[first] : self._columns_at[last]]
                else:
                    bags, rows = offsets[ids.start : ids.stop + 1], grad[ids]
                own_weights = None if weights is None else weights[ids]
                pieces.append((indices[ids], bags - ids.start, own_weights, rows))
            own_ids, own_offsets, own_weights, own_grad = pieces[0]
            if len(pieces) > 1:
                ids_of, bags_of, weights_of, grads = zip(*pieces, strict=True)
                own_ids, own_grad = torch.cat(ids_of), torch.cat(grads, int(pooled))
                own_offsets = complete_cumsum(torch.cat([bags.diff() for bags in bags_of]))
                own_weights = None if weights is None else torch.cat(weights_of)
            if own_ids.numel():
                own = own_geometry if pooled else geometry
                yield rate, (own, own_ids, own_offsets, own_weights, own_grad.contiguous())

    def _geometry_of(self, features: tuple[int, ...]) -> _Geometry:
        if features not in self._geometries:
            self._geometries[features] = _geometry_of(self.layout, features)
        return self._geometries[features]

    def _update_at(
        self,
        learning_rate: float,
        geometry: _Geometry,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        grad: Tensor,
    ) -> None:
        assert self.optimizer is not None
        spec = self.optimizer
        self._learning_rate.fill_(learning_rate)
        common = (
            grad,
            self.storage,
            geometry.host_placement,
            geometry.weights_offsets,
            geometry.dim_offsets,
            geometry.max_dim,
            geometry.row_cumsum,
            geometry.hash_bits,
            indices,
            offsets,
            _SUM,
            weights,
            _ROUND_STOCHASTICALLY,
        )
        if spec.algorithm is EmbOptimType.SGD:
            _ops().split_embedding_backward_codegen_sgd_cpu(*common, self._learning_rate)
            return
        state = (self.states["sum"], geometry.host_placement)
        if spec.algorithm is EmbOptimType.EXACT_ADAGRAD:
            _ops().split_embedding_backward_codegen_adagrad_cpu(
                *common, *state, geometry.weights_offsets, self._learning_rate, spec.eps
            )
            return
        assert spec.algorithm is EmbOptimType.EXACT_ROWWISE_ADAGRAD
        _ops().split_embedding_backward_codegen_rowwise_adagrad_cpu(
            *common, *state, geometry.row_state_offsets, self._learning_rate, spec.eps
        )

    @property
    def takes_row_moments(self) -> bool:
        """Whether the fused update can be told the row moments: row-wise Adagrad, nothing else."""
        spec = self.optimizer
        return (
            spec is not None
            and spec.algorithm is EmbOptimType.EXACT_ROWWISE_ADAGRAD
            and not spec.weight_decay
            and not spec.stochastic_rounding
        )

    def row_statistics(
        self, grad: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> list[RowStatistics]:
        """The statistics of each dim group, with no row gradients but of ids that repeat."""
        rows, empty = torch.empty(0, dtype=torch.int64), torch.empty(0)
        result = [(rows, empty)] * len(self.layout.groups)
        number = {group.dim: i for i, group in enumerate(self.layout.groups)}
        inputs = self._group_inputs(indices, offsets, weights) if indices.numel() else []
        for group, part in inputs:
            result[number[group.dim]] = _statistics_by_row(
                part.row_ids, group.num_rows, *self._gradient_of_ids(grad, group, part)
            )
        return result

    def update_by_moments(
        self,
        batch: tuple[Tensor, Tensor, Tensor, Tensor | None],
        statistics: list[RowStatistics],
        row_moments: list[Tensor],
        rates: Rates,
    ) -> None:
        """`update` of a batch with the given row moments [K] of each dim group.

        The kernel adds the moment of the columns it sees, so the state is lowered by that much
        before; after, it is set to what it must be, to the bit.
        """
        final = []
        for group, (rows, statistic), moment in zip(
            self.layout.groups, statistics, row_moments, strict=True
        ):
            state = group.rows(self.states["sum"])
            wanted = state.index_select(0, rows).add_(moment)
            state.index_copy_(0, rows, wanted.sub(statistic, alpha=1.0 / group.dim))
            final.append((state, rows, wanted))
        self.update(*batch, rates)
        for state, rows, wanted in final:
            state.index_copy_(0, rows, wanted)

    def _as_sum(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> tuple[_Geometry, Tensor, Tensor, Tensor | None]:
        """The batch as a sum-pooled lookup, which is what FBGEMM's backward does best."""
        offsets = offsets.to(indices.dtype)
        if self.pooling is PoolingMode.NONE:
            # Bags of one id in one table: half the time of FBGEMM's own sequence backward.
            (group,) = (g for g in self.layout.groups if g.features)
            row_ids = row_ids_of(group, indices, offsets)
            return self._one_table, row_ids, torch.arange(row_ids.numel() + 1), None
        if self.pooling is PoolingMode.MEAN:
            # FBGEMM's kernel forgets the bag length when the lookup is weighted.
            inverse = inverse_bag_length(offsets, indices.numel())
            weights = inverse if weights is None else weights * inverse
        return self._geometry, indices, offsets, weights


def _statistics_by_row(
    row_ids: Tensor, num_rows: int, gradients: Tensor, source: Tensor, scale: Tensor | None
) -> RowStatistics:
    """|sum of scale[i] * gradients[source[i]] over the i of a row|^2 of each distinct row id."""
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
        offsets = complete_cumsum(lengths)
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


_SUM, _MEAN = 0, 1
_ROUND_STOCHASTICALLY = False  # ignored: see `support.LIMITS`


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the half-open stretches of ascending numbers that follow each other."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], numbers[i - 1] + 1
            start = i


def _geometry_of(layout: StorageLayout, features: tuple[int, ...]) -> _Geometry:
    tables = [layout.feature_table_map[f] for f in features]
    # Cumulative row counts only tell the tables apart here, so an empty table counts as one row
    # and the order is that of the features, not of the storage.
    first_of_table: dict[int, int] = {}
    rows_so_far = 0
    for t in tables:
        if t not in first_of_table:
            first_of_table[t] = rows_so_far
            rows_so_far += max(layout.tables[t].num_rows, 1)
    return _Geometry(
        weights_offsets=torch.tensor([layout.first_element[t] for t in tables]),
        dims=[layout.feature_dims[f] for f in features],
        row_cumsum=torch.tensor([*(first_of_table[t] for t in tables), rows_so_far]),
        row_state_offsets=torch.tensor([layout.first_row[t] for t in tables]),
    )


def _ops() -> Any:
    return torch.ops.fbgemm


@final
class _Geometry:
    """The index tensors FBGEMM's CPU kernels take, one entry per feature."""

    def __init__(
        self,
        weights_offsets: Tensor,
        dims: Sequence[int],
        row_cumsum: Tensor,
        row_state_offsets: Tensor,
    ) -> None:
        self.dims = tuple(dims)
        self.weights_offsets = weights_offsets
        self.row_cumsum = row_cumsum
        self.row_state_offsets = row_state_offsets
        self.dim_offsets = torch.tensor([0, *dims]).cumsum(0).int()
        self.total_dim, self.max_dim = sum(dims), max(dims)
        self.hash_bits = int(math.log2(int(row_cumsum[-1]))) + 1
        self.host_placement = torch.zeros(len(self.dims), dtype=torch.int32)
        self.ones = torch.ones(len(self.dims), dtype=torch.int32)


class _RatePart(NamedTuple):
    """The features that are looked up at one rate."""

    rate: float
    runs: tuple[tuple[int, int], ...]
    """Half-open stretches of features that follow each other."""
    geometry: _Geometry


_SumBatch: TypeAlias = tuple[_Geometry, Tensor, Tensor, Tensor | None, Tensor]
"""A sum-pooled lookup: geometry, ids, offsets, weights, gradient of the output."""
