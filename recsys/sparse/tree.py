"""Registration with torch's pytrees, so that batches can be mapped, exported and compared.

Every leaf is a tensor. The same data gives the same tree whether or not its offsets were derived.
The batch size belongs to the structure only where the tensors do not imply it: without keys, and
where features have different batch sizes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from recsys.sparse.bags import Bags
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed import KeyedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor
from recsys.sparse.kjt_list import KJTList

_T = TypeVar("_T")
Leaves = dict[str, Tensor]


def leaves_of_jagged(jt: Bags) -> tuple[Leaves, bool]:
    """Return values, lengths and weights if any, and whether there are weights."""
    weights = jt.weights_or_none()
    leaves = {"values": jt.values(), "lengths": jt.lengths()}
    return (leaves, False) if weights is None else ({**leaves, "weights": weights}, True)


def _jagged_of(leaves: Iterable[Tensor], is_weighted: bool) -> JaggedTensor:
    values, lengths, *rest = leaves
    return JaggedTensor.from_parts(values, rest[0] if is_weighted else None, lengths)


def leaves_of_keyed_jagged(kjt: KeyedJaggedTensor) -> tuple[Leaves, object]:
    """Return the tensors that are there, and the rest of a batch: its structure."""
    leaves, is_weighted = leaves_of_jagged(kjt)
    inverse_keys, inverse_rows = kjt.inverse_indices_or_none() or (None, None)
    if inverse_rows is not None:
        leaves["inverse_indices"] = inverse_rows
    strides = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
    context = (kjt.keys(), is_weighted, strides, inverse_keys)
    has_other_stride = (
        inverse_keys is None
        and (strides is not None or not kjt.keys())
        and kjt.stride() != _largest(strides)
    )
    return leaves, (*context, kjt.stride()) if has_other_stride else context


def _largest(strides_per_rank: list[list[int]] | None) -> int:
    """Return the largest batch size of a feature, 0 if none is known."""
    return max(map(sum, strides_per_rank or ()), default=0)


def _keyed_jagged_of(leaves: Iterable[Tensor], context: Any) -> KeyedJaggedTensor:
    # programs exported before batch sizes were recorded have four members here, too
    keys, is_weighted, strides_per_rank, inverse_keys, *told = context
    values, lengths, *rest = leaves
    weights = rest[0] if is_weighted else None
    inverse = None if inverse_keys is None else (inverse_keys, rest[-1])
    if told:
        (stride,) = told
    elif inverse is not None and isinstance(inverse[1], Tensor):
        stride = inverse[1].shape[1]
    elif strides_per_rank is not None:
        stride = _largest(strides_per_rank)
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


def _members_of_list(batches: KJTList) -> tuple[dict[str, list[KeyedJaggedTensor]], object]:
    return {"features": batches.features}, None


def _list_of(members: Iterable[list[KeyedJaggedTensor]], context: Any) -> KJTList:
    (features,) = members
    return KJTList(features)


def register(
    kind: type[_T],
    members_of: Callable[[_T], tuple[Mapping[str, Any], object]],
    build: Callable[[Iterable[Any], Any], _T],
) -> None:
    """Register a class with torch's pytrees.

    Args:
        kind: the class.
        members_of: returns the members of an object by name, and the rest: plain values for JSON,
            whose only tuple may be the outermost.
        build: makes an object of the members in the same order, and the rest.
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
        # in a file of an exported program, a tuple has become a list
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda saved: tuple(saved) if isinstance(saved, list) else saved,
        serialized_type_name=".".join([*kind.__module__.split(".")[:2], kind.__name__]),
    )


register(JaggedTensor, leaves_of_jagged, _jagged_of)
register(KeyedJaggedTensor, leaves_of_keyed_jagged, _keyed_jagged_of)
register(KeyedTensor, _leaves_of_keyed, _keyed_of)
register(KJTList, _members_of_list, _list_of)
# batches hold tensors, names and numbers: `torch.load` and `torch.export.load` may read them
torch.serialization.add_safe_globals([JaggedTensor, KeyedJaggedTensor, KeyedTensor])
