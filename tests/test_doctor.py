"""The doctor's judgements, on made-up machines; and that it can look at this one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from recsys.__main__ import main
from recsys.doctor import (
    PAIRS,
    Facts,
    Finding,
    Kernels,
    _namesakes,
    diagnose,
    format_report,
    print_kernels,
)
from recsys.kernels import ops
from recsys.kernels.hashed import build

CPU_KERNELS = Kernels(fbgemm="1.8.0", has_cpu_kernels=True, backends={"cpu": "fbgemm (it can)"})
CUDA_KERNELS = Kernels(fbgemm="1.8.0", has_cpu_kernels=True, has_cuda_kernels=True)
LAPTOP = Facts(distributions={"fbgemm-gpu-cpu": "1.8.0"}, kernels=CPU_KERNELS)
GPU = {
    "torch": "2.13.0+cu130",
    "torch_cuda": "13.0",
    "has_nvidia_driver": True,
    "gpus": ("H100, 80 GiB",),
    "process_groups": ("gloo", "nccl"),
}


def problems(facts: Facts) -> list[Finding]:
    return [finding for finding in diagnose(facts) if finding.level == "problem"]


def notes(facts: Facts) -> list[Finding]:
    return [finding for finding in diagnose(facts) if finding.level == "note"]


@pytest.mark.parametrize(
    "facts",
    [
        LAPTOP,
        Facts(**GPU, distributions={"fbgemm-gpu": "1.8.0"}, kernels=CUDA_KERNELS),
        # unpacked by hand, so no distribution is recorded
        Facts(
            torch="2.11.0+cu130",
            kernels=Kernels(fbgemm="1.6.0", has_cpu_kernels=True, has_cuda_kernels=True),
        ),
        # a CUDA build of torch on a machine without GPU
        Facts(
            torch="2.13.0+cu130",
            torch_cuda="13.0",
            distributions={"fbgemm-gpu": "1.8.0"},
            kernels=CUDA_KERNELS,
        ),
    ],
    ids=["laptop", "gpu", "unpacked", "cuda-build-without-gpu"],
)
def test_healthy(facts: Facts) -> None:
    assert {finding.level for finding in diagnose(facts)} == {"ok"}


def test_every_known_pair_fits() -> None:
    for torch, fbgemm in PAIRS.items():
        kernels = Kernels(fbgemm=f"{fbgemm}.0", has_cpu_kernels=True)
        distributions = {"fbgemm-gpu-cpu": f"{fbgemm}.0"}
        assert not problems(
            Facts(torch=f"{torch}.0+cpu", distributions=distributions, kernels=kernels)
        )


def test_triton_that_cannot_compile() -> None:
    kernels = replace(CUDA_KERNELS, why_triton_fails="Triton finds no C compiler")
    facts = Facts(**GPU, distributions={"fbgemm-gpu": "1.8.0"}, kernels=kernels)
    [note] = notes(facts)
    assert note.text.endswith("several times as many kernels: Triton finds no C compiler.")
    assert not notes(replace(facts, gpus=()))


def test_why_triton_fails_is_told_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(ops, "WHY_TRITON_FAILS", "Triton finds no C compiler")
    with pytest.warns(RuntimeWarning, match="kernels: Triton finds no C compiler"):
        print_kernels()
    found = Kernels(**json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found.why_triton_fails == "Triton finds no C compiler"
    assert found.backends.keys() == {"cpu", "cuda"}


def test_triton_kernels_that_differ_are_problems() -> None:
    kernels = replace(CUDA_KERNELS, triton_differences={"pack": "", "row_ids": "another result"})
    facts = Facts(**GPU, distributions={"fbgemm-gpu": "1.8.0"}, kernels=kernels)
    [problem] = problems(facts)
    assert "row_ids" in problem.text
    assert "RECSYS_KERNELS=torch" in str(problem.fix)
    sound = replace(facts, kernels=replace(kernels, triton_differences={"pack": ""}))
    assert not problems(sound)
    assert any("All 1 Triton kernels" in finding.text for finding in diagnose(sound))


def test_without_fbgemm() -> None:
    assert not problems(Facts())
    [note] = notes(Facts())
    assert "everything works, on slower kernels" in note.text
    assert note.fix == 'pip install "fbgemm-gpu-cpu==1.8.*"'


@pytest.mark.parametrize(
    ("facts", "text", "fix"),
    [
        (
            Facts(python=(3, 10)),
            "Python must be 3.11 or newer; this is 3.10.",
            None,
        ),
        (
            Facts(torch="2.9.1+cpu"),
            "torch must be 2.11 or newer; installed is 2.9.1+cpu.",
            'pip install "torch==2.14.*"',
        ),
        (
            Facts(
                distributions={"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"},
                kernels=CPU_KERNELS,
            ),
            "overwrite each other's files are installed: fbgemm-gpu 1.8.0, fbgemm-gpu-cpu 1.8.0",
            'pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install "fbgemm-gpu-cpu==1.8.*"',
        ),
        (
            Facts(**GPU, distributions={"fbgemm-gpu-genai": "1.8.0"}, kernels=CUDA_KERNELS),
            "fbgemm-gpu-genai 1.8.0 has no embedding kernels.",
            'pip uninstall -y fbgemm-gpu-genai && pip install "fbgemm-gpu==1.8.*"',
        ),
        (
            Facts(
                torch="2.11.0+cpu",
                distributions={"fbgemm-gpu-cpu": "1.8.0"},
                kernels=Kernels(load_error="undefined symbol"),
            ),
            "torch 2.11.0+cpu needs FBGEMM 1.6; found fbgemm-gpu-cpu 1.8.0.",
            'pip uninstall -y fbgemm-gpu-cpu && pip install "fbgemm-gpu-cpu==1.6.*"',
        ),
        (
            Facts(
                torch="2.15.0+cpu",
                distributions={"fbgemm-gpu-cpu": "1.8.0"},
                kernels=CPU_KERNELS,
            ),
            "torch 2.15.0+cpu and fbgemm-gpu-cpu 1.8.0 do not fit. Known pairs: torch 2.11 with",
            'pip install "torch==2.14.*" && pip uninstall -y fbgemm-gpu-cpu && '
            'pip install "fbgemm-gpu-cpu==1.9.*"',
        ),
        (
            Facts(
                distributions={"fbgemm-gpu": "1.8.0"},
                kernels=Kernels(load_error="libcuda.so.1: cannot open shared object file"),
            ),
            "fbgemm-gpu is built for CUDA, but this torch for CPUs only.",
            'pip uninstall -y fbgemm-gpu && pip install "fbgemm-gpu-cpu==1.8.*"',
        ),
        (
            Facts(**GPU, distributions={"fbgemm-gpu-cpu": "1.8.0"}, kernels=CPU_KERNELS),
            "torch can use a GPU, but FBGEMM 1.8.0 has no CUDA kernels.",
            'pip uninstall -y fbgemm-gpu-cpu && pip install "fbgemm-gpu==1.8.*"',
        ),
        (
            Facts(
                distributions={"fbgemm-gpu-cpu": "1.8.0"},
                kernels=Kernels(load_error="OSError: bad file (exit code 1)"),
            ),
            "The kernels do not load (fbgemm-gpu-cpu 1.8.0): OSError: bad file (exit code 1)",
            'pip uninstall -y fbgemm-gpu-cpu && pip install "fbgemm-gpu-cpu==1.8.*"',
        ),
        (
            Facts(distributions={"fbgemm-gpu-cpu": "1.8.0"}, kernels=Kernels(fbgemm="1.8.0")),
            "FBGEMM 1.8.0 lacks CPU kernels with the arguments that we pass.",
            'pip uninstall -y fbgemm-gpu-cpu && pip install "fbgemm-gpu-cpu==1.8.*"',
        ),
        (
            Facts(torch="2.13.0+cu130", torch_cuda="13.0", has_nvidia_driver=True),
            "torch is built for CUDA 13.0, but cannot use a GPU here.",
            None,
        ),
        (
            Facts(namesakes=("recsys 0.0.1a3",)),
            "of another project is installed (recsys 0.0.1a3)",
            "pip uninstall -y recsys",
        ),
        (
            Facts(process_groups=()),
            "torch.distributed has no gloo, so models cannot be sharded across processes.",
            'pip install --force-reinstall "torch==2.13.*"',
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_problems(facts: Facts, text: str, fix: str | None) -> None:
    [problem] = problems(facts)
    assert text in problem.text
    assert problem.fix == fix


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            Facts(
                torch="2.15.0.dev20260801+cpu",
                distributions={"fbgemm-gpu-cpu": "1.10.0"},
                kernels=CPU_KERNELS,
            ),
            "has not been tried",
        ),
        (
            Facts(
                has_nvidia_driver=True,
                distributions=LAPTOP.distributions,
                kernels=CPU_KERNELS,
            ),
            "but this torch is built for CPUs only",
        ),
        (
            Facts(
                **{**GPU, "process_groups": ("gloo",)},
                distributions={"fbgemm-gpu": "1.8.0"},
                kernels=CUDA_KERNELS,
            ),
            "no NCCL",
        ),
    ],
)
def test_notes(facts: Facts, text: str) -> None:
    assert not problems(facts)
    [note] = notes(facts)
    assert text in note.text


def test_forced_kernels_are_not_a_broken_fbgemm() -> None:
    forced = replace(LAPTOP, is_forced_to_torch=True)
    assert not problems(forced)
    assert "RECSYS_KERNELS=torch is set" in notes(forced)[0].text
    assert not any("Lookups on" in finding.text for finding in diagnose(forced))


def test_says_who_serves_lookups_and_how_to_use_torchrec_names() -> None:
    texts = [finding.text for finding in diagnose(LAPTOP)]
    assert "Lookups on cpu are served by fbgemm (it can)." in texts
    assert "recsys.compat.torchrec" in texts[-1]
    hidden = diagnose(Facts(torchrec="1.8.0"))[-1]
    assert "1.8.0, which is then hidden" in hidden.text
    removed = diagnose(replace(LAPTOP, has_compat=False))
    assert [finding.text for finding in removed] == texts[:-1]


def test_report_shows_the_fix_below_its_finding() -> None:
    facts = Facts(torch="2.9.1", gpus=("H100, 80 GiB",), memory_bytes=2**34)
    lines = format_report(facts, [Finding("problem", "It is broken.", "pip install it")]).split(
        "\n"
    )
    assert lines[-2:] == ["problem  It is broken.", "         pip install it"]
    assert "gpu 0    H100, 80 GiB" in lines
    assert "machine  1 cores, 16 GiB" in lines


def test_finds_another_recsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(_namesakes())
    for name in ("recsys", "recommenders", "recsys_torch"):
        info = tmp_path / f"{name}-0.0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")
        (info / "top_level.txt").write_text("recsys\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert set(_namesakes()) - before == {"recsys 0.0.1", "recommenders 0.0.1"}


def test_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECSYS_KERNELS", raising=False)
    exit_code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert f"python   {sys.version_info[0]}.{sys.version_info[1]}" in lines
    assert any(line.startswith("ok       Lookups on cpu are served by ") for line in lines)
    assert any(line[9:].startswith("Hashed ids are mapped on a CPU by ") for line in lines)
    assert exit_code == any(line.startswith("problem") for line in lines)


def test_says_who_maps_hashed_ids() -> None:
    kernels = replace(CPU_KERNELS, hashed="C: /cache/hash_index.so")
    texts = [finding.text for finding in diagnose(replace(LAPTOP, kernels=kernels))]
    assert "Hashed ids are mapped on a CPU by the C file (/cache/hash_index.so)." in texts
    kernels = replace(CPU_KERNELS, hashed="torch: there is no C compiler")
    [note] = notes(replace(LAPTOP, kernels=kernels))
    assert note.text.endswith("by PyTorch, over 20 times slower: there is no C compiler.")


def test_hashed_ids_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    print_kernels()
    found = Kernels(**json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found.hashed == build.describe()
