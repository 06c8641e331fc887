"""The modules of the package, for tests that walk all of them."""

from __future__ import annotations

import importlib.util
import pkgutil

import recsys

# Left out of every walk without Triton: importing them raises an error about the missing package.
TRITON_MODULES = frozenset(
    f"recsys.kernels.{name}"
    for name in (
        "attention_grad_triton",
        "attention_triton",
        "ops_triton",
        "optional_triton",
        "output_triton",
        "ragged_triton",
        "self_check_cases",
        "sequence_triton",
        "update_triton",
    )
)


def all_modules() -> list[str]:
    """Return the names of all modules, the package first; commands (`__main__`) are left out."""
    has_triton = importlib.util.find_spec("triton") is not None
    names = [info.name for info in pkgutil.walk_packages(recsys.__path__, "recsys.")]
    return [
        "recsys",
        *(
            name
            for name in names
            if not name.endswith("__main__") and (has_triton or name not in TRITON_MODULES)
        ),
    ]
