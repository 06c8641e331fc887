"""Checks of jagged tensors: O(1) checks for constructors, and full checks on request.

O(1) checks read shapes, dtypes and devices, but no contents on a GPU.

Shapes: `M` bags, `N` values, `F` features, `B` batch size.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import torch
from torch import Tensor, fx

from recsys.base.arguments import flag, wrong_type

if TYPE_CHECKING:
    from recsys.sparse.bags import JaggedBase
    from recsys.sparse.keyed_bags import InverseIndices, KeyedBags

INT_DTYPES = frozenset((torch.int32, torch.int64))
_debug = os.environ.get("RECSYS_DEBUG", "0") not in {"", "0"}
_MAX_UNIQUE_LISTS = 64
_unique_lists: dict[tuple[int, str], list[str]] = {}
"""Copies of key lists without repeated keys, by length and first key."""


def set_debug(enabled: bool) -> None:
    """Turn full validation at every construction on or off.

    Full validation reads all lengths and offsets, which waits for the GPU. `RECSYS_DEBUG=1` in the
    environment turns it on from the start.

    Args:
        enabled: True to validate in constructors.

    Raises:
        TypeError: `enabled` is not a bool.

    Example:
        >>> set_debug(True)
        >>> is_debug()
        True
        >>> set_debug(False)
    """
    global _debug
    _debug = flag("set_debug: enabled", enabled)


def is_debug() -> bool:
    """Return whether constructors validate all contents.

    Returns:
        The state set by `set_debug` or `RECSYS_DEBUG`.

    Example:
        >>> is_debug()
        False
    """
    return _debug


def is_readable(tensor: Tensor) -> bool:
    """Return whether a tensor is a real CPU tensor, which is readable without waiting."""
    return type(tensor) is Tensor and tensor.is_cpu and not torch.compiler.is_compiling()


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has contents, and is neither fake nor on the meta device."""
    return type(tensor) is Tensor and not tensor.is_meta


def is_proxy(values: object) -> bool:
    """Return whether values are a proxy of a `torch.fx` trace."""
    return isinstance(values, fx.Proxy)


def is_meta(tensor: Tensor) -> bool:
    """Return whether a tensor is on the meta device; False for a proxy."""
    return not is_proxy(tensor) and tensor.is_meta


def is_checked_in_full(
    values: Tensor,
    lengths: Tensor | None,
    offsets: Tensor | None,
    has_counts: bool = False,
) -> bool:
    """Return whether a constructor validates all contents.

    It does in debug mode, and on a CPU if redundant arguments must agree.

    Args:
        values: The values.
        lengths: The lengths, or None.
        offsets: The offsets, or None.
        has_counts: True if numbers of values per key were passed.
    """
    if _debug:
        return has_values(values)
    is_redundant = has_counts or (lengths is not None and offsets is not None)
    return is_redundant and is_readable(values)


def refuse_missing(owner: str, name: str) -> NoReturn:
    """Raise because a batch does not have an optional part.

    Raises:
        ValueError: always.
    """
    shown = name.replace("_", " ")
    raise ValueError(f"{owner} has no {shown}. Ask with {name}_or_none().")


