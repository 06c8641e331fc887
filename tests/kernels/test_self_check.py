"""Triton's kernels are compared with PyTorch at their first use on a GPU without test results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recsys import KeyedJaggedTensor
from recsys.kernels import ops, self_check
from recsys.kernels.self_check import COVERED, check_all, digest_of_kernels, self_checked
from tests.needs_triton import HAS_TRITON, needs_triton
from tests.pretended_cuda import CUDA, KERNELS, PretendedCuda

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = {name for names in KERNELS.values() for name in names}

if HAS_TRITON:
    from recsys.kernels import ops_triton
    from recsys.kernels.optional_triton import tl, triton

    @triton.jit
    def _broken_cumsum(tensors, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        out_ptr, _, values_ptr = tensors
        places = tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < total, other=0)
        tl.store(out_ptr + places, tl.cumsum(values), mask=places < total)  # without the 0


@pytest.fixture
def new_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """A process that starts on a GPU without known results."""
    monkeypatch.setattr(self_check, "_pending", set(NAMES))
    monkeypatch.setattr(self_check, "_gpu_name", lambda device: "A New GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("RECSYS_SELF_CHECK", raising=False)
    self_check._is_covered.cache_clear()
    return "A New GPU"


def _offsets() -> list[int]:
    """Offsets of a batch on a device that is not there, which are a kernel's."""
    with PretendedCuda(triton=True) as cuda:
        lengths = torch.tensor([2, 0, 1]).to(CUDA)
        kjt = KeyedJaggedTensor(["f"], torch.arange(3).to(CUDA), lengths=lengths)
        offsets: list[int] = kjt.offsets().tolist()
        assert "complete_cumsum" in cuda.launched
    return offsets


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is pretended")
class TestOnAPretendedDevice:
    """Self-checks of sound kernels, and of a broken one."""

    def test_a_sound_kernel_is_compared_once(
        self, new_gpu: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compared = list[str]()
        difference = self_check._difference

        def note(name: str, device: torch.device) -> str:
            compared.append(name)
            return difference(name, device)

        monkeypatch.setattr(self_check, "_difference", note)
        assert _offsets() == _offsets() == [0, 2, 2, 3]
        assert compared == ["complete_cumsum"]

    def test_a_broken_kernel_is_an_error_each_time(
        self, new_gpu: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ops_triton, "_add_up_blocks", _broken_cumsum)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="complete_cumsum") as raised:
                _offsets()
            for part in (
                new_gpu,
                triton.__version__,
                torch.__version__,
                "RECSYS_KERNELS=torch",
                "Mismatched",
            ):
                assert part in str(raised.value)

    def test_the_switch_turns_it_off(self, new_gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops_triton, "_add_up_blocks", _broken_cumsum)
        monkeypatch.setenv("RECSYS_SELF_CHECK", "0")
        assert _offsets()[0] == 2

    def test_kernels_with_results_are_not_compared(
        self, new_gpu: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ops_triton, "_add_up_blocks", _broken_cumsum)
        tested = {(new_gpu, triton.__version__): digest_of_kernels()}
        monkeypatch.setattr(self_check, "COVERED", tested)
        assert _offsets()[0] == 2

    @pytest.mark.parametrize("other", ["source", "triton"])
    def test_results_of_other_kernels_do_not_count(
        self, new_gpu: str, monkeypatch: pytest.MonkeyPatch, other: str
    ) -> None:
        monkeypatch.setattr(ops_triton, "_add_up_blocks", _broken_cumsum)
        version = "0.1" if other == "triton" else triton.__version__
        digest = "0123" if other == "source" else digest_of_kernels()
        monkeypatch.setattr(self_check, "COVERED", {(new_gpu, version): digest})
        with pytest.raises(RuntimeError, match=r"complete_cumsum.*Mismatched"):
            _offsets()

    def test_nothing_is_compared_while_a_graph_is_captured(
        self, new_gpu: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compared = list[str]()
        monkeypatch.setattr(
            self_check, "_difference", lambda name, device: compared.append(name) or ""
        )
        lengths = torch.tensor([2, 1])
        with monkeypatch.context() as capture:
            capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            ops_triton.complete_cumsum(lengths)
            assert compared == []
        for _ in range(2):
            ops_triton.complete_cumsum(lengths)
        assert compared == ["complete_cumsum"]


def test_a_compiler_that_fails_is_a_difference(
    new_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def case(device: torch.device) -> Any:
        raise NotImplementedError("no such instruction")
        yield

    cases = SimpleNamespace(CASES={"kernel": case})  # the module needs Triton
    monkeypatch.setitem(sys.modules, "recsys.kernels.self_check_cases", cases)
    assert self_check._difference("kernel", torch.device("cpu")).endswith("no such instruction")


def test_covered_is_what_results_say() -> None:
    found = {}
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        if isinstance(result, dict) and "kernels" in result:
            found[result["gpu"], result["triton"]] = result["kernels"]
    assert found == COVERED, f"copy to self_check.COVERED: {found}"


def test_the_digest_is_that_of_the_source(tmp_path: Path) -> None:
    for module in self_check._MODULES:
        source = Path(ops.__file__).parent / f"{module}.py"
        (tmp_path / source.name).write_bytes(source.read_bytes())
    assert digest_of_kernels(tmp_path) == digest_of_kernels()
    (tmp_path / "ops_triton.py").write_text("other")
    assert digest_of_kernels(tmp_path) != digest_of_kernels()


@needs_triton
def test_check_all_names_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_difference", lambda name, device: f"{name} on {device}")
    assert check_all(torch.device("cpu")) == {name: f"{name} on cpu" for name in NAMES}


def test_a_function_keeps_its_name() -> None:
    known = dict(self_check._kernels)

    def kernel() -> None:
        """Do nothing."""

    try:
        assert self_checked(kernel).__doc__ == "Do nothing."
    finally:
        self_check._pending.discard("kernel")
        self_check._kernels.clear()
        self_check._kernels.update(known)
