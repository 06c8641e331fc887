"""All metrics of a model, as one configuration asks for them."""

import abc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recsys.contact import explained
from recsys.kernels.arguments import shown, whole, wrong_type
from recsys.metrics.checks import (
    check_group,
    check_intervals,
    check_ranks,
    instance,
    instances,
    mapping,
)
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
from recsys.metrics.rank_metrics import (
    AUCMetric,
    AUPRCMetric,
    BinnedAUCMetric,
    HindsightTargetPRMetric,
    RAUCMetric,
)
from recsys.metrics.rec_metric import RecMetric, RecMetricList
from recsys.metrics.session_metrics import (
    GAUCMetric,
    NDCGMetric,
    PrecisionSessionMetric,
    RecallSessionMetric,
    XAUCMetric,
)
from recsys.metrics.sum_metrics import (
    AccuracyMetric,
    AverageMetric,
    CalibrationMetric,
    CaliFreeNEMetric,
    CTRMetric,
    LogLossMetric,
    MAEMetric,
    MSEMetric,
    MulticlassRecallMetric,
    MultiLabelPrecisionMetric,
    NEMetric,
    NEPositiveMetric,
    NMSEMetric,
    NumMissingLabelsMetric,
    NumPositiveSamplesMetric,
    PrecisionMetric,
    RecalibratedCalibrationMetric,
    RecalibratedNEMetric,
    RecallMetric,
    ScalarMetric,
    SegmentedNEMetric,
    ServingCalibrationMetric,
    ServingNEMetric,
    SumWeightsMetric,
    TensorWeightedAvgMetric,
    UnweightedNEMetric,
    WeightedAvgMetric,
    WeightedSumPredictionsMetric,
)
from recsys.metrics.throughput import ThroughputMetric, TowerQPSMetric

REC_METRICS_MAPPING: dict[RecMetricEnumBase, type[RecMetric]] = {
    RecMetricEnum.ACCURACY: AccuracyMetric,
    RecMetricEnum.AUC: AUCMetric,
    RecMetricEnum.AUPRC: AUPRCMetric,
    RecMetricEnum.AVERAGE: AverageMetric,
    RecMetricEnum.BINNED_AUC: BinnedAUCMetric,
    RecMetricEnum.CALI_FREE_NE: CaliFreeNEMetric,
    RecMetricEnum.CALIBRATION: CalibrationMetric,
    RecMetricEnum.CTR: CTRMetric,
    RecMetricEnum.GAUC: GAUCMetric,
    RecMetricEnum.HINDSIGHT_TARGET_PR: HindsightTargetPRMetric,
    RecMetricEnum.LOG_LOSS: LogLossMetric,
    RecMetricEnum.MAE: MAEMetric,
    RecMetricEnum.MSE: MSEMetric,
    RecMetricEnum.MULTICLASS_RECALL: MulticlassRecallMetric,
    RecMetricEnum.MULTI_LABEL_PRECISION: MultiLabelPrecisionMetric,
    RecMetricEnum.NDCG: NDCGMetric,
    RecMetricEnum.NE: NEMetric,
    RecMetricEnum.NE_POSITIVE: NEPositiveMetric,
    RecMetricEnum.NMSE: NMSEMetric,
    RecMetricEnum.NUM_MISSING_LABELS: NumMissingLabelsMetric,
    RecMetricEnum.NUM_POSITIVE_SAMPLES: NumPositiveSamplesMetric,
    RecMetricEnum.PRECISION: PrecisionMetric,
    RecMetricEnum.PRECISION_SESSION_LEVEL: PrecisionSessionMetric,
    RecMetricEnum.RAUC: RAUCMetric,
    RecMetricEnum.RECALIBRATED_CALIBRATION: RecalibratedCalibrationMetric,
    RecMetricEnum.RECALIBRATED_NE: RecalibratedNEMetric,
    RecMetricEnum.RECALL: RecallMetric,
    RecMetricEnum.RECALL_SESSION_LEVEL: RecallSessionMetric,
    RecMetricEnum.SCALAR: ScalarMetric,
    RecMetricEnum.SEGMENTED_NE: SegmentedNEMetric,
    RecMetricEnum.SERVING_CALIBRATION: ServingCalibrationMetric,
    RecMetricEnum.SERVING_NE: ServingNEMetric,
    RecMetricEnum.SUM_WEIGHTS: SumWeightsMetric,
    RecMetricEnum.TENSOR_WEIGHTED_AVG: TensorWeightedAvgMetric,
    RecMetricEnum.TOWER_QPS: TowerQPSMetric,
    RecMetricEnum.UNWEIGHTED_NE: UnweightedNEMetric,
    RecMetricEnum.WEIGHTED_AVG: WeightedAvgMetric,
    RecMetricEnum.WEIGHTED_SUM_PREDICTIONS: WeightedSumPredictionsMetric,
    RecMetricEnum.XAUC: XAUCMetric,
}
"""What serves each name of a metric; put your own here to have it in a configuration."""


