"""The backends of lookups, in order of preference, and the choice among them.

The file of each backend has a table of its measured limits. A setting that a kernel would silently
ignore counts as unsupported. `tests/kernels/test_support.py` measures the limits on the CPU again,
so a change in a new FBGEMM fails a test.

A new backend is a class that extends `TorchKernel` (`Backend`, for quantized tables), and its place
in `BACKENDS`.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch

from recsys.kernels import ops
from recsys.kernels.backend import Backend, Role
from recsys.kernels.quantized import QuantizedInFbgemm, QuantizedInTorch
from recsys.kernels.tbe_fbgemm import FbgemmCpuKernel
from recsys.kernels.tbe_fbgemm_module import FbgemmCudaKernel, FbgemmCudaLookup
from recsys.kernels.tbe_torch import TorchKernel
from recsys.kernels.tbe_triton import TritonKernel
from recsys.kernels.types import LookupSettings, OptimizerSpec, UpdateMode

BACKENDS: tuple[type[Backend], ...] = (
    FbgemmCudaKernel,
    FbgemmCpuKernel,
    FbgemmCudaLookup,
    TritonKernel,
    TorchKernel,
    QuantizedInFbgemm,
    QuantizedInTorch,
)
"""The last of either kind of tables serves everything."""


@final
class BackendChoice(NamedTuple):
    """A backend's name and, for `repr` and error messages, why; and its class."""

    backend: str
    reason: str
    kernel: type[Backend]


def choose_backend(
    settings: LookupSettings, role: Role = "update", wanted: str | None = None
) -> BackendChoice:
    """Return the first backend that supports all settings.

    Args:
        settings: The lookup to serve.
        role: The forward pass, or gradients and updates; their backends may differ.
        wanted: Name of the required backend; None: any.

    Returns:
        The backend and the reason.

    Raises:
        ValueError: There is no backend of the wanted name, or it does not serve the settings.

    Example:
        >>> from recsys.kernels.types import PoolingType
        >>> choose_backend(LookupSettings(
        ...     device=torch.device("cpu"), weights_dtype=torch.bfloat16,
        ...     dims=[4], feature_table_map=[0], pooling=PoolingType.SUM,
        ...     optimizer=None, update_mode=UpdateMode.GRADIENT)).backend
        'torch'
    """
    device_type, refused = settings.device.type, dict[str, str]()
    if device_type == "cuda" and ops.WHY_TRITON_FAILS:
        text = f"Steps on a GPU launch several times as many kernels: {ops.WHY_TRITON_FAILS}."
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    for kernel in BACKENDS:
        has_device = kernel.device_types is None or device_type in kernel.device_types
        if kernel.reads_quantized is not bool(settings.bits) or not has_device:
            continue
        reason = kernel.refusal(settings, role)
        if reason is not None:
            # FBGEMM has several classes of one name; the reason of the preferred one is reported
            refused.setdefault(kernel.name, f"not {kernel.name}: {reason}")
        elif wanted in (None, kernel.name):
            break
    else:
        named = [why for name, why in refused.items() if wanted in (None, name)]
        why = named[0] if named else f"it has no kernels for {device_type!r}"
        raise ValueError(
            f"backend={wanted!r} cannot serve this lookup: {why}. Leave backend=None to choose one "
            "that can."
        )
    reasons = [why for name, why in refused.items() if name != kernel.name]
    if kernel.device_types is not None:
        reasons.insert(0, f"it supports these settings on {device_type}")
    elif wanted is not None:
        reasons = ["asked for"]
    elif not reasons:
        reasons = [f"the others have no kernels for device '{device_type}'"]
    why = "; ".join(reasons)
    return BackendChoice(kernel.name, why, kernel)


def shared_optimizer(
    spec: OptimizerSpec, device: torch.device, update_mode: UpdateMode
) -> OptimizerSpec:
    """Return the settings of an optimizer that tables of one lookup must share.

    A learning rate of 0 stands for any: each table of the lookup is then given its own. FBGEMM's
    CUDA module takes one rate for all its tables.

    Example:
        >>> from recsys.kernels.types import EmbOptimType
        >>> spec = OptimizerSpec(algorithm=EmbOptimType.SGD, learning_rate=0.5)
        >>> shared_optimizer(spec, torch.device("cpu"), UpdateMode.FUSED).learning_rate
        0.0
    """
    # on CUDA the fused update has one rate per launch
    # docs/decisions/optimizers.md, "Tables of one lookup have their own learning rates"
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
