"""Keys of results: `namespace-task|prefix_name`, such as `ne-click|window_ne`."""

import enum
import re

from recsys.base.arguments import wrong_type


class StrValueMixin:
    """Enumeration whose members print as their value."""

    value: str

    def __str__(self) -> str:
        return self.value


class MetricNameBase(StrValueMixin, enum.Enum):
    """Base class for names of your own."""


class MetricName(MetricNameBase):
    """Names of metrics and of their results: the two parts of a key."""

    DEFAULT = ""
    ACCURACY = "accuracy"
    ATTEMPT_EXAMPLES = "attempt_examples"
    AUC = "auc"
    AUPRC = "auprc"
    AVERAGE = "average"
    BATCH_SIZE = "batch_size"
    BINNED_AUC = "binned_auc"
    CALIBRATION = "calibration"
    CALI_FREE_NE = "cali_free_ne"
    CTR = "ctr"
    GAUC = "gauc"
    GAUC_NUM_SAMPLES = "gauc_num_samples"
    GROUPED_AUC = "grouped_auc"
    GROUPED_AUPRC = "grouped_auprc"
    GROUPED_RAUC = "grouped_rauc"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"
    HINDSIGHT_TARGET_PRECISION = "hindsight_target_precision"
    HINDSIGHT_TARGET_RECALL = "hindsight_target_recall"
    LABEL_AVERAGE = "label_average"
    LOG_LOSS = "logloss"
    MAE = "mae"
    MODEL_CONFIGURATOR = "model_configurator"
    MSE = "mse"
    MULTICLASS_RECALL = "multiclass_recall"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    NDCG = "ndcg"
    NE = "ne"
    NE_POSITIVE = "ne_positive"
    NMSE = "nmse"
    NRMSE = "nrmse"
    NUM_MISSING_LABELS = "num_missing_labels"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    OPTIMIZERS = "optimizers"
    PRECISION = "precision"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    PREDICTION_AVERAGE = "prediction_average"
    RAUC = "rauc"
    RECALIBRATED_CALIBRATION = "recalibrated_calibration"
    RECALIBRATED_NE = "recalibrated_ne"
    RECALL = "recall"
    RECALL_SESSION_LEVEL = "recall_session_level"
    RMSE = "rmse"
    R_SQUARED = "r_squared"
    SCALAR = "scalar"
    SEGMENTED_NE = "segmented_ne"
    SERVING_CALIBRATION = "serving_calibration"
    SERVING_NE = "serving_ne"
    SUM_WEIGHTS = "sum_weights"
    TENSOR_WEIGHTED_AVG = "tensor_weighted_avg"
    THROUGHPUT = "throughput"
    TOTAL_EXAMPLES = "total_examples"
    TOWER_QPS = "qps"
    UNWEIGHTED_NE = "unweighted_ne"
    WEIGHTED_AVG = "weighted_avg"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"
    XAUC = "xauc"


MetricNamespaceBase = MetricNameBase
"""Base class for namespaces of your own."""
MetricNamespace = MetricName
"""The same names, as the first part of a key."""


class MetricPrefix(StrValueMixin, enum.Enum):
    """Span of a result: the window, the lifetime, or this process (`attempt_`)."""

    DEFAULT = ""
    LIFETIME = "lifetime_"
    WINDOW = "window_"
    ATTEMPT = "attempt_"


def compose_metric_namespace(namespace: MetricNamespaceBase, task_name: str) -> str:
    """Compose the first part of a key.

    Args:
        namespace: Namespace of the metric.
        task_name: Name of the task.

    Returns:
        `namespace-task`.

    Raises:
        TypeError: An argument is neither text nor a member of an enumeration.

    Example:
        >>> compose_metric_namespace(MetricNamespace.NE, "click")
        'ne-click'
    """
    _check_names(namespace=namespace, task_name=task_name)
    return f"{namespace}-{task_name}"


def compose_customized_metric_key(
    namespace: str, metric_name: str, description: str | None = None
) -> str:
    """Compose the key of a result from strings.

    Args:
        namespace: First part of the key.
        metric_name: Second part of the key.
        description: Suffix of the key.

    Returns:
        `namespace|metric_name` with the suffix.

    Raises:
        TypeError: An argument is neither text nor a member of an enumeration.

    Example:
        >>> compose_customized_metric_key("optimizers-dense", "lr")
        'optimizers-dense|lr'
    """
    description = "" if description is None else description
    _check_names(namespace=namespace, metric_name=metric_name, description=description)
    return f"{namespace}|{metric_name}{description}"


def compose_metric_key(
    namespace: MetricNamespaceBase,
    task_name: str,
    metric_name: MetricNameBase,
    metric_prefix: MetricPrefix = MetricPrefix.DEFAULT,
    description: str | None = None,
) -> str:
    """Compose the key of a result.

    Args:
        namespace: Namespace of the metric.
        task_name: Name of the task.
        metric_name: Name of the result.
        metric_prefix: Span of the result.
        description: Suffix of the key.

    Returns:
        Key of the result of `RecMetricModule.compute`.

    Raises:
        TypeError: An argument is neither text nor a member of an enumeration.

    Example:
        >>> compose_metric_key(MetricNamespace.NE, "click", MetricName.NE, MetricPrefix.WINDOW)
        'ne-click|window_ne'
    """
    _check_names(metric_name=metric_name, metric_prefix=metric_prefix)
    return compose_customized_metric_key(
        compose_metric_namespace(namespace, task_name), f"{metric_prefix}{metric_name}", description
    )


def task_wildcard_metrics_pattern(
    namespace: MetricNamespaceBase,
    metric_name: MetricNameBase,
    metric_prefix: MetricPrefix = MetricPrefix.DEFAULT,
) -> str:
    r"""Compose a pattern for the keys of a result of any task.

    Args:
        namespace: Namespace of the metric.
        metric_name: Name of the result.
        metric_prefix: Span of the result.

    Returns:
        Regular expression.

    Raises:
        TypeError: An argument is neither text nor a member of an enumeration.

    Example:
        >>> task_wildcard_metrics_pattern(MetricNamespace.NE, MetricName.NE, MetricPrefix.WINDOW)
        'ne-.+\\|window_ne'
    """
    _check_names(namespace=namespace, metric_name=metric_name, metric_prefix=metric_prefix)
    return rf"{re.escape(str(namespace))}-.+\|{metric_prefix}{metric_name}"


def _check_names(**names: object) -> None:
    for argument, name in names.items():
        if not isinstance(name, str | enum.Enum):
            wrong_type(argument, "text or a member of an enumeration", name)
