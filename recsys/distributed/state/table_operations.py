"""Torch operations that are defined on a table with shards on several ranks.

There are two kinds. An elementwise operation computes each element of its result from the elements
at the same position: every rank applies it to its shards. A reduction combines all elements into
one value: every rank reduces its shards, the ranks exchange the partial results, and the reduction
of these is the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from recsys.distributed.ranks.comm import gather_objects

__all__ = ["Part", "is_by_element", "is_reduction", "like_of", "reduce_parts", "written_argument"]

Part: TypeAlias = tuple[tuple[int, ...], Tensor]
"""First row and column of a shard, and its values."""

_aten = torch.ops.aten
_BY_ELEMENT = {  # besides the operations that torch tags as pointwise
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.full_like.default,
    _aten.isclose.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
    _aten.copy_.default,
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
    _aten.record_stream.default,
}
_LIKE = {
    _aten.new_empty.default: _aten.empty_like.default,
    _aten.new_full.default: _aten.full_like.default,
    _aten.new_ones.default: _aten.ones_like.default,
    _aten.new_zeros.default: _aten.zeros_like.default,
}
# Reducing partial results gives the reduction of the whole; also the norm of norms does.
_REDUCTIONS = {
    _aten.all.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.any.default,
    _aten.linalg_vector_norm.default,
    _aten.max.default,
    _aten.mean.default,
    _aten.min.default,
    _aten.norm.Scalar,
    _aten.sum.default,
}


def is_by_element(function: OpOverload) -> bool:
    """Return whether each rank may apply an operation to its shards alone."""
    tags = function.tags
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return (function in _BY_ELEMENT or is_pointwise) and len(function._schema.returns) <= 1


def like_of(function: OpOverload) -> OpOverload | None:
    """Return the elementwise operation that replaces a `new_*` operation, if any.

    Example:
        >>> like_of(torch.ops.aten.new_zeros.default).name()
        'aten::zeros_like'
    """
    return _LIKE.get(function)


def is_reduction(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation reduces all elements of its first argument to one value."""
    if function not in _REDUCTIONS:
        return False
    arguments = _by_name(function, args) | kwargs
    counts_nonzeros = 0 in (
        arguments.get("ord", 2),
        arguments.get("p", 2),
    )  # cannot be combined
    return not (arguments.get("dim") or arguments.get("keepdim") or counts_nonzeros)


def written_argument(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the argument that an in-place operation modifies; None for other operations."""
    arguments = _by_name(function, args) | kwargs
    written = (a for a in function._schema.arguments if a.alias_info and a.alias_info.is_write)
    return next((arguments[a.name] for a in written if a.name in arguments), None)


def _by_name(function: OpOverload, args: Sequence[Any]) -> dict[str, Any]:
    return {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)}


def reduce_parts(
    function: OpOverload,
    parts: Sequence[Part],
    like: Tensor,
    group: torch.distributed.ProcessGroup | None,
    rest: Sequence[Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """Reduce a table to one value, the same on every rank. Every rank must call it.

    Args:
        function: A reduction.
        parts: Shards of this rank. Repeated shards count once.
        like: A tensor with the table's shape, dtype and device.
        group: Ranks with the other shards; None for this process alone.
        rest: Further arguments of the reduction.
        kwargs: Keyword arguments of the reduction.

    Raises:
        ValueError: No rank holds some shard.
    """
    if function is _aten.mean.default:
        total = reduce_parts(_aten.sum.default, parts, like, group, rest, kwargs)
        return total / like.numel()
    if like.is_meta:
        whole = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return function(whole, *rest, **kwargs)  # type: ignore[no-any-return]
    function(torch.ones(1, dtype=like.dtype), *rest, **kwargs)  # raises on every rank
    reduced = [
        (offsets, part.numel(), function(part, *rest, **kwargs).cpu())
        for offsets, part in parts
        if part.numel()
    ]
    gathered = gather_objects(group, "reduce a table", reduced)
    distinct = {offsets: (size, value) for of_rank in gathered for offsets, size, value in of_rank}
    if sum(size for size, _ in distinct.values()) != like.numel():
        raise ValueError(
            f"A ShardedTable of shape {tuple(like.shape)} cannot be reduced: no process of its "
            "group holds the other parts. A ShardedTable that was pickled has lost its group."
        )
    values = [value for _, value in distinct.values()]
    partial = torch.stack(values) if values else torch.empty(0, dtype=like.dtype)
    result: Tensor = function(partial, *rest, **kwargs)
    return result.to(like.device)
