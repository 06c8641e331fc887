"""Metrics of tasks over many batches and ranks, each over a window and over the lifetime."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from recsys.kernels.arguments import choice, whole
from recsys.metrics.accumulators import Accumulators
from recsys.metrics.batch import MetricBatch, Quantity, TaskTensors
from recsys.metrics.checks import check_group, check_ranks, flag, instances, mapping
from recsys.metrics.errors import raises_metric_errors
from recsys.metrics.metrics_config import RecComputeMode, RecTaskInfo
from recsys.metrics.metrics_namespace import MetricNameBase, MetricNamespaceBase, MetricPrefix
from recsys.metrics.saved_sums import read_saved_sums


@final
@dataclass(frozen=True, slots=True)
class Value:
    """One result of a metric, for all its tasks."""

    name: MetricNameBase
    """What it says."""
    values_T: torch.Tensor
    """`[T]`, or `[T, ...]` if a result is several numbers."""
    description: str = ""
    """Is appended to the name."""
    prefix: MetricPrefix | None = None
    """In place of the span; it is then given over the lifetime only."""


class _Measured(torch.nn.Module):
    """What is updated and computed: one metric, or several that share their sums."""

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
            labels: like them.
            weights: like them; `None` for ones.
            required_inputs: `[N]` the required inputs, by key.
            **kwargs: more required inputs.

        Raises:
            TypeError: something is no tensor.
            ValueError: something is missing, or sizes or devices differ.
            RuntimeError: it is called between `sync` and `unsync`.
        """
        if required_inputs is not None:
            kwargs = {**mapping("required_inputs", required_inputs), **kwargs}
        self._accumulators.update(predictions, labels, weights, kwargs)

    def update_from(
        self, model_out: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> None:
        """Add a batch of `N` samples, as `update` does.

        Args:
            model_out: `[N]` predictions, labels and weights under the names that the tasks give
                them.
            inputs: `[N]` the required inputs, by key.

        Raises:
            KeyError: a prediction, label or weight is missing.
        """
        self._modules["_accumulators"].update_from(model_out, inputs)  # type: ignore[union-attr,operator]

    def compute(self) -> dict[str, torch.Tensor]:
        """Compute the results over all ranks; every rank must call it.

        Returns:
            Results by key, as `RecMetric` describes them; nothing on ranks that get none.
        """
        return compute_synced(self._accumulators, self._members())

    def local_compute(self) -> dict[str, torch.Tensor]:
        """Compute the results over this rank's samples.

        Returns:
            Results by key, as `compute` does; the names begin with `local_`.
        """
        return self._accumulators.compute(self._members(), "local_")

    def sync(self) -> None:
        """Take in what all ranks have seen, until `unsync`; every rank must call it."""
        self._accumulators.sync()

    def unsync(self) -> None:
        """Go back to what this rank has seen."""
        self._accumulators.unsync()

    def reset(self) -> None:
        """Forget everything."""
        self._accumulators.reset()

    def get_memory_usage(self) -> dict[torch.Tensor, int]:
        """Return the size of each tensor that is kept; metrics of a list share tensors.

        Returns:
            Bytes by tensor.
        """
        return {kept: kept.numel() * kept.element_size() for kept in self._accumulators.kept()}


class RecMetric(_Measured, abc.ABC):
    """A metric of some tasks.

    It keeps sums (`quantities`, `values`), of which it needs constant memory and which are exact
    over any number of batches and ranks, or the last rows (`ranks_rows`, `window_values`).

    A result is a tensor `[1]` per task, or a scalar if tasks are fused. Its dtype is float64, for
    AUC, AUPRC, RAUC and segmented NE float32, for numbers of samples int64. These are the shapes
    and dtypes of TorchRec; sums are float64 in any case.

    Args:
        world_size: number of ranks, among which the window is divided.
        my_rank: this one.
        batch_size: samples per rank and step.
        tasks: what is measured.
        compute_mode: whether tasks are fused, on which the shape of results depends.
        window_size: samples of all ranks together that the `window_` results are over.
        fused_update_limit: has no effect.
        compute_on_all_ranks: whether all ranks get results, not rank 0 alone.
        should_validate_update: whether a batch whose weights are all zero is left out.
        process_group: the ranks; `None` for all.
        **kwargs: the metric's own arguments, which its class names.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: there is no task, two have one name, a size is not positive, `my_rank` is not
            below `world_size`, the window is smaller than a batch, or an argument is unknown.

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

    namespace: ClassVar[MetricNamespaceBase]
    """What comes first in the names of its results."""
    _namespace: ClassVar[MetricNamespaceBase]
    """The same, under TorchRec's name."""
    gives_scalars: ClassVar[bool] = False
    """Whether results are scalars even if tasks are not fused."""
    arguments: ClassVar[Mapping[str, Any]] = {}
    """Its own arguments and their defaults."""
    ranks_rows: ClassVar[bool] = False
    """Whether it needs the last rows themselves."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "namespace" in vars(cls):
            cls._namespace = cls.namespace

    @raises_metric_errors
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
        self.compute_mode = choice("compute_mode", compute_mode, RecComputeMode)
        check_group("process_group", process_group)
        self.tasks = tuple(instances("tasks", tasks, RecTaskInfo))
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
        self.compute_on_all_ranks = flag("compute_on_all_ranks", compute_on_all_ranks)
        self.should_validate_update = flag("should_validate_update", should_validate_update)
        self.process_group = process_group
        self.options = {**self.arguments, **kwargs}
        self._prepare()
        self._accumulators = Accumulators([self])

    def _prepare(self) -> None:
        """Check the options."""

    def shaped(self, values_T: torch.Tensor) -> torch.Tensor:
        """Bring results into the shape that `compute` returns.

        Args:
            values_T: `[T]` or `[T, ...]`.

        Returns:
            `[T, 1]` or `[T, 1, ...]`, or alike if tasks are fused.
        """
        is_fused = self.compute_mode is not RecComputeMode.UNFUSED_TASKS_COMPUTATION
        return values_T if is_fused or self.gives_scalars else values_T.unsqueeze(1)

    @property
    def num_classes(self) -> int:
        """Prediction per sample."""
        return 1

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums that the metric is made of.

        Returns:
            They, or nothing for a metric of rows.
        """
        return ()

    def values(self, sums: Mapping[str, torch.Tensor]) -> Iterator[Value]:
        """Compute results from sums.

        Args:
            sums: `[T]` or `[T, width]` of each quantity, by name.

        Returns:
            The results.
        """
        return iter(())

    def window_values(self, rows: MetricBatch) -> Iterator[Value]:
        """Compute results from the window's rows.

        Args:
            rows: the rows of all tasks.

        Returns:
            The results.
        """
        return iter(())

    def get_required_inputs(self) -> set[str]:
        """Name the model outputs that the metric needs besides the tasks' own.

        Returns:
            Their keys.
        """
        return set()

    def _members(self) -> "Sequence[RecMetric]":
        return [self]


def compute_synced(
    accumulators: Accumulators, metrics: Sequence[RecMetric]
) -> dict[str, torch.Tensor]:
    """Compute results over all ranks; every rank must call it.

    Args:
        accumulators: of the metrics.
        metrics: all of them.

    Returns:
        The results on ranks that get them; nothing on others.
    """
    to_all = any(metric.compute_on_all_ranks for metric in metrics)
    accumulators.sync(to_all)
    wanted = [m for m in metrics if m.my_rank == 0 or m.compute_on_all_ranks]
    try:
        return accumulators.compute(wanted)
    finally:
        accumulators.unsync()


@final
class RecMetricList(_Measured):
    """Metrics that are updated and computed together.

    They share their sums, and their ranks' sums travel together. What the metrics have seen before
    is forgotten; a metric of the list then computes its own results of what the list has seen.

    Args:
        rec_metrics: the metrics.

    Raises:
        TypeError: something else is among them.
    """

    def __init__(self, rec_metrics: Sequence[RecMetric]) -> None:
        super().__init__()
        self.rec_metrics = instances("rec_metrics", rec_metrics, RecMetric)
        self._accumulators = Accumulators(self.rec_metrics)
        for metric in self.rec_metrics:
            metric._accumulators = self._accumulators

    def __len__(self) -> int:
        return len(self.rec_metrics)

    def __getitem__(self, idx: int) -> RecMetric:
        return self.rec_metrics[idx]

    def get_required_inputs(self) -> list[str] | None:
        """Name the model outputs that metrics need besides the tasks' own.

        Returns:
            Their keys, sorted; `None` for none.
        """
        names = {name for metric in self.rec_metrics for name in metric.get_required_inputs()}
        return sorted(names) or None

    def _members(self) -> Sequence[RecMetric]:
        return self.rec_metrics
