"""Description of a model's inputs and outputs for the manifest of a package.

Shapes: `B` batch size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recsys.inference.input_features import (
    InputFeature,
    arguments_by_name,
    features_of_inputs,
    is_jagged,
    name_of,
)
from recsys.inference.quant.collection import QuantizedCollection
from recsys.kernels.hashed.index import IdIndex
from recsys.modules.ids.rows import stored_rows
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["describe_inputs", "describe_outputs", "sample_request", "with_rows"]


def describe_inputs(
    model: nn.Module,
    inputs: Sequence[object],
    defaults: Mapping[str, float],
    indexes: Mapping[tuple[str, str], str],
) -> list[dict[str, Any]]:
    """Return the manifest's entries of the inputs.

    Args:
        model: A quantized model.
        inputs: Example arguments.
        defaults: Values of missing dense inputs, by name.
        indexes: Names of the tables with hashed ids, by path of the module and name there.

    Raises:
        ValueError: Inputs have different numbers of rows, a KeyedJaggedTensor has a batch size per
            key, or a default names no dense input. Or the ids of a table with hashed ids are not
            an input, unchanged.
    """
    leaves = _leaves(model, inputs)
    features = features_of_inputs(model, inputs)
    rows = {name: _num_rows(name, leaf) for name, leaf in leaves.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"All inputs must have the same number of rows, as requests are merged by rows; "
            f"received {rows}. Make other values constants of the model."
        )
    dense = [name for name, leaf in leaves.items() if not is_jagged(leaf)]
    unknown = sorted(set(defaults) - set(dense))
    if unknown:
        raise ValueError(f"defaults must name dense inputs ({dense}); received {unknown}.")
    halves = [n for n in defaults if leaves[n].dtype in (torch.float16, torch.bfloat16)]
    if any(defaults[name] for name in halves):
        raise ValueError(f"defaults of float16 and bfloat16 inputs must be 0; received {defaults}.")
    uses = Counter([*dense, *(f.name for of_input in features.values() for f in of_input)])
    entries: list[dict[str, Any]] = []
    for name, leaf in leaves.items():
        if isinstance(leaf, Tensor):
            entries.append({
                "name": name, "kind": "dense", "dtype": _dtype(leaf),
                "shape": [-1, *leaf.shape[1:]], "default": defaults.get(name),
            })  # fmt: skip
            continue
        entries.append({
            "name": name, "kind": "jagged", "dtype": _dtype(leaf.values()),
            "lengths_dtype": _dtype(leaf.lengths()),
            "weighted": leaf.weights_or_none() is not None,
            "features": [
                {
                    "name": feature.name,
                    "tensor": feature.name if uses[feature.name] == 1 else f"{name}.{feature.name}",
                    "rows": feature.rows,
                    "index": indexes.get((str(feature.module), str(feature.table))),
                }
                for feature in features[name]
            ],
        })  # fmt: skip
    _check_hashed(model, features, entries, indexes)
    return entries


def _check_hashed(
    model: nn.Module,
    features: Mapping[str, Sequence[InputFeature]],
    entries: Sequence[Mapping[str, Any]],
    indexes: Mapping[tuple[str, str], str],
) -> None:
    """Check that servers can map all hashed ids before the program runs."""
    counts = Counter(
        (feature.module, feature.table) for of_input in features.values() for feature in of_input
    )
    for path, module in model.named_modules():
        for config in module.configs() if isinstance(module, QuantizedCollection) else ():
            if config.ids is None:
                continue
            if (path, config.name) not in indexes:
                raise ValueError(
                    f"Table {config.name!r} with HashedIds must be on one device; received a table "
                    "in shards. Package the model before shard_quant_model."
                )
            if getattr(module, "need_indices", bool)():
                raise ValueError(
                    f"need_indices must be False with HashedIds, as programs read rows; received "
                    f"True for the collection of table {config.name!r}."
                )
            if counts[path, config.name] != len(config.feature_names):
                raise ValueError(
                    f"Features {config.feature_names} of table {config.name!r} with HashedIds must "
                    "be inputs of the model, as servers map their ids before the program runs; "
                    "received a model that changes them, or reads them by another table too."
                )
    for entry in entries:
        hashed = [f["name"] for f in entry.get("features", ()) if f["index"] is not None]
        if hashed and entry["dtype"] != "int64":
            raise ValueError(
                f"Ids of input {entry['name']!r} must be int64, as {hashed} are features of tables "
                f"with HashedIds; received {entry['dtype']} in the example."
            )


def describe_outputs(output: Any, name: str = "") -> Iterator[dict[str, Any]]:
    """Yield the manifest's entries of the outputs, in the order of a program's tensors.

    Args:
        output: The model's output for the example.
        name: Name of the output.

    Raises:
        ValueError: An output is neither a tensor with rows nor a JaggedTensor.
    """
    if isinstance(output, KeyedJaggedTensor) or (isinstance(output, Tensor) and not output.dim()):
        raise ValueError(
            f"Outputs of a packaged model must have rows; received a {type(output).__name__} "
            f"{name or 'output'!r}. Return a dict of tensors or of JaggedTensors."
        )
    if isinstance(output, Tensor):
        yield {
            "name": name or "output", "kind": "rows", "dtype": _dtype(output),
            "shape": [-1, *output.shape[1:]],
        }  # fmt: skip
        return
    if isinstance(output, JaggedTensor):
        weights = output.weights_or_none()
        yield {
            "name": name, "kind": "jagged", "dtype": _dtype(output.values()),
            "shape": [-1, *output.values().shape[1:]],
            "lengths_dtype": _dtype(output.lengths()),
            "weights_dtype": None if weights is None else _dtype(weights),
        }  # fmt: skip
        return
    keys: Sequence[Any] = ()
    if isinstance(output, KeyedTensor):
        keys = output.keys()
    elif isinstance(output, Mapping):
        keys = list(output)
    elif isinstance(output, list | tuple):
        keys = range(len(output))
    for key in keys:
        yield from describe_outputs(output[key], f"{name}.{key}".lstrip("."))


def sample_request(
    model: nn.Module, inputs: Sequence[object], entries: Sequence[Mapping[str, Any]]
) -> dict[str, Tensor]:
    """Return example arguments as a request: tensors by name.

    Args:
        model: The model.
        inputs: Example arguments.
        entries: The result of `describe_inputs`.
    """
    request: dict[str, Tensor] = {}
    leaves = _leaves(model, inputs)
    for entry in entries:
        leaf = leaves[entry["name"]]
        if isinstance(leaf, Tensor):
            request[entry["name"]] = leaf.detach().cpu().contiguous()
            continue
        bags = leaf.to_dict() if isinstance(leaf, KeyedJaggedTensor) else {entry["name"]: leaf}
        for feature in entry["features"]:
            of_feature = bags[feature["name"]]
            request[feature["tensor"]] = of_feature.values().cpu().clone()
            request[f"{feature['tensor']}.lengths"] = of_feature.lengths().cpu().clone()
            if entry["weighted"]:
                request[f"{feature['tensor']}.weights"] = of_feature.weights().cpu().float()
    return request


def with_rows(
    model: nn.Module,
    inputs: Sequence[object],
    entries: Sequence[Mapping[str, Any]],
    indexes: Mapping[str, IdIndex],
) -> Sequence[object]:
    """Return example arguments with rows in place of hashed ids.

    Args:
        model: The model.
        inputs: Example arguments.
        entries: The result of `describe_inputs`.
        indexes: The index of each table with hashed ids.
    """
    tables = {entry["name"]: [f["index"] for f in entry.get("features", ())] for entry in entries}

    def mapped(path: Any, leaf: Any) -> Any:
        names = tables[name_of(path)] if is_jagged(leaf) else []
        if not any(names):
            return leaf
        sizes = leaf.length_per_key() if isinstance(leaf, KeyedJaggedTensor) else None
        parts = leaf.values().split(sizes or len(leaf.values()))
        rows = [
            part
            if name is None
            else stored_rows([indexes[name]], part.cpu(), [len(part)]).to(part.device)
            for name, part in zip(names, parts, strict=True)
        ]
        if isinstance(leaf, KeyedJaggedTensor):
            return leaf.with_values(torch.cat(rows))
        return JaggedTensor(rows[0], leaf.weights_or_none(), leaf.lengths())

    arguments = arguments_by_name(model, inputs)
    mapped_arguments = pytree.tree_map_with_path(mapped, arguments, is_leaf=is_jagged)
    return list(mapped_arguments.values())


def _leaves(model: nn.Module, inputs: Sequence[object]) -> dict[str, Any]:
    """Return the tensors and jagged tensors among arguments, by name of the input."""
    leaves, _ = pytree.tree_flatten_with_path(arguments_by_name(model, inputs), is_leaf=is_jagged)
    return {
        name_of(path): leaf for path, leaf in leaves if is_jagged(leaf) or isinstance(leaf, Tensor)
    }


def _num_rows(name: str, leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        if not leaf.dim():
            raise ValueError(
                f"Input {name!r} must have rows; received a tensor without dims. Make it a "
                "constant of the model."
            )
        return leaf.shape[0]
    if isinstance(leaf, KeyedJaggedTensor):
        if leaf.variable_stride_per_key():
            raise ValueError(
                f"Input {name!r} must have one batch size; received a batch size per key."
            )
        return leaf.stride()
    rows: int = leaf.lengths().numel()
    return rows


def _dtype(tensor: Tensor) -> str:
    known = (
        torch.bool, torch.uint8, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )  # fmt: skip
    if tensor.dtype not in known:
        raise ValueError(
            f"Tensors of a package must have one of the dtypes {[*known]}; received {tensor.dtype}."
        )
    return str(tensor.dtype).removeprefix("torch.")
