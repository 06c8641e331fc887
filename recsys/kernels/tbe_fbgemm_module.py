"""The `fbgemm` backend on CUDA: FBGEMM's own module, which also drives placement and caching.

Shape suffixes: N ids, T tables.
"""

from __future__ import annotations

import warnings
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor

from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.tbe_torch import inverse_bag_length
from recsys.kernels.types import (
    EmbeddingLocation,
    EmbOptimType,
    OptimizerSpec,
    PoolingMode,
    WeightDecayMode,
)

__all__ = ["FbgemmModule"]


@final
class FbgemmModule:
    """FBGEMM's TBE module, used on CUDA in FUSED mode, where it fuses every optimizer.

    It can be built on a CPU too, so that tests without a GPU reach most of it.

    Args:
        layout: Geometry of the tables.
        storage: Weights to adopt (DEVICE only); None: the module allocates.
        pooling, weights_dtype, output_dtype, optimizer: As for the lookup.
        location: Placement of the tables.
        cache_load_factor: Share of the rows that the cache of MANAGED_CACHING holds; None: 0.2.
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
        cache_load_factor: float | None = None,
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

        # Each forward pass of Adam, LAMB and LARS-SGD warns that they are "not optimized", which
        # must not end a program that takes warnings for errors.
        warnings.filterwarnings("ignore", r"\s*\S*\s*\[FBGEMM_GPU\] NOTE: The training optimizer")
        self._pools_mean = pooling is PoolingMode.MEAN
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
            stochastic_rounding=optimizer.stochastic_rounding,
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
            cache_load_factor=0.2 if cache_load_factor is None else cache_load_factor,
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
        names = [n for n, kind in optimizer.rule.state.items() if kind != "table"]
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
        self._counts_steps = "step" in optimizer.rule.state
        self.steps_T = torch.zeros(num_tables)
        self._checked_version = -1
        self._pending: WeakSet[_Step] = WeakSet()  # of forward passes without their backward
        if self._counts_steps:
            self.flat_states["step"] = self.steps_T
            for t in range(num_tables):
                self.states[t]["step"] = self.steps_T[t]
            # The module counts forwards, in evaluation too. We count backwards, and hand it the
            # number of this forward's; on the CPU, so that reading it does not wait for the device.
            self.module.iter = self.module.iter.cpu()

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Look up, recording the fused backward when gradients are enabled."""
        if self._counts_steps:
            if self.steps_T._version != self._checked_version:
                self._check_steps_agree()
            before = int(self.steps_T[0]) + len(self._pending)
            self.module.iter_cpu.fill_(before)
            self.module.iter.fill_(before)
        if self._pools_mean and weights is not None and weights.requires_grad:
            weights = self._with_mean_gradient(weights, offsets)
        out: Tensor = self.module(indices, offsets, weights)
        if self._counts_steps and out.requires_grad:
            step = _Step(self)
            self._pending.add(step)
            out.register_hook(step)
        return out

    @staticmethod
    def _with_mean_gradient(weights_N: Tensor, offsets: Tensor) -> Tensor:
        """The weights, whose gradient FBGEMM computes as if the bags were summed."""
        inverse_N = inverse_bag_length(offsets, weights_N.numel())
        weights_N = weights_N.view_as(weights_N)
        if weights_N.requires_grad:  # not under no_grad
            weights_N.register_hook(inverse_N.mul)
        return weights_N

    def set_learning_rate(self, value: float) -> None:
        """Used by the next update."""
        self.module.set_learning_rate(value)

    def drop_cache(self) -> None:
        """Forget cached rows; the next lookup reads the weights again."""
        self.module.reset_cache_states()

    def flush(self) -> None:
        """Write cached rows back to the weights."""
        self.module.flush()

    def count_backward(self, step: _Step) -> None:
        """Called when the backward pass of a forward pass has come."""
        self._pending.discard(step)
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


@final
class _Step:
    """The update that a forward pass's backward will make; it lives as long as the graph."""

    def __init__(self, module: FbgemmModule) -> None:
        self._module = module

    def __call__(self, _grad: Tensor) -> None:
        self._module.count_backward(self)
