"""All metrics of a model, built from a configuration."""

import abc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recsys.base.arguments import whole, wrong_type
from recsys.base.checked import checked_but
from recsys.base.contact import explained
from recsys.metrics import rank_metrics, session_metrics  # noqa: F401  # add their classes to METRICS
from recsys.metrics.checks import check_intervals, check_ranks, mapping
from recsys.metrics.errors import raises_metric_errors
from recsys.metrics.metrics_config import (
    BatchSizeStage,
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecMetricEnumBase,
    RecTaskInfo,
    StateMetricEnum,
    validate_batch_size_stages,
)
from recsys.metrics.metrics_namespace import (
    MetricNamespace,
    compose_customized_metric_key,
    compose_metric_namespace,
)
from recsys.metrics.rec_metric import METRICS, RecMetric, RecMetricList
from recsys.metrics.throughput import ThroughputMetric

REC_METRICS_MAPPING: dict[RecMetricEnumBase, type[RecMetric]] = {
    metric: METRICS[metric] for metric in RecMetricEnum
}
"""Class of each metric; add your own to use it in a configuration."""


class StateMetric(abc.ABC):
    """Source of further numbers to report, such as a learning rate."""

    @abc.abstractmethod
    def get_metrics(self) -> dict[str, torch.Tensor | float]:
        """Return the numbers, by name."""


