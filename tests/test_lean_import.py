"""``import recsys`` costs nothing: no torch, no CUDA, no process group, no optional package."""

from __future__ import annotations

import json
import subprocess
import sys

OPTIONAL = {"matplotlib", "pandas", "scipy", "sklearn", "torchrec", "tqdm", "yaml"}

# Every public module of the package; they may import torch and fbgemm_gpu, and nothing else.
EVERYTHING = """
import pkgutil, recsys, importlib
for info in pkgutil.walk_packages(recsys.__path__, "recsys."):
    if not info.name.endswith("__main__"):
        importlib.import_module(info.name)
"""
REPORT = """
import json, sys
torch = sys.modules.get("torch")
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "cuda": torch is not None and torch.cuda.is_initialized(),
    "process_group": torch is not None and torch.distributed.is_initialized(),
}))
"""


def state_after(code: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT], capture_output=True, text=True, check=True
    )
    state: dict[str, object] = json.loads(done.stdout)
    return state


def test_the_package_alone_does_not_even_import_torch() -> None:
    state = state_after("import recsys")
    assert "torch" not in state["modules"]  # type: ignore[operator]


def test_all_modules_leave_cuda_and_processes_alone() -> None:
    # Packages that torch itself imports where they are installed are not ours.
    suppressed = (
        "import contextlib, torch\nwith contextlib.suppress(ImportError): import fbgemm_gpu"
    )
    by_torch = set(state_after(suppressed)["modules"])  # type: ignore[call-overload]
    state = state_after(EVERYTHING)
    assert state["cuda"] is False
    assert state["process_group"] is False
    assert OPTIONAL & (set(state["modules"]) - by_torch) == set()  # type: ignore[call-overload]
