"""Checks of the floating-point inputs of a model: dense features, labels and weights of ids.

A NaN in these inputs would spread to the loss and to all table rows of the batch. On a CPU an
invalid value raises an error at once. On CUDA the host does not wait: the smallest and the largest
value are copied asynchronously, and a later batch raises the error.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from recsys.base.arguments import flag
from recsys.kernels.bounds import AsyncChecks

__all__ = [
    "FINITE",
    "PROBABILITY",
    "ValueRange",
    "check_dense_values",
    "check_id_weights",
    "check_labels",
    "check_values",
    "finish_value_checks",
    "has_value_checks",
    "name_columns",
    "set_value_checks",
]

_UNORDERED = frozenset((torch.uint16, torch.uint32, torch.uint64))
"""Dtypes without comparison operators in torch."""
_TRACING_MODES = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)
_is_on = os.environ.get("RECSYS_VALUE_CHECKS", "1") != "0"


def set_value_checks(enabled: bool) -> None:
    """Turn the checks of dense features, labels and weights of ids on or off.

    They are on by default; the environment variable `RECSYS_VALUE_CHECKS=0` turns them off. Checks
    of shapes and ids are always on.

    Args:
        enabled: True to check values.

    Raises:
        TypeError: `enabled` is not a bool.

    Example:
        >>> set_value_checks(False)
        >>> has_value_checks()
        False
        >>> set_value_checks(True)
    """
    global _is_on
    _is_on = flag("set_value_checks: enabled", enabled)


def has_value_checks() -> bool:
    """Return whether dense features, labels and weights of ids are checked.

    Returns:
        The state set by `set_value_checks` or `RECSYS_VALUE_CHECKS`.

    Example:
        >>> has_value_checks()
        True
    """
    return _is_on


def finish_value_checks() -> None:
    """Wait for the GPU, and raise an error if an earlier batch of this thread was invalid.

    Call it after the last batch. It does nothing on a CPU.

    Raises:
        ValueError: A value was invalid.

    Example:
        >>> finish_value_checks()
    """
    _of_thread.late.read_all()


@final
class ValueRange(NamedTuple):
    """Range of valid values, ends included; NaN is never valid."""

    low: float
    high: float
    text: str
    """The requirement, for messages."""
    hint: str
    """The remedy, for messages."""


FINITE: Final = ValueRange(
    -sys.float_info.max,
    sys.float_info.max,
    "must be finite",
    "Fill in missing values, and clip or rescale large ones.",
)
PROBABILITY: Final = ValueRange(
    0.0,
    1.0,
    "must be from 0 to 1 for a log loss",
    "Map other labels, such as ratings, to that range.",
)


@final
class _OfThread(threading.local):
    """Unfinished checks of a GPU, per thread: successive batches run in one thread."""

    def __init__(self) -> None:
        self.late = AsyncChecks()


_of_thread = _OfThread()
_names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def name_columns(values: Tensor, names: Sequence[str]) -> None:
    """Record the column names of a tensor for error messages.

    Args:
        values: `[B, columns]`, or `[B]` for one column.
        names: Names of the columns; may be empty.
    """
    if names and isinstance(values, Tensor) and not torch.compiler.is_compiling():
        _names[values] = tuple(names)


def check_dense_values(values: Tensor) -> Tensor:
    """Check that the dense features of a batch are finite.

    Args:
        values: `[B, columns]`.

    Returns:
        The features; on CUDA, NaN and infinity are replaced with 0.

    Raises:
        ValueError: A value is NaN or infinite, in this batch or (CUDA) in an earlier one.
    """
    return check_values(values, FINITE, "dense_features", partial(_place_in, values))


def check_labels(values: Tensor) -> Tensor:
    """Check that labels are valid for a log loss.

    Args:
        values: Any shape and dtype.

    Returns:
        The labels; on CUDA, NaN and infinity are replaced with 0.

    Raises:
        ValueError: A label is NaN or not in [0, 1], in this batch or (CUDA) in an earlier one.
    """
    return check_values(values, PROBABILITY, "labels", partial(_place_in, values))


def check_id_weights(
    owner: str,
    weights: Tensor,
    offsets: Tensor,
    keys: Sequence[str],
    stride_per_key: Callable[[], Sequence[int]],
) -> Tensor:
    """Check that the weights of ids are finite, unless they are computed from parameters.

    Args:
        owner: The module of the lookup, for messages.
        weights: `[N]`.
        offsets: Offsets of the bags.
        keys: features.
        stride_per_key: Returns the number of bags of each feature; only messages call it.

    Returns:
        The weights; on CUDA, NaN and infinity are replaced with 0.

    Raises:
        ValueError: A weight is NaN or infinite, in this batch or (CUDA) in an earlier one.
    """
    if weights.requires_grad:
        return weights

    def place_of(place: int) -> str:
        bag = int(torch.searchsorted(offsets, place, right=True)) - 1
        for key, stride in zip(keys, stride_per_key(), strict=True):
            if bag < stride:
                return f"in bag {bag} of feature {key!r}"
            bag -= stride
        return f"at position {place}"

    return check_values(weights, FINITE, f"{owner}: weights", place_of)


def check_values(
    values: Tensor,
    allowed: ValueRange,
    subject: str,
    place_of: Callable[[int], str],
    shown: Tensor | None = None,
) -> Tensor:
    """Check the values of a tensor, unless checks are off or the tensor is traced.

    Args:
        values: Any shape and dtype.
        allowed: The valid range.
        subject: Name of the tensor, for messages.
        place_of: Describes a flat position, for messages.
        shown: Values to show in messages, of the same shape; None for `values`.

    Returns:
        The values; on CUDA, NaN and infinity are replaced with 0.

    Raises:
        ValueError: A value is out of range, in this batch or (CUDA) in an earlier one.
    """
    if not _is_on or not _has_values(values):
        return values
    detached = values.detach()
    if detached.dtype in _UNORDERED:
        detached = detached.double()
    low, high = detached.aminmax()
    complain = partial(_complain, detached, detached if shown is None else shown, allowed, place_of)
    if detached.is_cpu:
        _judge(allowed, partial(complain, subject), low.item(), high.item())
        return values
    earlier = partial(complain, f"{subject} of an earlier batch")
    late = _of_thread.late
    late.read_arrived()
    late.send(torch.stack((low, high)), lambda found: _judge(allowed, earlier, *found.tolist()))
    return values.nan_to_num(0.0, 0.0, 0.0) if values.is_floating_point() else values


def _has_values(values: Tensor) -> bool:
    """Return whether a tensor has values, and is not traced or captured."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None  # of torch.jit.trace
        and type(values) in (Tensor, nn.Parameter)
        and values.numel() > 0
        and values.dtype is not torch.bool
        and all(torch._C._get_dispatch_mode(mode) is None for mode in _TRACING_MODES)
        and not torch._C._functorch.is_functorch_wrapped_tensor(values)
        and (values.is_cpu or (values.is_cuda and not torch.cuda.is_current_stream_capturing()))
    )


