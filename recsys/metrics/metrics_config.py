"""Configuration of metrics: tasks, metrics, windows, and the interval between computations."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recsys.base.arguments import finite, whole, whole_list
from recsys.base.checked import check_fields, checked
from recsys.metrics.checks import check_intervals
from recsys.metrics.metrics_namespace import StrValueMixin


class RecMetricEnumBase(StrValueMixin, enum.Enum):
    """Base class for an enumeration of metrics of your own."""


class RecMetricEnum(RecMetricEnumBase):
    """Metrics that a configuration can request."""

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
    """Sessions of a task, for metrics that rank the samples of a session.

    Raises:
        TypeError: A field has a wrong type.
        ValueError: `top_threshold` is not positive.
    """

    session_var_name: str
    """Model output with the session of each sample."""
    top_threshold: int | None = None
    """Number of best predictions of a session that count as predicted positive."""
    run_ranking_of_labels: bool = False
    """True: the `top_threshold` highest labels count as positive, instead of labels of 1."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.top_threshold is not None:
            whole("SessionMetricDef.top_threshold", self.top_threshold)


@dataclass(unsafe_hash=True)
class RecTaskInfo:
    """Task: a prediction, and the names of its tensors in the model output.

    Raises:
        TypeError: A field has a wrong type.
    """

    name: str = "DefaultTask"
    """Name of the task in the keys of results."""
    label_name: str = "label"
    """Key of the labels in the model output."""
    prediction_name: str = "prediction"
    """Key of the predictions."""
    weight_name: str = "weight"
    """Key of the weights."""
    session_metric_def: SessionMetricDef | None = None
    """Sessions, for metrics of sessions."""
    is_negative_task: bool = False
    """True if low predictions and labels are better; NDCG rejects such tasks."""
    tensor_name: str | None = None
    """Key of the tensor that `TENSOR_WEIGHTED_AVG` averages."""
    weighted: bool = True
    """True if the average of `tensor_name` is weighted."""
    mask_name: str | None = None
    """Key of the label mask, bool `[N]`, such as a column of `batch.label_mask`; `None` for none. A
    sample whose mask is False is in no metric of the task. A mask of `None` in the model output
    leaves out no sample. On a GPU each update then waits for the device."""

    def __post_init__(self) -> None:
        check_fields(self)


class RecComputeMode(enum.Enum):
    """Shape of results: `[1]` if tasks are not fused, otherwise scalars.

    All tasks of a metric are computed together in every mode.
    """

    FUSED_TASKS_COMPUTATION = 1
    UNFUSED_TASKS_COMPUTATION = 2
    FUSED_TASKS_AND_STATES_COMPUTATION = 3


@dataclass
class RecMetricDef:
    """Tasks, window and arguments of a metric.

    Raises:
        TypeError: A field has a wrong type.
        ValueError: `window_size` is not positive, or an index is negative.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    """Tasks; give these or `rec_task_indices`."""
    rec_task_indices: list[int] = field(default_factory=list)
    """Indices into `MetricsConfig.rec_tasks`."""
    window_size: int = 10_000_000
    """Number of samples of all ranks that `window_` results cover."""
    arguments: dict[str, Any] | None = None
    """Own arguments of the metric, by name."""

    def __post_init__(self) -> None:
        check_fields(self)
        whole_list("RecMetricDef.rec_task_indices", self.rec_task_indices)
        whole("RecMetricDef.window_size", self.window_size)


class StateMetricEnum(StrValueMixin, enum.Enum):
    """Sources of numbers that are reported with the metrics."""

    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"


@dataclass
class ThroughputDef:
    """Settings of `ThroughputMetric`.

    Raises:
        TypeError: A field is not a number.
        ValueError: `window_size` is not positive, or `warmup_steps` is negative.
    """

    window_size: int = 100
    """Window, in seconds."""
    warmup_steps: int = 100
    """Number of first steps that are not timed."""

    def __post_init__(self) -> None:
        finite("ThroughputDef.window_size", self.window_size, least=1)
        whole("ThroughputDef.warmup_steps", self.warmup_steps, least=0)


@dataclass
class MetricsConfig:
    """Configuration of a `RecMetricModule`.

    Raises:
        TypeError: A field has a wrong type.
        ValueError: A number is out of range.

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
    rec_metrics: dict[Any, RecMetricDef] = field(default_factory=dict)
    """Metrics by `RecMetricEnum`, or by a name of your own in `REC_METRICS_MAPPING`."""
    throughput_metric: ThroughputDef | None = None
    """Settings of the throughput; `None`: not measured."""
    rec_compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION
    """Shape of results."""
    fused_update_limit: int = 0
    """Ignored: an update is always one computation."""
    state_metrics: list[StateMetricEnum] = field(default_factory=list)
    """Sources of further numbers to report."""
    compute_interval_steps: int = 100
    """Steps between two computations, for `RecMetricModule.should_compute`."""
    min_compute_interval: float = 0.0
    """Minimum seconds between two computations; the steps are adjusted."""
    max_compute_interval: float = float("inf")
    """Maximum seconds between two computations."""
    compute_on_all_ranks: bool = False
    """True: all ranks get results; False: rank 0 alone."""
    should_validate_update: bool = False
    """True: batches whose weights are all zero are skipped."""
    enable_pt2_compile: bool = False
    """Ignored."""
    should_clone_update_inputs: bool = False
    """Ignored: an update neither keeps nor changes its inputs."""
    use_cpu_offloaded_rec_metric_module: bool | None = None
    """Ignored."""

    def __post_init__(self) -> None:
        check_fields(self)
        whole("MetricsConfig.fused_update_limit", self.fused_update_limit, least=0)
        check_intervals(
            self.compute_interval_steps, self.min_compute_interval, self.max_compute_interval
        )


@dataclass
class BatchSizeStage:
    """Batch size of a number of steps.

    Raises:
        TypeError: A field is not a whole number.
        ValueError: A field is negative.
    """

    batch_size: int = 0
    """Samples per rank and step."""
    max_iters: int | None = 0
    """Number of steps; `None`: the rest of the run."""

    def __post_init__(self) -> None:
        whole("BatchSizeStage.batch_size", self.batch_size, least=0)
        if self.max_iters is not None:
            whole("BatchSizeStage.max_iters", self.max_iters, least=0)


DefaultTaskInfo = RecTaskInfo()
"""Task with the default names."""

DefaultMetricsConfig = MetricsConfig(
    rec_tasks=[DefaultTaskInfo],
    rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[DefaultTaskInfo])},
    throughput_metric=ThroughputDef(),
)
"""Normalized entropy and throughput of one task."""

EmptyMetricsConfig = MetricsConfig()
"""Configuration without metrics."""


@checked
def validate_batch_size_stages(batch_size_stages: Sequence[BatchSizeStage] | None) -> None:
    """Check that the last stage, and no other, has no end.

    Args:
        batch_size_stages: Stages in order; `None` or empty for none.

    Raises:
        TypeError: An element is not a `BatchSizeStage`.
        ValueError: The last stage ends, or an earlier one does not.

    Example:
        >>> validate_batch_size_stages([BatchSizeStage(256, 100), BatchSizeStage(512, None)])
    """
    ends = [stage.max_iters for stage in batch_size_stages or ()]
    if ends and (ends[-1] is not None or None in ends[:-1]):
        raise ValueError(
            "batch_size_stages must end with a stage without end, and only there; received "
            f"max_iters {ends}. Give the last stage max_iters=None, and the others a count."
        )
