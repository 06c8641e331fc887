"""Writing of serving packages."""

from __future__ import annotations

import copy
import hashlib
import os
import platform
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final
from urllib.parse import quote

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

import recsys
from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.inference.export import PlainModel, compile_exported, exported_program, scripted
from recsys.inference.packages.describe import (
    describe_inputs,
    describe_outputs,
    sample_request,
    with_rows,
)
from recsys.inference.packages.indexes import open_index
from recsys.inference.packages.load import OpenProgram, open_program, set_buffer, set_constants
from recsys.inference.packages.manifest import fbgemm_release, read_manifest, sha256_of
from recsys.inference.packages.manifest_rules import FORMAT, manifest_text
from recsys.inference.packages.mapping import ALIGNMENT, MappedFile, map_files
from recsys.inference.packages.requests import check_request, merge, split
from recsys.inference.packages.safetensors import write_tensors
from recsys.inference.packages.server_configs import config_pbtxt
from recsys.inference.quant.collection import QuantizedCollection
from recsys.inference.served_part import served_part
from recsys.kernels.hashed.index import IdIndex
from recsys.kernels.hashed.twin import signed
from recsys.kernels.quantized_lookup import QuantizedLookup
from recsys.kernels.quantized_split_lookup import QuantizedSplitLookup
from recsys.modules.embedding_configs import BaseEmbeddingConfig, DataType
from recsys.modules.hashed_ids import HashedIds
from recsys.modules.item_index import Recommend
from recsys.modules.tables.fingerprints import check_spec

if TYPE_CHECKING:  # needs pyarrow
    from recsys.inference.packages.columns import PackageColumns

__all__ = ["package"]

_FILES = {"aoti": "program.pt2", "torchscript": "program.pt"}
_DTYPES = {
    DataType.INT8: "int8", DataType.UINT8: "int8", DataType.INT4: "int4", DataType.INT2: "int2",
    DataType.FP16: "float16", DataType.FP32: "float32",
}  # fmt: skip
_BLOCK_BYTES = 32 << 20


