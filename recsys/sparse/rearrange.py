"""Selection, concatenation and splitting of features, for methods of KeyedJaggedTensor.

Shapes: `F` features (keys), `B` batch size (stride), `N` values of all bags together.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recsys.base.arguments import MissingKeyError
from recsys.kernels import ops
from recsys.sparse import validate
from recsys.sparse.features import FeatureViews
from recsys.sparse.jagged import JaggedTensor

if TYPE_CHECKING:
    from recsys.sparse.keyed_bags import InverseIndices, KeyedBags
    from recsys.sparse.keyed_jagged import KeyedJaggedTensor


def _check_mergeable(
    caller: str, parts: Sequence[JaggedTensor] | Sequence[KeyedJaggedTensor]
) -> None:
    if not parts:
        raise ValueError(f"{caller} needs at least one part; received none.")
    weighted = [part.weights_or_none() is not None for part in parts]
    if len(set(weighted)) > 1:
        raise ValueError(
            f"{caller}: all parts must have weights, or none; received weighted: {weighted}."
        )
    for name, hint in (("dtype", "Convert with values.to(...)"), ("device", "Move with .to(...)")):
        kinds = {getattr(part.values(), name) for part in parts}
        if len(kinds) > 1:
            raise ValueError(
                f"{caller}: all parts must have values of the same {name}; received "
                f"{sorted(map(str, kinds))}. {hint}."
            )


def _cat_weights(parts: Sequence[JaggedTensor] | Sequence[KeyedJaggedTensor]) -> Tensor | None:
    weights = [part.weights_or_none() for part in parts]
    return None if weights[0] is None else torch.cat(weights)  # type: ignore[arg-type]


def merged(jt_dict: Mapping[str, JaggedTensor], has_varying_strides: bool) -> dict[str, Any]:
    """Return the constructor arguments for `KeyedJaggedTensor.from_jt_dict`."""
    parts = [jt.trim() for jt in jt_dict.values()]
    _check_mergeable("KeyedJaggedTensor.from_jt_dict", parts)
    lengths = [jt.lengths() for jt in parts]
    strides = [part.numel() for part in lengths]
    return {
        "keys": list(jt_dict),
        "values": torch.cat([jt.values() for jt in parts]),
        "weights": _cat_weights(parts),
        "lengths": torch.cat(lengths),
        "stride_per_key": strides if has_varying_strides or len(set(strides)) > 1 else None,
    }


def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Concatenate, as `KeyedJaggedTensor.concat`."""
    # parts without keys are ignored; their strides and dtypes may differ
    kjt_list = [kjt.trim() for kjt in kjt_list if kjt.keys()] or kjt_list[:1]
    _check_mergeable("KeyedJaggedTensor.concat", kjt_list)
    keys = list(itertools.chain.from_iterable(kjt._keys for kjt in kjt_list))
    validate.check_unique("KeyedJaggedTensor.concat", keys)
    is_variable = any(kjt.variable_stride_per_key() for kjt in kjt_list)
    strides = [kjt._stride for kjt in kjt_list]
    if len(set(strides)) > 1 and not is_variable:
        raise ValueError(
            "KeyedJaggedTensor.concat: all parts must have the same stride (batch size); "
            f"received {strides}."
        )
    per_rank = itertools.chain.from_iterable(map(_strides_per_rank, kjt_list))
    known = [kjt._length_per_key for kjt in kjt_list]
    return kjt_list[0].from_parts(
        keys,
        torch.cat([kjt._values for kjt in kjt_list]),
        _cat_weights(kjt_list),
        torch.cat([kjt.lengths() for kjt in kjt_list]),
        stride=max(strides),
        stride_per_key_per_rank=list(per_rank) if is_variable else None,
        length_per_key=None if None in known else list(itertools.chain(*known)),  # type: ignore[arg-type]
        inverse_indices=_concat_inverse_indices(kjt_list),
    )


