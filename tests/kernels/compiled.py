"""Compiles Triton's kernels for a GPU that is not there, in a process without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_COMPILE = """
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from recsys.kernels import (
    attention_grad_triton, attention_triton, ops_triton, output_triton, ragged_triton,
    sequence_triton, update_triton,
)

class Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

built = []

def compile(kernel: Any, grid: object, *arguments: object, **known: object) -> None:
    built.append(kernel.warmup(*arguments, grid=(1,), **known))
    print(kernel.__name__, len(built[-1].asm["cubin"]) > 0)

triton.runtime.driver.set_active(Driver())
for module in (
    attention_triton, ops_triton, output_triton, ragged_triton, sequence_triton, update_triton
):
    module.launch = compile

def empty(shape: int | tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)
"""


def num_compiled(script: str, folder: Path, capability: int = 90) -> int:
    """Return the number of kernels that compile for a compute capability in a script of launches.

    In the script kernels are compiled with the very arguments of a launch, and do not run. `empty`
    makes a tensor, of int64 if no dtype is given. `built` lists the compiled kernels. Other lines
    of the script's output that end in True count, too.
    """
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parents[2]), kept.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"CAPABILITY = {capability}\n" + _COMPILE + script],
        env=kept | own,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.count(" True")
