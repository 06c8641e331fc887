import enum
import re

from recsys.metrics.metrics_config import RecMetricEnum
from recsys.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
    MetricPrefix,
    compose_customized_metric_key,
    compose_metric_key,
    task_wildcard_metrics_pattern,
)


def test_keys():
    key = compose_metric_key(
        MetricNamespace.SEGMENTED_NE, "a-b", MetricName.NE, MetricPrefix.LIFETIME, "_3"
    )
    assert key == "segmented_ne-a-b|lifetime_ne_3"
    assert compose_customized_metric_key("space", "name") == "space|name"


def test_pattern_finds_every_task():
    pattern = task_wildcard_metrics_pattern(
        MetricNamespace.NE, MetricName.NE, MetricPrefix.WINDOW
    )  # fmt: skip
    assert re.fullmatch(pattern, "ne-click|window_ne")
    assert not re.fullmatch(pattern, "ne-click|lifetime_ne")


def test_names_and_namespaces_are_one_enumeration():
    assert MetricNamespace is MetricName
    assert {metric.name for metric in RecMetricEnum} <= set(MetricName.__members__)


def test_names_of_ones_own():
    class Mine(MetricNameBase, enum.Enum):
        SHARE = "share"

    assert compose_metric_key(MetricNamespace.CTR, "t", Mine.SHARE) == "ctr-t|share"
