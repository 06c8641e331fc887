"""Numbers of bags and positions of values, and checks that jagged tensors fit.

Shapes: `M` bags, `N` values of all bags.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from recsys.base.checked import checked_late
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.recorded import recorded
from recsys.sparse.validate import is_readable

__all__ = ["bags_of", "check_bags", "check_equal_lengths", "fail", "positions", "with_values"]


@recorded
def bags_of(x: JaggedTensor) -> Tensor:
    """Return the bag of each value, int64 `[N]`.

    Args:
        x: A jagged tensor.

    Example:
        >>> bags_of(JaggedTensor(torch.zeros(3), lengths=torch.tensor([2, 0, 1])))
        tensor([0, 0, 2])
    """
    x = x.trim()
    lengths = x.lengths().long()
    bags = torch.arange(lengths.shape[0], device=lengths.device)
    return bags.repeat_interleave(lengths, output_size=x.values().shape[0])


@recorded
@checked_late
def positions(x: JaggedTensor, from_end: bool = False) -> JaggedTensor:
    """Return the position of each value in its bag.

    Args:
        x: A jagged tensor.
        from_end: True to give the last value of each bag 0, the one before it 1, and so on.

    Returns:
        int64 `[N]`, with the lengths of `x`.

    Example:
        >>> x = JaggedTensor(torch.zeros(3), lengths=torch.tensor([2, 1]))
        >>> positions(x).values().tolist(), positions(x, from_end=True).values().tolist()
        ([0, 1, 0], [1, 0, 0])
    """
    x = x.trim()
    place = torch.arange(x.values().shape[0], device=x.device())
    offsets = x.offsets().long()
    if from_end:
        return with_values(x, (offsets[1:] - 1).index_select(0, bags_of(x)) - place)
    return with_values(x, place - offsets[:-1].index_select(0, bags_of(x)))


def with_values(x: JaggedTensor, values: Tensor) -> JaggedTensor:
    """Return a jagged tensor of other values in bags of the same lengths.

    Args:
        x: A jagged tensor.
        values: `[N, ...]`.

    Example:
        >>> x = JaggedTensor(torch.zeros(3), lengths=torch.tensor([2, 1]))
        >>> with_values(x, torch.tensor([5, 6, 7])).to_dense()
        [tensor([5, 6]), tensor([7])]
    """
    return JaggedTensor.from_parts(values, lengths=x.lengths_or_none(), offsets=x.offsets_or_none())


def check_bags(rows: Tensor, x: JaggedTensor) -> None:
    """Raise an error if there is not one row for each bag."""
    if rows.shape[0] != x.lengths().shape[0]:
        fail(f"numbers of bags must be equal; received {rows.shape[0]} and {x.lengths().shape[0]}")


def check_equal_lengths(x: JaggedTensor, y: JaggedTensor) -> None:
    """Raise an error if numbers of bags differ, or, on a CPU, lengths."""
    lengths, other = x.lengths(), y.lengths()
    if lengths is other:
        return
    check_bags(lengths, y)
    if (
        is_readable(lengths)
        and is_readable(other)
        and not torch.equal(lengths.long(), other.long())
    ):
        bag = int((lengths != other).long().argmax())
        fail(
            f"lengths must be equal; received {int(lengths[bag])} and {int(other[bag])} of bag "
            f"{bag}"
        )


def fail(text: str) -> NoReturn:
    """Raise a ValueError."""
    raise ValueError(f"recsys.sparse.ops: {text}.")
