"""Registration with torch's pytrees, so that batches can be mapped, exported and compared.

Every leaf is a tensor, and the same data gives the same tree whether or not its offsets have been
asked for. Batch sizes are no part of a tree's structure unless features differ in them.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recsys.sparse.jagged import Bags, JaggedTensor
from recsys.sparse.keyed import KeyedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor

_T = TypeVar("_T")
Leaves = dict[str, Tensor | None]
"""Tensors by name; those that are None are left out of the tree."""


def leaves_of_jagged(jt: Bags) -> tuple[Leaves, bool]:
    """Return values, lengths and weight, and whether there are weights."""
    weights = jt.weights_or_none()
    return {"values": jt.values(), "lengths": jt.lengths(), "weights": weights}, weights is not None


def _jagged_of(leaves: Iterable[Tensor], is_weighted: bool) -> JaggedTensor:
    values, lengths, *rest = leaves
    return JaggedTensor.from_parts(values, rest[0] if is_weighted else None, lengths)


def leaves_of_keyed_jagged(kjt: KeyedJaggedTensor) -> tuple[Leaves, object]:
    """Return the tensors, and what else makes the structure of a batch."""
    leaves, is_weighted = leaves_of_jagged(kjt)
    inverse_keys, leaves["inverse_indices"] = kjt.inverse_indices_or_none() or (None, None)
    strides = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
    return leaves, (kjt.keys(), is_weighted, strides, inverse_keys)


def _keyed_jagged_of(leaves: Iterable[Tensor], context: Any) -> KeyedJaggedTensor:
    keys, is_weighted, strides_per_rank, inverse_keys = context
    values, lengths, *rest = leaves
    weights = rest[0] if is_weighted else None
    inverse = None if inverse_keys is None else (inverse_keys, rest[-1])
    if inverse is not None and isinstance(inverse[1], Tensor):
        stride = inverse[1].shape[1]
    elif strides_per_rank is not None:
        stride = max(map(sum, strides_per_rank), default=0)
    else:  # a tree_map may have put something else than tensors, or their proxies, here
        stride = lengths.numel() // len(keys) if keys and hasattr(lengths, "numel") else 0
    return KeyedJaggedTensor.from_parts(
        keys,
        values,
        weights,
        lengths,
        stride=stride,
        stride_per_key_per_rank=strides_per_rank,
        inverse_indices=inverse,
    )


def _leaves_of_keyed(kt: KeyedTensor) -> tuple[Leaves, object]:
    return {"values": kt.values()}, (kt.keys(), kt.length_per_key(), kt.key_dim())


def _keyed_of(leaves: Iterable[Tensor], context: Any) -> KeyedTensor:
    (values,) = leaves
    keys, widths, key_dim = context
    return KeyedTensor.from_parts(keys, widths, values, key_dim)


def _register(
    kind: type[_T],
    leaves_of: Callable[[_T], tuple[Leaves, object]],
    build: Callable[[Iterable[Tensor], Any], _T],
) -> None:
    def flatten(batch: _T) -> tuple[list[Tensor], object]:
        leaves, context = leaves_of(batch)
        return [leaf for leaf in leaves.values() if leaf is not None], context

    def flatten_with_keys(batch: _T) -> tuple[list[tuple[pytree.KeyEntry, Tensor]], object]:
        leaves, context = leaves_of(batch)
        named = leaves.items()
        return [(pytree.GetAttrKey(n), leaf) for n, leaf in named if leaf is not None], context

    pytree.register_pytree_node(
        kind,
        flatten,
        build,
        flatten_with_keys_fn=flatten_with_keys,
        # in a file of an exported program, a tuple has become a list
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda saved: tuple(saved) if isinstance(saved, list) else saved,
        serialized_type_name=f"recsys.sparse.{kind.__name__}",
    )


_register(JaggedTensor, leaves_of_jagged, _jagged_of)
_register(KeyedJaggedTensor, leaves_of_keyed_jagged, _keyed_jagged_of)
_register(KeyedTensor, _leaves_of_keyed, _keyed_of)
# batches hold tensors, names and numbers: `torch.load` and `torch.export.load` may read them
torch.serialization.add_safe_globals([JaggedTensor, KeyedJaggedTensor, KeyedTensor])
