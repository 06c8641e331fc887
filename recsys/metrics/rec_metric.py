"""Metrics of tasks over many batches and ranks, each over a window and over the lifetime."""

import abc
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from recsys.base.arguments import finite, flag, instance, whole
from recsys.base.checked import checked
from recsys.metrics.accumulators import Accumulators
from recsys.metrics.batch import MetricBatch, Quantity, TaskTensors
from recsys.metrics.checks import check_ranks, mapping
from recsys.metrics.errors import raises_metric_errors
from recsys.metrics.metrics_config import (
    RecComputeMode,
    RecMetricEnum,
    RecMetricEnumBase,
    RecTaskInfo,
)
from recsys.metrics.metrics_namespace import MetricName, MetricNameBase, MetricPrefix
from recsys.metrics.saved_sums import read_saved_sums

METRICS: dict[RecMetricEnumBase, "type[RecMetric]"] = {}
"""Classes by metric; a class statement with the argument `metric` adds its class."""
_CHECKS: dict[type, Callable[[str, object], object]] = {
    bool: flag,
    float: finite,
    str: lambda name, value: instance(name, value, str, "text"),
}


@final
@dataclass(frozen=True, slots=True)
class Value:
    """Result of a metric for all its tasks."""

    name: MetricNameBase
    """Name of the result."""
    values_T: torch.Tensor
    """`[T]`, or `[T, ...]` if a result is several numbers."""
    description: str = ""
    """Suffix of the name."""
    prefix: MetricPrefix | None = None
    """Prefix instead of the span; such a result is reported over the lifetime alone."""


def total_examples(count_T: torch.Tensor) -> Value:
    """Report a number of samples, over the lifetime alone.

    Args:
        count_T: `[T]` numbers.

    Returns:
        Result, int64.
    """
    return Value(MetricName.TOTAL_EXAMPLES, count_T.long(), prefix=MetricPrefix.DEFAULT)


class _Measured(torch.nn.Module):
    """Metric, or list of metrics that share accumulators."""

    _accumulators: Accumulators

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(read_saved_sums)  # type: ignore[no-untyped-call]

    def _members(self) -> "Sequence[RecMetric]":
        raise NotImplementedError

    @raises_metric_errors
    def update(
        self,
        *,
        predictions: TaskTensors,
        labels: TaskTensors,
        weights: TaskTensors | None,
        required_inputs: Mapping[str, torch.Tensor] | None = None,
        **kwargs: torch.Tensor,
    ) -> None:
        """Add a batch of `N` samples.

        Args:
            predictions: `[N]` by task name, or `[T, N]`.
            labels: `[N]` by task name, or `[T, N]`.
            weights: `[N]` by task name, or `[T, N]`; `None` for ones.
            required_inputs: `[N]` required inputs, by key.
            **kwargs: Further required inputs.

        Raises:
            TypeError: A value is not a tensor.
            ValueError: A tensor is missing, or sizes or devices differ.
            RuntimeError: The call is between `sync` and `unsync`.
        """
        if required_inputs is not None:
            kwargs = {**mapping("required_inputs", required_inputs), **kwargs}
        self._accumulators.update((predictions, labels, weights), kwargs)

    def compute(self) -> dict[str, torch.Tensor]:
        """Compute the results over all ranks; every rank must call it.

        Returns:
            Results by key, in the shapes that `RecMetric` describes; empty on ranks without
            results.
        """
        members, accumulators = self._members(), self._accumulators
        accumulators.sync(any(metric.compute_on_all_ranks for metric in members))
        try:
            return accumulators.compute(
                [metric for metric in members if metric.my_rank == 0 or metric.compute_on_all_ranks]
            )
        finally:
            accumulators.unsync()

    def local_compute(self) -> dict[str, torch.Tensor]:
        """Compute the results over the samples of this rank.

        Returns:
            Results by key, as of `compute`; the names begin with `local_`.
        """
        return self._accumulators.compute(self._members(), "local_")

    def sync(self) -> None:
        """Use the sums and rows of all ranks until `unsync`; every rank must call it."""
        self._accumulators.sync()

    def unsync(self) -> None:
        """Restore the sums and rows of this rank."""
        self._accumulators.unsync()

    def reset(self) -> None:
        """Clear all sums and rows."""
        self._accumulators.reset()

    def get_memory_usage(self) -> dict[torch.Tensor, int]:
        """Return the size of each tensor in memory; metrics of a list share tensors.

        Returns:
            Bytes by tensor.
        """
        return {kept: kept.numel() * kept.element_size() for kept in self._accumulators.kept()}


