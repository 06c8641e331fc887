"""Import of Triton for the modules `*_triton`, with a clear error if it is not installed.

Triton is optional: PyTorch's CUDA builds for Linux include it, and `recsys.kernels` imports these
modules only if it is installed.
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
