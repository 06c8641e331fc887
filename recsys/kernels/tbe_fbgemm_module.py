"""The `fbgemm` backends on CUDA: FBGEMM's module with updates and cache, and its lookup alone.

The module serves lookups that update in backward. Where PyTorch updates (replicas, deferred and
frozen tables, tables without an optimizer), FBGEMM's kernels still look up.

Shapes: N ids, T tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, final
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recsys.kernels import ops
from recsys.kernels.backend import FBGEMM_LIMITS, OUTPUT_CODES, POOLING_CODES, Limits
from recsys.kernels.lookup_batch import (
    LookupBatch,
    RankedBags,
    as_rectangle,
    flat_blocks,
    inverse_bag_length,
    row_ids_of,
)
from recsys.kernels.ops import upload
from recsys.kernels.tbe_fbgemm import Geometry, has_ops
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.tbe_torch import Rates, TorchKernel
from recsys.kernels.types import (
    EmbeddingLocation,
    EmbOptimType,
    LookupSettings,
    PoolingType,
    WeightDecayMode,
)

_DECAYS: Mapping[EmbOptimType, tuple[WeightDecayMode, ...]] = {
    EmbOptimType.SGD: (),
    EmbOptimType.EXACT_ADAGRAD: (),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (WeightDecayMode.L2, WeightDecayMode.DECOUPLE),
    EmbOptimType.ADAM: (WeightDecayMode.DECOUPLE,),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: (WeightDecayMode.DECOUPLE,),
    EmbOptimType.LAMB: (WeightDecayMode.DECOUPLE,),
    EmbOptimType.LARS_SGD: (WeightDecayMode.L2,),
}
"""Optimizers with a fused CUDA update equal to ours, and the supported modes of weight decay."""
_OF_VARIABLE_SIZE = (EmbOptimType.SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM)
"""Optimizers whose kernels support a different number of bags per feature."""

_LOOKUP_OPS = {
    "dense_embedding_codegen_lookup_function": (
        "dev_weights weights_offsets D_offsets total_D max_D hash_size_cumsum total_hash_size_bits "
        "indices offsets pooling_mode indice_weights feature_requires_grad output_dtype"
    )
}


def has_cuda_ops() -> bool:
    """Return whether FBGEMM was built for CUDA; a CPU build may be beside a CUDA torch."""
    return "cuda" in ops.FBGEMM_DEVICES


# From fbgemm_gpu 1.8.0's own checks; tests/gpu compares the backends there.
_CUDA_LIMITS: Limits = {
    **FBGEMM_LIMITS,
    "the installed fbgemm_gpu has no CUDA kernels": lambda s: not has_cuda_ops(),
    "its CUDA kernels need dims divisible by 4": lambda s: any(dim % 4 for dim in s.dims),
    "its CUDA kernels need dims of at most 2048": lambda s: max(s.dims, default=0) > 2048,
    "its CUDA kernels train tables of fp32 and fp16 only": lambda s: (
        s.weights_dtype not in (torch.float32, torch.float16)
    ),
    "its CUDA kernels write outputs of fp32, fp16 and bf16 only": lambda s: (
        s.output_dtype not in OUTPUT_CODES
    ),
}
_MODULE_LIMITS: Limits = {
    **FBGEMM_LIMITS,
    "it has no CUDA kernel of this optimizer that was compared": lambda s: (
        s.fused is not None and s.fused.algorithm not in _DECAYS
    ),
    "on CUDA it serves the fused update only": lambda s: s.fused is None,
    "its CUDA update adds up in no fixed order (torch.use_deterministic_algorithms)": (
        lambda s: torch.are_deterministic_algorithms_enabled()
    ),
    **_CUDA_LIMITS,
    "it ignores this weight decay": lambda s: (
        s.fused is not None
        and s.fused.weight_decay != 0
        and s.fused.weight_decay_mode not in _DECAYS.get(s.fused.algorithm, ())
    ),
}


class FbgemmCudaLookup(TorchKernel):
    """FBGEMM's pooled lookup over our own storage; gradients and updates are PyTorch's."""

    name = "fbgemm"
    device_types = ("cuda",)
    lookup_limits: ClassVar[Limits] = {
        **_CUDA_LIMITS,
        "its lookup has other arguments": lambda s: not has_ops(_LOOKUP_OPS),
        "rows in a cache are its module's": lambda s: "MANAGED" in str(s.location),
    }
    update_limits: ClassVar[Limits] = {"it looks up only": lambda s: True}

    def _prepare(self) -> None:
        self._geometry = Geometry.of(self.layout, range(self.layout.num_features))
        self._one_table = Geometry.of_one_table(self.layout)

    def lookup(self, batch: LookupBatch) -> Tensor:
        """Look up rows, pooled or not; no autograd. [B, total_dim], or [N, D] without pooling."""
        if self.pooling is PoolingType.NONE or not batch.indices.numel():
            return super().lookup(batch)
        geometry, indices = self._geometry, batch.indices
        if batch.bags is not None:
            if self._one_table is None:
                return flat_blocks(self.lookup(as_rectangle(batch)), batch.bags, self.layout)
            geometry, indices = self._one_table, row_ids_of(self.layout.used_groups[0], batch)
        pooled: Tensor = torch.ops.fbgemm.dense_embedding_codegen_lookup_function(
            self.storage,
            geometry.weights_offsets,
            geometry.dim_offsets,
            geometry.total_dim,
            geometry.max_dim,
            geometry.row_cumsum,
            geometry.hash_bits,
            indices,
            batch.offsets.to(indices.dtype),
            POOLING_CODES[self.pooling],
            batch.weights,
            None,
            OUTPUT_CODES[self.output_dtype],
        )
        return pooled if batch.bags is None else pooled.view(-1)


@final
class FbgemmCudaKernel(TorchKernel):
    """FBGEMM's TBE module in FUSED mode, where on CUDA it fuses the optimizers.

    It can be built on a CPU too, so that tests without a GPU reach most of it. Storage can be
    adopted on the device only; elsewhere the module allocates.

    Without pooling all tables are concatenated to one, and each id is a bag. FBGEMM assigns one
    warp to a bag, so one bag per feature, with hundreds of thousands of ids, would be slow.

    For some optimizers the module supports batches of variable size, and sorts the output by rank
    itself. For the others ragged batches are padded with empty bags.

    Attributes:
        module: FBGEMM's module.
    """

    name = "fbgemm"
    device_types = ("cuda",)
    lookup_limits = update_limits = _MODULE_LIMITS
    has_own_graph = True

    def __init__(
        self,
        layout: StorageLayout,
        settings: LookupSettings,
        storage: Tensor | None = None,
        states: Mapping[str, Tensor] | None = None,
    ) -> None:
        if storage is not None and settings.location is not EmbeddingLocation.DEVICE:
            raise ValueError(
                "FBGEMM can adopt given weights on the device only; received location "
                f"{settings.location}."
            )
        assert states is None
        self.module = _module_of(layout, settings, without_weights=storage is not None)
        if storage is not None:
            self.module.weights_dev = storage
        place = {EmbeddingLocation.DEVICE: "dev", EmbeddingLocation.HOST: "host"}
        assert settings.location is not None
        flat = getattr(self.module, f"weights_{place.get(settings.location, 'uvm')}")
        spec = settings.optimizer
        assert spec is not None
        names = [name for name, kind in spec.rule.state.items() if kind != "table"]
        flat_states: dict[str, Tensor] = {
            name: buffer.detach().flatten()
            for name, prefix in zip(names, ("momentum1", "momentum2"), strict=False)
            for place in ("dev", "uvm", "host")
            if (buffer := getattr(self.module, f"{prefix}_{place}")).numel()
        }
        self._counts_steps = "step" in spec.rule.state
        self.steps_T = torch.zeros(len(layout.tables), device="cpu")
        self._checked_version = -1
        self._pending: WeakSet[_Step] = WeakSet()  # of forward passes without their backward
        if self._counts_steps:
            flat_states["step"] = self.steps_T
            # The module counts forwards, in evaluation too. We count backwards, and hand it the
            # number of this forward's; on the CPU, so that reading it does not wait for the device.
            self.module.iter = torch.zeros_like(self.module.iter, device="cpu")
        super().__init__(layout, settings, flat.detach().flatten(), flat_states)

    def look_up_and_update(self, batch: LookupBatch) -> Tensor | None:
        """Look up, recording the fused backward when gradients are enabled.

        Returns:
            None if the tables have several rates: the module supports one rate.
        """
        if not isinstance(self.rates, float):
            return None
        as_taken = self._as_taken(batch)
        weights = as_taken.weights
        if self._counts_steps:
            if self.steps_T._version != self._checked_version:
                self._check_steps_agree()
            before = int(self.steps_T[0]) + len(self._pending)
            self.module.iter_cpu.fill_(before)
            self.module.iter.fill_(before)
        if self.pooling is PoolingType.MEAN and weights is not None and weights.requires_grad:
            weights = self._with_mean_gradient(weights, batch.offsets)
        out: Tensor = self.module(*as_taken[:2], weights, **_sizes_of(as_taken))
        if batch.bags is not None and as_taken.bags is None:
            out = flat_blocks(out, batch.bags, self.layout)
            if batch.by_rank is not None:
                ranked = batch.by_rank, self.layout.dims_F
                out = _RowsByRank.apply(out, *ranked)  # type: ignore[no-untyped-call]
        elif as_taken.bags is not batch.bags:  # the added bags are the last
            out = out[: int(batch.bags @ self.layout.dims_F)]
        if self._counts_steps and out.requires_grad:
            step = _Step(self)
            self._pending.add(step)
            out.register_hook(step)
        return out

    def _as_taken(self, batch: LookupBatch) -> LookupBatch:
        """Convert a batch to the input of the module."""
        if self.pooling is PoolingType.NONE:
            return self._as_one_table(batch)
        if batch.indices.dtype is torch.int32 and self.layout.num_rows >= 2**31:
            # its backward numbers the rows of all tables in the dtype of the ids
            batch = batch._replace(indices=batch.indices.long(), offsets=batch.offsets.long())
        if batch.bags is None:
            return batch
        assert self.optimizer is not None
        if self.optimizer.algorithm not in _OF_VARIABLE_SIZE:
            return as_rectangle(batch)
        missing = self.layout.num_features - (batch.offsets.numel() - 1)
        if missing <= 0:
            return batch
        # With fewer bags than features, its CUDA kernels return uninitialized memory; without any
        # bag they divide by zero.
        bags, by_rank = batch.bags.copy(), batch.by_rank
        bags[-1] += missing
        if by_rank is not None:
            bags_FR = by_rank.bags_FR.copy()
            bags_FR[-1, -1] += missing
            by_rank = RankedBags(bags_FR)
        offsets = functional.pad(batch.offsets, (0, missing), value=batch.indices.numel())
        return batch._replace(offsets=offsets, bags=bags, by_rank=by_rank)

    def _as_one_table(self, batch: LookupBatch) -> LookupBatch:
        """Convert a batch of sequences to bags of one id each, of one table."""
        (group,) = self.layout.groups
        rows = row_ids_of(group, batch)
        if not rows.numel():
            return LookupBatch(rows, torch.zeros(2, dtype=rows.dtype, device=rows.device))
        return LookupBatch(rows, torch.arange(rows.numel() + 1, device=rows.device))

    @staticmethod
    def _with_mean_gradient(weights_N: Tensor, offsets: Tensor) -> Tensor:
        """Return the weights, whose gradient FBGEMM computes as if the bags were summed."""
        inverse_N = inverse_bag_length(offsets, weights_N.numel())
        weights_N = weights_N.view_as(weights_N)
        if weights_N.requires_grad:  # not under no_grad
            weights_N.register_hook(inverse_N.mul)
        return weights_N

    def use_rates(self, rates: Rates) -> None:
        """Set the learning rates from the next update on."""
        super().use_rates(rates)
        if isinstance(rates, float):
            self.module.set_learning_rate(rates)

    def prefetch(self, batch: LookupBatch) -> None:
        """Prefetch the rows of a later batch into the cache."""
        if self.settings.location is EmbeddingLocation.MANAGED_CACHING:
            as_taken = self._as_taken(batch)
            self.module.prefetch(*as_taken[:2], **_sizes_of(as_taken))

    def drop_cache(self) -> None:
        """Drop cached rows; the next lookup reads the weights again."""
        self.module.reset_cache_states()

    def flush(self) -> None:
        """Write cached rows back to the weights."""
        self.module.flush()

    def count_backward(self, step: _Step) -> None:
        """Count the backward pass of a forward pass."""
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
class _Sizes(list[list[int]]):
    """Bags of each feature as a list for FBGEMM, and as `bags_FR` the bags from each rank.

    `_without_waits` reads `bags_FR`.
    """

    def __init__(self, batch: LookupBatch) -> None:
        assert batch.bags is not None
        super().__init__([[count] for count in batch.bags.tolist()])
        self.bags_FR = batch.bags[:, None] if batch.by_rank is None else batch.by_rank.bags_FR


def _sizes_of(batch: LookupBatch) -> dict[str, _Sizes]:
    """Return FBGEMM's argument with the batch size of each feature; {} if all are equal."""
    return {} if batch.bags is None else {"batch_size_per_feature_per_rank": _Sizes(batch)}


