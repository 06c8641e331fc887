"""The `fbgemm` backend. The only file that talks to FBGEMM's table-batched embedding (TBE).

On a CPU the three kernels (forward, gradient of per-sample weights, fused backward) are called
as the
plain ops they are, on our own tensors: FBGEMM's module around them costs ten times the forward
    itself at
batch 8 (150 us against 11). The op signatures are the same in fbgemm_gpu 1.6 and 1.8, and are
checked when this file is imported. On CUDA, where the module also drives caching and placement,
it is used as it is.

Shape suffixes: N ids, F features, B bags per feature, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from recsys.kernels.ops import USE_FBGEMM
from recsys.kernels.row_update import STATE_KINDS
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.tbe_torch import TorchKernel, inverse_bag_length, row_ids_of
from recsys.kernels.types import (
    EmbeddingLocation,
    EmbOptimType,
    OptimizerSpec,
    PoolingMode,
    WeightDecayMode,
)

__all__ = [
    "FUSED_ON_CPU",
    "FbgemmCpuKernel",
    "FbgemmModule",
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
    "split_embedding_nobag_codegen_forward_cpu": (
        "weights weights_offsets D hash_size_cumsum indices offsets output_dtype"
    ),
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
    """Whether the installed FBGEMM was built for CUDA: its CPU build may sit beside a CUDA torch."""
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
        tables = layout.feature_table_map
        # Cumulative row counts only tell the tables apart here, so an empty table counts as one row
        # and the order is that of the features, not of the storage.
        first_of_table: dict[int, int] = {}
        rows_so_far = 0
        for t in tables:
            if t not in first_of_table:
                first_of_table[t] = rows_so_far
                rows_so_far += max(layout.tables[t].num_rows, 1)
        self._geometry = _Geometry(
            weights_offsets=torch.tensor([layout.first_element[t] for t in tables]),
            dims=layout.feature_dims,
            row_cumsum=torch.tensor([*(first_of_table[t] for t in tables), rows_so_far]),
            row_state_offsets=torch.tensor([layout.first_row[t] for t in tables]),
        )
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
        geometry = self._geometry
        offsets = offsets.to(indices.dtype)
        if self.pooling is PoolingMode.NONE:
            if indices.numel() == 0:
                return torch.empty(0, geometry.dims[0], dtype=self.output_dtype)
            rows: Tensor = _ops().split_embedding_nobag_codegen_forward_cpu(
                self.storage,
                geometry.weights_offsets,
                geometry.dims[0],
                geometry.row_cumsum,
                indices,
                offsets,
                _OUTPUT_CODE[self.output_dtype],
            )
            return rows
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
        """The gradient of the whole storage, in its dtype and layout."""
        if indices.numel() == 0:
            return torch.zeros_like(self.storage)
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
        return flat.to(self.storage.dtype)

    def update(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        learning_rate: float,
    ) -> None:
        """One optimizer step from the gradient of the output, in place."""
        if indices.numel() == 0:
            return
        assert self.optimizer is not None
        spec = self.optimizer
        geometry, indices, offsets, weights = self._as_sum(indices, offsets, weights)
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
            False,  # stochastic_rounding
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


_SUM, _MEAN = 0, 1


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


@final
class FbgemmModule:
    """FBGEMM's TBE module, used on CUDA in FUSED mode, where it fuses every optimizer.

    It can be built on a CPU too, so that tests without a GPU reach most of it.

    Args:
        layout: Geometry of the tables.
        storage: Weights to adopt (DEVICE only); None: the module allocates.
        pooling, weights_dtype, output_dtype, optimizer: As for the lookup.
        location: Placement of the tables.
    """

    def __init__(
        self,
        layout: StorageLayout,
        storage: Tensor | None,
        pooling: PoolingMode,
        weights_dtype: torch.dtype,
        output_dtype: torch.dtype,
        optimizer: OptimizerSpec,
        location: EmbeddingLocation,
    ) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType as Algorithm
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation as Location,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode as Pooling
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            WeightDecayMode as Decay,
        )

        on_cuda = layout.device.type == "cuda"
        rank_in_storage = {t: i for i, t in enumerate(layout.storage_order)}
        decay = Decay.NONE
        if optimizer.weight_decay and optimizer.algorithm is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            decay = {
                WeightDecayMode.L2: Decay.L2,
                WeightDecayMode.DECOUPLE: Decay.DECOUPLE,
                None: Decay.NONE,
            }[optimizer.weight_decay_mode]
        algorithm = (
            "EXACT_SGD" if optimizer.algorithm is EmbOptimType.SGD else optimizer.algorithm.name
        )
        self.module: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (
                    layout.tables[t].num_rows,
                    layout.tables[t].dim,
                    Location[location.name],
                    ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU,
                )
                for t in layout.storage_order
            ],
            feature_table_map=[rank_in_storage[t] for t in layout.feature_table_map],
            weights_precision=SparseType.from_dtype(weights_dtype),
            output_dtype=SparseType.from_dtype(output_dtype),
            optimizer=Algorithm[algorithm],
            stochastic_rounding=False,
            learning_rate=optimizer.learning_rate,
            eps=optimizer.eps,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
            weight_decay_mode=decay,
            eta=optimizer.eta,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            pooling_mode=Pooling[pooling.name],
            device=layout.device,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        suffix = {EmbeddingLocation.DEVICE: "dev", EmbeddingLocation.HOST: "host"}.get(
            location, "uvm"
        )
        if storage is not None:
            if location is not EmbeddingLocation.DEVICE:
                raise ValueError(
                    "FBGEMM can adopt given weights on the device only; received location "
                    f"{location.name}."
                )
            self.module.weights_dev = storage
        self.storage: Tensor = getattr(self.module, f"weights_{suffix}").detach().flatten()
        num_tables = len(layout.tables)
        self.weights: list[Tensor] = [torch.empty(0)] * num_tables
        self.states: list[dict[str, Tensor]] = [{} for _ in range(num_tables)]
        for t, weight in zip(
            layout.storage_order, self.module.split_embedding_weights(), strict=True
        ):
            self.weights[t] = weight
        names = [n for n, kind in STATE_KINDS[optimizer.algorithm].items() if kind != "table"]
        if names:
            split = self.module.split_optimizer_states()
            for t, values in zip(layout.storage_order, split, strict=True):
                self.states[t].update(zip(names, values, strict=True))
        self.flat_states: dict[str, Tensor] = {
            name: buffer.detach().flatten()
            for name, prefix in zip(names, ("momentum1", "momentum2"), strict=False)
            for buffer in (
                getattr(self.module, f"{prefix}_dev"),
                getattr(self.module, f"{prefix}_uvm"),
                getattr(self.module, f"{prefix}_host"),
            )
            if buffer.numel()
        }
        self._counts_steps = "step" in STATE_KINDS[optimizer.algorithm]
        self.steps_T = torch.zeros(num_tables)
        self._checked_version = -1
        if self._counts_steps:
            self.flat_states["step"] = self.steps_T
            for t in range(num_tables):
                self.states[t]["step"] = self.steps_T[t]
            # The module counts forwards, in evaluation too. We count backwards, and hand it our
            # count; on the CPU, so that reading it does not wait for the device.
            self.module.iter = self.module.iter.cpu()

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Look up, recording the fused backward when gradients are enabled."""
        if self._counts_steps:
            if self.steps_T._version != self._checked_version:
                self._check_steps_agree()
            done = int(self.steps_T[0])
            self.module.iter_cpu.fill_(done)
            self.module.iter.fill_(done)
        out: Tensor = self.module(indices, offsets, weights)
        if self._counts_steps and out.requires_grad:
            out.register_hook(self._count_backward)
        return out

    def set_learning_rate(self, value: float) -> None:
        """Used by the next update."""
        self.module.set_learning_rate(value)

    def flush(self) -> None:
        """Write cached rows back to the weights."""
        self.module.flush()

    def _count_backward(self, _grad: Tensor) -> None:
        self.steps_T.add_(1)
        self._checked_version = self.steps_T._version

    def _check_steps_agree(self) -> None:
        if bool((self.steps_T != self.steps_T[0]).any()):
            raise ValueError(
                "The tables of one FBGEMM lookup share one step counter; received the counters "
                f"{self.steps_T.tolist()}. Load equal counters, or build the lookup with "
                "backend='torch'."
            )
        self._checked_version = self.steps_T._version
