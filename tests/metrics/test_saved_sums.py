"""State dicts that TorchRec saved load into metrics; values of TorchRec are in tests/compat."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recsys.metrics.metric_module import REC_METRICS_MAPPING
from recsys.metrics.metrics_config import RecTaskInfo, SessionMetricDef
from recsys.metrics.metrics_namespace import MetricNamespace
from recsys.metrics.rank_metrics import HindsightTargetPRMetric
from recsys.metrics.rec_metric import RecMetric, RecMetricList
from recsys.metrics.saved_sums import FORMULAS
from recsys.metrics.session_metrics import GAUCMetric, NDCGMetric, PrecisionSessionMetric
from recsys.metrics.sum_metrics import (
    AccuracyMetric,
    CaliFreeNEMetric,
    MulticlassRecallMetric,
    MultiLabelPrecisionMetric,
    NEMetric,
    RecallMetric,
    SegmentedNEMetric,
)
from recsys.metrics.throughput import ThroughputMetric, TowerQPSMetric

TASK = RecTaskInfo("a", session_metric_def=SessionMetricDef("session", 2))


def build(kind: type[RecMetric], **options: Any) -> RecMetric:
    return kind(world_size=1, my_rank=0, batch_size=4, tasks=[TASK], window_size=100, **options)


def load(kind: type[RecMetric], sums: dict[str, list[Any]], **options: Any) -> dict[str, Any]:
    """Results of the lifetime after a load, by name."""
    metric = build(kind, **options)
    saved = {f"_metrics_computations.0.{k}": torch.tensor(v).double() for k, v in sums.items()}
    metric.load_state_dict(saved)
    assert len(saved) == len(sums)  # is not changed
    results = {key.partition("|")[2]: value for key, value in metric.compute().items()}
    return {
        key.removeprefix("lifetime_"): value.squeeze(0).tolist()
        for key, value in results.items()
        if "window" not in key
    }


def test_each_sum_has_one_formula() -> None:
    kinds = {kind.namespace: kind for kind in REC_METRICS_MAPPING.values()}
    needed = {MetricNamespace.MULTICLASS_RECALL: {"number_of_classes": 3}}
    for namespace, formulas in FORMULAS.items():
        if namespace is not MetricNamespace.WEIGHTED_AVG:  # TensorWeightedAvgMetric needs a name
            metric = build(kinds[namespace], **needed.get(namespace, {}))
            assert len(formulas) >= len(metric.quantities()) or "threshold" in metric.options


def test_sums_of_sessions_and_classes() -> None:
    sessions: dict[str, list[Any]] = {"sum_ndcg": [3.0], "num_sessions": [4.0]}
    assert load(NDCGMetric, sessions) == {"ndcg": 0.75}
    top: dict[str, list[Any]] = {"num_true_pos": [3.0], "num_false_pos": [1.0]}
    assert load(PrecisionSessionMetric, top) == {"precision_session_level": 0.75}
    areas: dict[str, list[Any]] = {"auc_sum": [3.0], "num_samples": [4.0]}
    assert load(GAUCMetric, areas) == {"gauc": 0.75, "gauc_num_samples": 4.0}
    classes: dict[str, list[Any]] = {"tp_at_k": [[1.0, 2.0, 4.0]], "total_weights": [4.0]}
    recalls = load(MulticlassRecallMetric, classes, number_of_classes=3)
    assert recalls == {"multiclass_recall": [0.25, 0.5, 1.0]}


def test_sums_of_labels_come_in_the_order_of_labels() -> None:
    sums: dict[str, list[Any]] = {
        "true_pos_sum_z": [3.0],
        "false_pos_sum_z": [1.0],
        "true_pos_sum_y": [1.0],
        "false_pos_sum_y": [1.0],
    }
    found = load(MultiLabelPrecisionMetric, sums, num_labels=2, label_names=["z", "y"])
    assert found == {"multi_label_precisionz": 0.75, "multi_label_precisiony": 0.5}


def test_sums_for_another_number_of_tasks_are_an_error() -> None:
    sums: dict[str, list[Any]] = {
        "true_pos_sum_label_0": [3.0, 1.0],
        "false_pos_sum_label_0": [1.0, 1.0],
    }
    with pytest.raises(ValueError, match=r"right_of_1 .*\['a'\]"):
        load(MultiLabelPrecisionMetric, sums)


def test_sums_of_segments() -> None:
    sums: dict[str, list[Any]] = {
        "cross_entropy_sum": [[2.0, 3.0]],
        "weighted_num_samples": [[2.0, 2.0]],
        "pos_labels": [[1.0, 1.0]],
        "neg_labels": [[1.0, 1.0]],
    }
    found = load(SegmentedNEMetric, sums, num_groups=2)
    assert found == {"segmented_ne_0": 1.0, "segmented_ne_1": 1.5}


def test_sums_at_thresholds_become_bins() -> None:
    hits = [4.0] * 300 + [3.0] * 700
    others = [6.0] * 300 + [1.0] * 700
    sums: dict[str, list[Any]] = {
        "true_pos_sum": hits,
        "false_pos_sum": others,
        "false_neg_sum": [5.0 - hit for hit in hits],
    }
    found = load(HindsightTargetPRMetric, sums, target_precision=0.7)
    assert found["hindsight_target_pr"] == pytest.approx(300 / 999)
    assert found["hindsight_target_precision"] == pytest.approx(0.75)
    assert found["hindsight_target_recall"] == pytest.approx(0.6)


def test_cali_free_ne_has_our_definition() -> None:
    sums: dict[str, list[Any]] = {
        "cross_entropy_sum": [2.0],
        "weighted_num_samples": [4.0],
        "pos_labels": [1.0],
        "neg_labels": [3.0],
        "weighted_sum_predictions": [2.0],
    }
    # Always predicting one half costs one bit per sample.
    assert load(CaliFreeNEMetric, sums)["cali_free_ne"] == pytest.approx(0.5)


def test_samples_per_second() -> None:
    sums: dict[str, list[Any]] = {
        "num_examples": [50], "warmup_examples": [10], "time_lapse": [4.0]
    }  # fmt: skip
    assert load(TowerQPSMetric, sums) == {"qps": 10.0, "total_examples": 50}
    saved = {"total_examples": 50, "warmup_examples": 10, "time_lapse_after_warmup": 4.0}
    metric = ThroughputMetric(batch_size=1, world_size=1, window_seconds=10)
    metric.load_state_dict({name: torch.tensor(value) for name, value in saved.items()})
    assert metric.compute()["throughput-throughput|total_examples"].item() == 50


def test_a_list_shares_what_its_metrics_saved() -> None:
    metrics = RecMetricList([build(AccuracyMetric), build(RecallMetric), build(NEMetric)])
    sums = (
        {"accuracy_sum": 3.0, "weighted_num_samples": 4.0},
        {"true_pos_sum": 1.0, "false_neg_sum": 1.0},
        {
            "cross_entropy_sum": 4.0,
            "weighted_num_samples": 4.0,
            "pos_labels": 2.0,
            "neg_labels": 2.0,
        },
    )
    saved = {
        f"rec_metrics.{place}._metrics_computations.0.{name}": torch.tensor([value]).double()
        for place, values in enumerate(sums)
        for name, value in values.items()
    }
    metrics.load_state_dict(saved)
    found = metrics.compute()
    assert found["accuracy-a|lifetime_accuracy"].item() == 0.75
    assert found["recall-a|lifetime_recall"].item() == 0.5
    assert found["ne-a|lifetime_ne"].item() == pytest.approx(1.0)
    assert math.isnan(found["ne-a|window_ne"].item())
    part = {key: value for key, value in saved.items() if "cross_entropy" not in key}
    with pytest.raises(RuntimeError, match=r"Missing key.*lifetime\.a\.log_loss"):
        metrics.load_state_dict(part)