class _RowsByRank(torch.autograd.Function):
    """Sort the flat output of a ragged lookup by rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, by_rank: RankedBags, dims_F: np.ndarray) -> Tensor:
        ctx.by_rank, ctx.dims_F = by_rank, dims_F
        return by_rank.rows_by_rank(rows, dims_F)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.by_rank.rows_by_feature(grad, ctx.dims_F), None, None


def _module_of(
    layout: StorageLayout, settings: LookupSettings, *, without_weights: bool = False
) -> Any:
    """Build FBGEMM's module, with empty weights if `without_weights`."""
    from fbgemm_gpu import split_embedding_configs as configs
    from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

    # Each forward pass of Adam, LAMB and LARS-SGD warns that they are "not optimized", which
    # must not end a program that raises warnings as errors.
    warnings.filterwarnings("ignore", r"\s*\S*\s*\[FBGEMM_GPU\] NOTE: The training optimizer")
    spec, location = settings.optimizer, settings.location
    assert spec is not None
    assert spec.weight_decay_mode is not None
    assert location is not None
    # the mode is row-wise Adagrad's; others have one, and FBGEMM asks for NONE
    has_modes = spec.weight_decay and spec.algorithm is EmbOptimType.EXACT_ROWWISE_ADAGRAD
    algorithm = "EXACT_SGD" if spec.algorithm is EmbOptimType.SGD else spec.algorithm.name
    compute = training.ComputeDevice["CPU" if layout.device.type == "cpu" else "CUDA"]
    rank_in_storage = {t: i for i, t in enumerate(layout.storage_order)}
    sizes = [(layout.tables[t].num_rows, layout.tables[t].dim) for t in layout.storage_order]
    features = [rank_in_storage[t] for t in layout.feature_table_map]
    if settings.pooling is PoolingType.NONE:  # see `FbgemmCudaKernel`
        sizes, features = [(layout.num_rows, sizes[0][1])], [0]
    place = common.EmbeddingLocation[location.name]
    factor = settings.cache_load_factor
    module = _without_waits(training.SplitTableBatchedEmbeddingBagsCodegen)
    if without_weights:  # a GPU may have no memory for a second copy
        module = _without_weights(module)
    return module(
        [(rows, dim, place, compute) for rows, dim in sizes],
        feature_table_map=features,
        weights_precision=configs.SparseType.from_dtype(settings.weights_dtype),
        output_dtype=configs.SparseType.from_dtype(settings.output_dtype),
        optimizer=configs.EmbOptimType[algorithm],
        stochastic_rounding=spec.stochastic_rounding,
        learning_rate=spec.learning_rate,
        eps=spec.eps,
        momentum=spec.momentum,
        weight_decay=spec.weight_decay,
        weight_decay_mode=training.WeightDecayMode[
            spec.weight_decay_mode.name if has_modes else "NONE"
        ],
        eta=spec.eta,
        beta1=spec.beta1,
        beta2=spec.beta2,
        pooling_mode=common.PoolingMode[settings.pooling.name],
        device=layout.device,
        bounds_check_mode=common.BoundsCheckMode.NONE,
        cache_load_factor=0.2 if factor is None else factor,
    )


