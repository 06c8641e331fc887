"""Checks of a batch before a lookup: dtypes, shapes, devices, weights and inverse indices."""

from collections.abc import Sequence

import torch

from recsys.sparse import validate
from recsys.sparse.keyed_bags import Parts
from recsys.sparse.keyed_jagged import KeyedJaggedTensor
from recsys.sparse.value_checks import check_id_weights


def check_features(
    features: KeyedJaggedTensor,
    owner: str,
    device: torch.device,
    *,
    is_pooled: bool,
    is_weighted: bool,
    names: Sequence[str] = (),
) -> tuple[KeyedJaggedTensor, Parts]:
    """Check that a lookup can read a batch; the range of the ids is checked elsewhere.

    Args:
        features: The batch.
        owner: Name of the module, for error messages.
        device: Device of the tables.
        is_pooled: True if the lookup returns one row per sample.
        is_weighted: True if the lookup needs weights.
        names: The features to look up.

    Returns:
        The batch, trimmed, and its parts.

    Raises:
        TypeError: `features` is not a KeyedJaggedTensor, ids are not int32 or int64, or weights are
            not floating.
        ValueError: Ids or weights have more than one dim, the batch is on another device, or
            weights or inverse indices are missing. A weight is NaN or infinite (on CUDA, in an
            earlier batch). On the CPU, lengths, offsets or inverse indices are inconsistent.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(
            f"{owner} needs a KeyedJaggedTensor; received {validate.described(features)}. Build "
            "one: KeyedJaggedTensor(keys=[...], values=ids, lengths=...)."
        )
    # on a CPU, parts() checks lengths and offsets
    parts = features.parts()
    known = parts.length_per_key
    num_read = getattr(features, "_num_read", None) if known is None else sum(known)
    if num_read is not None and num_read < parts.values.shape[0]:
        features = features.trim()
        parts = features.parts()
    values = parts.values
    if values.dtype is not torch.int64 and values.dtype is not torch.int32:
        raise TypeError(
            f"{owner} looks up ids, which must be int32 or int64; received {values.dtype} for the "
            f"features {validate.preview(parts.keys)}. Convert them with .long()."
        )
    if values.dim() != 1:
        raise ValueError(
            f"{owner} looks up ids, which must have one dim, [ids]; received values of shape "
            f"{tuple(values.shape)}. Flatten them: the ids of a sample are one bag."
        )
    if values.device != device:
        raise ValueError(
            f"{owner} has its tables on {device}; received a batch on {values.device}. Move one of "
            "them with .to()."
        )
    if is_weighted:
        weights = parts.weights
        if weights is None:
            raise ValueError(
                f"{owner} was built with is_weighted=True and needs one weight per id; received a "
                "batch without weights. Pass weights= to the KeyedJaggedTensor."
            )
        if weights.dim() != 1:
            raise ValueError(
                f"{owner} multiplies the row of each id by a number, so weights must have one dim, "
                f"[ids]; received weights of shape {tuple(weights.shape)}."
            )
        if not weights.is_floating_point():
            raise TypeError(
                f"{owner} needs weights of a floating dtype; received {weights.dtype}. Convert "
                "them with .float()."
            )
        safe = check_id_weights(owner, weights, parts.offsets, parts.keys, features.stride_per_key)
        parts = parts._replace(weights=safe)
    if parts.stride_per_key_per_rank is not None or parts.inverse_indices is not None:
        _check_samples(features, parts, is_pooled, names)
    return features, parts


def _check_samples(
    features: KeyedJaggedTensor, parts: Parts, is_pooled: bool, names: Sequence[str]
) -> None:
    inverse, strides = parts.inverse_indices, features.stride_per_key()
    if inverse is not None:
        validate.check_inverse_contents(parts.keys, strides, inverse)
    if not is_pooled:
        return
    if inverse is None:
        raise ValueError(
            "KeyedJaggedTensor.inverse_indices are required to pool features with different batch "
            f"sizes; received stride_per_key={strides[:10]} without them. Pass inverse_indices= to "
            "the KeyedJaggedTensor."
        )
    missing = set(names).difference(inverse[0])
    if missing:
        raise ValueError(
            "KeyedJaggedTensor.inverse_indices must have all features that are looked up; "
            f"received none for {validate.preview(sorted(missing))}."
        )
    if features.variable_stride_per_key() and inverse[1].shape[1] and not all(strides):
        key = parts.keys[strides.index(0)]
        raise ValueError(
            f"Each sample needs a bag of every feature; received inverse_indices of "
            f"{inverse[1].shape[1]} samples and no bag of feature '{key}'. Add an empty bag."
        )