def _judge(
    allowed: ValueRange, complain: Callable[[float, float], NoReturn], low: float, high: float
) -> None:
    if not (low >= allowed.low and high <= allowed.high):  # also for NaN
        complain(low, high)


def _complain(
    values: Tensor,
    shown: Tensor,
    allowed: ValueRange,
    place_of: Callable[[int], str],
    subject: str,
    low: float,
    high: float,
) -> NoReturn:
    wide = values.double()  # float32 would round the ends of the range to infinity
    is_bad = ~((wide >= allowed.low) & (wide <= allowed.high))
    places = is_bad.reshape(-1).nonzero().reshape(-1)
    if places.numel():
        place = int(places[0])
        more = f" ({places.numel()} such values in the batch)" if places.numel() > 1 else ""
        received = f"{shown.reshape(-1)[place].item()} {place_of(place)}{more}"
    else:  # the caller has overwritten the memory
        received = f"values from {low} to {high}, which are overwritten by now"
    raise ValueError(
        f"{subject} {allowed.text}; received {received}. {allowed.hint} "
        "recsys.sparse.set_value_checks(False) turns this check off."
    )


def _place_in(values: Tensor, place: int) -> str:
    """Describe a flat position by row and column."""
    num_columns = values.shape[1:].numel()
    row, column = divmod(place, num_columns)
    names = _names.get(values, ())
    if len(names) == num_columns:
        return f"in row {row} of column {names[column]!r}"
    return f"in row {row}" if num_columns == 1 else f"in row {row} of column {column}"
