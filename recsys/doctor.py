"""`python -m recsys doctor`: reports the installation, its problems, and commands to fix them.

`collect_facts` inspects the machine. `diagnose` only reads these facts, so tests can run it with
facts of any machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import final

import torch

import recsys
from recsys.base.findings import Finding
from recsys.host import collect_host, diagnose_host
from recsys.kernels.types import (
    EmbOptimType,
    LookupSettings,
    OptimizerSpec,
    PoolingType,
    UpdateMode,
)

__all__ = [
    "Facts",
    "Finding",
    "Kernels",
    "add_arguments",
    "collect_facts",
    "diagnose",
    "format_report",
    "main",
    "print_kernels",
]

DISTRIBUTION = "recsys-torch"
"""Name of this project for pip; `recsys` on the package index is another project."""

PAIRS: Mapping[str, str] = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}
"""The FBGEMM release that was built for each torch release."""

VARIANTS = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-genai")
"""Distributions that install the package `fbgemm_gpu` and overwrite each other."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Facts of a process that loaded the kernels; the defaults are a machine without FBGEMM."""

    fbgemm: str | None = None
    """Version that `fbgemm_gpu` reports; None if it is not installed or does not load."""
    load_error: str | None = None
    has_cpu_kernels: bool = False
    has_cuda_kernels: bool = False
    why_triton_fails: str = ""
    """Reason that an installed Triton cannot be used on GPUs."""
    triton_differences: Mapping[str, str] = field(default_factory=dict)
    """Difference to PyTorch on the GPU by Triton kernel; empty if there is none."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """Backend of an fp32 table with row-wise Adagrad, and its reason, by device type."""
    hashed: str = ""
    """Implementation that maps hashed ids on a CPU, "C" or "torch", a colon, and its library or the
    reason; empty if the process failed."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts about a machine; the defaults are a laptop without FBGEMM."""

    python: tuple[int, int] = (3, 11)
    torch: str = "2.13.0+cpu"
    torch_cuda: str | None = None
    """CUDA release of the torch build; None for a CPU build."""
    gpus: tuple[str, ...] = ()
    """GPUs that torch can use, with their memory."""
    has_nvidia_driver: bool = False
    """True if the machine has an NVIDIA driver, even if torch cannot use it."""
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Installed distributions of `VARIANTS`, with versions."""
    kernels: Kernels = field(default_factory=Kernels)
    """Available kernels, even if `is_forced_to_torch`."""
    is_forced_to_torch: bool = False
    """True if the environment variable RECSYS_KERNELS is "torch"."""
    process_groups: tuple[str, ...] = ("gloo",)
    torchrec: str | None = None
    has_compat: bool = True
    """False if `recsys.compat` was removed."""
    namesakes: tuple[str, ...] = ()
    """Other installed distributions with a package named recsys, with versions."""
    num_cores: int = 1
    memory_bytes: int | None = None


# -- checks ----------------------------------------------------------------------------------------


def diagnose(facts: Facts) -> list[Finding]:
    """Return findings about the facts, the most basic ones first.

    Args:
        facts: The result of `collect_facts`.

    Returns:
        The findings. The machine is fine if no finding has the level `problem`.

    Example:
        >>> [problem] = [f for f in diagnose(Facts(torch="2.9.1")) if f.level == "problem"]
        >>> problem.fix
        'pip install "torch==2.14.*"'
    """
    return [
        *_judge_namesakes(facts),
        *_judge_python_and_torch(facts),
        *_judge_fbgemm(facts),
        *_judge_backends(facts),
        *_judge_hashed_ids(facts),
        *_judge_process_groups(facts),
        *_judge_torchrec(facts),
    ]


def _judge_namesakes(facts: Facts) -> Iterator[Finding]:
    for namesake in facts.namesakes:
        text = (
            f"A package named recsys of another project is installed ({namesake}). `import recsys` "
            "imports the one that was installed last. Remove the other package, and install this "
            "one again."
        )
        yield Finding("problem", text, f"pip uninstall -y {namesake.partition(' ')[0]}")


def _judge_python_and_torch(facts: Facts) -> Iterator[Finding]:
    if facts.python < (3, 11):
        version = ".".join(map(str, facts.python))
        yield Finding("problem", f"Python must be 3.11 or newer; this is {version}.")
    if _release(facts.torch) < _release("2.11"):
        text = f"torch must be 2.11 or newer; installed is {facts.torch}."
        yield Finding("problem", text, f'pip install "torch=={_newest_torch()}.*"')
    if facts.has_nvidia_driver and facts.torch_cuda is None:
        text = "The machine has an NVIDIA driver, but this torch is built for CPUs only."
        present = " ".join(["torch", *facts.distributions])
        pair = f'"torch=={_newest_torch()}.*" "fbgemm-gpu=={PAIRS[_newest_torch()]}.*"'
        yield Finding("note", text, f"pip uninstall -y {present} && pip install {pair}")
    if facts.has_nvidia_driver and facts.torch_cuda is not None and not facts.gpus:
        yield Finding(
            "problem",
            f"torch is built for CUDA {facts.torch_cuda}, but cannot use a GPU here. Either none "
            "is visible (CUDA_VISIBLE_DEVICES) or the NVIDIA driver is too old; `nvidia-smi` "
            "shows the newest CUDA that it serves.",
        )


def _judge_fbgemm(facts: Facts) -> list[Finding]:
    versions = ", ".join(f"{name} {version}" for name, version in facts.distributions.items())
    kernels, reinstall = facts.kernels, _reinstall_fbgemm(facts)
    if len(facts.distributions) > 1:
        text = f"Distributions that overwrite each other's files are installed: {versions}."
        return [Finding("problem", text, reinstall)]
    if not facts.distributions and kernels.fbgemm is None and kernels.load_error is None:
        text = "FBGEMM is not installed; everything works, on slower kernels in PyTorch."
        return [Finding("note", text, reinstall)]
    if "fbgemm-gpu-genai" in facts.distributions:
        return [Finding("problem", f"{versions} has no embedding kernels.", reinstall)]
    misfits = [*_judge_variant(facts), *_judge_pair(facts, versions or str(kernels.fbgemm))]
    if misfits:
        return misfits
    if kernels.load_error is not None:
        text = f"The kernels do not load ({versions or 'no FBGEMM'}): {kernels.load_error}"
        return [Finding("problem", text, reinstall)]
    if not kernels.has_cpu_kernels:
        text = f"FBGEMM {kernels.fbgemm} lacks CPU kernels with the arguments that we pass."
        return [Finding("problem", text, reinstall)]
    return [Finding("ok", f"FBGEMM {kernels.fbgemm} fits torch {facts.torch}.")]


def _judge_variant(facts: Facts) -> Iterator[Finding]:
    """Yield a problem if FBGEMM and torch are built for different device types."""
    if "fbgemm-gpu" in facts.distributions and facts.torch_cuda is None:
        text = "fbgemm-gpu is built for CUDA, but this torch for CPUs only."
        yield Finding("problem", text, _reinstall_fbgemm(facts))
    elif facts.gpus and facts.kernels.fbgemm is not None and not facts.kernels.has_cuda_kernels:
        text = f"torch can use a GPU, but FBGEMM {facts.kernels.fbgemm} has no CUDA kernels."
        yield Finding("problem", text, _reinstall_fbgemm(facts))


def _judge_pair(facts: Facts, found: str) -> Iterator[Finding]:
    """Yield a finding unless torch and FBGEMM were released for each other."""
    version = next(iter(facts.distributions.values()), facts.kernels.fbgemm)
    torch_release = _minor(facts.torch)
    if version is None or PAIRS.get(torch_release) == _minor(version):
        return
    if torch_release in PAIRS:
        text = f"torch {facts.torch} needs FBGEMM {PAIRS[torch_release]}; found {found}."
        yield Finding("problem", text, _reinstall_fbgemm(facts))
        return
    known = ", ".join(f"torch {t} with FBGEMM {f}" for t, f in PAIRS.items())
    if _minor(version) in PAIRS.values() or facts.kernels.load_error is not None:
        text = f"torch {facts.torch} and {found} do not fit. Known pairs: {known}."
        fix = f'pip install "torch=={_newest_torch()}.*" && {_reinstall_fbgemm(facts)}'
        yield Finding("problem", text, fix)
    else:
        text = f"torch {facts.torch} with {found} has not been tried. Known pairs: {known}."
        yield Finding("note", text)


def _judge_backends(facts: Facts) -> Iterator[Finding]:
    if facts.is_forced_to_torch:
        text = "RECSYS_KERNELS=torch is set: lookups are served by torch, FBGEMM is not used."
        yield Finding("note", text, "unset RECSYS_KERNELS")
        return
    for device, served in facts.kernels.backends.items():
        yield Finding("ok", f"Lookups on {device} are served by {served}.")
    why = facts.kernels.why_triton_fails
    if facts.gpus and why:
        yield Finding("note", f"Steps on a GPU launch several times as many kernels: {why}.")
    compared = facts.kernels.triton_differences
    for name, difference in compared.items():
        if difference:
            text = f"Triton kernel {name} must return the same as PyTorch; received {difference}."
            yield Finding("problem", text, "export RECSYS_KERNELS=torch")
    if compared and not any(compared.values()):
        yield Finding("ok", f"All {len(compared)} Triton kernels return the same as PyTorch.")


def _judge_hashed_ids(facts: Facts) -> Iterator[Finding]:
    implementation, _, text = facts.kernels.hashed.partition(": ")
    if implementation == "C":
        yield Finding("ok", f"Hashed ids are mapped on a CPU by the C file ({text}).")
    elif implementation:
        yield Finding(
            "note", f"Hashed ids are mapped on a CPU by PyTorch, over 20 times slower: {text}."
        )


def _judge_process_groups(facts: Facts) -> Iterator[Finding]:
    if "gloo" not in facts.process_groups:
        text = "torch.distributed has no gloo, so models cannot be sharded across processes."
        fix = f'pip install --force-reinstall "torch=={_minor(facts.torch)}.*"'
        yield Finding("problem", text, fix)
    elif facts.gpus and "nccl" not in facts.process_groups:
        text = "There are GPUs, but torch.distributed has no NCCL: they would talk through gloo."
        yield Finding("note", text)
    else:
        groups = " and ".join(facts.process_groups)
        yield Finding("ok", f"Processes can talk through {groups}.")


def _judge_torchrec(facts: Facts) -> Iterator[Finding]:
    if not facts.has_compat:
        return
    state = "not installed" if facts.torchrec is None else f"{facts.torchrec}, which is then hidden"
    text = f"`import torchrec` can mean recsys: recsys.compat.torchrec (TorchRec: {state})."
    yield Finding("ok", text)


def _reinstall_fbgemm(facts: Facts) -> str:
    present = " ".join(facts.distributions)
    remove = f"pip uninstall -y {present} && " if present else ""
    variant = "fbgemm-gpu-cpu" if facts.torch_cuda is None else "fbgemm-gpu"
    release = PAIRS.get(_minor(facts.torch), PAIRS[_newest_torch()])
    return f'{remove}pip install "{variant}=={release}.*"'


def _release(version: str) -> tuple[int, ...]:
    """`(2, 13)` for `"2.13.0+cpu"`."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _minor(version: str) -> str:
    return ".".join(map(str, _release(version)))