class StateMetric(abc.ABC):
    """What has numbers of its own to report, such as an optimizer's rate."""

    @abc.abstractmethod
    def get_metrics(self) -> dict[str, torch.Tensor | float]:
        """Give the numbers, by name."""


class RecMetricModule(torch.nn.Module):
    """All metrics of a model.

    Call `update` in each step, and `compute` when `should_compute` says so, on every rank.

    Args:
        batch_size: samples per rank and step.
        world_size: number of ranks.
        rec_tasks: what is measured.
        rec_metrics: by which metrics.
        throughput_metric: counts samples per second.
        state_metrics: numbers that others report, by namespace.
        compute_interval_steps: `should_compute` says yes once in so many steps.
        min_compute_interval: seconds between two computations at least.
        max_compute_interval: at most. With one of the two given, the interval in steps is set anew
            after each `compute`, alike on all ranks.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: a size or an interval is not positive, or the least interval exceeds the
            greatest.

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
        if rec_metrics is not None:
            instance("rec_metrics", rec_metrics, RecMetricList)
        if throughput_metric is not None:
            instance("throughput_metric", throughput_metric, ThroughputMetric)
        self.batch_size = whole("batch_size", batch_size)
        self.world_size = whole("world_size", world_size)
        self.rec_tasks = instances("rec_tasks", () if rec_tasks is None else rec_tasks, RecTaskInfo)
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
        """Name the model outputs that metrics need besides the tasks' own.

        Returns:
            Their keys, sorted; `None` for none.
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
            model_out: `[N]` predictions, labels and weights under the names that the tasks give
                them, and the required inputs. What else is in it is not looked at.
            required_inputs: more required inputs.
            **kwargs: more required inputs.

        Raises:
            TypeError: something is no tensor.
            ValueError: something is missing, or sizes or devices differ.
        """
        # In each step, and what a step calls once is not in the caches: no look-ups of nn.Module.
        own = self.__dict__
        metrics = own["_modules"]["rec_metrics"]
        if metrics.rec_metrics:
            inputs = kwargs
            try:
                if self._inputs:
                    inputs = {name: model_out[name] for name in self._inputs if name in model_out}
                    inputs |= {**(required_inputs or {}), **kwargs}
                metrics.update_from(model_out, inputs)
            except (TypeError, IndexError):
                mapping("model_out", model_out)
                raise
            except KeyError as error:
                raise ValueError(
                    f"model_out must have {error}, as a task says; received {sorted(model_out)}."
                ) from None
        if self.throughput_metric is not None:
            self.throughput_metric.update()
        own["trained_batches"] += 1

    def should_compute(self) -> bool:
        """Say whether it is time to compute.

        Returns:
            Whether the steps so far are a multiple of the interval.
        """
        return self.trained_batches % self.compute_interval_steps == 0

    def compute(self) -> dict[str, torch.Tensor | float]:
        """Compute all results over all ranks; every rank must call it.

        Returns:
            Metrics' results by key, such as `ne-click|window_ne`, as `RecMetric` describes them,
            on rank 0 alone unless the metrics are made otherwise; throughput; what state metrics
            report.
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
        """Compute all results over this rank's samples.

        Returns:
            Metrics' results as `compute` returns them; the names begin with `local_`.
        """
        return dict(self.rec_metrics.local_compute())

    def sync(self) -> None:
        """Take in what all ranks have seen, until `unsync`; every rank must call it.

        The state dict then has the sums of all ranks.
        """
        self.rec_metrics.sync()

    def unsync(self) -> None:
        """Go back to what this rank has seen."""
        self.rec_metrics.unsync()

    def reset(self) -> None:
        """Forget what metrics have seen; throughput and the count of steps stay."""
        self.rec_metrics.reset()

    def get_memory_usage(self) -> dict[torch.Tensor, int]:
        """Return the size of each tensor that metrics keep.

        Returns:
            Bytes by tensor.
        """
        return self.rec_metrics.get_memory_usage()

    def _adjust_compute_interval(self) -> None:
        """Bring the seconds between two computations into their limits."""
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
    """Build the metrics that a configuration asks for.

    Args:
        metric_class: what is built.
        metrics_config: the configuration.
        batch_size: samples per rank and step.
        world_size: number of ranks.
        my_rank: this one.
        state_metrics_mapping: what serves the state metrics of the configuration.
        device: where the sums are kept: that of the predictions.
        process_group: the ranks; `None` for all.
        batch_size_stages: batch sizes that change, for throughput.
        module_kwargs: more arguments for `metric_class`.

    Returns:
        The module, on the device.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: a metric has no tasks, or tasks given twice; it is not known; a state metric is
            missing; there is no such rank; or a metric refuses its arguments.
    """
    if not (isinstance(metric_class, type) and issubclass(metric_class, RecMetricModule)):
        wrong_type("metric_class", "RecMetricModule or a class derived from it", metric_class)
    instance("metrics_config", metrics_config, MetricsConfig)
    check_ranks(world_size, my_rank, batch_size)
    check_group("process_group", process_group)
    validate_batch_size_stages(batch_size_stages)
    mapping("state_metrics_mapping", state_metrics_mapping)
    module_kwargs = mapping("module_kwargs", {} if module_kwargs is None else module_kwargs)
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"device must be a torch.device; received {shown(device)}.") from error
    metrics = [
        _build_metric(
            name, definition, metrics_config, batch_size, world_size, my_rank, process_group
        )
        for name, definition in metrics_config.rec_metrics.items()
    ]
    throughput = None
    if metrics_config.throughput_metric is not None:
        throughput = ThroughputMetric(
            batch_size=batch_size,
            world_size=world_size,
            window_seconds=metrics_config.throughput_metric.window_size,
            warmup_steps=metrics_config.throughput_metric.warmup_steps,
            batch_size_stages=batch_size_stages,
        )
    state_metrics = {}
    for kind in metrics_config.state_metrics:
        if kind not in state_metrics_mapping:
            raise ValueError(
                f"state_metrics_mapping must have all of the configuration's state metrics; "
                f"received {sorted(map(str, state_metrics_mapping))}, and not '{kind}'."
            )
        namespace = compose_metric_namespace(MetricNamespace(kind.value), str(kind))
        state_metrics[namespace] = state_metrics_mapping[kind]
    module = metric_class(
        batch_size=batch_size,
        world_size=world_size,
        rec_tasks=metrics_config.rec_tasks,
        rec_metrics=RecMetricList(metrics),
        throughput_metric=throughput,
        state_metrics=state_metrics,
        compute_interval_steps=metrics_config.compute_interval_steps,
        min_compute_interval=metrics_config.min_compute_interval,
        max_compute_interval=metrics_config.max_compute_interval,
        **module_kwargs,
    )
    return module.to(device)


