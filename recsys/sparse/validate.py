"""Checks of jagged data, cheap ones for every construction and full ones on request.

`check_*` raise or return nothing. The cheap ones read shapes, dtypes and devices, never a tensor's
contents on a GPU.

Legend: `M` bags, `N` values, `F` features, `B` batch size.
"""

import os
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

INT_DTYPES = frozenset((torch.int32, torch.int64))
_debug = os.environ.get("RECSYS_DEBUG", "0") not in {"", "0"}
_MAX_UNIQUE_LISTS = 64
_unique_lists: dict[tuple[int, str], list[str]] = {}
"""Lists of keys found unique, by size and first key: copies, so that nobody else changes them."""


def set_debug(enabled: bool) -> None:
    """Turn full validation at every construction on or off.

    Full validation reads all lengths and offsets, which waits for the GPU. `RECSYS_DEBUG=1` in the
    environment turns it on from the start.

    Args:
        enabled: whether constructors validate fully.

    Example:
        >>> set_debug(True)
        >>> is_debug()
        True
        >>> set_debug(False)
    """
    global _debug
    _debug = bool(enabled)


def is_debug() -> bool:
    """Tell whether every construction validates fully.

    Returns:
        The state set by `set_debug` or `RECSYS_DEBUG`.

    Example:
        >>> is_debug()
        False
    """
    return _debug


def is_readable(tensor: Tensor) -> bool:
    """Whether reading the contents costs no device sync and is possible at all (not traced)."""
    return type(tensor) is Tensor and tensor.is_cpu and not torch.compiler.is_compiling()


def check_parts(
    owner: str,
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
) -> None:
    """Check the parts of a jagged tensor against each other in O(1).

    Args:
        owner: the class, for messages.
        values: `[N, ...]`, any dtype.
        weights: `[N, ...]` or None.
        lengths: integers or None.
        offsets: integers or None.

    Raises:
        TypeError: if a part is not a tensor, or lengths or offsets are not int32 or int64.
        ValueError: if shapes or devices do not fit, or neither lengths nor offsets are given.
    """
    if lengths is None and offsets is None:
        raise ValueError(
            f"{owner} needs lengths or offsets; received neither. Pass lengths=, the number of "
            "values in each bag, or offsets=, their running sum with a leading 0."
        )
    if not isinstance(values, Tensor):
        _refuse_part(owner, "values", values)
    device = values.device
    if values.dim() == 0:
        raise ValueError(f"{owner}.values must have at least 1 dimension; received a scalar.")
    if weights is not None:
        if not isinstance(weights, Tensor):
            _refuse_part(owner, "weights", weights)
        if weights.shape[:1] != values.shape[:1]:
            raise ValueError(
                f"{owner}.weights must have one entry per value; received weights of shape "
                f"{tuple(weights.shape)} for values of shape {tuple(values.shape)}."
            )
        if weights.device != device:
            _refuse_device(owner, "weights", weights, device)
    if lengths is not None:
        if not isinstance(lengths, Tensor):
            _refuse_part(owner, "lengths", lengths)
        if lengths.dtype not in INT_DTYPES and lengths.numel():
            _refuse_dtype(owner, "lengths", lengths)
        if lengths.device != device:
            _refuse_device(owner, "lengths", lengths, device)
    if offsets is not None:
        if not isinstance(offsets, Tensor):
            _refuse_part(owner, "offsets", offsets)
        if offsets.dtype not in INT_DTYPES:
            _refuse_dtype(owner, "offsets", offsets)
        if offsets.device != device:
            _refuse_device(owner, "offsets", offsets, device)
        if offsets.dim() != 1 or offsets.numel() == 0:
            raise ValueError(
                f"{owner}.offsets must be 1-D with one entry more than there are bags; received "
                f"shape {tuple(offsets.shape)}."
            )
        if lengths is not None and offsets.numel() != lengths.numel() + 1:
            raise ValueError(
                f"{owner}.offsets must have one entry more than lengths; received "
                f"{offsets.numel()} offsets and {lengths.numel()} lengths."
            )
        check_offsets_span(owner, offsets, values)


def check_offsets_span(owner: str, offsets: Tensor, values: Tensor) -> None:
    """Check that offsets run from 0 to the number of values, where reading them is free.

    Raises:
        ValueError: if they do not.
    """
    if is_readable(offsets):
        first, last = offsets[0].item(), offsets[-1].item()
        if first != 0 or last != values.shape[0]:
            raise ValueError(
                f"{owner}.offsets must run from 0 to the number of values, {values.shape[0]}; "
                f"received offsets from {first} to {last}. They are the running sum of the bags' "
                "lengths with a leading 0."
            )


