"""The manifest of a version of a package: reading, and checks of files, releases and machine.

A version is a folder such as `movies/1`. Its `manifest.json` describes the other files, the inputs
and outputs of the program, and the tables.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from recsys.inference.packages.manifest_rules import parse_manifest

__all__ = [
    "check_machine",
    "fbgemm_release",
    "read_manifest",
    "sha256_of",
    "verify_files",
]

_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-genai")


def read_manifest(version: Path) -> dict[str, Any]:
    """Read the manifest of a version.

    Raises:
        FileNotFoundError: The folder is not a version of a package.
        ValueError: The manifest is damaged, has a later format, or names files outside the version.
    """
    path = version / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{version} must be a version of a package, such as movies/1; it has no manifest.json."
            f"{_remedy_for(version)}"
        )
    try:
        return parse_manifest(path.read_bytes().decode())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} must be a manifest; {error} Copy the package again.") from error


def _remedy_for(folder: Path) -> str:
    """Return what to pass instead of the parent of versions, or of the folder of a job."""
    inside = [*folder.iterdir()] if folder.is_dir() else []
    versions = [one for one in inside if one.name.isdecimal() and (one / "manifest.json").is_file()]
    if versions:
        return f" Pass its newest version, {max(versions, key=lambda one: int(one.name))}."
    from recsys.distributed.checkpoint import newest_version

    for name in ("best", "last"):
        if newest_version(folder / name) is not None:
            return (
                f" It is the folder of a training job: load its checkpoint {folder / name} into "
                "the model, and write a package of it."
            )
    return ""


def verify_files(version: Path, manifest: Mapping[str, Any], tables: bool) -> None:
    """Compare the files of a version with its manifest.

    Args:
        version: The folder.
        manifest: Its manifest.
        tables: Read the tables, too. Otherwise only their sizes are compared.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, or is a link to a file outside the version.
    """
    large = {table["file"] for table in manifest["tables"]}
    indexes = [table["index"] for table in manifest["tables"] if table["index"] is not None]
    large |= {index[name] for index in indexes for name in ("ids", "digests")}
    for name, file in manifest["files"].items():
        path = version / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing. Copy the package again.")
        if not path.resolve().is_relative_to(version.resolve()):
            raise ValueError(f"{path} must be in the package; it is a link to {path.resolve()}.")
        size = path.stat().st_size
        if size != file["bytes"]:
            raise ValueError(
                f"{path} is damaged: it must have {file['bytes']} bytes; received {size}. Copy the "
                "package again."
            )
        if (tables or name not in large) and sha256_of(path) != file["sha256"]:
            raise ValueError(
                f"{path} is damaged: it does not match its checksum in manifest.json. Copy the "
                "package again."
            )


def check_machine(manifest: Mapping[str, Any], kind: str) -> None:
    """Check that this machine and the installed releases can run a program.

    Args:
        manifest: The manifest.
        kind: Kind of the program, "aoti" or "torchscript".

    Raises:
        ValueError: A release, the machine or its instruction set differs.
    """
    installed = {"torch": torch.__version__, "fbgemm": fbgemm_release()}
    for name, release in installed.items():
        if _minor(release) != _minor(manifest[name]):
            raise ValueError(
                f"The package needs {name} {_minor(manifest[name])}; received {release}. Install "
                "that release, or write the package again."
            )
    if kind != "aoti":
        return
    if manifest["machine"] != platform.machine():
        raise ValueError(
            f"The package needs a machine of kind {manifest['machine']}; received "
            f"{platform.machine()}. Write the package again on such a machine."
        )
    for word in manifest["instruction_set"].split():
        if word not in _instruction_sets():
            raise ValueError(
                f"The package needs a CPU with {word}, which this CPU does not have. Write the "
                "package again on such a CPU."
            )


def fbgemm_release() -> str:
    """Return the release of the installed fbgemm_gpu."""
    for name in _FBGEMM:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise ImportError(
        "Packages need fbgemm_gpu, which is not installed. `python -m recsys doctor` shows the "
        "matching release."
    )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _minor(release: str) -> str:
    return ".".join(release.partition("+")[0].split(".")[:2])


def _instruction_sets() -> set[str]:
    """Return torch's words for the instruction sets of this CPU."""
    tests = {
        "AVX2": torch.cpu._is_avx2_supported,
        "AVX512": torch.cpu._is_avx512_supported,
        "AVX512_VNNI": torch.cpu._is_vnni_supported,
        "AMX_TILE": torch.cpu._is_amx_tile_supported,
    }
    supported = {word for word, is_supported in tests.items() if is_supported()}
    if platform.machine() == "aarch64":
        supported |= {"NEON", "ASIMD"}
    return supported | {"DEFAULT", "INVALID_VEC_ISA"}