def _build_metric(
    name: RecMetricEnumBase,
    definition: RecMetricDef,
    config: MetricsConfig,
    batch_size: int,
    world_size: int,
    my_rank: int,
    process_group: "torch.distributed.ProcessGroup | None",
) -> RecMetric:
    if name not in REC_METRICS_MAPPING:
        raise ValueError(
            f"rec_metrics must be some of {sorted(map(str, REC_METRICS_MAPPING))}; received "
            f"'{name}'. Put a metric of your own into REC_METRICS_MAPPING."
        )
    if bool(definition.rec_tasks) == bool(definition.rec_task_indices):
        raise ValueError(
            f"the metric '{name}' must have either rec_tasks or rec_task_indices; received "
            f"{definition.rec_tasks} and {definition.rec_task_indices}."
        )
    num_tasks = len(config.rec_tasks)
    if any(place >= num_tasks for place in definition.rec_task_indices):
        raise ValueError(
            f"rec_task_indices of the metric '{name}' must be less than the number of rec_tasks, "
            f"{num_tasks}; received {definition.rec_task_indices}."
        )
    tasks = definition.rec_tasks or [config.rec_tasks[i] for i in definition.rec_task_indices]
    unknown = [task.name for task in tasks if task not in config.rec_tasks]
    if unknown:
        raise ValueError(
            f"tasks of the metric '{name}' must be among the configuration's rec_tasks; "
            f"received {unknown}."
        )
    return REC_METRICS_MAPPING[name](
        world_size=world_size,
        my_rank=my_rank,
        batch_size=batch_size,
        tasks=tasks,
        compute_mode=config.rec_compute_mode,
        window_size=definition.window_size,
        fused_update_limit=config.fused_update_limit,
        compute_on_all_ranks=config.compute_on_all_ranks,
        should_validate_update=config.should_validate_update,
        process_group=process_group,
        **(definition.arguments or {}),
    )
