"""Triton, for the modules whose kernels need it; importing them without Triton says what to do.

Triton is optional: PyTorch's builds for CUDA on Linux bring it, and `recsys.kernels` imports these
modules only where it is installed.
"""

from __future__ import annotations

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

__all__ = ["tl", "triton"]
