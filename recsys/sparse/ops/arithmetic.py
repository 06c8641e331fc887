"""Elementwise operations, reductions and matrix products of jagged tensors.

Float16 and bfloat16 are summed in float32. Shapes: `M` bags, `N` values of all bags, `D` columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.ops.bags import bags_of, check_bags, check_equal_lengths, fail, with_values
from recsys.sparse.recorded import recorded

__all__ = [
    "add",
    "bmm",
    "div",
    "expand",
    "layer_norm",
    "max",
    "mean",
    "mul",
    "softmax",
    "sub",
    "sum",
]

_HALF: Final = (torch.float16, torch.bfloat16)


@recorded
def add(x: JaggedTensor, y: JaggedTensor | Tensor) -> JaggedTensor:
    """Add a jagged tensor or rows to a jagged tensor.

    Args:
        x: `[N, ...]`.
        y: A jagged tensor with the lengths of `x`; or a tensor `[M, ...]`, whose row of a bag is
            used for each of its values. For a padded tensor use `JaggedTensor.from_dense_lengths`.

    Returns:
        The sums, with the lengths of `x`.

    Raises:
        ValueError: The numbers of bags differ, or, on a CPU, the lengths.

    Example:
        >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 1]))
        >>> add(x, torch.tensor([10.0, 100.0])).to_dense()
        [tensor([11., 12.]), tensor([103.])]
    """
    return _elementwise(torch.add, x, y)


@recorded
def sub(x: JaggedTensor, y: JaggedTensor | Tensor) -> JaggedTensor:
    """Subtract a jagged tensor or rows from a jagged tensor.

    Args:
        x: As for `add`.
        y: As for `add`.

    Returns:
        The differences, with the lengths of `x`.

    Raises:
        ValueError: As for `add`.

    Example:
        >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 1]))
        >>> sub(x, torch.tensor([10.0, 100.0])).to_dense()
        [tensor([-9., -8.]), tensor([-97.])]
    """
    return _elementwise(torch.sub, x, y)


@recorded
def mul(x: JaggedTensor, y: JaggedTensor | Tensor) -> JaggedTensor:
    """Multiply a jagged tensor by a jagged tensor or rows.

    Args:
        x: As for `add`.
        y: As for `add`.

    Returns:
        The products, with the lengths of `x`.

    Raises:
        ValueError: As for `add`.

    Example:
        >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 1]))
        >>> mul(x, torch.tensor([10.0, 100.0])).to_dense()
        [tensor([10., 20.]), tensor([300.])]
    """
    return _elementwise(torch.mul, x, y)


@recorded
def div(x: JaggedTensor, y: JaggedTensor | Tensor) -> JaggedTensor:
    """Divide a jagged tensor by a jagged tensor or rows.

    Args:
        x: As for `add`.
        y: As for `add`.

    Returns:
        The quotients, with the lengths of `x`.

    Raises:
        ValueError: As for `add`.

    Example:
        >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 1]))
        >>> div(x, torch.tensor([10.0, 100.0])).to_dense()
        [tensor([0.1000, 0.2000]), tensor([0.0300])]
    """
    return _elementwise(torch.div, x, y)


@recorded
def expand(rows: Tensor, like: JaggedTensor) -> JaggedTensor:
    """Repeat the row of each bag for each of its values.

    Args:
        rows: `[M, ...]`.
        like: A jagged tensor of `M` bags.

    Returns:
        `[N, ...]`, with the lengths of `like`.

    Raises:
        ValueError: The number of rows is not the number of bags.

    Example:
        >>> like = JaggedTensor(torch.zeros(3), lengths=torch.tensor([2, 1]))
        >>> expand(torch.tensor([[5, 6], [7, 8]]), like).values().tolist()
        [[5, 6], [5, 6], [7, 8]]
    """
    check_bags(rows, like)
    return with_values(like.trim(), rows.index_select(0, bags_of(like)))


@recorded
def layer_norm(
    x: JaggedTensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> JaggedTensor:
    """Normalize each value over its columns (Ba et al., "Layer normalization", 2016).

    Args:
        x: `[N, D]`.
        weight: `[D]` factors, or None for 1.
        bias: `[D]` terms, or None for 0.
        eps: Added to the variance.

    Returns:
        `[N, D]`, with the lengths of `x`.

    Example:
        >>> x = JaggedTensor(torch.tensor([[1.0, 3.0], [2.0, 2.0]]), lengths=torch.tensor([2]))
        >>> layer_norm(x).values().round(decimals=2).tolist()
        [[-1.0, 1.0], [0.0, 0.0]]
    """
    x = x.trim()
    return with_values(
        x, functional.layer_norm(x.values(), x.values().shape[-1:], weight, bias, eps)
    )


@recorded
def sum(x: JaggedTensor) -> Tensor:
    """Add the values of each bag.

    Args:
        x: `[N, ...]`.

    Returns:
        `[M, ...]`; 0 for a bag without values.

    Example:
        >>> sum(JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 0, 1])))
        tensor([3., 0., 3.])
    """
    return _reduce(x, "sum", 0.0)


@recorded
def mean(x: JaggedTensor) -> Tensor:
    """Average the values of each bag.

    Args:
        x: `[N, ...]`.

    Returns:
        `[M, ...]`; 0 for a bag without values.

    Example:
        >>> mean(JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 0, 1])))
        tensor([1.5000, 0.0000, 3.0000])
    """
    total = _reduce(x, "sum", 0.0, keeps_float32=True)
    counts = x.lengths().clamp(min=1).view(-1, *[1] * (total.dim() - 1))
    return (total / counts).to(x.values().dtype)


@recorded
def max(x: JaggedTensor) -> Tensor:
    """Return the greatest value of each bag, by column.

    Args:
        x: `[N, ...]`.

    Returns:
        `[M, ...]`; 0 for a bag without values. Equal greatest values share the gradient.

    Example:
        >>> max(JaggedTensor(torch.tensor([-1.0, -2.0, 3.0]), lengths=torch.tensor([2, 0, 1])))
        tensor([-1.,  0.,  3.])
    """
    greatest = _reduce(x, "max", float("-inf"))
    is_empty = (x.lengths() == 0).view(-1, *[1] * (greatest.dim() - 1))
    return greatest.masked_fill(is_empty, 0.0)


@recorded
def softmax(x: JaggedTensor) -> JaggedTensor:
    """Normalize the exponentials of each bag's values to a sum of 1, by column.

    Args:
        x: `[N, ...]`.

    Returns:
        `[N, ...]`, with the lengths of `x`.

    Example:
        >>> x = JaggedTensor(torch.tensor([0.0, 0.0, 5.0]), lengths=torch.tensor([2, 1]))
        >>> softmax(x).values()
        tensor([0.5000, 0.5000, 1.0000])
    """
    x = x.trim()
    values, bags = _computed(x.values()), bags_of(x)
    with torch.no_grad():
        greatest = _segments(values, x.offsets(), "max", float("-inf")).index_select(0, bags)
    powers = (values - greatest).exp()
    total = _segments(powers, x.offsets(), "sum", 0.0).index_select(0, bags)
    return with_values(x, (powers / total).to(x.values().dtype))


@recorded
def bmm(x: JaggedTensor, y: JaggedTensor | Tensor) -> JaggedTensor | Tensor:
    """Multiply the matrix of each bag by a matrix of its own.

    Args:
        x: `[N, D]`: bag `i` is a matrix `X_i` of `[length, D]`.
        y: `[M, D, K]`, a matrix of each bag; or a jagged tensor `[N, K]` with the lengths of `x`.

    Returns:
        `X_i @ Y_i` of each bag, jagged `[N, K]`; for a jagged `y`, `X_i^T @ Y_i`, `[M, D, K]`.

    Raises:
        ValueError: Shapes do not match.

    Example:
        >>> x = JaggedTensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), lengths=torch.tensor([1, 1]))
        >>> bmm(x, torch.tensor([[[1.0], [1.0]], [[10.0], [0.0]]])).values().tolist()
        [[3.0], [30.0]]
        >>> bmm(x, x)[0].tolist()
        [[1.0, 2.0], [2.0, 4.0]]
    """
    x = x.trim()
    rows = x.values()
    if isinstance(y, JaggedTensor):
        y = y.trim()
        check_equal_lengths(x, y)
        _check_shape(rows.dim() == 2 and y.values().dim() == 2, rows, y.values())
        pairs = rows.unsqueeze(2) * y.values().unsqueeze(1)
        return _reduce(with_values(x, pairs), "sum", 0.0)
    check_bags(y, x)
    _check_shape(rows.dim() == 2 and y.dim() == 3 and y.shape[1] == rows.shape[1], rows, y)
    of_each = y.index_select(0, bags_of(x))
    return with_values(x, torch.bmm(rows.unsqueeze(1), of_each).squeeze(1))


def _elementwise(
    function: Callable[[Tensor, Tensor], Tensor], x: JaggedTensor, y: JaggedTensor | Tensor
) -> JaggedTensor:
    x = x.trim()
    if isinstance(y, JaggedTensor):
        y = y.trim()
        check_equal_lengths(x, y)
        return with_values(x, function(x.values(), y.values()))
    return with_values(x, function(x.values(), expand(y, x).values()))


def _computed(values: Tensor) -> Tensor:
    return values.float() if values.dtype in _HALF else values


def _reduce(x: JaggedTensor, kind: str, empty: float, keeps_float32: bool = False) -> Tensor:
    x = x.trim()
    reduced = _segments(_computed(x.values()), x.offsets(), kind, empty)
    return reduced if keeps_float32 else reduced.to(x.values().dtype)


def _segments(values: Tensor, offsets: Tensor, kind: str, empty: float) -> Tensor:
    return torch.segment_reduce(values, kind, offsets=offsets, unsafe=True, initial=empty)


def _check_shape(is_right: bool, x: Tensor, y: Tensor) -> None:
    if not is_right:
        fail(
            "bmm needs [N, D] with [M, D, K] or jagged [N, K]; received shapes "
            f"{list(x.shape)} and {list(y.shape)}"
        )
