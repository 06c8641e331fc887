"""Programs of a package in Python: loading, with tables outside of the program's file."""

from __future__ import annotations

import ctypes
import zipfile
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from recsys.inference.packages.indexes import open_index
from recsys.inference.packages.manifest import check_machine
from recsys.inference.packages.mapping import MappedFile, map_files
from recsys.inference.packages.safetensors import read_tensors
from recsys.kernels.hashed.index import IdIndex
from recsys.sparse.script_modules import without_torchscript_warnings

__all__ = [
    "OpenProgram",
    "map_buffers",
    "open_program",
    "program_of",
    "set_buffer",
    "set_constants",
]


@final
class OpenProgram(NamedTuple):
    """A loaded program."""

    program: Any
    device: torch.device
    buffers: Mapping[str, Tensor]
    """Memory of each buffer of tables, uint8, on the device. Writes do not change the files."""
    indexes: Mapping[str, IdIndex]
    """The indexes of tables with hashed ids, on the CPU, by table name."""

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the program on contiguous tensors, and return its outputs in order, on its device."""
        moved = [tensor.to(self.device) for tensor in inputs]
        with torch.inference_mode():
            if isinstance(self.program, torch.jit.ScriptModule):
                results = self.program(*moved)
                return list(results.values()) if isinstance(results, dict) else [results]
            outputs: list[Tensor] = self.program.boxed_run(moved)
            return outputs


def open_program(version: Path, manifest: Mapping[str, Any], kind: str = "") -> OpenProgram:
    """Load a program of a version on its tables.

    Args:
        version: The folder of the version.
        manifest: Its manifest; the files must have been verified.
        kind: "aoti" or "torchscript"; "": the first program of the manifest.

    Raises:
        ValueError: There is no such program, this machine cannot run it, or the file is not a
            program.
    """
    entry = program_of(manifest, kind)
    check_machine(manifest, entry["kind"])
    path = version / entry["file"]
    try:
        device = torch.device(entry["device"])
        buffers = {name: rows.to(device) for name, rows in map_buffers(version, manifest).items()}
        hashed = [table for table in manifest["tables"] if table["index"] is not None]
        indexes = {table["name"]: open_index(version, table) for table in hashed}
        if entry["kind"] == "torchscript":
            with without_torchscript_warnings():
                script = torch.jit.load(str(path), device)
            for name in entry["constants"]:
                set_buffer(script, name, buffers[name])
            return OpenProgram(script.eval(), device, buffers, indexes)
        _check_names(path)
        dense = read_tensors(version / "dense.safetensors")
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        constants = {name: (dense | buffers)[name].to(device) for name in entry["constants"]}
        set_constants(loader, constants)
    except (RuntimeError, KeyError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be a program; {error}.") from error
    return OpenProgram(_Kept(loader, constants), device, buffers, indexes)


def program_of(manifest: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the description of a program by its kind.

    Raises:
        ValueError: The package has no such program.
    """
    for program in manifest["programs"]:
        if kind in ("", program["kind"]):
            return cast(Mapping[str, Any], program)
    kinds = ", ".join(program["kind"] for program in manifest["programs"])
    raise ValueError(f"program must be one of the package's kinds ({kinds}); received {kind!r}.")


def map_buffers(version: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """Map the tables of a version into the buffers of its programs."""
    return {
        buffer["name"]: map_files(
            buffer["bytes"],
            [
                MappedFile(version / t["file"], t["offset"], t["rows"] * t["row_bytes"])
                for t in manifest["tables"]
                if t["buffer"] == buffer["name"]
            ],
        )
        for buffer in manifest["buffers"]
    }


def set_buffer(script: torch.jit.ScriptModule, name: str, value: Tensor) -> None:
    """Set a buffer of a program of TorchScript by its path."""
    *path, attribute = name.split(".")
    setattr(reduce(getattr, path, script), attribute, value)


def set_constants(loader: Any, constants: Mapping[str, Tensor]) -> None:
    """Set the constants of a compiled program, which does not own their memory.

    torch never frees its references to such tensors, so it gets views without an owner.
    """
    views = {}
    for name, tensor in constants.items():
        size = tensor.numel() * tensor.element_size()
        if tensor.is_cuda or not size:
            views[name] = tensor
            continue
        memory = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
        views[name] = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    loader.load_constants(views, False, True, True)


class _Kept(NamedTuple):
    """A program of AOTInductor and the memory of its constants, which it does not own."""

    loader: Any
    constants: Mapping[str, Tensor]

    def boxed_run(self, inputs: list[Tensor]) -> Any:
        return self.loader.boxed_run(inputs)


def _check_names(path: Path) -> None:
    """Check that no file of an archive leaves the folder to which torch extracts it."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.startswith("/") or ".." in PurePosixPath(name).parts:
                raise ValueError(
                    f"{path} must have files inside its folder; received {name!r}. Copy the "
                    "package again."
                )
