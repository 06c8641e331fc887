"""Batch sizes of programs of `torch.export`: a program must serve batches of any size.

Shapes: `K` keys of a batch, `B` batch size, `N` ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo

from recsys.inference.input_features import is_jagged
from recsys.sparse import JaggedTensor, KeyedJaggedTensor

__all__ = ["batch_sizes", "check_any_size", "samples_of"]

_COMPARED = re.compile(r"expression (Ne|Eq)\((\w+), (\d+)\)")


def check_any_size(exported: ExportedProgram, inputs: Iterable[tuple[str, bool, Tensor]]) -> None:
    """Check that a program serves batches of any size.

    torch assumes that a size is not 1 where it decides whether a tensor is contiguous, for example
    in `nn.MultiheadAttention`. This condition is removed. Compare the program with the model on a
    batch of one sample afterwards.

    Args:
        exported: The program; changed.
        inputs: Name of each input, whether it is part of a jagged tensor, and the traced input.

    Raises:
        ValueError: The program serves some batch sizes only.
    """
    names: dict[str, str] = {}
    ranges = {}
    for name, has_ids, tensor in inputs:
        size: Any = tensor.shape[0] if tensor.dim() else 0
        if isinstance(size, int):
            if has_ids and size > 1:
                raise _refusal(name, "==", size)
            continue
        names.setdefault(str(size.node.expr), name)
        ranges[name] = exported.range_constraints[size.node.expr]
    for node in list(exported.graph.nodes):
        if node.target is torch.ops.aten._assert_scalar.default:
            match = _COMPARED.search(node.args[1])
            if match is None or match[2] not in names:
                continue
            if match[1] == "Eq" or match[3] != "1":
                relation = "==" if match[1] == "Eq" else "!="
                raise _refusal(names[match[2]], relation, match[3])
            exported.graph.erase_node(node)
    for name, limits in ranges.items():
        if limits.lower > 1:
            raise _refusal(name, ">=", limits.lower)
        if limits.upper < int_oo:
            raise _refusal(name, "<=", limits.upper)
    exported.graph.eliminate_dead_code()
    exported.graph_module.recompile()


def _refusal(name: str, relation: str, size: object) -> ValueError:
    return ValueError(
        f"A package serves batches of any size, but the model is traced for {name}.shape[0] "
        f"{relation} {size} only. Pass an example of two or more samples. Look for a branch on a "
        "shape in forward, or for a size written as a number. Or use export_torchscript, which "
        "keeps branches."
    )


def batch_sizes(inputs: Sequence[object]) -> set[int]:
    """Return the batch sizes of all jagged inputs."""
    leaves = pytree.tree_leaves(inputs, is_leaf=is_jagged)
    strides = {leaf.stride() for leaf in leaves if isinstance(leaf, KeyedJaggedTensor)}
    return strides | {len(leaf.lengths()) for leaf in leaves if isinstance(leaf, JaggedTensor)}


def samples_of(inputs: Sequence[object], samples: slice) -> list[object]:
    """Return example arguments with some samples of the batch only.

    Args:
        inputs: Arguments of a model. Tensors with the batch size of a jagged input as first dim
            are split by samples; other arguments are returned unchanged.
        samples: The samples. A KeyedJaggedTensor with a batch size per key is returned unchanged.
    """
    sizes = batch_sizes(inputs)

    def cut(leaf: object) -> object:
        if isinstance(leaf, JaggedTensor | KeyedJaggedTensor):
            return _samples_of_jagged(leaf, samples)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] in sizes:
            return leaf[samples]
        return leaf

    return list(pytree.tree_map(cut, list(inputs), is_leaf=is_jagged))


def _samples_of_jagged(
    batch: JaggedTensor | KeyedJaggedTensor, samples: slice
) -> JaggedTensor | KeyedJaggedTensor:
    keys = [""]
    if isinstance(batch, KeyedJaggedTensor):
        keys = batch.keys()
        if batch.variable_stride_per_key() or not keys:
            return batch
    lengths_KB = batch.lengths().view(len(keys), -1)
    is_kept_KB = torch.zeros_like(lengths_KB, dtype=torch.bool)
    is_kept_KB[:, samples] = True
    is_kept_N = is_kept_KB.flatten().repeat_interleave(lengths_KB.flatten())
    values, weights = batch.values()[is_kept_N], batch.weights_or_none()
    if weights is not None:
        weights = weights[is_kept_N]
    lengths = lengths_KB[:, samples].flatten()
    if isinstance(batch, KeyedJaggedTensor):
        return KeyedJaggedTensor(keys, values, weights, lengths)
    return JaggedTensor(values, weights, lengths)
