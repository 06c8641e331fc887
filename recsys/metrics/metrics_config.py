"""What is measured: metrics, tasks, windows, and when results are computed."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recsys.kernels.arguments import choice, finite, whole, whole_list
from recsys.metrics.checks import check_intervals, flag, instance, instances, mapping, text
from recsys.metrics.metrics_namespace import StrValueMixin


class RecMetricEnumBase(StrValueMixin, enum.Enum):
    """What names of metrics have in common; derive from it for metrics of your own."""


class RecMetricEnum(RecMetricEnumBase):
    """The metrics that a configuration can ask for."""

    ACCURACY = "accuracy"
    AUC = "auc"
    AUPRC = "auprc"
    AVERAGE = "average"
    BINNED_AUC = "binned_auc"
    CALIBRATION = "calibration"
    CALI_FREE_NE = "cali_free_ne"
    CTR = "ctr"
    GAUC = "gauc"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"
    LOG_LOSS = "log_loss"
    MAE = "mae"
    MSE = "mse"
    MULTICLASS_RECALL = "multiclass_recall"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    NDCG = "ndcg"
    NE = "ne"
    NE_POSITIVE = "ne_positive"
    NMSE = "nmse"
    NUM_MISSING_LABELS = "num_missing_labels"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    PRECISION = "precision"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    RAUC = "rauc"
    RECALIBRATED_CALIBRATION = "recalibrated_calibration"
    RECALIBRATED_NE = "recalibrated_ne"
    RECALL = "recall"
    RECALL_SESSION_LEVEL = "recall_session_level"
    SCALAR = "scalar"
    SEGMENTED_NE = "segmented_ne"
    SERVING_CALIBRATION = "serving_calibration"
    SERVING_NE = "serving_ne"
    SUM_WEIGHTS = "sum_weights"
    TENSOR_WEIGHTED_AVG = "tensor_weighted_avg"
    TOWER_QPS = "tower_qps"
    UNWEIGHTED_NE = "unweighted_ne"
    WEIGHTED_AVG = "weighted_avg"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"
    XAUC = "xauc"


@dataclass(unsafe_hash=True)
class SessionMetricDef:
    """How metrics per session rank.

    Raises:
        TypeError: a field is of a wrong type.
        ValueError: `top_threshold` is not positive.
    """

    session_var_name: str
    """Which model output says what session a sample belongs to."""
    top_threshold: int | None = None
    """So many best predictions of a session count as predicted positive."""
    run_ranking_of_labels: bool = False
    """Whether so many highest labels count as positive, in place of labels that are 1."""

    def __post_init__(self) -> None:
        text("SessionMetricDef.session_var_name", self.session_var_name)
        if self.top_threshold is not None:
            whole("SessionMetricDef.top_threshold", self.top_threshold)
        flag("SessionMetricDef.run_ranking_of_labels", self.run_ranking_of_labels)


@dataclass(unsafe_hash=True)
class RecTaskInfo:
    """What is predicted, and under which names a model's output has it.

    Raises:
        TypeError: a field is of a wrong type.
    """

    name: str = "DefaultTask"
    """Is part of the results' names."""
    label_name: str = "label"
    """The key of the labels in the model's output."""
    prediction_name: str = "prediction"
    """The key of the predictions."""
    weight_name: str = "weight"
    """The key of the weights."""
    session_metric_def: SessionMetricDef | None = None
    """For metrics per session."""
    is_negative_task: bool = False
    """Whether low predictions and labels are the good ones, for NDCG."""
    tensor_name: str | None = None
    """The key of what a tensor's weighted average is of."""
    weighted: bool = True
    """Whether that average is weighted."""

    def __post_init__(self) -> None:
        for name in ("name", "label_name", "prediction_name", "weight_name"):
            text(f"RecTaskInfo.{name}", getattr(self, name))
        if self.session_metric_def is not None:
            instance("RecTaskInfo.session_metric_def", self.session_metric_def, SessionMetricDef)
        flag("RecTaskInfo.is_negative_task", self.is_negative_task)
        if self.tensor_name is not None:
            text("RecTaskInfo.tensor_name", self.tensor_name)
        flag("RecTaskInfo.weighted", self.weighted)


class RecComputeMode(enum.Enum):
    """Whether the tasks of a metric are fused.

    All tasks of a metric are always computed at once. The mode decides the shape of results alone:
    `[1]` if tasks are not fused, else scalars.
    """

    FUSED_TASKS_COMPUTATION = 1
    UNFUSED_TASKS_COMPUTATION = 2
    FUSED_TASKS_AND_STATES_COMPUTATION = 3


