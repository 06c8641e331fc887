"""Checks of the arguments of metrics: each raises an error that names the argument."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
import torch

from recsys.kernels.arguments import finite, shown, whole, wrong_type

_Value = TypeVar("_Value")


def flag(subject: str, value: object) -> bool:
    """Check that a value is a bool.

    Args:
        subject: name of the argument.
        value: the argument.

    Returns:
        The value.

    Raises:
        TypeError: it is something else, such as 0 or 1.

    Example:
        >>> flag("grouped_auc", True)
        True
    """
    if not isinstance(value, bool | np.bool_):
        wrong_type(subject, "True or False", value)
    return bool(value)


def text(subject: str, value: object) -> str:
    """Check that a value is a string.

    Args:
        subject: name of the argument.
        value: the argument.

    Returns:
        The value.

    Raises:
        TypeError: it is something else.

    Example:
        >>> text("session_key", "session_id")
        'session_id'
    """
    if not isinstance(value, str):
        wrong_type(subject, "text", value)
    return value


def instance(subject: str, value: _Value, kind: type[object]) -> _Value:
    """Check that a value is of a class.

    Args:
        subject: name of the argument.
        value: the argument.
        kind: the class.

    Returns:
        The value.

    Raises:
        TypeError: it is something else.

    Example:
        >>> instance("clock", 1.5, float)
        1.5
    """
    if not isinstance(value, kind):
        wrong_type(subject, f"a {kind.__name__}", value)
    return value


def instances(subject: str, value: Iterable[_Value], kind: type[object]) -> list[_Value]:
    """Check that all items of an iterable are of a class.

    Args:
        subject: name of the argument.
        value: the argument.
        kind: the class.

    Returns:
        The items.

    Raises:
        TypeError: it is no iterable, or an item is something else.

    Example:
        >>> instances("names", ("a", "b"), str)
        ['a', 'b']
    """
    if isinstance(value, str | bytes | Mapping | torch.Tensor) or not isinstance(value, Iterable):
        wrong_type(subject, f"a list of {kind.__name__}", value)
    return [instance(f"{subject}[{place}]", item, kind) for place, item in enumerate(value)]


def mapping(subject: str, value: _Value) -> _Value:
    """Check that a value is a dictionary or another mapping.

    Args:
        subject: name of the argument.
        value: the argument.

    Returns:
        The value.

    Raises:
        TypeError: it is something else.

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
        world_size: number of ranks.
        my_rank: rank of this process.
        batch_size: samples per rank and step.

    Raises:
        TypeError: one is not a whole number.
        ValueError: a size is not positive, or there is no such rank.

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
    """Check when results are computed.

    Args:
        compute_interval_steps: steps between two computations.
        min_compute_interval: seconds between two at least.
        max_compute_interval: seconds at most; may be infinite.

    Raises:
        TypeError: one is no number.
        ValueError: an interval is not positive, or the least exceeds the greatest.

    Example:
        >>> check_intervals(100, 0.0, float("inf"))
    """
    whole("compute_interval_steps", compute_interval_steps)
    finite("min_compute_interval", min_compute_interval, least=0.0)
    if not (isinstance(max_compute_interval, float) and max_compute_interval == float("inf")):
        finite("max_compute_interval", max_compute_interval, least=0.0)
    if min_compute_interval > max_compute_interval:
        raise ValueError(
            "min_compute_interval must be from 0 to max_compute_interval, in seconds; received "
            f"{min_compute_interval} and {max_compute_interval}."
        )


def check_group(subject: str, group: object) -> None:
    """Check that a value is a process group, or `None`.

    Args:
        subject: name of the argument.
        group: the argument.

    Raises:
        TypeError: it is something else.

    Example:
        >>> check_group("process_group", None)
    """
    if group is not None:
        instance(subject, group, torch.distributed.ProcessGroup)


def check_tensor(subject: str, value: object) -> None:
    """Check that a value is a tensor.

    Args:
        subject: name of the argument.
        value: the argument.

    Raises:
        TypeError: it is something else.

    Example:
        >>> check_tensor("labels", torch.ones(2))
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{subject} must be a tensor; received {type(value).__name__} {shown(value)}."
        )


def check_predictions(
    predictions_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring predictions, labels and weights to one shape and precision.

    Values are not looked at: on a GPU that would wait for the device in every step.

    Args:
        predictions_N: any shape with `N` values.
        labels_N: as many values, 0 or 1.
        weights_N: as many values; `None` for ones.

    Returns:
        The three, detached, `[N]` float64.

    Raises:
        TypeError: one is not a tensor.
        ValueError: they differ in size or device.
    """
    given = {"predictions": predictions_N, "labels": labels_N}
    if weights_N is not None:
        given["weights"] = weights_N
    for name, tensor in given.items():
        check_tensor(name, tensor)
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
    predictions = predictions_N.detach().reshape(-1).double()
    labels = labels_N.detach().reshape(-1).double()
    if weights_N is None:
        return predictions, labels, torch.ones_like(predictions)
    return predictions, labels, weights_N.detach().reshape(-1).double()