def refuse_meta(subject: str, hint: str) -> NoReturn:
    """Raise because the meta device has no contents to read.

    Args:
        subject: Class and method, for the message.
        hint: An alternative that needs no contents.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"{subject} needs the contents of its tensors; received tensors on the meta device, which "
        f"have shapes only. {hint}"
    )


def check_parts(
    owner: str,
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
) -> Tensor | None:
    """Check that the parts of a jagged tensor are consistent, in O(1).

    Args:
        owner: The class, for messages.
        values: `[N, ...]`, any dtype.
        weights: `[N, ...]` or None.
        lengths: Integers or None.
        offsets: Integers or None.

    Returns:
        The lengths. Empty float lengths are converted to integers.

    Raises:
        TypeError: If a part is not a tensor, or lengths or offsets are not int32 or int64.
        ValueError: If shapes or devices do not match, or lengths and offsets are both None.
    """
    if lengths is None and offsets is None:
        raise ValueError(
            f"{owner} needs lengths or offsets; received neither. Pass lengths=, the number of "
            "values of each bag, or offsets=, the running sum of the lengths with a leading 0."
        )
    if not isinstance(values, Tensor):
        _refuse_part(owner, "values", values)
    device = values.device
    if values.dim() == 0:
        raise ValueError(f"{owner}.values must have at least 1 dimension; received a scalar.")
    if weights is not None:
        if not isinstance(weights, Tensor) or weights.device != device:
            _refuse_part(owner, "weights", weights, device)
        if weights.shape[:1] != values.shape[:1]:
            raise ValueError(
                f"{owner}.weights must have one entry per value; received weights of shape "
                f"{tuple(weights.shape)} for values of shape {tuple(values.shape)}."
            )
    if lengths is not None:
        if not isinstance(lengths, Tensor) or lengths.device != device:
            _refuse_part(owner, "lengths", lengths, device)
        if lengths.dtype not in INT_DTYPES:
            if lengths.numel():
                _refuse_dtype(owner, "lengths", lengths)
            lengths = lengths.long()  # empty: `torch.tensor([])` is fp32
    if offsets is not None:
        if not isinstance(offsets, Tensor) or offsets.device != device:
            _refuse_part(owner, "offsets", offsets, device)
        if offsets.dtype not in INT_DTYPES:
            _refuse_dtype(owner, "offsets", offsets)
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
    return lengths


def check_offsets_span(owner: str, offsets: Tensor, values: Tensor) -> None:
    """Check on a CPU that offsets start at 0 and do not exceed the number of values.

    Raises:
        ValueError: If they do.
    """
    if is_readable(offsets):
        first, last = offsets[0].item(), offsets[-1].item()
        if first != 0 or last > values.shape[0]:
            raise ValueError(
                f"{owner}.offsets must run from 0 to at most the number of values, "
                f"{values.shape[0]}; received offsets from {first} to {last}. Pass the running sum "
                "of the lengths with a leading 0."
            )


def check_lengths(jagged: JaggedBase, lengths: Tensor) -> int | None:
    """Check on a CPU that lengths are not negative and do not exceed the number of values.

    Args:
        jagged: The jagged tensor.
        lengths: `[M]`, its lengths.

    Returns:
        Their sum; None on a GPU.

    Raises:
        ValueError: With the first invalid bag (and its feature).
    """
    if not is_readable(lengths):
        return None
    total = int(lengths.sum())  # int64: it cannot overflow
    if total > jagged.values().shape[0] or (lengths.numel() and int(lengths.min()) < 0):
        jagged.validate()
    return total


def check_total(owner: str, total: int, values: Tensor, *, is_exact: bool = False) -> None:
    """Check the sum of the lengths against the number of values.

    Args:
        owner: The class, for messages.
        total: The sum of the lengths.
        values: `[N, ...]`.
        is_exact: True if the sum must be the number of values, as on a GPU without
            `length_per_key`.

    Raises:
        ValueError: If the sum exceeds the number of values or, with `is_exact`, differs.
    """
    if total > values.shape[0] or (is_exact and total < values.shape[0]):
        rule, more = "to at most", ""
        if is_exact:
            rule = "to"
            more = " A buffer on a GPU that is longer than its bags needs length_per_key."
        raise ValueError(
            f"{owner}.lengths must add up {rule} the number of values; received lengths that add "
            f"up to {total} for {values.shape[0]} values. Correct the lengths or the values.{more}"
        )


def check_unique(owner: str, keys: list[str]) -> None:
    """Check that keys are unique.

    Raises:
        TypeError: If the first key is not hashable.
        ValueError: If keys repeat, with these keys.
    """
    if not keys:
        return
    if not isinstance(keys[0], Hashable):
        wrong_type(f"{owner}.keys[0]", "text", keys[0])
    # Most batches have the keys of the previous batch. Comparing 1000 keys takes 1 us, hashing 13.
    # Compiled callers skip the cache, which would cause recompilation.
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


def flatten_lengths(keys: Sequence[str], lengths: Tensor) -> Tensor:
    """Convert lengths of shape `[keys, samples]` to one dimension.

    Raises:
        ValueError: If the shape differs.
    """
    if lengths.dim() != 1 and (lengths.dim() != 2 or lengths.shape[0] != len(keys)):
        raise ValueError(
            "KeyedJaggedTensor.lengths must be [keys * samples] or [keys, samples]; received shape "
            f"{tuple(lengths.shape)} for {len(keys)} keys."
        )
    return lengths.reshape(-1)


def check_inverse_indices(values: Tensor, inverse_indices: InverseIndices) -> int:
    """Check the shape, dtype and device of inverse indices.

    Returns:
        The number of samples.

    Raises:
        ValueError: If one of them is wrong.
    """
    indices = cast(object, inverse_indices)
    is_pair = isinstance(indices, tuple | list) and len(indices) == 2
    if not is_pair or not isinstance(inverse_indices[1], Tensor | fx.Proxy):
        wrong_type("KeyedJaggedTensor.inverse_indices", "a tuple of keys and a tensor", indices)
    inverse_keys, rows = inverse_indices
    if isinstance(cast(object, rows), fx.Proxy):
        return rows.shape[1]
    if rows.dim() != 2 or rows.shape[0] != len(inverse_keys) or rows.is_floating_point():
        raise ValueError(
            "KeyedJaggedTensor.inverse_indices must be keys and integers [keys, samples]; received "
            f"{len(inverse_keys)} keys and {rows.dtype} of shape {tuple(rows.shape)}."
        )
    if rows.device != values.device:
        _refuse_part("KeyedJaggedTensor", "inverse_indices", rows, values.device)
    return rows.shape[1]


def check_inverse_contents(
    keys: Sequence[str], stride_per_key: Sequence[int], inverse_indices: InverseIndices
) -> None:
    """Check on a CPU that all inverse indices are bag numbers of their features.

    Args:
        keys: features.
        stride_per_key: Number of bags of each feature.
        inverse_indices: Keys and `[keys, samples]`, in any order of keys.

    Raises:
        ValueError: With the first invalid feature.
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
                f"{bags}; received {low if low < 0 else high}. An entry is a sample's bag number."
            )