@dataclass
class RecMetricDef:
    """For which tasks a metric is computed, and over which window.

    Raises:
        TypeError: a field is of a wrong type.
        ValueError: `window_size` is not positive, or an index is negative.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    """The tasks; or else `rec_task_indices`."""
    rec_task_indices: list[int] = field(default_factory=list)
    """Places in `MetricsConfig.rec_tasks`."""
    window_size: int = 10_000_000
    """Samples of all ranks together that the `window_` results are over."""
    arguments: dict[str, Any] | None = None
    """What the metric takes besides, by name."""

    def __post_init__(self) -> None:
        instances("RecMetricDef.rec_tasks", self.rec_tasks, RecTaskInfo)
        whole_list("RecMetricDef.rec_task_indices", self.rec_task_indices)
        whole("RecMetricDef.window_size", self.window_size)
        if self.arguments is not None:
            mapping("RecMetricDef.arguments", self.arguments)


class StateMetricEnum(StrValueMixin, enum.Enum):
    """Whose own numbers are reported along with the metrics."""

    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"


@dataclass
class ThroughputDef:
    """How samples per second are counted.

    Raises:
        TypeError: a field is no number.
        ValueError: `window_size` is not positive, or `warmup_steps` is negative.
    """

    window_size: int = 100
    """Seconds."""
    warmup_steps: int = 100
    """Steps that are not timed."""

    def __post_init__(self) -> None:
        finite("ThroughputDef.window_size", self.window_size, least=1)
        whole("ThroughputDef.warmup_steps", self.warmup_steps, least=0)


@dataclass
class MetricsConfig:
    """All that a `RecMetricModule` computes.

    Raises:
        TypeError: a field is of a wrong type.
        ValueError: a number is out of range.

    Example:
        >>> click = RecTaskInfo("click", "click_label", "click_prediction", "click_weight")
        >>> config = MetricsConfig(
        ...     rec_tasks=[click],
        ...     rec_metrics={
        ...         RecMetricEnum.NE: RecMetricDef(rec_tasks=[click], window_size=100_000),
        ...         RecMetricEnum.AUC: RecMetricDef(rec_tasks=[click], window_size=100_000),
        ...     },
        ... )
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    """All tasks."""
    rec_metrics: dict[RecMetricEnum, RecMetricDef] = field(default_factory=dict)
    """All metrics."""
    throughput_metric: ThroughputDef | None = None
    """Whether and how samples per second are counted."""
    rec_compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION
    """Whether results are of shape `[1]` or scalars."""
    fused_update_limit: int = 0
    """Has no effect: an update is one computation anyway."""
    state_metrics: list[StateMetricEnum] = field(default_factory=list)
    """Whose own numbers are reported."""
    compute_interval_steps: int = 100
    """`RecMetricModule.should_compute` says yes once in so many steps."""
    min_compute_interval: float = 0.0
    """Seconds between two computations at least; steps between them are adjusted."""
    max_compute_interval: float = float("inf")
    """Seconds at most."""
    compute_on_all_ranks: bool = False
    """Whether all ranks get results, not rank 0 alone."""
    should_validate_update: bool = False
    """Whether a batch whose weights are all zero is left out, windows included."""
    enable_pt2_compile: bool = False
    """Has no effect."""
    should_clone_update_inputs: bool = False
    """Has no effect: nothing given to an update is kept or changed."""
    use_cpu_offloaded_rec_metric_module: bool | None = None
    """Has no effect."""

    def __post_init__(self) -> None:
        instances("MetricsConfig.rec_tasks", self.rec_tasks, RecTaskInfo)
        mapping("MetricsConfig.rec_metrics", self.rec_metrics)
        for name, definition in self.rec_metrics.items():
            instance(f"MetricsConfig.rec_metrics[{name}]", definition, RecMetricDef)
        if self.throughput_metric is not None:
            instance("MetricsConfig.throughput_metric", self.throughput_metric, ThroughputDef)
        choice("MetricsConfig.rec_compute_mode", self.rec_compute_mode, RecComputeMode)
        whole("MetricsConfig.fused_update_limit", self.fused_update_limit, least=0)
        instances("MetricsConfig.state_metrics", self.state_metrics, StateMetricEnum)
        check_intervals(
            self.compute_interval_steps, self.min_compute_interval, self.max_compute_interval
        )
        for flagged in (
            "compute_on_all_ranks",
            "should_validate_update",
            "enable_pt2_compile",
            "should_clone_update_inputs",
        ):
            flag(f"MetricsConfig.{flagged}", getattr(self, flagged))
        if self.use_cpu_offloaded_rec_metric_module is not None:
            flag(
                "MetricsConfig.use_cpu_offloaded_rec_metric_module",
                self.use_cpu_offloaded_rec_metric_module,
            )


@dataclass
class BatchSizeStage:
    """A batch size for some steps.

    Raises:
        TypeError: a field is no whole number.
        ValueError: a field is negative.
    """

    batch_size: int = 0
    """Samples per rank and step."""
    max_iters: int | None = 0
    """For so many steps; `None` for the rest of the run."""

    def __post_init__(self) -> None:
        whole("BatchSizeStage.batch_size", self.batch_size, least=0)
        if self.max_iters is not None:
            whole("BatchSizeStage.max_iters", self.max_iters, least=0)


DefaultTaskInfo = RecTaskInfo()
"""A task with the default names."""

DefaultMetricsConfig = MetricsConfig(
    rec_tasks=[DefaultTaskInfo],
    rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[DefaultTaskInfo])},
    throughput_metric=ThroughputDef(),
)
"""Normalized entropy and throughput of one task."""

EmptyMetricsConfig = MetricsConfig()
"""Nothing."""


def validate_batch_size_stages(batch_size_stages: Sequence[BatchSizeStage] | None) -> None:
    """Check that the stages last to the end of a run.

    Args:
        batch_size_stages: in order; `None` or empty for none.

    Raises:
        TypeError: something else is among them.
        ValueError: the last stage ends, or an earlier one does not.

    Example:
        >>> validate_batch_size_stages([BatchSizeStage(256, 100), BatchSizeStage(512, None)])
    """
    if batch_size_stages is None:
        return
    instances("batch_size_stages", batch_size_stages, BatchSizeStage)
    ends = [stage.max_iters for stage in batch_size_stages]
    if ends and (ends[-1] is not None or None in ends[:-1]):
        raise ValueError(
            "batch_size_stages must end with a stage without end, and only there; received "
            f"max_iters {ends}. Give the last stage max_iters=None, and the others a count."
        )
