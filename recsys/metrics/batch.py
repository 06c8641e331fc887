"""What metrics see of a batch. Shapes: ``T`` tasks, ``N`` samples, ``C`` classes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

import torch

from recsys.metrics.entropy import cross_entropy
from recsys.metrics.metrics_config import RecTaskInfo
from recsys.metrics.ranking import Groups, Ranked, group_samples, one_group

TaskTensors = torch.Tensor | Mapping[str, torch.Tensor]
"""``[T, N]`` in the order of the tasks, or by the tasks' names."""


@final
class MetricBatch:
    """Predictions, labels and weights of tasks in one batch, as one tensor.

    What several metrics are built from is computed once.

    Args:
        tasks: the tasks.
        rows_3TN: ``[3, T, N]`` predictions, labels and weights, of any float dtype. Predictions of
            classes are apart, and zero here.
        classes_TNC: ``[T, N, C]`` predictions of classes, if there are.
        inputs: other outputs of the model, by name.
    """

    def __init__(
        self,
        tasks: Sequence[RecTaskInfo],
        rows_3TN: torch.Tensor,
        classes_TNC: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        self.tasks = tasks
        self.rows = rows_3TN
        self.classes = classes_TNC
        self._inputs = inputs
        self._decisions: dict[float, torch.Tensor] = {}
        self._groups: dict[str | None, Groups] = {}
        self._ranked: dict[str | None, Sequence[Ranked]] = {}

    def of_task(self, place: int) -> Self:
        """Give one task's part, which shares the groups; what is computed from it goes with it.

        Args:
            place: the task's.

        Returns:
            A batch of one task, without predictions of classes.
        """
        part = type(self)(
            self.tasks[place : place + 1], self.rows[:, place : place + 1], None, self._inputs
        )
        part._groups = self._groups
        return part

    @cached_property
    def _doubles(self) -> tuple[torch.Tensor, ...]:
        return self.rows.double().unbind()

    @property
    def predictions(self) -> torch.Tensor:
        """``[T, N]`` float64."""
        return self._doubles[0]

    @property
    def labels(self) -> torch.Tensor:
        """``[T, N]`` float64."""
        return self._doubles[1]

    @property
    def weights(self) -> torch.Tensor:
        """``[T, N]`` float64."""
        return self._doubles[2]

    @cached_property
    def ones(self) -> torch.Tensor:
        """``[T, N]`` ones, float64."""
        return torch.ones_like(self.labels)

    @cached_property
    def log_loss(self) -> torch.Tensor:
        """``[T, N]`` binary cross entropy, in nats."""
        return cross_entropy(self.predictions, self.labels)

    @cached_property
    def errors(self) -> torch.Tensor:
        """``[T, N]`` predictions less labels."""
        return self.predictions - self.labels

    def decisions(self, threshold: float) -> torch.Tensor:
        """Tell which predictions are at least a threshold.

        Args:
            threshold: the least.

        Returns:
            ``[T, N]`` 0 or 1, float64.
        """
        if threshold not in self._decisions:
            decided = torch.ge(self.predictions, threshold, out=torch.empty_like(self.predictions))
            self._decisions[threshold] = decided
        return self._decisions[threshold]

    def ranked(self, grouping: str | None) -> Sequence[Ranked]:
        """Rank the samples of each task by their predictions.

        Args:
            grouping: the model output whose equal values make a group; ``None`` for one of all.

        Returns:
            They, by task.
        """
        if grouping not in self._groups:
            self._groups[grouping] = (
                one_group(self.rows[0, 0])
                if grouping is None
                else group_samples(self.input(grouping))
            )
        if grouping not in self._ranked:
            # Predictions as they came: float32 sorts faster than float64.
            tasks = zip(self.rows[0], self.labels, self.weights, strict=True)
            self._ranked[grouping] = [Ranked(*task, self._groups[grouping]) for task in tasks]
        return self._ranked[grouping]

    def input(self, name: str, per_sample: bool = True) -> torch.Tensor:
        """Look up another output of the model.

        Args:
            name: its key.
            per_sample: whether it must have one value per sample.

        Returns:
            Its values, in one dimension.

        Raises:
            ValueError: there is none, or its size is not the batch's.
        """
        if name not in self._inputs:
            raise ValueError(
                f"a metric needs the model output '{name}'; received {sorted(self._inputs)}. "
                "Add it to what update() is given."
            )
        values = self._inputs[name]
        if per_sample and values.numel() != self.rows.size(2):
            raise ValueError(
                f"the model output '{name}' must have one value per sample, "
                f"{self.rows.size(2)}; received shape {list(values.shape)}."
            )
        return values.reshape(-1)


@final
@dataclass(frozen=True, slots=True)
class Quantity:
    """What is summed over samples. Sums are all that metrics of constant memory keep."""

    name: str
    """Equal names mean the same sum: metrics share it, and a state dict names it so."""
    of: Callable[[MetricBatch], torch.Tensor]
    """Gives ``[T, N]`` values, float64; or sums, as `width` says."""
    is_weighted: bool = True
    """Whether values are summed times the weights."""
    width: int = 0
    """If not 0, `of` gives ``[T, width]`` sums itself."""

    def sums(self, batch: MetricBatch) -> torch.Tensor:
        """Sum the values, if `width` is 0.

        Args:
            batch: the batch.

        Returns:
            ``[T]`` float64.
        """
        values_TN = self.of(batch)
        if not self.is_weighted:
            return values_TN.sum(-1)
        summed: torch.Tensor = torch.linalg.vecdot(values_TN, batch.weights)
        return summed


def build_batch(
    tasks: Sequence[RecTaskInfo],
    predictions: TaskTensors,
    labels: TaskTensors,
    weights: TaskTensors | None,
    inputs: Mapping[str, torch.Tensor],
    num_classes: int = 1,
) -> MetricBatch:
    """Put the tensors of tasks together.

    Args:
        tasks: whose.
        predictions: ``N`` values a task, or ``N`` times `num_classes`.
        labels: ``N`` values a task.
        weights: ``N`` values a task; ``None`` for ones.
        inputs: other outputs of the model.
        num_classes: predictions per sample.

    Returns:
        The batch.

    Raises:
        TypeError: something is no tensor.
        ValueError: a task is missing, or sizes or devices differ.
    """
    rows = None
    if num_classes == 1:
        rows = _stack_plain(tasks, predictions, labels, weights)
    if rows is None:
        return _build_any_batch(tasks, predictions, labels, weights, inputs, num_classes)
    return MetricBatch(tasks, rows, None, inputs)


def _stack_plain(
    tasks: Sequence[RecTaskInfo],
    predictions: TaskTensors,
    labels: TaskTensors,
    weights: TaskTensors | None,
) -> torch.Tensor | None:
    """Stack float32 rows of one size by task name, in few calls; ``None`` for anything else."""
    # Each line here counts: a step has driven it out of the caches.
    try:
        flat = [given[task.name] for given in (predictions, labels, weights) for task in tasks]  # type: ignore[index]
        kinds = {(tensor.dtype, tensor.device, tensor.shape) for tensor in flat}
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    if len(kinds) > 1 or flat[0].dtype != torch.float32 or flat[0].dim() != 1:
        return None
    return torch.cat(flat).detach().view(3, len(tasks), -1)


def _build_any_batch(
    tasks: Sequence[RecTaskInfo],
    predictions: TaskTensors,
    labels: TaskTensors,
    weights: TaskTensors | None,
    inputs: Mapping[str, torch.Tensor],
    num_classes: int,
) -> MetricBatch:
    """Check and convert what is not plain float32 rows of one size."""
    places = range(len(tasks))
    found = [
        [_of_task(kind, given, place, tasks[place]) for place in places]
        for kind, given in (("predictions", predictions), ("labels", labels))
    ]
    if weights is None:
        found.append([torch.ones_like(label) for label in found[1]])
    else:
        found.append([_of_task("weights", weights, place, tasks[place]) for place in places])
    num_samples = found[1][0].numel()
    classes = None
    if num_classes > 1:
        _check_sizes("predictions", found[0], tasks, num_samples * num_classes)
        classes = torch.stack([t.reshape(num_samples, num_classes) for t in found[0]])
        found[0] = [torch.zeros_like(label) for label in found[1]]
    for kind, tensors in zip(("predictions", "labels", "weights"), found, strict=True):
        _check_sizes(kind, tensors, tasks, num_samples)
    flat = [_as_row(tensor) for tensors in found for tensor in tensors]
    if len({tensor.device for tensor in flat}) > 1:
        devices = sorted({str(tensor.device) for tensor in flat})
        raise ValueError(
            f"predictions, labels and weights must be on one device; received {devices}. "
            "Move them with .to(device)."
        )
    rows = torch.cat(flat).detach().view(3, len(tasks), num_samples)
    return MetricBatch(tasks, rows, classes, inputs)


def _of_task(kind: str, given: TaskTensors, place: int, task: RecTaskInfo) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given[place]
    if task.name not in given:
        raise ValueError(
            f"{kind} must have every task; received {sorted(given)}, and not '{task.name}'."
        )
    tensor = given[task.name]
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{kind} of the task '{task.name}' must be a tensor; received {type(tensor).__name__}."
        )
    return tensor


def _check_sizes(
    kind: str, tensors: Sequence[torch.Tensor], tasks: Sequence[RecTaskInfo], size: int
) -> None:
    for tensor, task in zip(tensors, tasks, strict=True):
        if tensor.numel() != size:
            raise ValueError(
                f"all tasks of a metric must have equally many predictions, labels and weights, "
                f"here {size}; received {kind} of shape {list(tensor.shape)} for the task "
                f"'{task.name}'. Give a sample without a label the weight 0."
            )


def _as_row(tensor: torch.Tensor) -> torch.Tensor:
    # Whole numbers may be too big for the float32 of the others.
    if not tensor.dtype.is_floating_point and tensor.dtype != torch.bool:
        tensor = tensor.double()
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)
