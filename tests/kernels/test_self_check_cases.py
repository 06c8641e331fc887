"""Each case of the self-check passes for the kernel as it is, and notices another result."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.needs_triton import HAS_TRITON, NEEDS_TRITON, needs_triton

if not HAS_TRITON:
    pytest.skip(NEEDS_TRITON, allow_module_level=True)

from recsys.kernels import self_check, self_check_cases, update_triton
from recsys.kernels.self_check_cases import CASES
from tests.fast_scans import fast_scans
from tests.pretended_cuda import KERNELS

pytestmark = needs_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODULES = {name: module for module, names in KERNELS.items() for name in names}


@pytest.fixture(autouse=True)
def _few_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the interpreter add up groups of blocks of few ids."""
    if DEVICE.type == "cuda":
        yield
        return
    monkeypatch.setattr(self_check_cases, "_SHAPES", ((20, 60, True), (3, 40, False)))
    monkeypatch.setattr(self_check_cases, "_VERY_MANY", (1, 300, False))
    for name, value in {"_TILE": 1, "_LEAST": 4, "_MOST": 4, "_FEW_BLOCKS": 8}.items():
        monkeypatch.setattr(update_triton, name, value)
    with fast_scans():
        yield


def test_every_kernel_has_a_case() -> None:
    assert CASES.keys() == MODULES.keys()


@pytest.mark.parametrize("name", CASES)
def test_pytorch_gives_the_same(name: str) -> None:
    before = torch.get_rng_state()
    assert self_check._difference(name, DEVICE) == ""
    assert torch.equal(torch.get_rng_state(), before)


def _broken(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel with another last value in its result, or in the tensor that it updates."""

    def broken(*args: Any) -> Any:
        found = kernel(*args)
        changed = args[0] if found is None else found
        if isinstance(changed, update_triton.RowUpdate):
            changed = changed.weight_RD
        last = changed if isinstance(changed, Tensor) else changed[-1]
        last.view(-1)[-1] += 1
        return found

    return broken


@pytest.mark.parametrize("name", CASES)
def test_another_result_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"recsys.kernels.{MODULES[name]}")
    monkeypatch.setattr(module, name, _broken(getattr(module, name)))
    assert self_check._difference(name, DEVICE).startswith("another result: ")
