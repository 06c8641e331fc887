"""Loading of exported programs: checksums of files, and inputs of compiled programs.

A program of TorchScript validates its inputs itself. A program of AOTInductor is machine code for
one memory layout and does not check its inputs, so `AOTIProgram` validates tensors first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from recsys.base.checked import checked
from recsys.base.checksums import verify_if_present
from recsys.inference.batch_checks import are_outside, by_key, first_bad_id, read_sizes
from recsys.inference.input_features import InputFeature
from recsys.kernels.bounds import bad_id_text
from recsys.sparse.script_modules import without_torchscript_warnings

if TYPE_CHECKING:
    from torch.export.pt2_archive._package import AOTICompiledModel

__all__ = ["AOTIProgram", "load_aoti", "load_torchscript"]


class Input(NamedTuple):
    """An input tensor of a compiled program."""

    name: str
    dtype: str
    """Such as "int64"."""
    shape: tuple[str, ...]
    """The size of each dim, or a name; dims with the same name have the same size."""

    def validated(self, tensor: Tensor, device: torch.device, sizes: dict[str, int]) -> Tensor:
        """Validate an argument and return it as a contiguous tensor.

        Args:
            tensor: The argument.
            device: Device of the program.
            sizes: Sizes of names in earlier inputs; the names of this input are added.

        Raises:
            TypeError: The argument is not a dense tensor of the dtype.
            ValueError: The tensor is on another device, or has another shape.
        """
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{self.name} must be a dense tensor; received {kind}.")
        if str(tensor.dtype) != f"torch.{self.dtype}":
            raise TypeError(
                f"{self.name} must be torch.{self.dtype}, the dtype of the compiled program; "
                f"received {tensor.dtype}. Convert it with .to(torch.{self.dtype})."
            )
        if tensor.device != device:
            raise ValueError(
                f"{self.name} must be on {device}, as the program is; received a tensor on "
                f"{tensor.device}. Move it with .to({str(device)!r})."
            )
        if len(tensor.shape) != len(self.shape):
            self._refuse_shape(tensor, sizes)
        for size, wanted in zip(tensor.shape, self.shape, strict=True):
            if size != (int(wanted) if wanted.isdecimal() else sizes.setdefault(wanted, size)):
                self._refuse_shape(tensor, sizes)
        return tensor.detach().contiguous().resolve_conj().resolve_neg()

    def _refuse_shape(self, tensor: Tensor, sizes: Mapping[str, int]) -> NoReturn:
        known = [f"{name} = {sizes[name]}" for name in self.shape if name in sizes]
        where = f", where {' and '.join(known)}" if known else ""
        raise ValueError(
            f"{self.name} must have the shape [{', '.join(self.shape)}]{where}; received "
            f"{list(tensor.shape)}."
        )


class JaggedInput(NamedTuple):
    """A jagged input of a compiled program: the tensors of its values and lengths."""

    name: str
    features: tuple[InputFeature, ...]

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check ids and lengths, which waits for the device.

        Args:
            tensors: The inputs of the program by name.

        Raises:
            IndexError: An id is outside its table.
            ValueError: The lengths do not match the ids or the features.
        """
        values, lengths = tensors[f"{self.name}_values"], tensors[f"{self.name}_lengths"]
        rows = [-1 if feature.rows is None else feature.rows for feature in self.features]
        if max(rows, default=-1) < 0 or values.dim() != 1:
            return
        try:
            lengths_KB = by_key(values, lengths, len(rows))
            read_sizes(values, lengths_KB, False)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None
        ids_per_key = lengths_KB.sum(1)
        bad_N = are_outside(values, ids_per_key, rows)
        if not bool(bad_N.any()):
            return
        where, key, position = first_bad_id(bad_N, ids_per_key)
        feature = self.features[key]
        text = bad_id_text(feature.name, int(values[where]), position, rows[key])
        raise IndexError(
            f"{self.name}: {text} Module {feature.module!r} looks it up in table "
            f"{feature.table!r} with {rows[key]} rows."
        )


