"""Changes of jagged tensors along time: concatenation, slices, padding, selection.

Shapes: `M` bags, `N` values of all bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from recsys.base.arguments import shown, whole
from recsys.base.checked import checked_late
from recsys.kernels.ops import complete_cumsum
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.ops.bags import bags_of, check_bags, positions, with_values
from recsys.sparse.recorded import recorded

__all__ = ["concat", "flip", "pad", "select", "slice", "truncate"]

_Side: TypeAlias = Literal["left", "right"]


@recorded
def concat(parts: Sequence[JaggedTensor]) -> JaggedTensor:
    """Concatenate the bags of several jagged tensors: all values of the first, then the second.

    Args:
        parts: At least one; equal numbers of bags, columns and dtypes.

    Returns:
        `M` bags, whose lengths are the sums.

    Raises:
        ValueError: There is no part, or the numbers of bags differ.

    Example:
        >>> history = JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
        >>> target = JaggedTensor(torch.tensor([7, 8]), lengths=torch.tensor([1, 1]))
        >>> concat([history, target]).to_dense()
        [tensor([1, 2, 7]), tensor([3, 8])]
    """
    if not parts:
        raise ValueError("concat needs at least one jagged tensor; received none.")
    parts = [part.trim() for part in parts]
    for part in parts[1:]:
        check_bags(part.lengths(), parts[0])
    lengths = torch.stack([part.lengths() for part in parts]).sum(0, dtype=parts[0].lengths().dtype)
    offsets = complete_cumsum(lengths)
    places, starts = list[Tensor](), offsets[:-1]
    for part in parts:
        shift = (starts - part.offsets()[:-1]).index_select(0, bags_of(part))
        places.append(shift + torch.arange(shift.shape[0], device=shift.device))
        starts = starts + part.lengths()
    values = torch.cat([part.values() for part in parts])
    order = torch.cat(places).long().argsort()
    return JaggedTensor.from_parts(values.index_select(0, order), lengths=lengths, offsets=offsets)


@recorded
@checked_late
def slice(x: JaggedTensor, start: int, end: int | None = None) -> JaggedTensor:
    """Return the values of each bag from one position to before another, as slices of lists.

    Args:
        x: `[N, ...]`.
        start: First position; negative to count from the end of each bag.
        end: Position after the last; negative to count from the end; None for the end.

    Returns:
        `M` bags.

    Example:
        >>> x = JaggedTensor(torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([3, 1]))
        >>> slice(x, 0, -1).to_dense(), slice(x, -2).to_dense()
        ([tensor([1, 2]), tensor([], dtype=torch.int64)], [tensor([2, 3]), tensor([4])])
    """
    x = x.trim()
    lengths, place = x.lengths(), positions(x).values()
    first, last = _edge(start, lengths), lengths if end is None else _edge(end, lengths)
    bags = bags_of(x)
    kept = (place >= first.index_select(0, bags)) & (place < last.index_select(0, bags))
    return JaggedTensor.from_parts(x.values()[kept], lengths=(last - first).clamp(min=0))


@recorded
@checked_late
def truncate(x: JaggedTensor, length: int, keep: _Side = "right") -> JaggedTensor:
    """Return at most `length` values of each bag.

    Args:
        x: `[N, ...]`.
        length: The most values of a bag.
        keep: "right" for the last (latest) values, "left" for the first.

    Returns:
        `M` bags.

    Raises:
        ValueError: `length` is negative, or `keep` has another value.

    Example:
        >>> x = JaggedTensor(torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([3, 1]))
        >>> truncate(x, 2).to_dense()
        [tensor([2, 3]), tensor([4])]
    """
    length = whole("truncate: length", length, 0)
    if _side("truncate: keep", keep) == "left" or length == 0:
        return slice(x, 0, length)
    return slice(x, -length)


@recorded
@checked_late
def pad(x: JaggedTensor, length: int, value: float = 0.0, side: _Side = "right") -> Tensor:
    """Return a padded tensor of the last `length` values of each bag.

    Args:
        x: `[N, ...]`.
        length: Positions of each bag.
        value: Value of the padding.
        side: Side of the padding: "right" for values first, "left" for values last.

    Returns:
        `[M, length, ...]`.

    Raises:
        ValueError: `length` is negative, or `side` has another value.

    Example:
        >>> x = JaggedTensor(torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([3, 1]))
        >>> pad(x, 2, side="left").tolist()
        [[2, 3], [0, 4]]
    """
    length = whole("pad: length", length, 0)
    _side("pad: side", side)
    x = x.trim()
    lengths, offsets = x.lengths().unsqueeze(1), x.offsets()
    place = torch.arange(length, device=x.device())
    kept = lengths.clamp(max=length)
    first = lengths - kept
    if side == "left":
        place = place - (length - kept)
    is_value = (place >= 0) & (place < kept)
    values = x.values()
    rows = (offsets[:-1].unsqueeze(1) + first + place).masked_fill(~is_value, values.shape[0])
    filled = torch.cat([values, values.new_full((1, *values.shape[1:]), value)])
    padded = filled.index_select(0, rows.flatten())
    return padded.view(rows.shape[0], length, *values.shape[1:])


@recorded
def flip(x: JaggedTensor) -> JaggedTensor:
    """Reverse the values of each bag.

    Args:
        x: `[N, ...]`.

    Returns:
        `[N, ...]`, with the lengths of `x`.

    Example:
        >>> flip(JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))).values()
        tensor([2, 1, 3])
    """
    x = x.trim()
    ends = (x.offsets()[:-1] + x.offsets()[1:] - 1).index_select(0, bags_of(x))
    place = torch.arange(ends.shape[0], device=ends.device)
    return with_values(x, x.values().index_select(0, ends - place))


@recorded
def select(x: JaggedTensor, bags: Tensor) -> JaggedTensor:
    """Return some bags, in any order and as often as they are asked for.

    Args:
        x: `[N, ...]`.
        bags: int64 `[K]`, numbers of bags.

    Returns:
        `K` bags.

    Raises:
        IndexError: There is no such bag.

    Example:
        >>> x = JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
        >>> select(x, torch.tensor([1, 0, 1])).to_dense()
        [tensor([3]), tensor([1, 2]), tensor([3])]
    """
    x = x.trim()
    lengths = x.lengths().index_select(0, bags)
    offsets = complete_cumsum(lengths)
    shift = x.offsets()[:-1].index_select(0, bags) - offsets[:-1]
    rows = shift.repeat_interleave(lengths)
    rows = rows + torch.arange(rows.shape[0], device=rows.device)
    return JaggedTensor.from_parts(
        x.values().index_select(0, rows), lengths=lengths, offsets=offsets
    )


def _edge(place: int, lengths: Tensor) -> Tensor:
    """Return the position of each bag that a number of a slice means."""
    if place >= 0:
        return lengths.clamp(max=place)
    return (lengths + place).clamp(min=0)


def _side(subject: str, side: _Side) -> _Side:
    if side not in ("left", "right"):
        raise ValueError(f"{subject} must be 'left' or 'right'; received {shown(side)}.")
    return side