@checked
def package(
    model: nn.Module,
    folder: str | Path,
    inputs: Any,
    *,
    version: int = 1,
    programs: Sequence[str] = ("aoti",),
    max_rows: int = 4096,
    defaults: Mapping[str, float] | None = None,
    spec: Any = None,
) -> Path:
    """Write a version of a serving package: a folder that NVIDIA Triton serves.

    The tables are files of raw rows, which servers map into memory; versions share equal tables by
    hard links. The rest of a version is the program, its dense constants, and a sample request with
    its response, which is compared when the version is opened. The version appears whole or not at
    all.

    Args:
        model: A quantized model in evaluation mode, on the device for which programs are compiled.
            Of a `DLRMTrain`, the model inside.
        folder: The package. Its last part is the name of the model.
        inputs: Example arguments of the model, as for `export_aoti`, with two samples or more. All
            inputs have one row per sample. With `spec` a table of raw columns, as for
            `FeatureSpec.transform`.
        version: Number of the version.
        programs: "aoti" for AOTInductor, "torchscript", or both; servers take the first by default.
            TorchScript is for modules of your own that branch on values and that it can compile,
            and for tables on several devices, which are stored in the program. It is deprecated by
            PyTorch.
        max_rows: Maximum number of rows of a request, and of a merged batch.
        defaults: Values of dense inputs that a request may leave out, by name.
        spec: A fitted `FeatureSpec`. The package contains it, and requests have its raw columns:
            texts, numbers and lists. The arguments of the model are then the dense features, if the
            spec has any, and the features with ids. If the model is a `Recommend` of a
            `Categorical` feature, a `Predictor` also returns the values of the recommended rows.

    Returns:
        The folder of the version.

    Raises:
        FileExistsError: The package has this version.
        TypeError: The model returns an object without tensors.
        ValueError: The model cannot be exported, an input or output has no rows, or the outputs of
            a row depend on other rows.

    Example:
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> from recsys.sparse import KeyedJaggedTensor
        >>> tables = [EmbeddingBagConfig(9, 4, "films", feature_names=["film"])]
        >>> model = quantize_embeddings(EmbeddingBagCollection(tables=tables))
        >>> batch = KeyedJaggedTensor(["film"], torch.tensor([3, 4]), lengths=torch.tensor([1, 1]))
        >>> package(model, "models/movies", [batch])  # doctest: +SKIP
        PosixPath('models/movies/1')
    """
    model, folder, kinds = served_part(model), Path(folder), list(dict.fromkeys(programs))
    whole("package.version", version, least=1)
    whole("package.max_rows", max_rows, least=1)
    if not kinds or any(kind not in _FILES for kind in kinds):
        raise ValueError(f"programs must be some of {[*_FILES]}; received {list(programs)}.")
    target = folder / str(version)
    if target.exists():
        raise FileExistsError(f"{target} exists. Choose another version, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".part-{secrets.token_hex(8)}"
    part.mkdir()
    try:
        columns: PackageColumns | None = None
        if spec is not None:
            from recsys.inference.packages.columns import PackageColumns

            check_spec("package: spec", spec, model)
            columns = PackageColumns(spec, inputs)
            inputs = columns.arguments()
        manifest = _write_version(
            part, model, inputs, kinds, max_rows, dict(defaults or {}), columns
        )
        _sync(part)
        os.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    config = folder / f".part-{secrets.token_hex(8)}"
    config.write_text(config_pbtxt(manifest, folder.name))
    os.replace(config, folder / "config.pbtxt")
    return target


def _write_version(
    part: Path,
    model: nn.Module,
    inputs: Sequence[object],
    kinds: Sequence[str],
    max_rows: int,
    defaults: Mapping[str, float],
    columns: PackageColumns | None,
) -> dict[str, Any]:
    (part / "tables").mkdir()
    (part / "deltas").mkdir()
    tables, mapped = _write_tables(part, model)
    hashed = [table.entry for table in tables if table.entry["index"] is not None]
    names = {table.source: table.entry["name"] for table in tables if table.entry in hashed}
    entries = describe_inputs(model, inputs, defaults, names)
    indexes = {entry["name"]: open_index(part, entry) for entry in hashed}
    packaged: nn.Module = copy.deepcopy(model, dict[int, Any](mapped))
    plain = PlainModel(packaged, with_rows(model, inputs, entries, indexes))
    paths = {id(module): f"{path}.weights" for path, module in plain.named_modules()}
    lookups = [
        lookup
        for collection in mapped.values()
        for lookup in collection.lookups().lookups
        if isinstance(lookup, QuantizedLookup)
    ]
    buffers = {paths[id(lookup)]: lookup for lookup in lookups}
    dense: dict[str, Tensor] = {}
    programs = []
    machine = {"machine": platform.machine(), "instruction_set": ""}
    for kind in kinds:
        constants = list(buffers)
        if kind == "aoti":
            constants, machine = _write_compiled(part, plain, set(buffers), dense)
        else:
            _write_script(part, plain, buffers)
        device = plain.tensors[0].device.type
        program = {"kind": kind, "file": _FILES[kind], "device": device, "constants": constants}
        programs.append(program)
    write_tensors(part / "dense.safetensors", dense)
    manifest = {
        "format": FORMAT,
        "recsys": recsys.__version__,
        "torch": torch.__version__.partition("+")[0],
        "fbgemm": fbgemm_release(),
        **machine,
        "programs": programs,
        "inputs": entries,
        "outputs": _outputs(model, plain.expected, columns),
        "tables": [
            {**table.entry, "buffer": paths[id(table.lookup)], "offset": table.offset}
            for table in tables
        ],
        "buffers": [
            {"name": name, "bytes": lookup.weights.numel()}  # type: ignore[operator]
            for name, lookup in buffers.items()
        ],
        "limits": {"max_rows": max_rows},
        "columns": [] if columns is None else columns.write(part, entries),
    }
    request = sample_request(model, inputs, entries)
    response = _checked_response(part, manifest, request)
    sample = {f"request.{name}": tensor for name, tensor in request.items()}
    sample |= {f"response.{name}": tensor for name, tensor in response.items()}
    write_tensors(part / "sample.safetensors", sample)
    manifest["files"] = {
        str(path.relative_to(part)): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(part.rglob("*"))
        if path.is_file()
    }
    (part / "manifest.json").write_text(manifest_text(manifest))
    return manifest


def _outputs(
    model: nn.Module, expected: Any, columns: PackageColumns | None
) -> list[dict[str, Any]]:
    """Return the entries of the outputs; rows that a recommender returns name their vocabulary."""
    entries = list(describe_outputs(expected))
    if columns is not None and isinstance(model, Recommend) and model.has_row_ids:
        feature = model.history or getattr(model.model, "history", None)
        table = columns.vocabulary_of(feature)
        if table is not None:
            entries[1]["vocabulary"] = table
    return entries


# -- tables ----------------------------------------------------------------------------------------


@final
class _Written(NamedTuple):
    """A table of a package."""

    source: tuple[str, str]
    """The path of its collection, and its name there."""
    entry: dict[str, Any]
    """The manifest's entry without buffer and offset."""
    lookup: QuantizedLookup
    offset: int


def _write_tables(
    part: Path, model: nn.Module
) -> tuple[list[_Written], dict[int, QuantizedCollection]]:
    """Write the tables of a model.

    Returns:
        The tables; and by the `id` of each collection a collection whose rows are the mapped files.
        Collections with tables on several devices are left out: they stay in the program.
    """
    collections = {path: module for path, module in model.named_modules() if _has_files(module)}
    configs = [config for owner in collections.values() for config in owner.configs()]
    names = [config.name for config in configs]
    earlier = _earlier_files(part.parent)
    tables: list[_Written] = []
    mapped = {}
    for path, collection in collections.items():
        served = collection.lookups()
        lookups = []
        for places, lookup in zip(served.tables_by_lookup(), served.lookups, strict=True):
            assert isinstance(lookup, QuantizedLookup)
            sources, entries, starts, files, end = [], [], [], [], 0
            for table, rows in zip(places, lookup.stored_tables(), strict=True):
                config = collection.configs()[table]
                name = config.name if names.count(config.name) == 1 else f"{path}.{config.name}"
                entry = _entry(name, config, rows)
                _write_rows(part / entry["file"], rows, earlier)
                if config.ids is not None:
                    index = collection.indexes.table(config.name).index
                    entry["index"] = _write_index(part, entry["file"], config.ids, index, earlier)
                sources.append((path, config.name))
                files.append(MappedFile(part / entry["file"], end, rows.numel()))
                entries.append(entry)
                starts.append(end)
                end += -(-rows.numel() // ALIGNMENT) * ALIGNMENT
            storage = map_files(end, files).to(rows.device)
            lookups.append(lookup.over(starts, storage))
            tables += [
                _Written(source, entry, lookups[-1], start)
                for source, entry, start in zip(sources, entries, starts, strict=True)
            ]
        mapped[id(collection)] = collection.over(served.over(lookups))
    return tables, mapped


def _has_files(module: nn.Module) -> bool:
    if not isinstance(module, QuantizedCollection) or module.is_placed:
        return False
    return not any(isinstance(lookup, QuantizedSplitLookup) for lookup in module.lookups().lookups)


def _entry(name: str, config: BaseEmbeddingConfig, rows: Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "rows": rows.shape[0],
        "dim": config.embedding_dim,
        "dtype": _DTYPES[config.data_type],
        "row_bytes": rows.shape[1],
        "file": f"tables/{quote(name, safe='')}.rows",
        "features": list(config.feature_names),
        "index": None,
    }


def _write_index(
    part: Path, rows: str, ids: HashedIds, index: IdIndex, earlier: Mapping[str, Path]
) -> dict[str, Any]:
    """Write the index of a table; return its entry in the manifest."""
    files = {name: f"{rows.removesuffix('.rows')}.{name}" for name in ("ids", "digests")}
    _write_rows(part / files["ids"], index.ids.view(-1, 1).view(torch.uint8), earlier)
    _write_rows(part / files["digests"], index.digests.view(-1, 1), earlier)
    return {
        **files, "regions": index.num_regions, "seed": signed(index.seed), "unknown": ids.unknown,
    }  # fmt: skip


def _write_rows(path: Path, rows: Tensor, earlier: Mapping[str, Path]) -> None:
    """Write a table, or link the file of an earlier version with the same content."""
    step = max(_BLOCK_BYTES // max(rows.shape[1], 1), 1)

    def blocks() -> Iterator[memoryview]:
        for block in rows.split(step):
            yield block.cpu().contiguous().numpy().data

    if earlier:
        digest = hashlib.sha256()
        for block in blocks():
            digest.update(block)
        same = earlier.get(digest.hexdigest())
        if same is not None:
            try:
                os.link(same, path)
            except OSError:  # another file system, or one without links
                shutil.copyfile(same, path)
            return
    with path.open("wb") as file:
        for block in blocks():
            file.write(block)


def _earlier_files(folder: Path) -> dict[str, Path]:
    """Return the table files of other versions by checksum."""
    files = {}
    for path in folder.glob("*/manifest.json"):
        try:
            manifest = read_manifest(path.parent)
        except (ValueError, OSError):  # leave out a damaged version
            continue
        for name, about in manifest["files"].items():
            file = path.parent / name
            is_table = name.startswith("tables/") and file.is_file()
            if is_table and file.stat().st_size == about["bytes"]:
                files[about["sha256"]] = file
    return files


# -- programs --------------------------------------------------------------------------------------


def _write_compiled(
    part: Path, plain: PlainModel, buffers: set[str], dense: dict[str, Tensor]
) -> tuple[list[str], dict[str, str]]:
    """Write a program of AOTInductor without constants.

    Returns:
        The names of its constants, and the machine that it needs. The values of all constants that
        are not buffers of tables are added to `dense`.
    """
    exported = exported_program(plain)
    path = part / _FILES["aoti"]
    device = plain.tensors[0].device
    config = {
        "aot_inductor.package_constants_in_so": False,
        # CUDA kernels inside the library, so that it needs no other file once it is loaded
        "aot_inductor.embed_kernel_binary": device.type == "cuda",
    }
    compile_exported(exported, path, device, config)
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    values = _constants(exported)
    constants = {name: values[name].to(device) for name in loader.get_constant_fqns()}
    dense |= {name: value for name, value in constants.items() if name not in buffers}
    set_constants(loader, constants)
    program = OpenProgram(loader, device, {}, {})

    def call(*tensors: Tensor) -> object:
        outputs = program.run(tensors)
        is_one = isinstance(plain.expected, Tensor)
        return outputs[0] if is_one else dict(zip(plain.output_names, outputs, strict=True))

    plain.check(call)
    about = loader.get_metadata()
    return list(constants), {
        "machine": about["AOTI_MACHINE"],
        "instruction_set": about["AOTI_CPU_ISA"],
    }


def _constants(exported: ExportedProgram) -> dict[str, Tensor]:
    """Return the constants of an exported program by their names in the compiled program.

    Inductor renames tensors that `forward` makes: `_tensor_constant0`, ... in the order of their
    first use.
    """
    constants = {**exported.state_dict, **exported.constants}
    targets = {
        spec.arg.name: spec.target
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    made: dict[str, None] = {}
    for node in exported.graph.nodes:
        for used in node.all_input_nodes:
            if used.name in targets and used.op == "placeholder":
                made.setdefault(targets[used.name])
    for i, name in enumerate(made):
        constants[f"_tensor_constant{i}"] = exported.constants[name]
    return constants


def _write_script(part: Path, plain: PlainModel, buffers: Mapping[str, QuantizedLookup]) -> None:
    """Write a program of TorchScript without the rows of tables."""
    try:
        program = scripted(plain)
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        raise ValueError(
            f"programs must be ['aoti'] for this model, as TorchScript cannot compile it: "
            f"{str(error).partition(chr(10))[0]}. {notes}"
        ) from error
    kept = {name: lookup.weights for name, lookup in buffers.items()}
    for name in buffers:
        set_buffer(program, name, torch.zeros(0, dtype=torch.uint8))
    program.save(str(part / _FILES["torchscript"]))
    for name, weights in kept.items():
        set_buffer(program, name, weights)  # type: ignore[arg-type]


# -- sample ----------------------------------------------------------------------------------------


def _checked_response(
    part: Path, manifest: dict[str, Any], request: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the response of the sample request, by each program of a package.

    Raises:
        ValueError: Two copies of the request in a batch get other responses than one.
    """
    first: dict[str, Tensor] = {}
    for program in manifest["programs"]:
        opened = open_program(part, manifest, program["kind"])
        alone, merged = (_respond(opened, manifest, request, n) for n in (1, 2))
        for name, wanted in alone[0].items():
            for response in merged:
                if not _are_close(response[name], wanted):
                    raise ValueError(
                        f"Output {name!r} of a row must not depend on other rows, as a server "
                        "merges requests; received another output for two copies of the example "
                        "in one batch. Leave out what combines rows, such as in-batch negatives."
                    )
        first = first or alone[0]
    return first


def _respond(
    program: OpenProgram,
    manifest: Mapping[str, Any],
    request: Mapping[str, Tensor],
    copies: int,
) -> list[dict[str, Tensor]]:
    checked_requests = [check_request(manifest, request)] * copies
    outputs = program.run(merge(manifest, checked_requests, program.indexes))
    return split(manifest, outputs, [checked.rows for checked in checked_requests])


def _are_close(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(
        found, wanted, rtol=1e-3, atol=1e-5, equal_nan=True
    )


def _sync(folder: Path) -> None:
    """Write a folder's files to disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
