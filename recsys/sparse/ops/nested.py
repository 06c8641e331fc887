"""Conversion to and from `torch.nested`.

Shapes: `M` bags, `N` values of all bags.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.ops.bags import positions
from recsys.sparse.recorded import recorded

__all__ = ["from_nested", "to_nested"]


@recorded
def to_nested(x: JaggedTensor) -> Tensor:
    """Return a nested tensor of `torch.nested` with the layout `torch.jagged`.

    Args:
        x: `[N, ...]`.

    Returns:
        `[M, j, ...]`; it shares the memory of the values.

    Example:
        >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 1]))
        >>> to_nested(x).unbind()
        (tensor([1., 2.]), tensor([3.]))
    """
    x = x.trim()
    return torch.nested.nested_tensor_from_jagged(x.values(), x.offsets().long())


@recorded
def from_nested(nested: Tensor) -> JaggedTensor:
    """Return the jagged tensor of a nested tensor of `torch.nested`.

    Args:
        nested: `[M, j, ...]`, with the layout `torch.jagged`, and `j` as its second dimension.

    Returns:
        `M` bags, which share the memory of the nested tensor where it has no gaps.

    Raises:
        TypeError: The tensor is not nested, or has another layout.

    Example:
        >>> nested = torch.nested.nested_tensor([[1, 2], [3]], layout=torch.jagged)
        >>> from_nested(nested).to_dense()
        [tensor([1, 2]), tensor([3])]
    """
    if not (nested.is_nested and nested.layout is torch.jagged):
        raise TypeError(
            "from_nested needs a nested tensor with the layout torch.jagged; received a tensor "
            f"with the layout {nested.layout}. Use JaggedTensor.from_dense_lengths."
        )
    values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()  # type: ignore[attr-defined]
    if lengths is None:
        return JaggedTensor(values, offsets=offsets)
    starts = offsets[:-1].repeat_interleave(lengths)
    place = positions(JaggedTensor.from_parts(starts, lengths=lengths)).values()
    return JaggedTensor(values.index_select(0, starts + place), lengths=lengths)
