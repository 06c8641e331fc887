"""Comparison of Triton kernels with PyTorch at their first use on an untested GPU.

A kernel is covered if the tests passed with the same source, on the same GPU and with the same
Triton: `COVERED` lists the results in `benchmarks/results/`. Any other kernel is compared with
PyTorch, on small inputs on the device, when a process first calls it. A difference raises an error.
`RECSYS_SELF_CHECK=0` turns the comparison off. `python -m recsys doctor` compares all kernels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")

COVERED: Final[Mapping[tuple[str, str], str]] = {
    ("NVIDIA H100 80GB HBM3", "3.6.0"): "c153e7b75316f239",
}
"""Digest of the kernels that `benchmarks/results/` covers, by GPU and Triton version."""

_MODULES = (
    "attention_grad_triton",
    "attention_triton",
    "ops_triton",
    "output_triton",
    "ragged_triton",
    "sequence_triton",
    "update_triton",
)

_kernels: dict[str, str] = {}
"""Module of each kernel. A kernel is a function that launches one or more of Triton's."""
_pending: set[str] = set()
"""Kernels that this process has not called yet."""


def self_checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compare a kernel with PyTorch at its first use; `self_check_cases` has a case of its name."""
    name = function.__name__
    _kernels[name] = function.__module__
    _pending.add(name)

    @functools.wraps(function)
    def kernel(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if name in _pending:
            _check_first_use(name, _device_of(args))
        return function(*args, **kwargs)

    return kernel


def check_all(device: torch.device) -> dict[str, str]:
    """Compare all kernels with PyTorch.

    Args:
        device: A CUDA device.

    Returns:
        By kernel, the error; empty if it returns the same as PyTorch.
    """
    for module in _MODULES:
        importlib.import_module(f"recsys.kernels.{module}")
    return {name: _difference(name, device) for name in sorted(_kernels)}


def digest_of_kernels(folder: Path | None = None) -> str:
    """Return the digest of the kernels' source.

    Args:
        folder: Folder of the modules; None: the folder of this module.
    """
    digest = hashlib.sha256()
    for module in _MODULES:
        digest.update(((folder or Path(__file__).parent) / f"{module}.py").read_bytes())
    return digest.hexdigest()[:16]


def _check_first_use(name: str, device: torch.device) -> None:
    gpu = _gpu_name(device)
    if gpu is not None and torch.cuda.is_current_stream_capturing():
        return  # a comparison waits for the device, which fails in a capture; it stays pending
    _pending.discard(name)
    if gpu is None or os.environ.get("RECSYS_SELF_CHECK") == "0" or _is_covered(gpu):
        return
    error = _difference(name, device)
    if error:
        _pending.add(name)
        raise RuntimeError(
            f"Triton kernel {name} must return the same as PyTorch; received {error}, on {gpu} "
            f"with Triton {_triton_version()} and torch {torch.__version__}. Set "
            "RECSYS_KERNELS=torch to train without Triton kernels. `python -m recsys doctor` "
            "compares all kernels. RECSYS_SELF_CHECK=0 skips the comparison."
        )


def _difference(name: str, device: torch.device) -> str:
    """Return how a kernel differs from PyTorch on a device; empty if it does not."""
    from recsys.kernels.self_check_cases import CASES

    was_pending = name in _pending
    _pending.discard(name)  # the case calls the kernel
    try:
        with torch.no_grad():
            for result, expected in CASES[name](device):
                torch.testing.assert_close(result, expected)
    except AssertionError as error:
        return f"another result: {' '.join(str(error).split())}"
    except Exception as error:  # for example of Triton's compiler
        return f"{type(error).__name__}: {error}"
    finally:
        if was_pending:
            _pending.add(name)
    return ""


@functools.cache
def _is_covered(gpu: str) -> bool:
    return COVERED.get((gpu, _triton_version())) == digest_of_kernels()


def _gpu_name(device: torch.device) -> str | None:
    """Return the name of a CUDA device; None for a CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _triton_version() -> str:
    import triton

    version: str = triton.__version__
    return version


def _device_of(args: tuple[Any, ...]) -> torch.device:
    # a `RowUpdate` is a tuple with the tensors
    first = args[0] if isinstance(args[0], tuple) else args
    return next(value.device for value in first if isinstance(value, Tensor))
