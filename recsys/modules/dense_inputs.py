"""Checks of the dense features of a batch, before its ids are looked up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recsys.modules.traced import is_traced
from recsys.sparse.value_checks import check_dense_values

__all__ = ["check_dense_features"]


def check_dense_features(dense_features: Tensor, dense_arch: nn.Module, size_name: str) -> Tensor:
    """Check the dense features of a model, unless the model is only traced.

    Args:
        dense_features: `[B, in_features]`.
        dense_arch: reads them; its `in_features`, if it has any, is how many there must be.
        size_name: the model's argument that says how many there are, for messages.

    Returns:
        The features; on CUDA with 0 in place of values that are not finite.

    Raises:
        TypeError: they are no tensor of floats.
        ValueError: they have another shape, or a value is NaN or infinite, in this batch or (CUDA)
            in an earlier one.

    Example:
        >>> import torch
        >>> check_dense_features(torch.ones(1, 2), nn.Linear(2, 4), "dense_in_features")
        tensor([[1., 1.]])
    """
    if is_traced(dense_features) or torch._C._get_tracing_state() is not None:
        return dense_features
    in_features = getattr(dense_arch, "in_features", None)
    if not isinstance(dense_features, Tensor) or not dense_features.is_floating_point():
        received = getattr(dense_features, "dtype", type(dense_features).__name__)
        raise TypeError(
            f"dense_features must be a tensor of floats, [samples, {in_features or 'columns'}]; "
            f"received {received}. Batch.from_columns(..., dense=[...]) makes it from columns."
        )
    shape = tuple(dense_features.shape)
    if len(shape) != 2 or shape[1] != (shape[1] if in_features is None else in_features):
        raise ValueError(
            f"dense_features must be [samples, {size_name}], and {size_name} is {in_features}; "
            f"received shape {shape}. Pass as many columns, such as Batch.from_columns(..., "
            f"dense=[...]) makes, or build the model with another {size_name}."
        )
    return check_dense_values(dense_features)
