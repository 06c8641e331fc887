"""What metrics see of a batch. Shapes: `T` tasks, `N` samples, `C` classes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

import torch

from recsys.kernels.arguments import instance, wrong_type
from recsys.metrics.entropy import cross_entropy
from recsys.metrics.metrics_config import RecTaskInfo
from recsys.metrics.ranking import Groups, Ranked, group_samples, one_group

TaskTensors = torch.Tensor | Mapping[str, torch.Tensor]
"""`[T, N]` in the order of the tasks, or by the tasks' names."""


@final
class MetricBatch:
    """Predictions, labels and weights of tasks in one batch, as one tensor.

    What several metrics are built from is computed once.

    Args:
        tasks: the tasks.
        rows_3TN: `[3, T, N]` predictions, labels and weights, float32 or float64. Predictions of
            classes are apart, and zero here.
        classes_TNC: `[T, N, C]` predictions of classes, if there are.
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
    def predictions(self) -> torch.Tensor:
        """`[T, N]` float64."""
        return self.rows[0].double()

    @cached_property
    def labels(self) -> torch.Tensor:
        """`[T, N]` float64."""
        return self.rows[1].double()

    @cached_property
    def weights(self) -> torch.Tensor:
        """`[T, N]` float64."""
        return self.rows[2].double()

    @cached_property
    def weights_or_nan(self) -> torch.Tensor:
        """`[T, N]` float64 weights; NaN where a prediction or label is, so that sums show it."""
        is_nan_TN = self.rows[0].isnan() | self.rows[1].isnan()
        if self.classes is not None:
            is_nan_TN |= self.classes.isnan().any(2)
        return self.weights.masked_fill(is_nan_TN, torch.nan)

    @cached_property
    def ones(self) -> torch.Tensor:
        """`[T, N]` ones, float64."""
        return torch.ones_like(self.labels)

    @cached_property
    def log_loss(self) -> torch.Tensor:
        """`[T, N]` binary cross entropy, in nats, of the dtype of the rows."""
        return cross_entropy(self.rows[0], self.rows[1])

    @cached_property
    def errors(self) -> torch.Tensor:
        """`[T, N]` predictions less labels, of the dtype of the rows."""
        return self.rows[0] - self.rows[1]

    def decisions(self, threshold: float) -> torch.Tensor:
        """Tell which predictions are at least a threshold.

        Args:
            threshold: the least.

        Returns:
            `[T, N]` 0 or 1, of the dtype of the rows; 0 for NaN.
        """
        if threshold not in self._decisions:
            probs_TN = self.rows[0]
            self._decisions[threshold] = torch.ge(
                probs_TN, threshold, out=torch.empty_like(probs_TN)
            )
        return self._decisions[threshold]

    def ranked(self, grouping: str | None) -> Sequence[Ranked]:
        """Rank the samples of each task by their predictions.

        Args:
            grouping: the model output whose equal values make a group; `None` for one of all.

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
            TypeError: it is no tensor.
            ValueError: there is none, or its size is not the batch's.
        """
        if name not in self._inputs:
            raise ValueError(
                f"a metric needs the model output '{name}'; received {sorted(self._inputs)}. "
                "Add it to what update() is given."
            )
        values = self._inputs[name]
        instance(f"the model output '{name}'", values, torch.Tensor, "a tensor")
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
    """Gives `[T, N]` values, float64 or of the dtype of the batch's rows; or sums, as `width`
    says. Values whose sums a formula subtracts from each other should be float64."""
    is_weighted: bool = True
    """Whether values are summed times the weights."""
    width: int = 0
    """If not 0, `of` gives `[T, width]` sums itself."""

    def sums(self, batch: MetricBatch) -> torch.Tensor:
        """Sum the values, if `width` is 0.

        Args:
            batch: the batch.

        Returns:
            `[T]`, of the dtype of the values.
        """
        values_TN = self.of(batch)
        if not self.is_weighted:
            return values_TN.sum(-1)
        weights_TN = batch.weights if values_TN.dtype == torch.float64 else batch.rows[2]
        summed: torch.Tensor = torch.linalg.vecdot(values_TN, weights_TN)
        return summed


def stack_plain(flat: Sequence[torch.Tensor], num_tasks: int) -> torch.Tensor | None:
    """Stack what most batches are, in few calls: each counts after a step emptied the caches.

    Args:
        flat: `[N]` predictions of all tasks, then labels, then weights.
        num_tasks: `T`.

    Returns:
        `[3, T, N]` float32; `None` if something is not a float32 tensor of one size and device.
    """
    try:
        if {tensor.dtype for tensor in flat} != {torch.float32}:
            return None
        rows = torch.stack(flat)  # type: ignore[arg-type]
    except (AttributeError, TypeError, RuntimeError):
        return None
    return rows.detach().view(3, num_tasks, -1) if rows.dim() == 2 else None


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
        predictions: `N` values a task, or `N` times `num_classes`.
        labels: `N` values a task.
        weights: `N` values a task; `None` for ones.
        inputs: other outputs of the model.
        num_classes: predictions per sample.

    Returns:
        The batch.

    Raises:
        TypeError: something is no tensor.
        ValueError: a task is missing, or sizes or devices differ.
    """
    places = range(len(tasks))
    found = [
        [_of_task(kind, given, place, tasks) for place in places]
        for kind, given in (("predictions", predictions), ("labels", labels))
    ]
    if weights is None:
        found.append([torch.ones_like(label) for label in found[1]])
    else:
        found.append([_of_task("weights", weights, place, tasks) for place in places])
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


def _of_task(
    kind: str, given: TaskTensors, place: int, tasks: Sequence[RecTaskInfo]
) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        if given.dim() == 0 or given.size(0) != len(tasks):
            raise ValueError(
                f"{kind} must have a row for each task, {len(tasks)}; received shape "
                f"{list(given.shape)}. Or pass a dictionary by task name."
            )
        return given[place]
    if not isinstance(given, Mapping):
        wrong_type(kind, "a tensor, or tensors by task name", given)
    name = tasks[place].name
    if name not in given:
        raise ValueError(
            f"{kind} must have every task; received {sorted(given)}, and not '{name}'."
        )
    return instance(f"{kind} of the task '{name}'", given[name], torch.Tensor, "a tensor")


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
    if tensor.dtype not in (torch.float32, torch.float64):
        # Whole numbers may be too big for float32; half precision is not enough to compute in.
        is_whole = not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
        tensor = tensor.double() if is_whole else tensor.float()
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)