@cache
def _without_waits(module: Any) -> Any:
    """Return a subclass of FBGEMM's module that uploads the metadata of bags without waiting.

    FBGEMM computes the metadata from lists, on several ranks number by number, and copies it in
    three parts from memory that is not pinned.
    """

    def generate(self: Any, offsets: Tensor, sizes: Any, *rest: Any, **named: Any) -> Any:
        made = module._generate_vbe_metadata(self, offsets, None, *rest, **named)
        if sizes is None:
            return made
        bags_FR, dims_F = sizes.bags_FR, self.feature_dims.numpy()  # on the host by now
        num_features, num_ranks = bags_FR.shape
        rows = np.zeros(bags_FR.size + 1, dtype=np.int64)  # first row of each rank and feature
        np.cumsum((bags_FR * dims_F[:, None]).T, out=rows[1:])
        of_ranks = np.zeros((num_features, num_ranks + 1), dtype=np.int64)
        np.cumsum(bags_FR, axis=1, out=of_ranks[:, 1:])
        of_features = np.concatenate([[0], np.cumsum(of_ranks[:, -1])])
        numbers = np.concatenate([of_features, of_ranks.ravel(), [0]]).astype(np.int32)
        # two int32 per word: of an odd number of them, the 0 at the end fills the last word
        words = np.concatenate([rows, numbers[: numbers.size // 2 * 2].view(np.int64)])
        uploaded = upload(words, self.current_device)
        narrow = uploaded[rows.size :].view(torch.int32)
        return made._replace(
            B_offsets=narrow[: num_features + 1],
            output_offsets_feature_rank=uploaded[: rows.size],
            B_offsets_rank_per_feature=narrow[num_features + 1 :][: of_ranks.size].view(
                num_features, -1
            ),
            max_B=int(of_ranks[:, -1].max()),
            max_B_feature_rank=int(bags_FR.max()),
            output_size=int(rows[-1]),
        )

    return type(module.__name__, (module,), {"_generate_vbe_metadata": generate})


@cache
def _without_weights(module: Any) -> Any:
    """Return a subclass of FBGEMM's module that allocates states, but no weights on the device.

    The module cannot adopt weights. It allocates each buffer in one method, which is overridden.
    """

    def apply_split(self: Any, split: Any, prefix: str, *rest: Any, **named: Any) -> None:
        if prefix == "weights":
            split = split._replace(dev_size=0)  # the offsets of tables are kept
        module._apply_split(self, split, prefix, *rest, **named)

    return type(module.__name__, (module,), {"_apply_split": apply_split})


@final
class _Step:
    """Pending update by the backward of one forward pass; lives as long as the graph."""

    def __init__(self, module: FbgemmCudaKernel) -> None:
        self._module = module

    def __call__(self, _grad: Tensor) -> None:
        self._module.count_backward(self)