class RecMetricModule(torch.nn.Module):
    """All metrics of a model.

    Call `update` in each step, and `compute` when `should_compute` returns true, on every rank.

    Args:
        batch_size: Samples per rank and step.
        world_size: Number of ranks.
        rec_tasks: Tasks.
        rec_metrics: Metrics.
        throughput_metric: Throughput.
        state_metrics: Sources of further numbers, by namespace.
        compute_interval_steps: Steps between two computations.
        min_compute_interval: Minimum seconds between two computations.
        max_compute_interval: Maximum seconds between two computations. If either limit is given,
            each `compute` adjusts the interval in steps, to the same value on all ranks.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A size or an interval is not positive, or the minimum interval exceeds the
            maximum.

    Example:
        >>> from recsys.metrics.metrics_config import DefaultMetricsConfig
        >>> metrics = generate_metric_module(
        ...     RecMetricModule, DefaultMetricsConfig, batch_size=2, world_size=1, my_rank=0,
        ...     state_metrics_mapping={}, device=torch.device("cpu"),
        ... )
        >>> metrics.update({
        ...     "prediction": torch.tensor([0.5, 0.5]),
        ...     "label": torch.tensor([0.0, 1.0]),
        ...     "weight": torch.tensor([1.0, 1.0]),
        ... })
        >>> round(metrics.compute()["ne-DefaultTask|window_ne"].item(), 6)
        1.0
    """

    @checked_but("state_metrics")
    def __init__(
        self,
        batch_size: int,
        world_size: int,
        rec_tasks: Sequence[RecTaskInfo] | None = None,
        rec_metrics: RecMetricList | None = None,
        throughput_metric: ThroughputMetric | None = None,
        state_metrics: Mapping[str, StateMetric] | None = None,
        compute_interval_steps: int = 100,
        min_compute_interval: float = 0.0,
        max_compute_interval: float = float("inf"),
    ) -> None:
        super().__init__()
        check_intervals(compute_interval_steps, min_compute_interval, max_compute_interval)
        self.batch_size = whole("batch_size", batch_size)
        self.world_size = whole("world_size", world_size)
        self.rec_tasks = list(rec_tasks or ())
        self.rec_metrics = rec_metrics if rec_metrics is not None else RecMetricList([])
        self._inputs = self.get_required_inputs() or []
        self.throughput_metric = throughput_metric
        self.state_metrics = dict(
            mapping("state_metrics", {} if state_metrics is None else state_metrics)
        )
        for namespace, metric in self.state_metrics.items():
            if not callable(getattr(metric, "get_metrics", None)):
                wrong_type(f"state_metrics[{namespace!r}]", "a StateMetric", metric)
        self.trained_batches = 0
        self.compute_count = 0
        self.compute_interval_steps = compute_interval_steps
        self.min_compute_interval = min_compute_interval
        self.max_compute_interval = max_compute_interval
        self.last_compute_time = -1.0
        self._steps_at_compute = 0

    def get_required_inputs(self) -> list[str] | None:
        """List the model outputs that the metrics need besides labels, predictions and weights.

        Returns:
            Sorted keys; `None` for none.
        """
        return self.rec_metrics.get_required_inputs()

    @raises_metric_errors
    def update(
        self,
        model_out: Mapping[str, torch.Tensor],
        required_inputs: Mapping[str, torch.Tensor] | None = None,
        **kwargs: torch.Tensor,
    ) -> None:
        """Add a batch.

        Args:
            model_out: `[N]` predictions, labels and weights by the keys of the tasks, and the
                required inputs. Other entries are ignored.
            required_inputs: Further required inputs.
            **kwargs: Further required inputs.

        Raises:
            TypeError: A value is not a tensor.
            ValueError: A tensor is missing, or sizes or devices differ.
        """
        # Runs in every step with cold caches: no attribute look-ups of nn.Module.
        attributes = self.__dict__
        metrics = attributes["_modules"]["rec_metrics"]
        if metrics.rec_metrics:
            inputs = kwargs
            try:
                if self._inputs:
                    inputs = {name: model_out[name] for name in self._inputs if name in model_out}
                    inputs |= {**(required_inputs or {}), **kwargs}
                metrics._modules["_accumulators"].update_from(model_out, inputs)
            except (TypeError, IndexError):
                mapping("model_out", model_out)
                raise
            except KeyError as error:
                mapping("model_out", model_out)
                raise ValueError(
                    f"model_out must have {error}, a key of a task; received {sorted(model_out)}."
                ) from None
        if self.throughput_metric is not None:
            self.throughput_metric.update()
        attributes["trained_batches"] += 1

    def should_compute(self) -> bool:
        """Return whether to compute in this step.

        Returns:
            Whether the number of steps is a multiple of the interval.
        """
        return self.trained_batches % self.compute_interval_steps == 0

    def compute(self) -> dict[str, torch.Tensor | float]:
        """Compute all results over all ranks; every rank must call it.

        Returns:
            Results of metrics by key, such as `ne-click|window_ne`, in the shapes that `RecMetric`
            describes, on rank 0 or on all ranks (`compute_on_all_ranks`); throughput; numbers of
            `state_metrics`.
        """
        self.compute_count += 1
        self._adjust_compute_interval()
        results: dict[str, torch.Tensor | float] = dict(self.rec_metrics.compute())
        if self.throughput_metric is not None:
            results.update(self.throughput_metric.compute())
        for namespace, metric in self.state_metrics.items():
            for name, value in metric.get_metrics().items():
                results[compose_customized_metric_key(namespace, name)] = value
        return results

    def local_compute(self) -> dict[str, torch.Tensor | float]:
        """Compute the results of metrics over the samples of this rank.

        Returns:
            Results by key, as of `compute`; the names begin with `local_`.
        """
        return dict(self.rec_metrics.local_compute())

    def sync(self) -> None:
        """Use the sums and rows of all ranks until `unsync`; every rank must call it.

        The state dict has the sums of all ranks in between.
        """
        self.rec_metrics.sync()

    def unsync(self) -> None:
        """Restore the sums and rows of this rank."""
        self.rec_metrics.unsync()

    def reset(self) -> None:
        """Clear all metrics; throughput and the number of steps stay."""
        self.rec_metrics.reset()

    def get_memory_usage(self) -> dict[torch.Tensor, int]:
        """Return the size of each tensor of the metrics.

        Returns:
            Bytes by tensor.
        """
        return self.rec_metrics.get_memory_usage()

    def _adjust_compute_interval(self) -> None:
        """Adjust the steps so that the seconds between two computations are within their limits."""
        if self.min_compute_interval == 0.0 and self.max_compute_interval == float("inf"):
            return
        now_s, steps = time.monotonic(), self.trained_batches - self._steps_at_compute
        elapsed_s = now_s - self.last_compute_time
        if self.last_compute_time >= 0 and steps:
            elapsed_s = self._mean_over_ranks(elapsed_s)
            if not self.min_compute_interval <= elapsed_s <= self.max_compute_interval:
                wanted_s = max(self.min_compute_interval, 1e-3)
                if self.max_compute_interval != float("inf"):
                    wanted_s = (self.min_compute_interval + self.max_compute_interval) / 2
                self.compute_interval_steps = max(1, round(steps * wanted_s / elapsed_s))
        self.last_compute_time = now_s
        self._steps_at_compute = self.trained_batches

    def _mean_over_ranks(self, seconds: float) -> float:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or not len(self.rec_metrics):
            return seconds
        group = self.rec_metrics[0].process_group
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        total = torch.tensor(seconds, dtype=torch.float64, device=device)
        with explained(group, "agree on when to compute metrics"):
            dist.all_reduce(total, group=group)
        return total.item() / dist.get_world_size(group)


