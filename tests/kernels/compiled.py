"""Compiles Triton's kernels for a GPU that is not there, in a process without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from recsys.kernels import (
    ops_triton, output_triton, ragged_triton, sequence_triton, update_triton
)

def compile(kernel, arguments, warps=4, **known):
    names = [name for name in kernel.arg_names if name not in known]
    signature = dict(zip(names, arguments.split(), strict=True)) | dict.fromkeys(known, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=known)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": warps}
    built = triton.compile(source, target=target, options=options)
    print(kernel.__name__, len(built.asm["cubin"]) > 0)
    return built
"""


def num_compiled(script: str, folder: Path) -> int:
    """How many kernels a script compiles for compute capability 9.0, by calls of ``compile``.

    ``compile(kernel, arguments, warps, **known)`` takes the kernel, its arguments' types and its
    constants. What else the script prints that ends in True counts, too.
    """
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    own = {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _COMPILE + script],
        env=kept | own,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.count(" True")
