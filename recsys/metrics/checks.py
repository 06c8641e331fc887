"""Checks of the arguments of metrics: each raises an error that names the argument."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from recsys.base.arguments import finite, instance, whole, wrong_type

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


def check_columns(
    names: Sequence[str], columns: Sequence[torch.Tensor], num_tasks: int = 1, num_classes: int = 1
) -> int:
    """Check the types, sizes and devices of predictions, labels and weights.

    Values are not checked: on a GPU, every step would wait for the device.

    Args:
        names: Name of each column.
        columns: Predictions of all tasks, then labels, then weights, if there are weights.
        num_tasks: Number of tasks.
        num_classes: Number of predictions per sample.

    Returns:
        Number of samples.

    Raises:
        TypeError: A column is not a tensor.
        ValueError: The columns differ in size or device.

    Example:
        >>> check_columns(("predictions", "labels"), (torch.rand(3), torch.ones(3)))
        3
    """
    for name, column in zip(names, columns, strict=False):
        instance(name, column, torch.Tensor, "a tensor")
    num_samples = columns[num_tasks].numel()
    for index, column in enumerate(columns):
        size = num_samples * (num_classes if index < num_tasks else 1)
        if column.numel() != size:
            raise ValueError(
                f"predictions, labels and weights must have the same number of values, {size}; "
                f"received {names[index]} of shape {list(column.shape)}. Pass one per sample; "
                "give a sample without a label the weight 0."
            )
    if len(devices := sorted({str(column.device) for column in columns})) > 1:
        raise ValueError(
            f"predictions, labels and weights must be on one device; received {devices}. "
            "Move them with .to(device)."
        )
    return num_samples


def check_predictions(
    predictions_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert predictions, labels and weights to one shape and precision.

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
    columns = [predictions_N, labels_N, *([] if weights_N is None else [weights_N])]
    check_columns(("predictions", "labels", "weights"), columns)
    rows = [column.detach().reshape(-1).double() for column in columns]
    return rows[0], rows[1], rows[2] if len(rows) == 3 else torch.ones_like(rows[0])