def feature(kjt: KeyedJaggedTensor, key: str) -> JaggedTensor:
    """Return one feature as views of the buffer.

    Raises:
        KeyError: If the key does not exist.
    """
    index = kjt.index_per_key().get(key)
    if index is None:
        raise MissingKeyError(
            f"KeyedJaggedTensor has no key {key!r}; received keys {validate.preview(kjt.keys())}."
        )
    start, length = kjt.offset_per_key()[index], kjt.length_per_key()[index]
    first_bag, stride = index * kjt._stride, kjt._stride
    if kjt._stride_per_key_per_rank is not None:
        strides = kjt.stride_per_key()
        first_bag, stride = sum(strides[:index]), strides[index]
    return JaggedTensor.from_parts(
        kjt._values.narrow(0, start, length),
        None if kjt._weights is None else kjt._weights.narrow(0, start, length),
        kjt.lengths().narrow(0, first_bag, stride),
    )


def features(kjt: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """Return all features as views of the buffer, created at the first access."""
    sizes, strides = kjt.length_per_key(), kjt.stride_per_key()
    kjt = kjt.trim()
    views = FeatureViews(kjt._values, kjt._weights, kjt.lengths(), sizes, strides)
    return JaggedTensor.from_views(kjt._keys, views)


divides_evenly_on_meta = False
"""Features of batches on `meta` have the same number of values, and the first the remainder, as in
TorchRec. `recsys.compat` sets it."""


def total_on_meta(kjt: KeyedBags, places: Sequence[int]) -> int:
    """Return the number of values of some features, derived from the shapes.

    Shapes determine the number if each feature of the batch occurs equally often.

    Args:
        kjt: A batch on the meta device with unknown `length_per_key`.
        places: Positions of the features; may repeat.

    Raises:
        ValueError: If the shapes do not determine the number.
    """
    if divides_evenly_on_meta and places:
        share, rest = divmod(kjt._values.shape[0], len(kjt._keys))
        return sum(share + rest * (place == 0) for place in places)
    counts = Counter(places)
    times = {counts[place] for place in range(len(kjt._keys))}
    if len(times) > 1:
        validate.refuse_meta(
            "KeyedJaggedTensor.length_per_key", "Pass length_per_key= to the constructor."
        )
    return kjt._values.shape[0] * sum(times)


def split(kjt: KeyedJaggedTensor, segments: list[int]) -> list[KeyedJaggedTensor]:
    """Split, as `KeyedJaggedTensor.split`."""
    keys, stride = kjt.keys(), kjt.stride()
    if sum(segments) != len(keys) or min(segments, default=0) < 0:
        raise ValueError(
            "KeyedJaggedTensor.split: segments must be counts that add up to the number of "
            f"keys, {len(keys)}; received {list(segments)}."
        )
    ends = itertools.accumulate(segments)
    runs = [slice(end - size, end) for size, end in zip(segments, ends, strict=True)]
    length_per_key: list[int] | None
    if kjt._length_per_key is None and validate.is_meta(kjt._values):
        length_per_key = None
        sizes = [total_on_meta(kjt, range(len(keys))[run]) for run in runs]
    else:
        length_per_key = kjt.length_per_key()
        sizes = [sum(length_per_key[run]) for run in runs]
        kjt = kjt.trim()
    strides = num_bags = None
    if kjt.variable_stride_per_key():
        strides, per_key = kjt.stride_per_key_per_rank(), kjt.stride_per_key()
        num_bags = [sum(per_key[run]) for run in runs]
    values = kjt.values().split_with_sizes(sizes)
    lengths = kjt.lengths().split_with_sizes(num_bags or [size * stride for size in segments])
    weights = kjt.weights_or_none()
    split_weights = [None] * len(runs) if weights is None else weights.split_with_sizes(sizes)
    inverse, from_parts = kjt.inverse_indices_or_none(), kjt.from_parts
    return [
        from_parts(
            keys[run],
            values[i],
            split_weights[i],
            lengths[i],
            stride=stride,
            stride_per_key_per_rank=strides[run] if strides else None,
            length_per_key=None if length_per_key is None else length_per_key[run],
            inverse_indices=inverse,
        )
        for i, run in enumerate(runs)
    ]


def permute(
    kjt: KeyedJaggedTensor, indices: list[int], indices_tensor: Tensor | None
) -> KeyedJaggedTensor:
    """Select features, as `KeyedJaggedTensor.permute`."""
    keys, old_values = kjt._keys, kjt._values
    if indices and not 0 <= min(indices) <= max(indices) < len(keys):
        raise IndexError(
            f"KeyedJaggedTensor.permute: indices must be in 0..{len(keys) - 1}; received "
            f"{validate.preview([i for i in indices if not 0 <= i < len(keys)])}."
        )
    if indices_tensor is None:
        indices_tensor = torch.tensor(indices, dtype=torch.int32, device=old_values.device)
    elif indices_tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(  # a kernel would read other positions
            "KeyedJaggedTensor.permute: indices_tensor must be int32 or int64; received a tensor "
            f"of {indices_tensor.dtype}."
        )
    elif indices_tensor.numel() != len(indices):
        raise ValueError(
            "KeyedJaggedTensor.permute: indices_tensor must equal indices; received "
            f"{indices_tensor.numel()} entries for {len(indices)}."
        )
    if validate.is_readable(old_values):
        kjt.length_per_key()  # checks the lengths: a kernel would read out of bounds
    trimmed = kjt.trim()
    old_values, given_weights = trimmed._values, trimmed._weights
    sizes, total, strides = kjt._length_per_key, None, None
    if sizes is not None:
        sizes = [sizes[i] for i in indices]
        total = sum(sizes)
    elif validate.is_meta(old_values):
        total = total_on_meta(kjt, indices)
    if kjt.variable_stride_per_key():
        _, values, weights = ops.permute_1d(
            indices_tensor, kjt.values_per_key(), old_values, given_weights, total
        )
        per_key, per_rank = kjt.stride_per_key(), kjt.stride_per_key_per_rank()
        strides_F = torch.tensor(per_key, dtype=torch.int32, device=old_values.device)
        num_bags = sum([per_key[i] for i in indices])
        strides = [per_rank[i] for i in indices]
        _, lengths, _ = ops.permute_1d(indices_tensor, strides_F, kjt.lengths(), None, num_bags)
    else:
        lengths_FB = kjt.lengths().view(len(keys), kjt.stride())
        lengths, values, weights = ops.permute_2d(
            indices_tensor, lengths_FB, old_values, given_weights, total
        )
    return kjt.from_parts(
        [keys[i] for i in indices],
        values,
        weights,
        lengths.view(-1),
        stride=kjt.stride(),
        stride_per_key_per_rank=strides,
        length_per_key=sizes,
        inverse_indices=kjt.inverse_indices_or_none(),
    )


def _strides_per_rank(kjt: KeyedJaggedTensor) -> list[list[int]]:
    return kjt.stride_per_key_per_rank() or [[size] for size in kjt.stride_per_key()]


def _concat_inverse_indices(kjt_list: Sequence[KeyedJaggedTensor]) -> InverseIndices | None:
    inverse = [_own_inverse_indices(kjt) for kjt in kjt_list]
    present = [part for part in inverse if part is not None]
    if not present:
        return None
    if len(present) != len(inverse) or len({rows.shape[1] for _, rows in present}) > 1:
        raise ValueError(
            "KeyedJaggedTensor.concat: all parts must have inverse indices for the same number of "
            "samples, or none; received "
            f"{[None if part is None else tuple(part[1].shape) for part in inverse]}."
        )
    keys = list(itertools.chain.from_iterable(keys for keys, _ in present))
    return keys, torch.cat([rows for _, rows in present])


def _own_inverse_indices(kjt: KeyedJaggedTensor) -> InverseIndices | None:
    """Return the inverse indices without features that are not keys, as after a split."""
    inverse = kjt._inverse_indices
    if inverse is None or not kjt._keys or set(inverse[0]) <= set(kjt._keys):
        return inverse
    place = {key: i for i, key in enumerate(inverse[0])}
    keys = [key for key in kjt._keys if key in place]
    rows = [inverse[1].narrow(0, place[key], 1) for key in keys]
    return keys, torch.cat([*rows, inverse[1][:0]])
