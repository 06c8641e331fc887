"""Pytree registration of batch types, for `tree_map`, `torch.export` and comparison.

Leaves have the order of TorchRec: values, weights, lengths and offsets; for a KeyedJaggedTensor
also the batch sizes per key and rank, and the inverse indices. Missing parts are None. Offsets are
None if the lengths are known, so the tree does not depend on whether offsets were computed.

The structure contains batch sizes if the tensors do not determine them: without keys, and for
features with different batch sizes. The leaf of the batch sizes is then an unused copy.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recsys.sparse.bags import JaggedBase
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed import KeyedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor
from recsys.sparse.kjt_list import KJTList

_T = TypeVar("_T")
Leaves = dict[str, Tensor]


def leaves_of_jagged(jt: JaggedBase) -> tuple[Leaves, bool]:
    """Return values, lengths and weights (if any), and whether there are weights."""
    weights = jt.weights_or_none()
    leaves = {"values": jt.values(), "lengths": jt.lengths()}
    return (leaves, False) if weights is None else ({**leaves, "weights": weights}, True)


def leaves_of_keyed_jagged(kjt: KeyedJaggedTensor) -> tuple[Leaves, object]:
    """Return the existing tensors, and the structure of the batch."""
    leaves, is_weighted = leaves_of_jagged(kjt)
    inverse = kjt.inverse_indices_or_none()
    if inverse is not None:
        leaves["inverse_indices"] = inverse[1]
    return leaves, (is_weighted, *_structure_of(kjt))


def _parts_of_jagged(jt: JaggedBase) -> tuple[dict[str, Tensor | None], None]:
    lengths = jt.lengths_or_none()
    return {
        "_values": jt.values(),
        "_weights": jt.weights_or_none(),
        "_lengths": lengths,
        "_offsets": jt.offsets_or_none() if lengths is None else None,
    }, None


def _structure_of(kjt: KeyedJaggedTensor) -> tuple[Any, ...]:
    """Return keys, varying strides, keys of inverse indices, and a stride of its own."""
    inverse_keys, _ = kjt.inverse_indices_or_none() or (None, None)
    strides = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
    has_other_stride = (
        inverse_keys is None
        and (strides is not None or not kjt.keys())
        and kjt.stride() != _largest(strides)
    )
    return kjt.keys(), strides, inverse_keys, kjt.stride() if has_other_stride else None


def _parts_of_keyed_jagged(
    kjt: KeyedJaggedTensor,
) -> tuple[dict[str, Tensor | None], tuple[Any, ...]]:
    parts, _ = _parts_of_jagged(kjt)
    structure = _structure_of(kjt)
    strides, inverse = structure[1], kjt.inverse_indices_or_none()
    is_matrix = strides is not None and len(set(map(len, strides))) == 1
    parts["_stride_per_key_per_rank"] = (
        torch.tensor(strides, dtype=torch.int32) if is_matrix else None
    )
    parts["_inverse_indices"] = None if inverse is None else inverse[1]
    return parts, structure


def _largest(strides_per_rank: list[list[int]] | None) -> int:
    """Return the largest batch size of a feature, or 0."""
    return max(map(sum, strides_per_rank or ()), default=0)


def _keyed_jagged_of(leaves: Iterable[Any], structure: Any) -> KeyedJaggedTensor:
    keys, strides_per_rank, inverse_keys, stride = structure
    values, weights, lengths, offsets, _, inverse_rows = leaves
    inverse = None if inverse_keys is None else (inverse_keys, inverse_rows)
    if stride is None:
        if inverse is not None and isinstance(inverse_rows, Tensor):
            stride = inverse_rows.shape[1]
        elif strides_per_rank is not None:
            stride = _largest(strides_per_rank)
        else:
            stride = _stride_of(len(keys), lengths, offsets)
    return KeyedJaggedTensor.from_parts(
        keys,
        values,
        weights,
        lengths,
        offsets,
        stride=stride,
        stride_per_key_per_rank=strides_per_rank,
        inverse_indices=inverse,
    )


def _stride_of(num_keys: int, lengths: Any, offsets: Any) -> int:
    """Return the batch size, or 0 if a tree_map has replaced the tensors."""
    bags, more = (offsets, 1) if lengths is None else (lengths, 0)
    return (bags.numel() - more) // num_keys if num_keys and hasattr(bags, "numel") else 0


def _parts_of_keyed(kt: KeyedTensor) -> tuple[Leaves, object]:
    return {"_values": kt.values()}, (kt.keys(), kt.length_per_key(), kt.key_dim())


def _keyed_of(leaves: Iterable[Tensor], context: Any) -> KeyedTensor:
    (values,) = leaves
    keys, widths, key_dim = context
    return KeyedTensor.from_parts(keys, widths, values, key_dim)


def register(
    kind: type[_T],
    members_of: Callable[[_T], tuple[Mapping[str, Any], object]],
    build: Callable[[Iterable[Any], Any], _T],
) -> None:
    """Register a class with torch's pytrees.

    Args:
        kind: The class.
        members_of: Returns the members of an object by name, and the structure: plain values for
            JSON, where only the outermost value may be a tuple.
        build: Builds an object from the members in the same order, and the structure.
    """

    def flatten(batch: _T) -> tuple[list[Any], object]:
        members, context = members_of(batch)
        return list(members.values()), context

    def flatten_with_keys(batch: _T) -> tuple[list[tuple[pytree.KeyEntry, Any]], object]:
        members, context = members_of(batch)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in members.items()], context

    pytree.register_pytree_node(
        kind,
        flatten,
        build,
        flatten_with_keys_fn=flatten_with_keys,
        # files of exported programs store tuples as lists
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda saved: tuple(saved) if isinstance(saved, list) else saved,
        serialized_type_name=".".join([*kind.__module__.split(".")[:2], kind.__name__]),
    )


register(JaggedTensor, _parts_of_jagged, lambda leaves, _: JaggedTensor.from_parts(*leaves))
register(KeyedJaggedTensor, _parts_of_keyed_jagged, _keyed_jagged_of)
register(KeyedTensor, _parts_of_keyed, _keyed_of)
register(
    KJTList,
    lambda batches: ({"features": batches.features}, None),
    lambda members, _: KJTList(*members),
)
# safe for `torch.load` and `torch.export.load`: tensors, names and numbers
torch.serialization.add_safe_globals([JaggedTensor, KeyedJaggedTensor, KeyedTensor])
