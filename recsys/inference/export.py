"""Export of a quantized model to a file that runs without this library, in Python or in C++.

A program takes and returns plain tensors and needs only torch and fbgemm_gpu. There are two kinds.
TorchScript keeps loops and branches and is compiled at load time. `torch.fx` traces the modules
that TorchScript does not support: the model runs once on symbolic inputs, and the trace has tensor
operations only. AOTInductor compiles one graph of `torch.export` to machine code for one kind of
device.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import linecache
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx.experimental import _config as shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from recsys.base.checked import checked
from recsys.base.checksums import new_file
from recsys.inference.batch_sizes import batch_sizes, check_any_size, samples_of
from recsys.inference.input_features import (
    arguments_by_name,
    features_of_inputs,
    is_jagged,
    name_of,
)
from recsys.inference.programs import AOTIProgram, describe
from recsys.inference.quant.collection import QuantizedCollection
from recsys.inference.quant.lookup import position_processor
from recsys.inference.served_part import served_part
from recsys.inference.tracer import Tracer
from recsys.kernels.quantized_split_lookup import QuantizedSplitLookup
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recsys.sparse.script_modules import without_torchscript_warnings

__all__ = ["export_aoti", "export_torchscript"]

_MAX_TRIED = 8
"""Samples of the example that are tried as a batch, until the model supports one."""


@checked
def export_torchscript(
    model: nn.Module, path: str | Path, inputs: Sequence[object]
) -> torch.jit.ScriptModule:
    """Compile a quantized model by TorchScript and write it to a file.

    The file needs torch and fbgemm_gpu. Load it by `load_torchscript` or `torch.jit.load`. Its
    SHA-256 is written to a file of the same name plus ".sha256"; see `verify_checksum`.

    The program takes the tensors of the model's arguments, in their order. For a KeyedJaggedTensor
    or JaggedTensor, these are `values`, `lengths` and, if the example has them, `weights`. If the
    model returns a tensor, so does the program. Otherwise it returns a dict of tensors by name:
    "ctr" for an entry of a dict, "0" for the first entry of a tuple, one tensor per key of a
    KeyedTensor, and "film.values" and "film.lengths" for jagged tensors.

    A module that branches on the values of tensors is compiled from its source, if TorchScript
    supports it. All other modules are traced.

    Args:
        model: A quantized model in evaluation mode.
        path: The file to write.
        inputs: Example arguments of `model`: tensors and jagged tensors, also in lists, tuples and
            dicts, of any batch size. Other arguments, such as numbers, are constants of the
            program.

    Returns:
        The compiled program.

    Raises:
        TypeError: The model returns an object without tensors.
        ValueError: The model is in training mode or has tables that are not quantized.
        Exception: An error of torch about a module that it cannot compile; a note names the line.

    Example:
        >>> import tempfile
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> tables = [EmbeddingBagConfig(9, 4, "films", feature_names=["film"])]
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> model = quantize_embeddings(EmbeddingBagCollection(tables=tables))
        >>> batch = KeyedJaggedTensor(["film"], torch.tensor([3]), lengths=torch.tensor([1, 0]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     program = export_torchscript(model, f"{folder}/model.pt", [batch])
        >>> program(torch.tensor([3, 4]), torch.tensor([0, 1, 1]))["film"].shape
        torch.Size([3, 4])
    """
    plain = PlainModel(model, inputs)
    program = scripted(plain)
    with new_file(path) as temporary:
        program.save(str(temporary))
    return program


@checked
def export_aoti(model: nn.Module, path: str | Path, inputs: Sequence[object]) -> AOTIProgram:
    """Compile a quantized model by AOTInductor and write it to a package.

    The package needs the same versions of torch and fbgemm_gpu, and the kind of device that the
    model is on. Load it by `load_aoti` in Python or `torch::inductor::AOTIModelPackageLoader` in
    C++. Inputs and outputs are as for `export_torchscript`. In C++ the outputs are a list; their
    names are in the package's metadata under "outputs", as a JSON list.

    The compiled code does not validate dtypes, shapes and strides of its inputs; `load_aoti` does.
    For other loaders, the metadata has JSON lists with an entry per input: "inputs" (names),
    "dtypes" (such as "int64") and "shapes" (such as "n0 5"). In a shape, a number is the size of a
    dim, and dims with the same name have the same size. Tensors must be contiguous. "jagged" has an
    entry per jagged input: its name under "input", and under "features" the "name", "rows", "table"
    and "module" of each feature. Rows are null if the model changes the ids before the lookup.

    The file's SHA-256 is written to a file of the same name plus ".sha256"; see `verify_checksum`.

    The program serves batches of any size, including 0 and 1. A model must not branch on the values
    of tensors; use `torch.where` or `torch.cond`.

    Args:
        model: A quantized model in evaluation mode, on one device.
        path: The file to write; it must end in ".pt2".
        inputs: As for `export_torchscript`.

    Returns:
        The program, as loaded by `load_aoti`.

    Raises:
        TypeError: The model returns an object without tensors.
        ValueError: The model is in training mode, has tables that are not quantized or is spread
            over devices, or the path has another ending.
        Exception: An error of torch about a model that it cannot export; a note names the line.

    Example:
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> tables = [EmbeddingBagConfig(9, 4, "films", feature_names=["film"])]
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> model = quantize_embeddings(EmbeddingBagCollection(tables=tables))
        >>> batch = KeyedJaggedTensor(["film"], torch.tensor([3]), lengths=torch.tensor([1, 0]))
        >>> program = export_aoti(model, "model.pt2", [batch])  # doctest: +SKIP
        >>> program(torch.tensor([3, 4]), torch.tensor([0, 1, 1]))["film"].shape  # doctest: +SKIP
        torch.Size([3, 4])
    """
    if not str(path).endswith(".pt2"):
        raise ValueError(f"A package's path must end in '.pt2'; received {str(path)!r}.")
    model = served_part(model)
    plain = PlainModel(model, inputs)
    exported = exported_program(plain)
    about = {
        **describe(plain.names, _traced_inputs(exported, plain)),
        "jagged": [
            {"input": name, "features": list(map(asdict, features))}
            for name, features in features_of_inputs(model, inputs).items()
        ],
        "outputs": plain.output_names,
    }
    metadata = {k: json.dumps(v, ensure_ascii=False) for k, v in about.items()}
    with new_file(path) as temporary:
        device = plain.tensors[0].device
        compile_exported(exported, temporary, device, {"aot_inductor.metadata": metadata})
        program = AOTIProgram(torch._inductor.aoti_load_package(str(temporary)), path)
        plain.check(program)
    return program


def scripted(plain: PlainModel) -> torch.jit.ScriptModule:
    """Compile a plain model by TorchScript, and compare its outputs."""
    with without_torchscript_warnings():
        # harmless: caused by an annotation in torch.fx.GraphModule.__init__
        warnings.filterwarnings("ignore", "The TorchScript type system doesn't support instance")
        program: torch.jit.ScriptModule = torch.jit.script(_traced(plain))
    plain.check(program)
    return program


def compile_exported(
    exported: ExportedProgram, path: Path, device: torch.device, config: Mapping[str, Any]
) -> None:
    """Compile a program of `torch.export` to a file, with options of Inductor."""
    # otherwise AOTI_RUNTIME_CHECK_INPUTS=1 rejects batches of 0 and 1 samples
    config = {"aot_inductor.check_lowerbound": False, **config}
    if device.type != "cpu":
        # Inductor times kernels with lengths of zero and any number of ids
        config["assert_indirect_indexing"] = False
    with warnings.catch_warnings(), _any_size():
        # a warning of torch's own code that copies the structure of the inputs
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # the caller's choice
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs=config
        )


class PlainModel(nn.Module):
    """Wrapper that calls a quantized model with plain tensors.

    Args:
        model: The model; not changed.
        inputs: Example arguments.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[object]) -> None:
        super().__init__()
        model = served_part(model)
        arguments = arguments_by_name(model, inputs)
        with torch.no_grad():
            self.expected = model(*inputs)
        self.output_names = list(_plain(self.expected, self.expected))
        for jagged in pytree.tree_leaves(inputs, is_leaf=is_jagged):
            if is_jagged(jagged):
                jagged.lengths()  # a program takes lengths instead of offsets
        leaves, self._structure = pytree.tree_flatten_with_path(arguments)
        self._leaves = [leaf for _, leaf in leaves]
        self._places = _places_of_tensors(leaves)
        self.tensors = self._tensors_in(inputs)
        self._none = self._tensors_in(samples_of(inputs, slice(0)))
        tried = range(min(max(batch_sizes(inputs), default=0), _MAX_TRIED))
        self._single = [self._tensors_in(samples_of(inputs, slice(i, i + 1))) for i in tried]
        for i, tensor in zip(self._places, self.tensors, strict=True):
            self._leaves[i] = tensor
        self.names = [name_of(leaves[i][0]) for i in self._places]
        are_jagged = [
            is_jagged(leaf)
            for leaf in pytree.tree_leaves(inputs, is_leaf=is_jagged)
            for _ in pytree.tree_leaves(leaf)
        ]
        self.are_jagged = [are_jagged[i] for i in self._places]
        served = {
            id(m): m.served if isinstance(m, QuantizedCollection) else position_processor(m)
            for m in model.modules()
        }
        self.model: nn.Module = copy.deepcopy(model, {k: m for k, m in served.items() if m})

    def forward(self, *tensors: Tensor) -> Any:
        """Call the model."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        arguments = pytree.tree_unflatten(leaves, self._structure)
        return self._tensors_of(self.model(*arguments.values()))

    def _tensors_in(self, inputs: Sequence[object]) -> tuple[Tensor, ...]:
        """Return the tensors of arguments of the model, in order."""
        leaves = pytree.tree_leaves(list(inputs))
        # the graph records the strides of the example, which must be contiguous
        return tuple(
            leaves[i].detach().clone(memory_format=torch.contiguous_format) for i in self._places
        )

    def _tensors_of(self, output: Any) -> Any:
        return output if isinstance(self.expected, Tensor) else _plain(output, self.expected)

    def check(self, program: Callable[..., object]) -> None:
        """Compare the outputs of a program and the model.

        Raises:
            ValueError: They differ on the example, or on a batch of no or one sample that the model
                supports.
        """
        cases: list[tuple[str, Sequence[Tensor], object]] = [
            ("the example", self.tensors, self._tensors_of(self.expected))
        ]
        with torch.no_grad():
            for size, batches in (("an empty batch", [self._none]), ("one sample", self._single)):
                for batch in batches:
                    with contextlib.suppress(Exception):  # some models need a sample, or an id
                        cases.append((size, batch, self(*batch)))
                        break
            for size, tensors, wanted in cases:
                try:
                    torch.testing.assert_close(program(*tensors), wanted)
                except Exception as error:
                    raise ValueError(
                        f"The program must return the model's outputs; received other outputs on "
                        f"{size}. Look for a size in forward that is written, or read, as a number."
                    ) from error


class _PlainTracer(Tracer):
    """Tracer of a plain model, with one argument per tensor.

    Args:
        names: Names of the arguments.
        compiled: Modules that TorchScript compiles from source.
    """

    def __init__(self, names: Sequence[str], compiled: Sequence[nn.Module]) -> None:
        super().__init__()
        self._names = names
        self._compiled = set(compiled)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is called instead of traced."""
        return m in self._compiled or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Return the function to trace, and its arguments."""
        make = partial(self.create_proxy, "placeholder", args=(), kwargs={}, type_expr=Tensor)
        return root_fn, [self.root, *map(make, self._names)]


def _traced(plain: PlainModel) -> fx.GraphModule:
    """Trace a plain model to tensor operations and modules for TorchScript."""
    compiled: list[nn.Module] = []
    while True:
        try:
            graph = _PlainTracer(plain.names, compiled).trace(plain)
            break
        except Exception as error:
            where = _where(error, plain.model)
            if where is None or where.module in compiled:
                raise
            try:
                torch.jit.script(where.module)
            except Exception as reason:
                error.add_note(
                    f"{where} torch.fx cannot trace this module, and TorchScript cannot compile "
                    "it. Select between tensors by torch.where, or change the module so that "
                    f"TorchScript supports it. Its error: {reason}"
                )
                raise error from None
            compiled.append(where.module)
    for node in graph.nodes:
        if node.op == "output":
            node.type = None  # TorchScript infers it, and does not support unions
    return fx.GraphModule(plain, graph)


def exported_program(plain: PlainModel) -> ExportedProgram:
    """Export a plain model as one graph for batches of any size.

    Raises:
        ValueError: The model is spread over devices, or supports some batch sizes only.
    """
    _check_one_device(plain)
    dims = tuple(dict.fromkeys(range(min(t.dim(), 1)), Dim.AUTO) for t in plain.tensors)
    try:
        # conditions on sizes are checked at run time
        with torch.no_grad(), _without_partial_graph(), _any_size():
            exported = torch.export.export(
                plain,
                plain.tensors,
                dynamic_shapes=(dims,),
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except Exception as error:
        where = _where(error, plain.model)
        if where is None:
            raise
        reason = ""
        if isinstance(error, GuardOnDataDependentSymNode):
            reason = (
                " Branches and sizes must not depend on values of tensors. Use torch.where, and "
                "pass desired_length to to_padded_dense."
            )
        error.add_note(f"{where} torch.export cannot trace it.{reason}")
        raise error.with_traceback(
            None
        ) from None  # the note names the line, without 40 frames of torch
    device = plain.tensors[0].device
    if device.type != "cpu":  # numbers that were copied from the host while the model was traced
        exported = move_to_device_pass(exported, device)
    traced = _traced_inputs(exported, plain)
    check_any_size(exported, zip(plain.names, plain.are_jagged, traced, strict=True))
    return exported


def _any_size() -> contextlib.AbstractContextManager[object]:
    """Disable torch's specialization for sizes 0 and 1 of the example."""
    patched: contextlib.AbstractContextManager[object] = shapes.patch(  # type: ignore[attr-defined]
        backed_size_oblivious=True
    )
    return patched


@contextlib.contextmanager
def _without_partial_graph() -> Iterator[None]:
    """Drop the graph that torch prints to standard error if an export fails."""
    stderr, printed, graph = sys.stderr, io.StringIO(), ""
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except Exception as error:
        graph = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        stderr.write(printed.getvalue().replace(graph, ""))


def _traced_inputs(exported: ExportedProgram, plain: PlainModel) -> list[Tensor]:
    """Return the traced inputs of a plain model, with symbols as sizes."""
    inputs = [node for node in exported.graph.nodes if node.op == "placeholder"]
    return [node.meta["val"] for node in inputs[len(inputs) - len(plain.tensors) :]]


class _Where(NamedTuple):
    """The line of a model that raised an error."""

    module: nn.Module
    path: str
    file: str
    line: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        kind = type(self.module).__name__
        return f"Module {self.path!r} ({kind}), {self.file}:{self.line}: `{code}`."


def _where(error: Exception, model: nn.Module) -> _Where | None:
    """Return the line that raised an error, in the innermost module outside of torch."""
    paths = {id(module): path for path, module in model.named_modules()}
    ours = os.path.dirname(torch.__file__)
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        module, file = frame.f_locals.get((*code.co_varnames, "")[0]), code.co_filename
        if isinstance(module, nn.Module) and id(module) in paths and not file.startswith(ours):
            return _Where(module, paths[id(module)], file, line)
    return None


def _places_of_tensors(found: Sequence[tuple[Sequence[Any], object]]) -> list[int]:
    """Return the leaves that are arguments of a program, in order: weights follow lengths."""

    def order(place: int) -> float:
        is_weights = getattr(found[place][0][-1], "name", "") == "_weights"
        return place + 1.5 if is_weights else place

    return sorted((i for i, (_, leaf) in enumerate(found) if isinstance(leaf, Tensor)), key=order)


def _plain(output: Any, like: object, name: str = "") -> dict[str, Any]:
    """Return the tensors of a model's output, by name.

    Args:
        output: The output, or containers of `torch.fx` proxies.
        like: The output for the example.
        name: Name of the output.
    """
    if isinstance(like, Tensor):
        return {name or "output": output}
    if isinstance(like, JaggedTensor | KeyedJaggedTensor):
        parts = {"values": output.values(), "lengths": output.lengths()}
        if like.weights_or_none() is not None:
            parts["weights"] = output.weights()
        return {f"{name}.{part}".lstrip("."): tensor for part, tensor in parts.items()}
    keys: Sequence[Any] = []
    if isinstance(like, KeyedTensor):
        keys = like.keys()
    elif isinstance(like, Mapping):
        keys = list(like)
    elif isinstance(like, list | tuple):
        keys = range(len(like))
    elif like is not None:
        raise TypeError(
            f"An exported model returns tensors and jagged tensors, also in lists, tuples and "
            f"dicts; received {type(like).__name__} {name!r}."
        )
    tensors: dict[str, Any] = {}
    for key in keys:
        tensors |= _plain(output[key], like[key], f"{name}.{key}".lstrip("."))  # type: ignore[index]
    return tensors


def _check_one_device(model: nn.Module) -> None:
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if len(devices) > 1 or any(isinstance(m, QuantizedSplitLookup) for m in model.modules()):
        raise ValueError(
            "A package of AOTInductor needs unsharded tables on one device; received a model "
            f"spread over {sorted(map(str, devices))}. Export it before sharding, or use "
            "export_torchscript."
        )