def check_contents(
    owner: str,
    values: Tensor,
    lengths: Tensor | None,
    offsets: Tensor | None,
    keys: Sequence[str] = (),
    stride_per_key: Sequence[int] = (),
    *,
    is_exact: bool = False,
) -> None:
    """Check all lengths and offsets; waits for the device.

    Args:
        owner: The class, for messages.
        values: `[N, ...]`.
        lengths: `[M]` or None.
        offsets: `[M + 1]` or None.
        keys: Features, for messages.
        stride_per_key: Number of bags of each feature.
        is_exact: True if the sum of the lengths must be the number of values.

    Raises:
        ValueError: With the first invalid bag (and its feature).
    """
    if values.is_meta:
        refuse_meta(f"{owner}.validate()", "Validate a batch on a real device.")
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
        check_total(owner, int(lengths.sum()), values, is_exact=is_exact)
    if offsets is not None:
        check_offsets_span(owner, offsets.cpu(), values)
        check_total(owner, int(offsets[-1]), values, is_exact=is_exact)
    if lengths is not None and derived is not None and not torch.equal(lengths, derived):
        position = int((lengths != derived).nonzero()[0, 0])
        raise ValueError(
            f"{owner}.lengths and offsets must agree; received length {int(lengths[position])} "
            f"and a difference of offsets of {int(derived[position])} at "
            f"{_describe_bag(position, keys, stride_per_key)}. Pass only one of them."
        )


def check_keyed(kjt: KeyedBags) -> None:
    """Check all lengths, offsets, sizes per key and inverse indices; waits for the device.

    Raises:
        ValueError: With the first invalid feature and bag.
    """
    keys, strides = kjt.keys(), kjt.stride_per_key()
    lengths, offsets = kjt.lengths_or_none(), kjt.offsets_or_none()
    is_exact = not kjt.values().is_cpu and kjt.length_per_key_or_none() is None
    check_contents(
        "KeyedJaggedTensor", kjt.values(), lengths, offsets, keys, strides, is_exact=is_exact
    )
    sizes: list[int] = kjt.values_per_key().tolist()
    bounds = list(itertools.accumulate(sizes, initial=0))
    for name, known, actual in (
        ("length_per_key", kjt.length_per_key_or_none(), sizes),
        ("offset_per_key", kjt.offset_per_key_or_none(), bounds),
    ):
        if known is not None and known != actual:
            raise ValueError(
                f"KeyedJaggedTensor.{name} must agree with lengths; received {preview(known)} "
                f"for {preview(actual)}. Omit this argument."
            )
    inverse = kjt.inverse_indices_or_none()
    if inverse is not None:
        check_inverse_contents(keys, strides, (inverse[0], inverse[1].cpu()))


def described(given: object) -> str:
    """Describe an argument for a message: its type, or the shape of a tensor."""
    if isinstance(given, Tensor):
        return f"a tensor of shape {tuple(given.shape)}"
    return "None" if given is None else f"a {type(given).__name__}"


def preview(items: Sequence[object]) -> str:
    """Return the first items of a list as text, for a message."""
    shown = ", ".join(map(repr, items[:10]))
    return f"[{shown}, ... {len(items)} in all]" if len(items) > 10 else f"[{shown}]"


def _describe_bag(position: int, keys: Sequence[str], stride_per_key: Sequence[int]) -> str:
    bag = position
    for key, stride in zip(keys, stride_per_key, strict=True):
        if bag < stride:
            return f'bag {bag} of feature "{key}"'
        bag -= stride
    return f"bag {position}"


def _refuse_part(
    owner: str, name: str, part: object, device: torch.device | None = None
) -> NoReturn:
    if not isinstance(part, Tensor):
        raise TypeError(
            f"{owner}.{name} must be a torch.Tensor; received {type(part).__name__}. "
            f"Convert with torch.tensor({name})."
        )
    raise ValueError(
        f"{owner}.{name} must be on the values' device; received {name} on {part.device} and "
        f"values on {device}. Move with {name}.to({str(device)!r})."
    )


def _refuse_dtype(owner: str, name: str, part: Tensor) -> NoReturn:
    raise TypeError(
        f"{owner}.{name} must be int32 or int64; received {part.dtype}. Convert with {name}.long()."
    )