@final
class AOTIProgram:
    """A compiled program of `export_aoti`, with validation of its inputs.

    Call it with the tensors of `inputs` on its device. Tensors that are not contiguous are copied.
    Dtypes are not converted: int32 ids are an error if the program was compiled for int64. Ids and
    lengths are checked too, if the program looks up the ids as they are. On a GPU this waits for
    the device.

    Args:
        compiled: The package, loaded by torch.
        path: Its file, for messages.

    Attributes:
        compiled: The program without validation, of `torch._inductor.aoti_load_package`.
        inputs: Its inputs, in order: `name`, `dtype` and `shape` of each.
        jagged: Its jagged inputs: `name`, and `features` with `name`, `rows`, `table` and `module`.
        outputs: The names of the outputs.
        device: The device of the inputs.

    Raises:
        ValueError: The package was not written by this version's `export_aoti`.
    """

    def __init__(self, compiled: AOTICompiledModel, path: str | Path) -> None:
        self.compiled = compiled
        metadata = compiled.get_metadata()
        try:
            parts = [json.loads(metadata[key]) for key in ("inputs", "dtypes", "shapes")]
            self.outputs: list[str] = json.loads(metadata["outputs"])
        except KeyError as error:
            raise ValueError(
                f"{path} must be a package of export_aoti that describes its inputs; received a "
                f"package without {error} in its metadata. Export the model again by this version."
            ) from None
        self.inputs = tuple(
            Input(name, dtype, tuple(shape.split()))
            for name, dtype, shape in zip(*parts, strict=True)
        )
        self.jagged = tuple(
            JaggedInput(entry["input"], tuple(InputFeature(**f) for f in entry["features"]))
            for entry in json.loads(metadata.get("jagged", "[]"))
        )
        kind = metadata["AOTI_DEVICE_KEY"]
        self.device = torch.device(kind)
        if kind == "cuda":
            self.device = torch.device(kind, torch.cuda.current_device())

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the program.

        Args:
            tensors: One tensor for each of `inputs`.

        Returns:
            A tensor, or a dict of tensors by name; see `export_aoti`.

        Raises:
            IndexError: An id is outside its table.
            TypeError: The number of tensors differs, or a tensor has another dtype.
            ValueError: A tensor has another shape, or is on another device, or lengths do not match
                the ids.
            RuntimeError: The program raised an error.
        """
        if len(tensors) != len(self.inputs):
            names = ", ".join(entry.name for entry in self.inputs)
            raise TypeError(
                f"The program takes {len(self.inputs)} tensors ({names}); received {len(tensors)}."
            )
        sizes: dict[str, int] = {}
        ready = [
            entry.validated(tensor, self.device, sizes)
            for entry, tensor in zip(self.inputs, tensors, strict=True)
        ]
        by_name = {entry.name: tensor for entry, tensor in zip(self.inputs, ready, strict=True)}
        for jagged in self.jagged:
            jagged.check(by_name)
        return self.compiled(*ready)

    def __repr__(self) -> str:
        inputs = (f"{i.name}: {i.dtype}[{', '.join(i.shape)}]" for i in self.inputs)
        return f"AOTIProgram({', '.join(inputs)}, device={str(self.device)!r})"


def describe(names: Sequence[str], tensors: Sequence[Tensor]) -> Mapping[str, list[str]]:
    """Return the metadata of a package about its inputs.

    Args:
        names: Names of the inputs.
        tensors: The traced inputs, whose sizes are numbers or symbols.
    """
    symbols: dict[str, str] = {}
    for size in (size for tensor in tensors for size in tensor.shape if not isinstance(size, int)):
        symbols.setdefault(str(size), f"n{len(symbols)}")
    return {
        "inputs": list(names),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "shapes": [
            " ".join(symbols.get(str(size), str(size)) for size in tensor.shape)
            for tensor in tensors
        ],
    }


@checked
def load_aoti(path: str | Path) -> AOTIProgram:
    """Load a package of `export_aoti`; a package for GPUs is loaded to the current device.

    The file is a program: load files from trusted sources only. Its checksum is verified first; a
    file without checksum is loaded with a warning.

    Args:
        path: The file that `export_aoti` wrote.

    Raises:
        TypeError: `path` is neither a string nor a Path.
        FileNotFoundError: There is no such file.
        ValueError: The checksum differs, or the file is not a package of this version.

    Example:
        >>> program = load_aoti("model.pt2")  # doctest: +SKIP
        >>> program(torch.tensor([3, 4]), torch.tensor([0, 1, 1]))["film"].shape  # doctest: +SKIP
        torch.Size([3, 4])
    """
    verify_if_present(path)
    return AOTIProgram(torch._inductor.aoti_load_package(str(path)), path)


@checked
def load_torchscript(
    path: str | Path, device: torch.device | str | None = None
) -> torch.jit.ScriptModule:
    """Load a program of `export_torchscript`, as `torch.jit.load` does.

    The file is a program: load files from trusted sources only. Its checksum is verified first; a
    file without checksum is loaded with a warning.

    Args:
        path: The file that `export_torchscript` wrote.
        device: Device of the tables; None: the device of the export.

    Raises:
        TypeError: An argument has another type.
        FileNotFoundError: There is no such file.
        ValueError: The checksum differs, or there is no such device.

    Example:
        >>> program = load_torchscript("model.pt")  # doctest: +SKIP
        >>> program(torch.tensor([3, 4]), torch.tensor([0, 1, 1]))["film"].shape  # doctest: +SKIP
        torch.Size([3, 4])
    """
    verify_if_present(path)
    with without_torchscript_warnings():
        program: torch.jit.ScriptModule = torch.jit.load(str(path), map_location=device)
    return program