@raises_metric_errors
@checked_but("state_metrics_mapping")
def generate_metric_module(
    metric_class: type[RecMetricModule],
    metrics_config: MetricsConfig,
    batch_size: int,
    world_size: int,
    my_rank: int,
    state_metrics_mapping: Mapping[StateMetricEnum, StateMetric],
    device: torch.device,
    process_group: "torch.distributed.ProcessGroup | None" = None,
    batch_size_stages: Sequence[BatchSizeStage] | None = None,
    module_kwargs: Mapping[str, Any] | None = None,
) -> RecMetricModule:
    """Build the metrics of a configuration.

    Args:
        metric_class: Class of the module.
        metrics_config: Configuration.
        batch_size: Samples per rank and step.
        world_size: Number of ranks.
        my_rank: Rank of this process.
        state_metrics_mapping: Sources of the state metrics of the configuration.
        device: Device of the sums and of the predictions.
        process_group: Process group; `None` for all ranks.
        batch_size_stages: Batch sizes that change with the steps, for throughput.
        module_kwargs: Further arguments for `metric_class`.

    Returns:
        Module on the device.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A metric is unknown, has no tasks, has both kinds of tasks, or rejects its
            arguments; a state metric is missing; or `my_rank` is not below `world_size`.
    """
    config = metrics_config
    check_ranks(world_size, my_rank, batch_size)
    validate_batch_size_stages(batch_size_stages)
    mapping("state_metrics_mapping", state_metrics_mapping)
    metrics = [
        _metric_class(name)(
            world_size=world_size,
            my_rank=my_rank,
            batch_size=batch_size,
            tasks=_tasks_of(name, definition, config.rec_tasks),
            compute_mode=config.rec_compute_mode,
            window_size=definition.window_size,
            fused_update_limit=config.fused_update_limit,
            compute_on_all_ranks=config.compute_on_all_ranks,
            should_validate_update=config.should_validate_update,
            process_group=process_group,
            **(definition.arguments or {}),
        )
        for name, definition in config.rec_metrics.items()
    ]
    throughput = None
    if config.throughput_metric is not None:
        throughput = ThroughputMetric(
            batch_size=batch_size,
            world_size=world_size,
            window_seconds=config.throughput_metric.window_size,
            warmup_steps=config.throughput_metric.warmup_steps,
            batch_size_stages=batch_size_stages,
        )
    state_metrics = {}
    for kind in config.state_metrics:
        if kind not in state_metrics_mapping:
            raise ValueError(
                f"state_metrics_mapping must have all state metrics of the configuration; "
                f"received {sorted(map(str, state_metrics_mapping))}, and not '{kind}'."
            )
        namespace = compose_metric_namespace(MetricNamespace(kind.value), str(kind))
        state_metrics[namespace] = state_metrics_mapping[kind]
    module = metric_class(
        batch_size=batch_size,
        world_size=world_size,
        rec_tasks=config.rec_tasks,
        rec_metrics=RecMetricList(metrics),
        throughput_metric=throughput,
        state_metrics=state_metrics,
        compute_interval_steps=config.compute_interval_steps,
        min_compute_interval=config.min_compute_interval,
        max_compute_interval=config.max_compute_interval,
        **(module_kwargs or {}),
    )
    return module.to(device)


def _metric_class(name: RecMetricEnumBase) -> type[RecMetric]:
    if name not in REC_METRICS_MAPPING:
        raise ValueError(
            f"rec_metrics must be some of {sorted(map(str, REC_METRICS_MAPPING))}; received "
            f"'{name}'. Add a metric of your own to REC_METRICS_MAPPING."
        )
    return REC_METRICS_MAPPING[name]


def _tasks_of(
    name: RecMetricEnumBase, definition: RecMetricDef, rec_tasks: Sequence[RecTaskInfo]
) -> Sequence[RecTaskInfo]:
    if bool(definition.rec_tasks) == bool(definition.rec_task_indices):
        raise ValueError(
            f"the metric '{name}' must have either rec_tasks or rec_task_indices; received "
            f"{definition.rec_tasks} and {definition.rec_task_indices}."
        )
    if any(index >= len(rec_tasks) for index in definition.rec_task_indices):
        raise ValueError(
            f"rec_task_indices of the metric '{name}' must be less than the number of rec_tasks, "
            f"{len(rec_tasks)}; received {definition.rec_task_indices}."
        )
    tasks = definition.rec_tasks or [rec_tasks[index] for index in definition.rec_task_indices]
    if unknown := [task.name for task in tasks if task not in rec_tasks]:
        raise ValueError(
            f"tasks of the metric '{name}' must be among the rec_tasks of the configuration; "
            f"received {unknown}."
        )
    return tasks
