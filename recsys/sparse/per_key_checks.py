"""Checks of the per-key arguments of KeyedJaggedTensor: sizes, strides and positions.

They read numbers on the host only.

Shapes: `F` features (keys).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Sized
from numbers import Integral
from typing import cast

import torch
from torch import Tensor, fx

from recsys.base.arguments import shown, wrong_type
from recsys.sparse.validate import check_total, is_proxy, preview


def check_length_per_key(
    keys: Sequence[str],
    length_per_key: list[int],
    values: Tensor,
    source: str = "length_per_key",
) -> None:
    """Check the number of values per feature against the number of values.

    Args:
        keys: features.
        length_per_key: `F` numbers.
        values: `[N, ...]`.
        source: The argument with the numbers, for messages; "lengths" if they are sums of lengths.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If the sum exceeds the number of values, or a number is negative.
    """
    check_one_per_key(source, keys, length_per_key)
    total = sum(length_per_key)
    if not _is_whole(total):
        wrong_type(f"KeyedJaggedTensor.{source}", "a list of integers", length_per_key)
    if source == "lengths":
        check_total("KeyedJaggedTensor", total, values, is_exact=not values.is_cpu)
    if total > values.shape[0]:
        raise ValueError(
            f"KeyedJaggedTensor.{source} must add up to at most the number of values; received "
            f"counts that add up to {total}, {preview(length_per_key)}, for {values.shape[0]} "
            "values. Omit this argument to compute it from the lengths."
        )
    if min(length_per_key, default=0) < 0:
        index = next(i for i, length in enumerate(length_per_key) if length < 0)
        if source == "lengths":
            text = f'lengths of feature "{keys[index]}" that add up to {length_per_key[index]}'
        else:
            text = f'{length_per_key[index]} for feature "{keys[index]}"'
        raise ValueError(f"KeyedJaggedTensor.{source} must not be negative; received {text}.")


def check_counts(
    keys: Sequence[str],
    values: Tensor,
    length_per_key: list[int] | None,
    offset_per_key: list[int] | None,
) -> list[int]:
    """Check `length_per_key` and `offset_per_key` of the constructor.

    Args:
        keys: features.
        values: `[N, ...]`.
        length_per_key: The argument, or None.
        offset_per_key: The argument, or None; one of both is required.

    Returns:
        The number of values of each feature.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: With the inconsistent argument.
    """
    if length_per_key is not None:
        check_length_per_key(keys, length_per_key, values)
        if offset_per_key is not None:
            bounds = list(itertools.accumulate(length_per_key, initial=0))
            meaning = "the running sum of length_per_key"
            check_derived("KeyedJaggedTensor", "offset_per_key", offset_per_key, bounds, meaning)
        return length_per_key
    assert offset_per_key is not None
    if len(offset_per_key) != len(keys) + 1 or offset_per_key[0] != 0:
        raise ValueError(
            "KeyedJaggedTensor.offset_per_key must start with 0 and have one entry per key and "
            f"one more; received {preview(offset_per_key)} for {len(keys)} keys. Omit the argument."
        )
    widths = [end - start for start, end in itertools.pairwise(offset_per_key)]
    check_length_per_key(keys, widths, values, "offset_per_key")
    return widths


def check_is_list(name: str, given: object, rule: str = "a list of integers") -> None:
    """Check that an argument is iterable and not a string.

    Raises:
        TypeError: If not.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable) or is_scalar(given):
        wrong_type(f"KeyedJaggedTensor.{name}", rule, given)


def check_one_per_key(name: str, keys: Sequence[str], numbers: Sized) -> None:
    """Check that an argument has one number per key.

    Raises:
        TypeError: If it is not a list.
        ValueError: If the number of entries differs.
    """
    entries = cast(object, numbers)
    if not isinstance(entries, Sized) or isinstance(entries, str | bytes) or is_scalar(entries):
        wrong_type(f"KeyedJaggedTensor.{name}", "a list of integers", numbers)
    if len(numbers) != len(keys):
        raise ValueError(
            f"KeyedJaggedTensor.{name} must have one entry per key; received {len(numbers)} for "
            f"{len(keys)} keys."
        )