def _newest_torch() -> str:
    return max(PAIRS, key=_release)


# -- facts -----------------------------------------------------------------------------------------


def collect_facts() -> Facts:
    """Inspect this machine.

    Returns:
        The facts. FBGEMM is loaded in its own process, which an incompatible pair can crash.
    """
    is_distributed = torch.distributed.is_available()
    groups = {
        "gloo": is_distributed and torch.distributed.is_gloo_available(),
        "nccl": is_distributed and torch.distributed.is_nccl_available(),
    }
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return Facts(
        python=sys.version_info[:2],
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        gpus=tuple(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus),
        has_nvidia_driver=Path("/dev/nvidiactl").exists() or bool(shutil.which("nvidia-smi")),
        distributions={
            name: version for name in VARIANTS if (version := _version_of(name)) is not None
        },
        kernels=_probe_kernels(),
        is_forced_to_torch=os.environ.get("RECSYS_KERNELS") == "torch",
        process_groups=tuple(name for name, is_there in groups.items() if is_there),
        torchrec=_version_of("torchrec"),
        has_compat=importlib.util.find_spec("recsys.compat") is not None,
        namesakes=_namesakes(),
        num_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
    )


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _namesakes() -> tuple[str, ...]:
    """Return other distributions with a package `recsys`."""
    distributions = importlib.metadata.packages_distributions().get("recsys", [])
    others = {name for name in distributions if name.replace("_", "-") != DISTRIBUTION} | {"recsys"}
    return tuple(f"{name} {version}" for name in sorted(others) if (version := _version_of(name)))


