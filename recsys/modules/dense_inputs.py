"""Checks of a model's tables, and of the dense features of a batch before the lookup."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.tables.traced import is_traced
from recsys.sparse.value_checks import check_dense_values

__all__ = ["check_dense_features", "common_dim"]


def common_dim(collection: EmbeddingBagCollection, reason: str) -> int:
    """Return the dim of all tables of a model's collection.

    Args:
        collection: The tables.
        reason: Why the dims must be equal, for the message.

    Raises:
        ValueError: There is no table, or the tables have different dims.
    """
    dims = {config.name: config.embedding_dim for config in collection.embedding_bag_configs()}
    if len(set(dims.values())) != 1:
        raise ValueError(
            "embedding_bag_collection must have tables, all of one embedding_dim; received "
            f"{dims}. {reason}"
        )
    return next(iter(dims.values()))


def check_dense_features(dense_features: Tensor, dense_arch: nn.Module, size_name: str) -> Tensor:
    """Check the dense features of a model; a traced model skips the check.

    Args:
        dense_features: `[B, in_features]`.
        dense_arch: The module that reads them; its `in_features`, if any, is the required number.
        size_name: The model's argument for this number, for messages.

    Returns:
        The features; on CUDA, values that are not finite are 0.

    Raises:
        TypeError: The features are not a tensor of floats, or are float64 and the model is not.
        ValueError: The shape differs, or a value is NaN or infinite, in this batch or (CUDA) in an
            earlier batch.

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
            f"received {received}. Batch.from_columns(..., dense=[...]) builds it from columns."
        )
    if dense_features.dtype is torch.float64:
        dtypes = {parameter.dtype for parameter in dense_arch.parameters()}
        if dtypes and torch.float64 not in dtypes:
            raise TypeError(
                "dense_features must have the dtype of the model, "
                f"{min(map(str, dtypes))}; received torch.float64. Convert them by "
                "dense_features.float()."
            )
    shape = tuple(dense_features.shape)
    if len(shape) != 2 or shape[1] != (shape[1] if in_features is None else in_features):
        raise ValueError(
            f"dense_features must be [samples, {size_name}], and {size_name} is {in_features}; "
            f"received shape {shape}. Pass that many columns, such as Batch.from_columns(..., "
            f"dense=[...]) builds, or build the model with another {size_name}."
        )
    return check_dense_values(dense_features)
