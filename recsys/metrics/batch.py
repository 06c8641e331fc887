"""Batches of metrics, and sums over them. Shapes: `T` tasks, `N` samples, `C` classes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

import torch

from recsys.base.arguments import instance, wrong_type
from recsys.metrics.checks import check_columns
from recsys.metrics.entropy import cross_entropy
from recsys.metrics.metrics_config import RecTaskInfo
from recsys.metrics.ranking import Groups, Ranked, group_samples, one_group

TaskTensors = torch.Tensor | Mapping[str, torch.Tensor]
"""`[T, N]` in the order of the tasks, or `[N]` by task name."""
TaskBatch = tuple[TaskTensors, TaskTensors, TaskTensors | None]
"""Predictions, labels and weights; weights `None` for ones."""
Inputs = Mapping[str, torch.Tensor]
"""Other outputs of the model, by name."""
_KINDS = ("predictions", "labels", "weights")


@final
class MetricBatch:
    """Predictions, labels and weights of tasks in one batch, as one tensor.

    Values that several metrics use are computed once.

    Args:
        tasks: `T` tasks.
        rows_3TN: `[3, T, N]` predictions, labels and weights, float32 or float64. Predictions are
            zero if there are classes.
        classes_TNC: `[T, N, C]` predictions of classes; `None` without classes.
        inputs: Other outputs of the model, by name.
    """

    def __init__(
        self,
        tasks: Sequence[RecTaskInfo],
        rows_3TN: torch.Tensor,
        classes_TNC: torch.Tensor | None,
        inputs: Inputs,
    ) -> None:
        self.tasks = tasks
        self.rows = rows_3TN
        self.classes = classes_TNC
        self._inputs = inputs
        self._decisions: dict[float, torch.Tensor] = {}
        self._groups: dict[str | None, Groups] = {}
        self._ranked: dict[str | None, Sequence[Ranked]] = {}

    def of_task(self, index: int) -> Self:
        """Return the batch of one task, which shares the groups but no computed values.

        Args:
            index: Index of the task.

        Returns:
            Batch of one task, without predictions of classes.
        """
        of_task = slice(index, index + 1)
        part = type(self)(self.tasks[of_task], self.rows[:, of_task], None, self._inputs)
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
        """`[T, N]` float64 weights; NaN where a prediction or label is NaN."""
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
        """`[T, N]` predictions minus labels, of the dtype of the rows."""
        return self.rows[0] - self.rows[1]

    def decisions(self, threshold: float) -> torch.Tensor:
        """Compare the predictions with a threshold.

        Args:
            threshold: Smallest prediction that counts as positive.

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
            grouping: Model output with equal values for the samples of a group; `None` for a single
                group.

        Returns:
            Ranked samples of each task.
        """
        if grouping not in self._groups:
            self._groups[grouping] = (
                one_group(self.rows[0, 0])
                if grouping is None
                else group_samples(self.input(grouping))
            )
        if grouping not in self._ranked:
            # Predictions in their own dtype: float32 sorts faster than float64.
            tasks = zip(self.rows[0], self.labels, self.weights, strict=True)
            self._ranked[grouping] = [Ranked(*task, self._groups[grouping]) for task in tasks]
        return self._ranked[grouping]

    def input(self, name: str, per_sample: bool = True) -> torch.Tensor:
        """Return another output of the model.

        Args:
            name: Key of the output.
            per_sample: Whether the output must have one value per sample.

        Returns:
            Values in one dimension.

        Raises:
            TypeError: The output is not a tensor.
            ValueError: The output is missing, or its size differs from the batch.
        """
        if name not in self._inputs:
            raise ValueError(
                f"a metric needs the model output '{name}'; received {sorted(self._inputs)}. "
                "Pass it to update()."
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
    """Sum over samples that a metric accumulates."""

    name: str
    """Name in state dicts. Metrics share sums with equal names."""
    of: Callable[[MetricBatch], torch.Tensor]
    """Function that returns `[T, N]` values, float64 or of the dtype of the batch's rows; or
    `[T, width]` sums. Values should be float64 if a formula subtracts their sums."""
    is_weighted: bool = True
    """True if values are multiplied by the weights."""
    width: int = 0
    """Number of sums that `of` returns; 0 if it returns values."""

    def sums(self, batch: MetricBatch) -> torch.Tensor:
        """Sum the values; for a `width` of 0.

        Args:
            batch: Batch.

        Returns:
            `[T]` sums, of the dtype of the values.
        """
        values_TN = self.of(batch)
        if not self.is_weighted:
            return values_TN.sum(-1)
        weights_TN = batch.weights if values_TN.dtype == torch.float64 else batch.rows[2]
        summed: torch.Tensor = torch.linalg.vecdot(values_TN, weights_TN)
        return summed


def pick_columns(
    tasks: Sequence[RecTaskInfo], given: TaskBatch, of: Sequence[RecTaskInfo]
) -> list[torch.Tensor]:
    """Collect the tensors of tasks.

    Args:
        tasks: `T` tasks.
        given: Predictions, labels and weights of these.
        of: The tasks to collect, in the order of `tasks`.

    Returns:
        Predictions of the collected tasks, then labels, then weights, if there are weights.

    Raises:
        TypeError: An element of `given` is neither a tensor nor a mapping.
        ValueError: A task is missing.
    """
    return [
        _pick(kind, tensors, index, tasks)
        for kind, tensors in zip(_KINDS, given[:2] if given[2] is None else given, strict=False)
        for index, task in enumerate(tasks)
        if task in of
    ]


def select_labeled(
    mask_name: str, num_tasks: int, columns: Sequence[torch.Tensor], inputs: Inputs
) -> tuple[Sequence[torch.Tensor], Inputs]:
    """Select the samples that have a label.

    Args:
        mask_name: Key of the mask in the inputs: bool `[N]`, False for samples to leave out, or
            `None` for all samples.
        num_tasks: Number of tasks.
        columns: Predictions of all tasks, then labels, then weights.
        inputs: Other outputs of the model. Those with a value per sample are selected; the sizes
            `num_candidates` of consecutive sessions count the selected samples.

    Returns:
        Columns and inputs.

    Raises:
        TypeError: The mask is not a bool tensor.
        ValueError: The mask is missing, or its size differs from the labels.
    """
    if mask_name not in inputs:
        raise ValueError(
            f"model_out must have the label mask '{mask_name}'; received {sorted(inputs)}. Pass "
            "None for a batch with all labels."
        )
    mask: object = inputs[mask_name]
    if mask is None:
        return columns, inputs
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        wrong_type(f"the label mask '{mask_name}'", "a bool tensor", mask)
    size = mask.numel()
    if columns[num_tasks].numel() != size:
        raise ValueError(
            f"the label mask '{mask_name}' must have one value per label, "
            f"{columns[num_tasks].numel()}; received shape {list(mask.shape)}."
        )
    if size == 0:
        return columns, inputs
    kept = mask.reshape(-1).nonzero().squeeze(1)
    tensors = {}
    for name, values in inputs.items():
        if name == "num_candidates" and int(values.sum()) == size:
            ends = values.long().cumsum(0)
            counts = torch.searchsorted(kept, torch.stack([ends - values, ends]))
            values = counts[1] - counts[0]
        elif isinstance(values, torch.Tensor) and values.numel() == size:
            values = values.reshape(-1)[kept]
        tensors[name] = values
    # columns of other sizes are reported with the batch
    selected = [c if c.numel() % size else c.reshape(size, -1)[kept].squeeze(1) for c in columns]
    return selected, tensors


def build_batch(
    tasks: Sequence[RecTaskInfo],
    columns: Sequence[torch.Tensor],
    inputs: Inputs,
    num_classes: int = 1,
) -> MetricBatch:
    """Stack the tensors of tasks.

    Args:
        tasks: `T` tasks.
        columns: Predictions of all tasks, then labels, then weights: `N` values each, or `N` times
            `num_classes` predictions. Without weights, all are one.
        inputs: Other outputs of the model.
        num_classes: Predictions per sample.

    Returns:
        Batch.

    Raises:
        TypeError: A column is not a tensor.
        ValueError: Sizes or devices differ.
    """
    num_tasks = len(tasks)
    if num_classes == 1 and len(columns) == 3 * num_tasks:
        rows = _stack_plain(columns)
        if rows is not None:
            return MetricBatch(tasks, rows.view(3, num_tasks, -1), None, inputs)
    names = [f"{kind} of the task '{task.name}'" for kind in _KINDS for task in tasks]
    num_samples = check_columns(names, columns, num_tasks, num_classes)
    if len(columns) == 2 * num_tasks:
        columns = [*columns, *map(torch.ones_like, columns[num_tasks:])]
    predictions, rest, classes = columns[:num_tasks], columns[num_tasks:], None
    if num_classes > 1:
        classes = torch.stack([t.reshape(num_samples, num_classes) for t in predictions])
        predictions = [torch.zeros_like(label) for label in rest[:num_tasks]]
    rows = (
        torch.cat([_as_row(column) for column in (*predictions, *rest)])
        .detach()
        .view(3, num_tasks, num_samples)
    )
    return MetricBatch(tasks, rows, classes, inputs)


def _stack_plain(columns: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Stack float32 columns of one size and device, `[N]` each, in few calls; otherwise `None`.

    Each call counts: a training step evicts the code of metrics from the caches.
    """
    try:
        if {column.dtype for column in columns} != {torch.float32}:
            return None
        rows = torch.stack(columns)  # type: ignore[arg-type]
    except (AttributeError, TypeError, RuntimeError):
        return None
    return rows.detach() if rows.dim() == 2 else None


def _pick(
    kind: str, given: TaskTensors | None, index: int, tasks: Sequence[RecTaskInfo]
) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        if given.dim() == 0 or given.size(0) != len(tasks):
            raise ValueError(
                f"{kind} must have a row for each task, {len(tasks)}; received shape "
                f"{list(given.shape)}. Or pass a dictionary by task name."
            )
        return given[index]
    if not isinstance(given, Mapping):
        wrong_type(kind, "a tensor, or tensors by task name", given)
    name = tasks[index].name
    if name not in given:
        raise ValueError(
            f"{kind} must have every task; received {sorted(given)}, and not '{name}'."
        )
    return given[name]


def _as_row(column: torch.Tensor) -> torch.Tensor:
    if column.dtype not in (torch.float32, torch.float64):
        # Whole numbers may exceed float32; half precision is too coarse.
        is_whole = not column.dtype.is_floating_point and column.dtype != torch.bool
        column = column.double() if is_whole else column.float()
    return column if column.dim() == 1 else column.reshape(-1)