class RecMetric(_Measured, abc.ABC):
    """Metric of one or more tasks.

    It accumulates sums (`quantities`, `values`), in constant memory, or keeps the last rows
    (`ranks_rows`, `window_values`). Sums are exact over any number of batches and ranks.

    A result is a tensor `[1]` per task, or a scalar if tasks are fused. Its dtype is float64;
    float32 for AUC, AUPRC, RAUC and segmented NE; int64 for numbers of samples. These are the
    shapes and dtypes of TorchRec. Sums are always float64.

    A class statement may have the argument `metric`: the class then implements this metric, and
    `namespace` defaults to its name.

    Args:
        world_size: Number of ranks; each holds its share of the window.
        my_rank: Rank of this process.
        batch_size: Samples per rank and step.
        tasks: Tasks to measure.
        compute_mode: Shape of results.
        window_size: Number of samples of all ranks that the `window_` results cover.
        fused_update_limit: Ignored.
        compute_on_all_ranks: Whether all ranks get results; otherwise rank 0 alone.
        should_validate_update: Whether to skip batches whose weights are all zero.
        process_group: Process group; `None` for all ranks.
        **kwargs: Own arguments of the metric, described by its class.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: `tasks` is empty or two tasks have the same name, a size is not positive,
            `my_rank` is not below `world_size`, the window is smaller than a batch, or an argument
            is unknown.

    Example:
        >>> from recsys.metrics.sum_metrics import CalibrationMetric
        >>> metric = CalibrationMetric(
        ...     world_size=1, my_rank=0, batch_size=2, tasks=[RecTaskInfo("click")], window_size=4
        ... )
        >>> metric.update(
        ...     predictions={"click": torch.tensor([0.5, 0.25])},
        ...     labels={"click": torch.tensor([1.0, 0.0])},
        ...     weights=None,
        ... )
        >>> metric.compute()["calibration-click|window_calibration"]
        tensor([0.7500], dtype=torch.float64)
    """

    namespace: ClassVar[MetricNameBase]
    """First part of the keys of results."""
    _namespace: ClassVar[MetricNameBase]
    """Namespace under the name that TorchRec uses."""
    name: ClassVar[MetricNameBase]
    """Name of the main result; defaults to the base class's name, or to the namespace."""
    gives_scalars: ClassVar[bool] = False
    """True if results are scalars even if tasks are not fused."""
    arguments: ClassVar[Mapping[str, Any]] = {}
    """Own arguments and their defaults, besides the arguments of base classes. If the default is a
    bool, a float or text, the type of the argument is checked."""
    ranks_rows: ClassVar[bool] = False
    """True if the metric needs the last rows."""

    def __init_subclass__(cls, metric: RecMetricEnum | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if metric is not None:
            METRICS[metric] = cls
            cls.namespace = vars(cls).get("namespace", MetricName[metric.name])
        if hasattr(cls, "namespace"):
            cls._namespace = cls.namespace
            cls.name = getattr(cls, "name", cls.namespace)
        cls.arguments = dict(ChainMap(*(vars(base).get("arguments", {}) for base in cls.__mro__)))

    @raises_metric_errors
    @checked
    def __init__(
        self,
        world_size: int,
        my_rank: int,
        batch_size: int,
        tasks: Sequence[RecTaskInfo],
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        window_size: int = 100,
        fused_update_limit: int = 0,
        compute_on_all_ranks: bool = False,
        should_validate_update: bool = False,
        process_group: "torch.distributed.ProcessGroup | None" = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_ranks(world_size, my_rank, batch_size)
        whole("window_size", window_size)
        whole("fused_update_limit", fused_update_limit, least=0)
        self.compute_mode = compute_mode
        self.tasks = tuple(tasks)
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"{type(self).__name__} must have tasks of different names; received {names}."
            )
        self.local_window = window_size // world_size
        if self.local_window < batch_size:
            raise ValueError(
                f"window_size must be at least world_size times batch_size, "
                f"{world_size * batch_size}; received {window_size}."
            )
        if unknown := sorted(set(kwargs) - set(self.arguments)):
            raise ValueError(
                f"{type(self).__name__} takes the arguments {sorted(self.arguments)}; "
                f"received {unknown}."
            )
        self.world_size = world_size
        self.my_rank = my_rank
        self.compute_on_all_ranks = compute_on_all_ranks
        self.should_validate_update = should_validate_update
        self.process_group = process_group
        self.options = {**self.arguments, **kwargs}
        for name, value in kwargs.items():
            if type(self.arguments[name]) in _CHECKS:
                _CHECKS[type(self.arguments[name])](name, value)
        self._prepare()
        self._accumulators = Accumulators([self])

    def _prepare(self) -> None:
        """Check the options beyond their types."""

    def shaped(self, values_T: torch.Tensor) -> torch.Tensor:
        """Reshape results as `compute` returns them.

        Args:
            values_T: `[T]` or `[T, ...]`.

        Returns:
            `[T, 1]` or `[T, 1, ...]`; the same shape if tasks are fused.
        """
        is_fused = self.compute_mode is not RecComputeMode.UNFUSED_TASKS_COMPUTATION
        return values_T if is_fused or self.gives_scalars else values_T.unsqueeze(1)

    @property
    def num_classes(self) -> int:
        """Number of predictions per sample."""
        return 1

    def quantities(self) -> Sequence[Quantity]:
        """List the sums that the metric accumulates.

        Returns:
            The sums; empty for a metric of rows.
        """
        return ()

    def values(self, sums: Mapping[str, torch.Tensor]) -> Iterator[Value]:
        """Compute results from sums.

        Args:
            sums: `[T]` or `[T, width]` of each quantity, by name.

        Returns:
            Results.
        """
        return iter(())

    def window_values(self, rows: MetricBatch) -> Iterator[Value]:
        """Compute results from the rows of the window.

        Args:
            rows: Rows of all tasks.

        Returns:
            Results.
        """
        return iter(())

    def get_required_inputs(self) -> set[str]:
        """List the model outputs that the metric needs besides labels, predictions and weights.

        Returns:
            Keys.
        """
        return set()

    def _members(self) -> "Sequence[RecMetric]":
        return [self]


@final
class RecMetricList(_Measured):
    """Metrics that are updated and computed together.

    They share sums, and one all-reduce exchanges the sums of all. The list resets the metrics;
    afterwards each computes its results from the batches of the list.

    Args:
        rec_metrics: Metrics.

    Raises:
        TypeError: An element is not a `RecMetric`.
    """

    @checked
    def __init__(self, rec_metrics: Sequence[RecMetric]) -> None:
        super().__init__()
        self.rec_metrics = list(rec_metrics)
        self._accumulators = Accumulators(self.rec_metrics)
        for metric in self.rec_metrics:
            metric._accumulators = self._accumulators

    def __len__(self) -> int:
        return len(self.rec_metrics)

    def __getitem__(self, idx: int) -> RecMetric:
        return self.rec_metrics[idx]

    def get_required_inputs(self) -> list[str] | None:
        """List the model outputs that the metrics need besides labels, predictions and weights.

        Returns:
            Sorted keys, also of label masks; `None` for none.
        """
        names = {name for metric in self.rec_metrics for name in metric.get_required_inputs()}
        tasks = (task for metric in self.rec_metrics for task in metric.tasks)
        names |= {task.mask_name for task in tasks if task.mask_name is not None}
        return sorted(names) or None

    def _members(self) -> Sequence[RecMetric]:
        return self.rec_metrics
