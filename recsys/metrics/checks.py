"""Checks of the arguments of metrics: each raises an error that names the argument."""

from collections.abc import Mapping
from typing import TypeVar

import torch

from recsys.kernels.arguments import finite, instance, whole, wrong_type

_Value = TypeVar("_Value")


def mapping(subject: str, value: _Value) -> _Value:
    """Check that a value is a dictionary or another mapping.

    Args:
        subject: Name of the argument.
        value: The argument.

    Returns:
        The value.

    Raises:
        TypeError: The value is not a mapping.

    Example:
        >>> mapping("arguments", {"k": 3})
        {'k': 3}
    """
    if not isinstance(value, Mapping):
        wrong_type(subject, "a dictionary", value)
    return value


def check_ranks(world_size: int, my_rank: int, batch_size: int) -> None:
    """Check the sizes of a job.

    Args:
        world_size: Number of ranks.
        my_rank: Rank of this process.
        batch_size: Samples per rank and step.

    Raises:
        TypeError: An argument is not a whole number.
        ValueError: A size is not positive, or `my_rank` is not below `world_size`.

    Example:
        >>> check_ranks(world_size=2, my_rank=1, batch_size=512)
    """
    whole("world_size", world_size)
    whole("batch_size", batch_size)
    if whole("my_rank", my_rank, least=0) >= world_size:
        raise ValueError(
            f"my_rank must be less than world_size, {world_size}; received {my_rank}. "
            "Pass torch.distributed.get_rank()."
        )


def check_intervals(
    compute_interval_steps: int, min_compute_interval: float, max_compute_interval: float
) -> None:
    """Check the interval between two computations.

    Args:
        compute_interval_steps: Steps.
        min_compute_interval: Minimum in seconds.
        max_compute_interval: Maximum in seconds; may be infinite.

    Raises:
        TypeError: An argument is not a number.
        ValueError: An interval is not positive, or the minimum exceeds the maximum.

    Example:
        >>> check_intervals(100, 0.0, float("inf"))
    """
    whole("compute_interval_steps", compute_interval_steps)
    finite("min_compute_interval", min_compute_interval, least=0.0)
    if max_compute_interval != float("inf"):
        finite("max_compute_interval", max_compute_interval, least=0.0)
    if min_compute_interval > max_compute_interval:
        raise ValueError(
            "min_compute_interval must be from 0 to max_compute_interval, in seconds; received "
            f"{min_compute_interval} and {max_compute_interval}."
        )


def check_predictions(
    predictions_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert predictions, labels and weights to one shape and precision.

    Values are not checked: on a GPU, every step would wait for the device.

    Args:
        predictions_N: Any shape with `N` values.
        labels_N: `N` values, 0 or 1.
        weights_N: `N` values; `None` for ones.

    Returns:
        The three tensors, detached, `[N]` float64.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: The tensors differ in size or device.
    """
    given = {"predictions": predictions_N, "labels": labels_N}
    if weights_N is not None:
        given["weights"] = weights_N
    for name, tensor in given.items():
        instance(name, tensor, torch.Tensor, "a tensor")
    if len({tensor.numel() for tensor in given.values()}) > 1:
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
        raise ValueError(
            f"predictions, labels and weights must have equally many values; received {sizes}. "
            "Pass one of each per sample."
        )
    if len({tensor.device for tensor in given.values()}) > 1:
        devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise ValueError(
            f"predictions, labels and weights must be on one device; received {devices}. "
            "Move them with .to(device)."
        )
    rows = [tensor.detach().reshape(-1).double() for tensor in given.values()]
    if weights_N is None:
        rows.append(torch.ones_like(rows[0]))
    return rows[0], rows[1], rows[2]
