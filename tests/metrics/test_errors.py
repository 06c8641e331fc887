"""Errors of metrics are metric errors, and TypeErrors or ValueErrors."""

from __future__ import annotations

import pytest
import torch

from recsys.metrics.errors import (
    MetricTypeError,
    MetricValueError,
    RecMetricException,
    raises_metric_errors,
)
from recsys.metrics.metrics_config import RecTaskInfo
from recsys.metrics.sum_metrics import MSEMetric


@raises_metric_errors
def parse(text: object) -> int:
    return int(text)  # type: ignore[call-overload,no-any-return]


def test_errors_keep_their_message_and_place() -> None:
    with pytest.raises(MetricValueError, match="invalid literal") as caught:
        parse("one")
    assert isinstance(caught.value, ValueError)
    assert caught.traceback[-1].name == "parse"
    assert caught.value.__cause__ is None
    with pytest.raises(MetricTypeError, match="NoneType"):
        parse(None)
    assert parse("1") == 1


def test_other_errors_pass() -> None:
    @raises_metric_errors
    def fail(error: Exception) -> None:
        raise error

    for error in (KeyError("a"), RuntimeError("b"), MetricValueError("c")):
        with pytest.raises(type(error)) as caught:
            fail(error)
        assert caught.value is error


def test_metrics_raise_them() -> None:
    arguments = {"world_size": 1, "my_rank": 0, "batch_size": 4}
    with pytest.raises(RecMetricException, match="window_size must be at least"):
        MSEMetric(**arguments, tasks=[RecTaskInfo()], window_size=1)
    metric = MSEMetric(**arguments, tasks=[RecTaskInfo("a")])
    good = {"a": torch.ones(2)}
    with pytest.raises(RecMetricException, match="predictions must have every task"):
        metric.update(predictions={}, labels=good, weights=None)
    with pytest.raises(MetricTypeError, match="required_inputs must be a dictionary"):
        metric.update(predictions=good, labels=good, weights=None, required_inputs=[])  # type: ignore[arg-type]
