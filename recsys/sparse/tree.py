"""Registration with torch's pytrees, so that batches can be mapped, exported and compared.

Every leaf is a tensor, and the same data gives the same tree whether or not its offsets have been
asked for. Batch sizes are no part of a tree's structure unless features differ in them.
"""

from collections.abc import Iterable

from torch import Tensor
from torch.utils import _pytree as pytree

from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed import KeyedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor

_KeyedLeaves = list[tuple[pytree.KeyEntry, Tensor]]
_JaggedContext = bool  # weighted?
_KeyedJaggedContext = tuple[list[str], bool, list[list[int]] | None, list[str] | None]
_KeyedContext = tuple[list[str], list[int], int]


def _flatten_jagged(jt: JaggedTensor) -> tuple[list[Tensor], _JaggedContext]:
    weights = jt.weights_or_none()
    leaves = [jt.values(), jt.lengths()]
    return (leaves, False) if weights is None else ([*leaves, weights], True)


def _flatten_jagged_with_keys(jt: JaggedTensor) -> tuple[_KeyedLeaves, _JaggedContext]:
    leaves, context = _flatten_jagged(jt)
    return _name(leaves, ["values", "lengths", "weights"]), context


def _unflatten_jagged(leaves: Iterable[Tensor], context: _JaggedContext) -> JaggedTensor:
    values, lengths, *rest = leaves
    return JaggedTensor.from_parts(values, rest[0] if context else None, lengths)


def _flatten_keyed_jagged(kjt: KeyedJaggedTensor) -> tuple[list[Tensor], _KeyedJaggedContext]:
    weights, inverse = kjt.weights_or_none(), kjt.inverse_indices_or_none()
    leaves = [kjt.values(), kjt.lengths()]
    if weights is not None:
        leaves.append(weights)
    if inverse is not None:
        leaves.append(inverse[1])
    inverse_keys = None if inverse is None else inverse[0]
    strides = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
    return leaves, (kjt.keys(), weights is not None, strides, inverse_keys)


def _flatten_keyed_jagged_with_keys(
    kjt: KeyedJaggedTensor,
) -> tuple[_KeyedLeaves, _KeyedJaggedContext]:
    leaves, context = _flatten_keyed_jagged(kjt)
    names = ["values", "lengths", *["weights"] * context[1], "inverse_indices"]
    return _name(leaves, names), context


def _unflatten_keyed_jagged(
    leaves: Iterable[Tensor], context: _KeyedJaggedContext
) -> KeyedJaggedTensor:
    keys, is_weighted, strides_per_rank, inverse_keys = context
    values, lengths, *rest = leaves
    weights = rest.pop(0) if is_weighted else None
    inverse = None if inverse_keys is None else (inverse_keys, rest[0])
    strides = None if strides_per_rank is None else [sum(row) for row in strides_per_rank]
    if inverse is not None and isinstance(inverse[1], Tensor):
        stride = inverse[1].shape[1]
    elif strides is not None:
        stride = max(strides, default=0)
    else:  # a tree_map may have put something else than tensors here
        stride = lengths.numel() // len(keys) if keys and isinstance(lengths, Tensor) else 0
    return KeyedJaggedTensor.from_parts(
        keys,
        values,
        weights,
        lengths,
        stride=stride,
        stride_per_key_per_rank=strides_per_rank,
        stride_per_key=strides,
        inverse_indices=inverse,
    )


def _flatten_keyed(kt: KeyedTensor) -> tuple[list[Tensor], _KeyedContext]:
    return [kt.values()], (kt.keys(), kt.length_per_key(), kt.key_dim())


def _flatten_keyed_with_keys(kt: KeyedTensor) -> tuple[_KeyedLeaves, _KeyedContext]:
    leaves, context = _flatten_keyed(kt)
    return _name(leaves, ["values"]), context


def _unflatten_keyed(leaves: Iterable[Tensor], context: _KeyedContext) -> KeyedTensor:
    (values,) = leaves
    keys, widths, key_dim = context
    return KeyedTensor.from_parts(keys, widths, values, key_dim)


def _name(leaves: list[Tensor], names: list[str]) -> _KeyedLeaves:
    return [(pytree.GetAttrKey(n), leaf) for n, leaf in zip(names, leaves, strict=False)]


pytree.register_pytree_node(
    JaggedTensor,
    _flatten_jagged,
    _unflatten_jagged,
    flatten_with_keys_fn=_flatten_jagged_with_keys,
    serialized_type_name="recsys.sparse.JaggedTensor",
)
pytree.register_pytree_node(
    KeyedJaggedTensor,
    _flatten_keyed_jagged,
    _unflatten_keyed_jagged,
    flatten_with_keys_fn=_flatten_keyed_jagged_with_keys,
    serialized_type_name="recsys.sparse.KeyedJaggedTensor",
)
pytree.register_pytree_node(
    KeyedTensor,
    _flatten_keyed,
    _unflatten_keyed,
    flatten_with_keys_fn=_flatten_keyed_with_keys,
    serialized_type_name="recsys.sparse.KeyedTensor",
)
