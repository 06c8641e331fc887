"""Selection of the tensors of metrics from the output of a model. Shapes: `N` samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recsys.base.arguments import instance
from recsys.metrics.metrics_config import RecTaskInfo

ByTask = dict[str, Tensor]


def is_empty_signals(labels: Tensor, predictions: Tensor, weights: Tensor) -> bool:
    """Return whether a batch has no labels, predictions and weights at all.

    Example:
        >>> is_empty_signals(torch.empty(0), torch.empty(0), torch.empty(0))
        True
    """
    return not (labels.numel() or predictions.numel() or weights.numel())


def session_ids_to_tensor(session_ids: Sequence[str], device: torch.device | None = None) -> Tensor:
    """Return the session number of each sample, from 1. A session is a run of equal ids.

    Args:
        session_ids: `N` ids; the samples of a session are consecutive.
        device: Device of the result.

    Returns:
        `[N]` int64.

    Example:
        >>> session_ids_to_tensor(["b", "b", "a"])
        tensor([1, 1, 2])
    """
    starts = [i > 0 and session != session_ids[i - 1] for i, session in enumerate(session_ids)]
    return torch.tensor(starts, device=device).long().cumsum(0) + 1


def parse_model_outputs(
    label_name: str, prediction_name: str, weight_name: str, model_out: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Select labels, predictions and weights, without dimensions of size 1.

    Args:
        label_name: Key of the labels.
        prediction_name: Key of the predictions; empty for none.
        weight_name: Key of the weights; empty for none.
        model_out: Output of the model.

    Returns:
        Labels, predictions and weights, at least one-dimensional.

    Raises:
        ValueError: An output is missing.
        AssertionError: Labels, predictions and weights differ in their number of samples.

    Example:
        >>> out = {"label": torch.ones(2, 1), "prediction": torch.zeros(2)}
        >>> parse_model_outputs("label", "prediction", "", out)
        (tensor([1., 1.]), tensor([0., 0.]), None)
    """
    selected: list[Tensor | None] = []
    for kind, name in (
        ("label", label_name), ("prediction", prediction_name), ("weight", weight_name)
    ):  # fmt: skip
        if name and name not in model_out:
            raise ValueError(
                f"model_out must have the {kind} {name!r}; received {list(model_out)}."
            )
        selected.append(torch.atleast_1d(model_out[name].squeeze()) if name else None)
    sizes = {len(tensor) for tensor in selected if tensor is not None}
    if len(sizes) > 1:
        raise AssertionError(
            f"labels, predictions and weights must have the same number of samples; received "
            f"{sizes}."
        )
    labels, predictions, weights = selected
    assert labels is not None
    return labels, predictions, weights


def parse_required_inputs(
    model_out: Mapping[str, Tensor | Sequence[str]],
    required_inputs_list: Sequence[str],
    ndcg_transform_input: bool = False,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Select the required inputs of metrics.

    Args:
        model_out: Output of the model.
        required_inputs_list: Keys of the inputs.
        ndcg_transform_input: Whether to convert lists of session ids to numbers.
        device: Device of these numbers.

    Returns:
        Inputs by key, without dimensions of size 1.

    Raises:
        KeyError: An input is missing.
        TypeError: An input is not a tensor.

    Example:
        >>> parse_required_inputs({"session_id": torch.tensor([[3], [4]])}, ["session_id"])
        {'session_id': tensor([3, 4])}
    """
    inputs = {}
    for name in required_inputs_list:
        values = model_out[name]
        if ndcg_transform_input and not isinstance(values, Tensor):
            values = session_ids_to_tensor(values, device)
        inputs[name] = instance(f"model_out[{name!r}]", values, Tensor, "a tensor").squeeze()
    return inputs


def parse_task_model_outputs(
    tasks: Sequence[RecTaskInfo],
    model_out: Mapping[str, Tensor],
    required_inputs_list: Sequence[str] | None = None,
) -> tuple[ByTask, ByTask, ByTask, dict[str, Tensor]]:
    """Select labels, predictions and weights of tasks, and the required inputs.

    Args:
        tasks: Tasks; tasks with empty outputs are left out.
        model_out: Output of the model.
        required_inputs_list: Keys of the required inputs.

    Returns:
        Labels, predictions and weights by task name, and required inputs by key.

    Raises:
        ValueError: An output of a task is missing.

    Example:
        >>> out = {name: torch.ones(1) for name in ("label", "prediction", "weight")}
        >>> parse_task_model_outputs([RecTaskInfo("click")], out)[0]
        {'click': tensor([1.])}
    """
    selected: tuple[ByTask, ByTask, ByTask] = {}, {}, {}
    for task in tasks:
        names = (task.label_name, task.prediction_name, task.weight_name)
        parsed = [t for t in parse_model_outputs(*names, model_out) if t is not None]
        if any(tensor.numel() for tensor in parsed):
            for by_task, tensor in zip(selected, parsed, strict=True):
                by_task[task.name] = tensor
    return *selected, parse_required_inputs(model_out, required_inputs_list or ())
