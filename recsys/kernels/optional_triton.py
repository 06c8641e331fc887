"""Triton import and kernel launch for the modules `*_triton`; a clear error without Triton.

Triton is optional: PyTorch's CUDA builds for Linux include it, and `recsys.kernels` imports these
modules only if it is installed.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "The modules recsys.kernels.*_triton are optional and need Triton, which is not installed. "
        "Run pip install 'recsys-torch[triton]' to import them. Without Triton, FBGEMM's and "
        "PyTorch's kernels are used.",
        name="triton",
    ) from error

__all__ = ["launch", "tl", "triton"]


def launch(
    kernel: Any, grid: int | tuple[int, ...], tensors: tuple[Any, ...], *numbers: Any, **known: Any
) -> None:
    """Launch a kernel on the device of its first tensor.

    Args:
        kernel: the function under `triton.jit`.
        grid: the number of programs, per axis.
        tensors: its first argument, a tuple or NamedTuple of tensors; the first is a tensor. None
            marks an absent tensor, which the kernel sees at compile time. Triton specializes
            integers in tuples, so numbers that differ from batch to batch do not belong there.
        numbers: its other arguments.
        known: its compile-time constants, and Triton's options such as `num_warps`.
    """
    device = tensors[0].device
    programs = grid if isinstance(grid, tuple) else (grid,)
    if device.type != "cuda":  # Triton's interpreter
        kernel[programs](tensors, *numbers, **known)
        return
    with torch.cuda.device(device):  # Triton launches on the current device
        kernel[programs](tensors, *numbers, **known)