def _memory_bytes() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _probe_kernels() -> Kernels:
    command = [sys.executable, "-c", "from recsys import doctor; doctor.print_kernels()"]
    env = {name: value for name, value in os.environ.items() if name != "RECSYS_KERNELS"}
    probe = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    lines = (probe.stdout if probe.returncode == 0 else probe.stderr).strip().splitlines()
    if probe.returncode == 0:
        return Kernels(**json.loads(lines[-1]))
    reason = lines[-1] if lines else "no message"
    return Kernels(load_error=f"{reason} (exit code {probe.returncode})")


def print_kernels() -> None:
    """Load the kernels in this process and print the fields of `Kernels` as JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # `ops` only warns if FBGEMM does not load
        from recsys.kernels import ops, self_check, support, tbe_fbgemm, tbe_fbgemm_module
        from recsys.kernels.hashed import build
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the report has the reason
        hashed = build.describe()

    def serves(device_type: str) -> str:
        choice = support.choose_backend(
            LookupSettings(
                device=torch.device(device_type),
                dims=[64],
                feature_table_map=[0],
                pooling=PoolingType.SUM,
                optimizer=OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD),
                update_mode=UpdateMode.FUSED,
            )
        )
        return f"{choice.backend} ({choice.reason})"

    differences: dict[str, str] = {}
    if ops.HAS_TRITON and torch.cuda.device_count():
        differences = self_check.check_all(torch.device("cuda", 0))
    kernels = Kernels(
        triton_differences=differences,
        fbgemm=getattr(sys.modules.get("fbgemm_gpu"), "__version__", None),
        has_cpu_kernels=tbe_fbgemm.has_cpu_ops(),
        has_cuda_kernels=tbe_fbgemm_module.has_cuda_ops(),
        why_triton_fails=ops.WHY_TRITON_FAILS,
        backends={d: serves(d) for d in ("cpu", "cuda") if d == "cpu" or torch.cuda.is_available()},
        hashed=hashed,
    )
    print(json.dumps(asdict(kernels)))


# -- report ----------------------------------------------------------------------------------------


def format_report(facts: Facts, findings: Sequence[Finding]) -> str:
    """Return the report: the facts, and each finding with its fix."""
    memory = "" if facts.memory_bytes is None else f", {facts.memory_bytes / 2**30:.0f} GiB"
    build = "CPU" if facts.torch_cuda is None else f"CUDA {facts.torch_cuda}"
    fbgemm = ", ".join(f"{name} {version}" for name, version in facts.distributions.items())
    lines = [
        f"recsys   {recsys.__version__}",
        f"python   {'.'.join(map(str, facts.python))}",
        f"torch    {facts.torch}, built for {build}",
        f"fbgemm   {fbgemm or facts.kernels.fbgemm or 'not installed'}",
        f"machine  {facts.num_cores} cores{memory}",
        *(f"gpu {i}    {gpu}" for i, gpu in enumerate(facts.gpus)),
        "",
    ]
    return "\n".join([*lines, *map(str, findings)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--host",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="also check names, addresses, shared memory, open files and clock of this machine for "
        "a job of several machines, and connect to its rendezvous, if it is named",
    )


def main(options: argparse.Namespace | None = None) -> int:
    """Print the report; return 1 if there is a problem, else 0."""
    facts = collect_facts()
    findings = diagnose(facts)
    print(format_report(facts, findings))
    rendezvous = getattr(options, "host", None)
    if rendezvous is not None:
        of_host = diagnose_host(collect_host(rendezvous))
        print("", *of_host, sep="\n")
        findings = [*findings, *of_host]
    return int(any(finding.level == "problem" for finding in findings))
