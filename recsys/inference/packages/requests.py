"""Requests of a package in Python: checks, merging into one batch, and splitting of the outputs.

docs/serving_rules.md lists the rules, which the C++ core shares (`recsys/inference/cpp/batch.cpp`).

Shapes: `B` rows, `F` features of an input, `N` ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys.kernels.bounds import bad_id_text
from recsys.kernels.hashed.index import IdIndex
from recsys.modules.ids.rows import stored_rows

__all__ = ["CheckedRequest", "Request", "check_request", "merge", "split"]

Request = Mapping[str, Tensor | NDArray[Any]]
"""Tensors or arrays by name."""

_INTEGERS = (torch.int64, torch.int32)


@final
class CheckedRequest(NamedTuple):
    """A request with contiguous tensors."""

    rows: int
    tensors: Mapping[str, Tensor]


def check_request(manifest: Mapping[str, Any], request: Request) -> CheckedRequest:
    """Check a request.

    Args:
        manifest: The manifest of the package.
        request: Dense inputs `[B, ...]`; and per feature ids `[N]`, `<tensor>.lengths` `[B]` and
            `<tensor>.weights` `[N]`. Without lengths each row has one id. An absent feature has no
            ids.

    Raises:
        IndexError: An id is outside its table.
        TypeError: A tensor has another dtype.
        ValueError: A tensor is unknown or missing, or sizes do not match.
    """
    dense = {e["name"]: e for e in manifest["inputs"] if e["kind"] == "dense"}
    features = {
        feature["tensor"]: (feature, entry)
        for entry in manifest["inputs"]
        if entry["kind"] == "jagged"
        for feature in entry["features"]
    }
    tensors = {}
    for name, value in request.items():
        tensor = (
            value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value, order="C"))
        )
        tensor = tensor.detach().cpu().contiguous()
        owner, _, part = name.rpartition(".")
        if name in dense:
            wanted = getattr(torch, dense[name]["dtype"])
            _check_tensor(name, tensor, (wanted,), dense[name]["shape"])
        elif name in features or (owner in features and part == "lengths"):
            _check_tensor(name, tensor, _INTEGERS, [-1])
        elif owner in features and part == "weights" and features[owner][1]["weighted"]:
            _check_tensor(name, tensor, (torch.float32,), [-1])
        else:
            known = ", ".join([*dense, *features])
            raise ValueError(
                f"A request must have tensors of the model ({known}); received {name!r}."
            )
        tensors[name] = tensor
    for name, entry in dense.items():
        if name not in tensors and entry["default"] is None:
            raise ValueError(f"A request must have {name}, which has no default; it is missing.")
    rows = _count_rows([*dense], [*features], tensors)
    most = manifest["limits"]["max_rows"]
    if rows > most:
        raise ValueError(
            f"A request must have at most {most} rows; received {rows}. Split the request."
        )
    for name, (feature, entry) in features.items():
        _check_bags(name, feature["rows"], entry, tensors)
    return CheckedRequest(rows, tensors)


def merge(
    manifest: Mapping[str, Any],
    requests: Sequence[CheckedRequest],
    indexes: Mapping[str, IdIndex],
) -> list[Tensor]:
    """Join requests to the inputs of a program, in order, with rows in place of hashed ids.

    Args:
        manifest: The manifest of the package.
        requests: The requests.
        indexes: The indexes of the tables with hashed ids, by table name.

    Returns:
        A dense input is `[B, ...]`. A jagged input is ids `[N]`, lengths `[F * B]`, feature-major,
        and float32 weights `[N]` if it is weighted.
    """
    inputs: list[Tensor] = []
    for entry in manifest["inputs"]:
        dtype = getattr(torch, entry["dtype"])
        name = entry["name"]
        if entry["kind"] == "dense":
            parts = [
                request.tensors[name]
                if name in request.tensors
                else torch.full((request.rows, *entry["shape"][1:]), entry["default"], dtype=dtype)
                for request in requests
            ]
            inputs.append(torch.cat(parts))
            continue
        names = [feature["tensor"] for feature in entry["features"]]
        bags = [(request, name) for name in names for request in requests]
        none = torch.zeros(0, dtype=dtype)
        ids = []
        for feature in entry["features"]:
            of_feature = [_ids(request, feature["tensor"]).to(dtype) for request in requests]
            ids.append(torch.cat([none, *of_feature]))
            if feature["index"] is not None:
                ids[-1] = stored_rows([indexes[feature["index"]]], ids[-1], [len(ids[-1])])
        inputs.append(torch.cat([none, *ids]))
        lengths_dtype = getattr(torch, entry["lengths_dtype"])
        none = torch.zeros(0, dtype=lengths_dtype)
        inputs.append(
            torch.cat([none, *(_lengths(request, n).to(lengths_dtype) for request, n in bags)])
        )
        if entry["weighted"]:
            weights = [request.tensors.get(f"{n}.weights", torch.zeros(0)) for request, n in bags]
            inputs.append(torch.cat([torch.zeros(0), *weights]))
    return inputs


def split(
    manifest: Mapping[str, Any], outputs: Sequence[Tensor], rows: Sequence[int]
) -> list[dict[str, Tensor]]:
    """Split the outputs of a program.

    Args:
        manifest: The manifest.
        outputs: The program's outputs, in order.
        rows: The rows of each request.

    Returns:
        The outputs of each request, by name.

    Raises:
        ValueError: An output does not have the rows of the batch.
    """
    parts: list[dict[str, Tensor]] = [{} for _ in rows]
    tensors = iter(outputs)

    def add(name: str, tensor: Tensor, sizes: Sequence[int]) -> None:
        if not tensor.dim() or tensor.shape[0] != sum(sizes):
            raise ValueError(
                f"Output {name} must have {sum(sizes)} rows; the program returned the shape "
                f"{list(tensor.shape)}."
            )
        for of_request, part in zip(parts, tensor.cpu().split(list(sizes)), strict=True):
            of_request[name] = part

    for entry in manifest["outputs"]:
        if entry["kind"] == "rows":
            add(entry["name"], next(tensors), rows)
            continue
        prefix = f"{entry['name']}." if entry["name"] else ""
        values, lengths = next(tensors), next(tensors)
        add(f"{prefix}lengths", lengths, rows)
        sizes = [int(answer[f"{prefix}lengths"].sum()) for answer in parts]
        add(f"{prefix}values", values, sizes)
        if entry["weights_dtype"] is not None:
            add(f"{prefix}weights", next(tensors), sizes)
    return parts


def _check_tensor(
    name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int]
) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        received = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{name} must be {wanted}; received {received}.")
    if tensor.dim() != len(shape) or list(tensor.shape[1:]) != list(shape[1:]):
        raise ValueError(
            f"{name} must have the shape {list(shape)}; received {list(tensor.shape)}."
        )


def _count_rows(
    dense: Sequence[str], features: Sequence[str], tensors: Mapping[str, Tensor]
) -> int:
    counts = {name: len(tensors[name]) for name in dense if name in tensors}
    for name in features:
        stated = f"{name}.lengths" if f"{name}.lengths" in tensors else name
        if stated in tensors:
            counts[stated] = len(tensors[stated])
    if not counts:
        raise ValueError(
            "A request must have a tensor that states its rows: a dense input, ids or lengths."
        )
    first, rows = next(iter(counts.items()))
    for name, count in counts.items():
        if count != rows:
            raise ValueError(f"{name} must have {rows} rows, as {first} has; received {count}.")
    return rows


def _check_bags(
    name: str, rows: int | None, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    ids = tensors.get(name)
    num_ids = 0 if ids is None else len(ids)
    lengths = tensors.get(f"{name}.lengths")
    if lengths is not None:
        if len(lengths) and int(lengths.min()) < 0:
            row = int((lengths < 0).nonzero()[0])
            raise ValueError(
                f"{name}.lengths must not be negative; received {int(lengths[row])} for row {row}."
            )
        total = sum(lengths.tolist())  # whole numbers of Python do not overflow
        if total != num_ids:
            received = "more than 2^63" if total >= 2**63 else total
            raise ValueError(
                f"{name}.lengths must add up to the number of ids, {num_ids}; received {received}."
            )
    weights = tensors.get(f"{name}.weights")
    if entry["weighted"] and ids is not None and (weights is None or len(weights) != num_ids):
        received = "none" if weights is None else len(weights)
        raise ValueError(
            f"{name}.weights must have one number per id, {num_ids}; received {received}."
        )
    if weights is not None and ids is None and len(weights):
        raise ValueError(f"{name}.weights must come with ids; received no tensor {name}.")
    if rows is None and entry["dtype"] == "int32":
        rows = 2**31
    if ids is None or rows is None or not num_ids:
        return
    is_bad = (ids < 0) | (ids >= rows)
    if bool(is_bad.any()):
        at = int(is_bad.nonzero()[0])
        raise IndexError(bad_id_text(name, int(ids[at]), at, rows))


def _ids(request: CheckedRequest, name: str) -> Tensor:
    return request.tensors.get(name, torch.zeros(0, dtype=torch.int64))


def _lengths(request: CheckedRequest, name: str) -> Tensor:
    lengths = request.tensors.get(f"{name}.lengths")
    if lengths is not None:
        return lengths
    return torch.full((request.rows,), int(name in request.tensors), dtype=torch.int64)