def check_derived(owner: str, name: str, given: object, derived: object, meaning: str) -> None:
    """Check that a redundant argument equals the computed value.

    Args:
        owner: The class, for messages.
        name: The argument.
        given: Its value.
        derived: The computed value.
        meaning: A description of the value, for messages.

    Raises:
        ValueError: If the values differ.
    """
    if given != derived:
        raise ValueError(
            f"{owner}.{name} must be {meaning}, {shown(derived)}; received {shown(given)}. Omit "
            "this argument to compute it."
        )


def check_index_per_key(owner: str, keys: Iterable[str], given: Mapping[str, int]) -> None:
    """Check `index_per_key`, the position of each key.

    Raises:
        ValueError: If a position is wrong.
    """
    places = {key: place for place, key in enumerate(keys)}
    check_derived(owner, "index_per_key", given, places, "the position of each key")


def check_strides(
    keys: Sequence[str],
    num_bags: int,
    stride: int | None,
    stride_per_key: list[int] | None,
    stride_per_key_per_rank: Tensor | list[list[int]] | None,
    num_samples: int | None,
) -> tuple[int, list[list[int]] | None]:
    """Check that the batch sizes match the number of bags; compute missing ones.

    Args:
        keys: features.
        num_bags: Number of bags of all features.
        stride: The argument of the constructor.
        stride_per_key: The argument of the constructor.
        stride_per_key_per_rank: The argument of the constructor.
        num_samples: Number of samples of the inverse indices; None without inverse indices.

    Returns:
        The batch size, and the batch sizes per key and rank (None if all are equal).

    Raises:
        TypeError: If `stride` is not an integer.
        ValueError: If the batch sizes do not match the number of bags.
    """
    if stride is not None and not _is_whole(stride) and not is_proxy(stride):
        wrong_type("KeyedJaggedTensor.stride", "an integer", stride)
    if isinstance(stride, int) and stride < 0:
        raise ValueError(f"KeyedJaggedTensor.stride must not be negative; received {stride}.")
    per_rank = stride_per_key_per_rank
    is_list = isinstance(per_rank, Tensor | Sequence | fx.Proxy) and not isinstance(per_rank, str)
    if per_rank is not None and not is_list:
        wrong_type("KeyedJaggedTensor.stride_per_key_per_rank", "a list of lists", per_rank)
    if stride_per_key is not None and not isinstance(cast(object, stride_per_key), list):
        check_is_list("stride_per_key", stride_per_key)
    if isinstance(per_rank, Tensor):
        per_rank = per_rank.tolist()
    if not per_rank and stride_per_key is None:
        if stride is None:
            stride = num_bags // len(keys) if keys else 0
        if not is_proxy(num_bags) and num_bags != len(keys) * stride:
            raise ValueError(
                "KeyedJaggedTensor needs one length for each key and sample; received "
                f"{num_bags} lengths for {len(keys)} keys"
                f"{f' and a stride of {stride}' if stride * len(keys) else ''}. Features with "
                "different batch sizes need stride_per_key."
            )
        if num_samples is None:
            return stride, None
        return num_samples, [[stride] for _ in keys] or None
    name = "stride_per_key_per_rank" if per_rank else "stride_per_key"
    try:
        strides = [sum(sizes) for sizes in per_rank] if per_rank else list(stride_per_key or ())
    except TypeError:
        rule = "a list of lists of integers" if per_rank else "a list of integers"
        wrong_type(f"KeyedJaggedTensor.{name}", rule, per_rank or stride_per_key)
    fits = len(strides) == len(keys) and min(strides, default=0) >= 0
    if not fits or (not isinstance(cast(object, num_bags), fx.Proxy) and sum(strides) != num_bags):
        raise ValueError(
            f"KeyedJaggedTensor.{name} must have one entry per key, none negative, with the number "
            f"of lengths as their sum; received batch sizes {preview(strides)} for {len(keys)} "
            f"keys and {num_bags} lengths."
        )
    if per_rank and stride_per_key is not None:
        meaning = "the sums of stride_per_key_per_rank"
        check_derived("KeyedJaggedTensor", "stride_per_key", list(stride_per_key), strides, meaning)
    if stride is None:
        stride = max(strides, default=0)
    return (
        stride if num_samples is None else num_samples,
        per_rank or [[size] for size in strides],
    )


def is_scalar(value: object) -> bool:
    """Return whether a value is a 0-dimensional tensor, which cannot be iterated."""
    return isinstance(value, Tensor) and not value.dim()


def _is_whole(number: object) -> bool:
    return isinstance(number, int | torch.SymInt | Integral) and not isinstance(number, bool)