def check_lengths(
    owner: str,
    values: Tensor,
    lengths: Tensor,
    offsets: Tensor | None = None,
    *,
    keys: Sequence[str] = (),
    stride_per_key: Sequence[int] = (),
) -> None:
    """Check that no length is negative and that every value has a bag, where reading is free.

    Args:
        owner: the class, for messages.
        values: `[N, ...]`.
        lengths: `[M]`.
        offsets: `[M + 1]`, what the lengths were derived from; None: they were given.
        keys: features, to name the one at fault.
        stride_per_key: bags of each feature.

    Raises:
        ValueError: naming the first bag (and feature) at fault.
    """
    if not is_readable(lengths):
        return
    # The sum of int32 lengths is int64, so it cannot wrap to the right number.
    if int(lengths.sum()) != values.shape[0] or (lengths.numel() and int(lengths.min()) < 0):
        given = lengths if offsets is None else None
        check_contents(owner, values, given, offsets, keys, stride_per_key)


def check_total(owner: str, total: int, values: Tensor) -> None:
    """Check that lengths add up to the number of values.

    Raises:
        ValueError: if they do not.
    """
    if total != values.shape[0]:
        raise ValueError(
            f"{owner}.lengths must add up to the number of values; received lengths that add up "
            f"to {total} for {values.shape[0]} values. Every value belongs to one bag: correct "
            "the lengths or the values."
        )


def check_length_per_key(keys: Sequence[str], length_per_key: list[int], values: Tensor) -> None:
    """Check that the numbers of values of each feature account for all values.

    Raises:
        ValueError: if they do not, naming a feature whose lengths are negative.
    """
    if len(length_per_key) != len(keys):
        raise ValueError(
            "KeyedJaggedTensor.length_per_key must have one entry per key; received "
            f"{len(length_per_key)} for {len(keys)} keys."
        )
    check_total("KeyedJaggedTensor", sum(length_per_key), values)
    if min(length_per_key, default=0) < 0:
        index = next(i for i, length in enumerate(length_per_key) if length < 0)
        raise ValueError(
            "KeyedJaggedTensor.lengths must not be negative; received lengths of feature "
            f'"{keys[index]}" that add up to {length_per_key[index]}.'
        )


def check_unique(owner: str, keys: list[str]) -> None:
    """Check that no key occurs twice.

    Raises:
        ValueError: naming the repeated keys.
    """
    if not keys:
        return
    # Batches have the keys of the batch before: comparing a thousand takes 1 us, hashing them 13.
    # A compiled caller does not look: it would be compiled anew whenever other keys came by.
    known = {} if torch.compiler.is_compiling() else _unique_lists
    slot = len(keys), keys[0]
    if known.get(slot) == keys:
        return
    if len(set(keys)) != len(keys):
        repeated = [key for key, count in Counter(keys).items() if count > 1]
        raise ValueError(f"{owner}.keys must be unique; received more than once: {repeated}.")
    if len(known) >= _MAX_UNIQUE_LISTS:
        known.clear()
    known[slot] = list(keys)


def check_stride(keys: Sequence[str], num_bags: int, stride: int | None) -> int:
    """Check that every key has as many bags as the others; return how many.

    Raises:
        ValueError: if they have not.
    """
    if stride is None:
        stride = num_bags // len(keys) if keys else 0
    if num_bags != len(keys) * stride:
        raise ValueError(
            "KeyedJaggedTensor needs one length for each key and sample; received "
            f"{num_bags} lengths for {len(keys)} keys"
            f"{f' and a stride of {stride}' if stride * len(keys) else ''}. Lengths lie key by "
            "key; features with different batch sizes need stride_per_key."
        )
    return stride


def check_stride_per_key(
    keys: Sequence[str], num_bags: int, stride: int | None, stride_per_key: list[int]
) -> int:
    """Check that strides of their own per key account for all bags; return the stride of the whole.

    Raises:
        ValueError: if they do not.
    """
    if len(stride_per_key) != len(keys) or sum(stride_per_key) != num_bags:
        raise ValueError(
            "KeyedJaggedTensor: strides must have one entry per key and add up to the number of "
            f"lengths; received strides {preview(stride_per_key)} for {len(keys)} keys and "
            f"{num_bags} lengths."
        )
    return max(stride_per_key, default=0) if stride is None else stride


