"""What FBGEMM's kernels really do, as a table of measured facts, and the choice that follows.

A setting that a kernel would ignore without a word counts as unsupported.
`tests/kernels/test_support.py` measures the CPU rows of the table anew, so that a new FBGEMM
cannot make them wrong unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch

from recsys.kernels.ops import USE_FBGEMM
from recsys.kernels.tbe_fbgemm import FUSED_ON_CPU, has_cpu_ops, has_cuda_ops
from recsys.kernels.types import (
    EmbeddingLocation,
    EmbOptimType,
    OptimizerSpec,
    PoolingMode,
    UpdateMode,
    WeightDecayMode,
)

__all__ = [
    "LIMITS",
    "Backend",
    "BackendChoice",
    "Limit",
    "LookupSettings",
    "choose_backend",
    "fbgemm_element_type",
    "shared_optimizer",
]

Backend: TypeAlias = Literal["fbgemm", "torch"]


@final
class BackendChoice(NamedTuple):
    """A backend and, for `repr` and error messages, why."""

    backend: Backend
    reason: str


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LookupSettings:
    """Everything about a lookup that decides which kernels can do it."""

    device: torch.device
    weights_dtype: torch.dtype
    output_dtype: torch.dtype
    dims: Sequence[int]
    feature_table_map: Sequence[int]
    pooling: PoolingMode
    optimizer: OptimizerSpec | None
    update_mode: UpdateMode
    location: EmbeddingLocation

    @property
    def fused(self) -> OptimizerSpec | None:
        """The optimizer that a kernel has to apply inside backward, if any."""
        return self.optimizer if self.update_mode is UpdateMode.FUSED else None


@final
@dataclass(frozen=True, slots=True)
class Limit:
    """One thing FBGEMM cannot do on one kind of device."""

    device_type: str
    reason: str
    applies: Callable[[LookupSettings], bool]


def _features_are_scattered(s: LookupSettings) -> bool:
    if s.pooling is PoolingMode.NONE:  # its backward is one of rows: see `FbgemmCpuKernel._as_sum`
        return False
    changes = sum(
        a != b for a, b in zip(s.feature_table_map, s.feature_table_map[1:], strict=False)
    )
    return changes + 1 > len(set(s.feature_table_map))


_HALF_OR_FULL = (torch.float32, torch.float16)
_DECAYS_ON_CUDA: Mapping[EmbOptimType, tuple[WeightDecayMode, ...]] = {
    EmbOptimType.SGD: (),
    EmbOptimType.EXACT_ADAGRAD: (),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (WeightDecayMode.L2, WeightDecayMode.DECOUPLE),
    EmbOptimType.ADAM: (WeightDecayMode.DECOUPLE,),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: (WeightDecayMode.DECOUPLE,),
    EmbOptimType.LAMB: (WeightDecayMode.DECOUPLE,),
    EmbOptimType.LARS_SGD: (WeightDecayMode.L2,),
}
"""The optimizers that it fuses on CUDA as ours do them, each with the decays that it heeds."""

LIMITS: tuple[Limit, ...] = (
    # CPU: measured with fbgemm_gpu_cpu 1.8.0.
    Limit(
        "cpu",
        "its CPU kernels do not read tables of this dtype (only fp32 and fp16)",
        lambda s: s.weights_dtype not in _HALF_OR_FULL,
    ),
    Limit(
        "cpu",
        "its CPU kernels do not write outputs of this dtype (only fp32 and fp16)",
        lambda s: s.output_dtype not in _HALF_OR_FULL,
    ),
    Limit(
        "cpu",
        "its CPU backward is wrong when the features of one table are not neighbours",
        _features_are_scattered,
    ),
    Limit(
        "cpu",
        "its CPU kernels fuse only SGD, Adagrad and row-wise Adagrad",
        lambda s: s.fused is not None and s.fused.algorithm not in FUSED_ON_CPU,
    ),
    Limit(
        "cpu",
        "its CPU kernels ignore weight decay",
        lambda s: s.fused is not None and s.fused.weight_decay != 0,
    ),
    Limit(
        "cpu",
        "its CPU kernels ignore stochastic rounding",
        lambda s: s.fused is not None and s.fused.stochastic_rounding,
    ),
    Limit("cpu", "the installed fbgemm_gpu lacks the CPU kernels", lambda s: not has_cpu_ops()),
    # CUDA: from fbgemm_gpu 1.8.0's own checks; tests/gpu compares the two backends there.
    Limit(
        "cuda",
        "it has no CUDA kernel of this optimizer that was compared",
        lambda s: s.fused is not None and s.fused.algorithm not in _DECAYS_ON_CUDA,
    ),
    Limit("cuda", "the installed fbgemm_gpu has no CUDA kernels", lambda s: not has_cuda_ops()),
    Limit(
        "cuda",
        "on CUDA it serves the fused update only",
        lambda s: s.update_mode is not UpdateMode.FUSED,
    ),
    Limit(
        "cuda",
        "its CUDA kernels need dims divisible by 4",
        lambda s: any(dim % 4 for dim in s.dims),
    ),
    Limit(
        "cuda",
        "its CUDA kernels train tables of fp32 and fp16 only",
        lambda s: s.weights_dtype not in _HALF_OR_FULL,
    ),
    Limit(
        "cuda",
        "its CUDA kernels write outputs of fp32, fp16 and bf16 only",
        lambda s: s.output_dtype not in (*_HALF_OR_FULL, torch.bfloat16),
    ),
    Limit(
        "cuda",
        "it ignores this weight decay",
        lambda s: (
            s.fused is not None
            and s.fused.weight_decay != 0
            and s.fused.weight_decay_mode not in _DECAYS_ON_CUDA.get(s.fused.algorithm, ())
        ),
    ),
)


def choose_backend(settings: LookupSettings) -> BackendChoice:
    """`fbgemm` where it does exactly what the settings say, else `torch`.

    Args:
        settings: The lookup to serve.

    Returns:
        The backend and the reason.

    Example:
        >>> choose_backend(LookupSettings(
        ...     device=torch.device("cpu"), weights_dtype=torch.bfloat16,
        ...     output_dtype=torch.float32, dims=[4], feature_table_map=[0],
        ...     pooling=PoolingMode.SUM, optimizer=None, update_mode=UpdateMode.GRADIENT,
        ...     location=EmbeddingLocation.HOST)).backend
        'torch'
    """
    device_type = settings.device.type
    if not USE_FBGEMM:
        return BackendChoice("torch", "fbgemm_gpu is not installed, or RECSYS_KERNELS=torch")
    if device_type not in {limit.device_type for limit in LIMITS}:
        return BackendChoice("torch", f"FBGEMM has no kernels for device '{device_type}'")
    for limit in LIMITS:
        if limit.device_type == device_type and limit.applies(settings):
            return BackendChoice("torch", f"not FBGEMM: {limit.reason}")
    return BackendChoice("fbgemm", f"FBGEMM supports these settings on {device_type}")


def shared_optimizer(
    spec: OptimizerSpec, device: torch.device, update_mode: UpdateMode
) -> OptimizerSpec:
    """What of an optimizer must be equal for tables to be served by one lookup.

    A learning rate of 0 stands for any: each table of the lookup is then given its own. FBGEMM's
    CUDA module takes one rate for all its tables.

    Example:
        >>> spec = OptimizerSpec(algorithm=EmbOptimType.SGD, learning_rate=0.5)
        >>> shared_optimizer(spec, torch.device("cpu"), UpdateMode.FUSED).learning_rate
        0.0
    """
    if device.type == "cuda" and update_mode is UpdateMode.FUSED:
        return spec
    return replace(spec, learning_rate=0.0)


def fbgemm_element_type(element_type: torch.dtype | str) -> Any:
    """FBGEMM's `SparseType` of an element type.

    Args:
        element_type: A dtype, or a name such as "FP16" or "INT4".

    Raises:
        ImportError: FBGEMM is not installed.
        ValueError: It has no such type.

    Example:
        >>> fbgemm_element_type(torch.bfloat16).name
        'BF16'
    """
    from fbgemm_gpu.split_embedding_configs import SparseType

    if isinstance(element_type, str):
        return SparseType(element_type.lower())
    return SparseType.from_dtype(element_type)