def check_inverse_indices(
    keys: Sequence[str], values: Tensor, inverse_indices: tuple[list[str], Tensor]
) -> None:
    """Check the shape, dtype, device and keys of inverse indices.

    Raises:
        ValueError: if they do not fit.
    """
    inverse_keys, rows = inverse_indices
    if rows.dim() != 2 or rows.shape[0] != len(inverse_keys) or rows.is_floating_point():
        raise ValueError(
            "KeyedJaggedTensor.inverse_indices must be keys and integers [keys, samples]; received "
            f"{len(inverse_keys)} keys and {rows.dtype} of shape {tuple(rows.shape)}."
        )
    missing = set(keys).difference(inverse_keys)
    if missing:
        raise ValueError(
            "KeyedJaggedTensor.inverse_indices must cover every key; received none for "
            f"{preview(sorted(missing))}."
        )
    if rows.device != values.device:
        raise ValueError(
            "KeyedJaggedTensor.inverse_indices must be on the values' device; received indices on "
            f"{rows.device} and values on {values.device}."
        )


def check_inverse_contents(
    keys: Sequence[str], stride_per_key: Sequence[int], inverse_indices: tuple[list[str], Tensor]
) -> None:
    """Check that every inverse index names a bag of its feature, where reading is free.

    Args:
        keys: features.
        stride_per_key: bags of each.
        inverse_indices: keys and `[keys, samples]`, in any order of keys.

    Raises:
        ValueError: naming the first feature at fault.
    """
    inverse_keys, rows = inverse_indices
    if not is_readable(rows) or not rows.numel():
        return
    lows, highs = rows.aminmax(dim=1)
    strides = dict(zip(keys, stride_per_key, strict=True))
    for key, low, high in zip(inverse_keys, lows.tolist(), highs.tolist(), strict=True):
        stride = strides.get(key)
        if stride is not None and (low < 0 or high >= stride):
            bags = f"0..{stride - 1}" if stride else "none, as it has no bags"
            raise ValueError(
                f'KeyedJaggedTensor.inverse_indices of feature "{key}" must be in '
                f"{bags}; received {low if low < 0 else high}. Each names the bag of a sample."
            )


def check_contents(
    owner: str,
    values: Tensor,
    lengths: Tensor | None,
    offsets: Tensor | None,
    keys: Sequence[str] = (),
    stride_per_key: Sequence[int] = (),
) -> None:
    """Check every length and offset; waits for the device.

    Args:
        owner: the class, for messages.
        values: `[N, ...]`.
        lengths: `[M]` or None.
        offsets: `[M + 1]` or None.
        keys: features, to name the one at fault.
        stride_per_key: bags of each feature.

    Raises:
        ValueError: naming the first bag (and feature) at fault.
    """
    derived = None if offsets is None else offsets.diff()
    for name, bags in (("lengths", lengths), ("offsets", derived)):
        if bags is None:
            continue
        if bags.numel() and bool((bags < 0).any()):
            position = int((bags < 0).nonzero()[0, 0])
            rule = "must not be negative" if name == "lengths" else "must not decrease"
            raise ValueError(
                f"{owner}.{name} {rule}; received length {int(bags[position])} at "
                f"{_describe_bag(position, keys, stride_per_key)}."
            )
    if lengths is not None:
        check_total(owner, int(lengths.sum()), values)
    if offsets is not None and (int(offsets[0]) != 0 or int(offsets[-1]) != values.shape[0]):
        check_offsets_span(owner, offsets.cpu(), values)
    if lengths is not None and derived is not None and not torch.equal(lengths, derived):
        position = int((lengths != derived).nonzero()[0, 0])
        raise ValueError(
            f"{owner}.lengths and offsets must agree; received length {int(lengths[position])} "
            f"and offsets that say {int(derived[position])} at "
            f"{_describe_bag(position, keys, stride_per_key)}. Pass only one of them."
        )


def preview(items: Sequence[object]) -> str:
    """Write the first items of a list for a message."""
    shown = ", ".join(map(repr, items[:10]))
    return f"[{shown}, ... {len(items)} in all]" if len(items) > 10 else f"[{shown}]"


def _describe_bag(position: int, keys: Sequence[str], stride_per_key: Sequence[int]) -> str:
    bag = position
    for key, stride in zip(keys, stride_per_key, strict=True):
        if bag < stride:
            return f'bag {bag} of feature "{key}"'
        bag -= stride
    return f"bag {position}"


def _refuse_part(owner: str, name: str, part: object) -> NoReturn:
    raise TypeError(
        f"{owner}.{name} must be a torch.Tensor; received {type(part).__name__}. "
        f"Convert with torch.tensor({name})."
    )


def _refuse_dtype(owner: str, name: str, part: Tensor) -> NoReturn:
    raise TypeError(
        f"{owner}.{name} must be int32 or int64; received {part.dtype}. Convert with {name}.long()."
    )


def _refuse_device(owner: str, name: str, part: Tensor, device: torch.device) -> NoReturn:
    raise ValueError(
        f"{owner}.{name} must be on the values' device; received {name} on {part.device} and "
        f"values on {device}. Move with {name}.to({str(device)!r})."
    )
