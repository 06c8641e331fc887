import math

import numpy as np
import pytest
import torch

from recsys.metrics.metric_module import REC_METRICS_MAPPING
from recsys.metrics.metrics_config import RecComputeMode, RecMetricEnum, RecTaskInfo
from recsys.metrics.metrics_namespace import MetricName, MetricNamespace
from recsys.metrics.rank_metrics import AUCMetric
from recsys.metrics.rec_metric import RecMetricList
from recsys.metrics.sum_metrics import (
    LABEL,
    WEIGHT,
    CaliFreeNEMetric,
    CTRMetric,
    NEMetric,
    NEPositiveMetric,
    SegmentedNEMetric,
    ServingNEMetric,
    SumMetric,
    WeightedSumPredictionsMetric,
)


def build(cls, tasks=("a", "b"), window_size=8, batch_size=2, **kwargs):
    infos = [RecTaskInfo(task) for task in tasks]
    return cls(
        world_size=1, my_rank=0, batch_size=batch_size, tasks=infos, window_size=window_size,
        **kwargs,
    )  # fmt: skip


def batch(**labels):
    tensors = {task: torch.tensor(values) for task, values in labels.items()}
    return {
        "predictions": {task: torch.full((len(t),), 0.5) for task, t in tensors.items()},
        "labels": tensors,
        "weights": None,
    }


def test_alone():
    metric = build(CTRMetric)
    metric.update(**batch(a=[1.0, 0.0], b=[1.0, 1.0]))
    assert metric.compute() == {
        "ctr-a|lifetime_ctr": 0.5,
        "ctr-b|lifetime_ctr": 1.0,
        "ctr-a|window_ctr": 0.5,
        "ctr-b|window_ctr": 1.0,
    }
    assert metric.local_compute()["ctr-a|local_window_ctr"] == 0.5
    metric.reset()
    assert metric.compute()["ctr-a|lifetime_ctr"].isnan()


def test_tasks_may_be_rows_of_one_tensor():
    metric = build(NEMetric)
    ones = torch.ones(2, 4)
    metric.update(predictions=ones * 0.5, labels=torch.eye(4)[:2], weights=ones)
    entropy = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert metric.compute()["ne-b|window_ne"].item() == pytest.approx(math.log(2) / entropy)


def test_whole_numbers_and_columns_are_taken():
    metric = build(CTRMetric, tasks=("a",))
    metric.update(
        predictions={"a": torch.rand(2, 1).half()},
        labels={"a": torch.tensor([[0], [16777217]])},
        weights={"a": torch.tensor([[True], [True]])},
    )
    assert metric.compute()["ctr-a|window_ctr"] == 16777217 / 2


def test_nothing_given_is_kept():
    metric = build(CTRMetric, tasks=("a",))
    given = batch(a=[1.0, 0.0])
    metric.update(**given)
    given["labels"]["a"].zero_()
    assert metric.compute()["ctr-a|window_ctr"] == 0.5


def test_a_list_shares_sums():
    metrics = RecMetricList([build(CTRMetric), build(NEMetric), build(CTRMetric, tasks=("b",))])
    metrics.update(**batch(a=[1.0, 0.0], b=[1.0, 1.0]))
    assert len(metrics) == 3
    assert metrics[0].compute()["ctr-b|window_ctr"] == 1.0
    assert "ne-a|window_ne" not in metrics[0].compute()
    assert set(metrics.compute()) > set(metrics[0].compute())
    assert {key for key in metrics.state_dict() if "lifetime.a" in key} == {
        f"_accumulators.lifetime.a.{name}" for name in ("label", "weight", "log_loss", "negative")
    }


def test_a_formula_of_ones_own():
    class OddsMetric(SumMetric):
        namespace = MetricNamespace.DEFAULT
        sums = (LABEL, WEIGHT)
        results = {MetricName.DEFAULT: lambda s: s["label"] / (s["weight"] - s["label"])}  # noqa: RUF012

    metric = build(OddsMetric, tasks=("a",))
    metric.update(**batch(a=[1.0, 1.0, 1.0, 0.0]))
    assert metric.compute()["-a|window_"] == 3.0


def test_class_statements_define_metrics():
    class ShareMetric(
        SumMetric, sums=(LABEL, WEIGHT), formula=lambda label, weight: label / weight
    ):
        namespace = MetricName.CTR
        arguments = {"scale": 1.0}  # noqa: RUF012

    class OtherShareMetric(ShareMetric):
        namespace = MetricName.MAE

    class UserAUCMetric(AUCMetric):
        """Metrics of rows can be derived from, too."""

    for kind, key in ((ShareMetric, "ctr-a|window_ctr"), (OtherShareMetric, "mae-a|window_ctr")):
        metric = build(kind, tasks=("a",), scale=2.0)
        metric.update(**batch(a=[1.0, 1.0, 1.0, 0.0]))
        assert metric.compute()[key] == 0.75
        with pytest.raises(TypeError, match=r"scale must be a number; .*'x'"):
            build(kind, scale="x")
    assert REC_METRICS_MAPPING[RecMetricEnum.CTR] is CTRMetric  # own classes do not replace it
    assert REC_METRICS_MAPPING[RecMetricEnum.AUC] is AUCMetric
    assert set(build(UserAUCMetric, grouped_auc=False).compute()) == {
        "auc-a|window_auc",
        "auc-b|window_auc",
    }


def test_sync_alone_changes_nothing():
    metric = build(CTRMetric)
    metric.update(**batch(a=[1.0, 0.0], b=[1.0, 1.0]))
    metric.sync()
    assert metric.local_compute()["ctr-a|local_window_ctr"] == 0.5
    with pytest.raises(RuntimeError, match=r"sync\(\) must not be called twice"):
        metric.sync()
    with pytest.raises(RuntimeError, match="must not be called while synced"):
        metric.update(**batch(a=[1.0], b=[1.0]))
    metric.unsync()
    with pytest.raises(RuntimeError, match=r"unsync\(\) must come after sync\(\)"):
        metric.unsync()
    metric.update(**batch(a=[1.0], b=[1.0]))


def test_bad_input():
    with pytest.raises(ValueError, match=r"tasks of different names; .*\['a', 'a'\]"):
        build(CTRMetric, tasks=("a", "a"))
    with pytest.raises(ValueError, match="times batch_size, 9; received 8"):
        build(CTRMetric, batch_size=9)
    metric = build(CTRMetric)
    with pytest.raises(ValueError, match=r"have every task; .*\['a'\], .*'b'"):
        metric.update(**batch(a=[1.0]))
    with pytest.raises(ValueError, match=r"1; received predictions.*'b'.*shape \[2\]"):
        metric.update(**batch(a=[1.0], b=[1.0, 0.0]))
    given = batch(a=[1.0], b=[0.0])
    with pytest.raises(TypeError, match="labels of the task 'a' must"):
        metric.update(**given | {"labels": {"a": [1.0], "b": [0.0]}})
    given["weights"] = {"a": torch.ones(1), "b": torch.ones(1, device="meta")}
    with pytest.raises(ValueError, match="must be on one device; received"):
        metric.update(**given)


def test_nothing_that_is_kept_has_a_graph():
    metric = build(NEMetric, tasks=("a",))
    given = batch(a=[1.0, 0.0])
    given["predictions"]["a"].requires_grad_()
    for weights in (None, {"a": torch.ones(2)}):  # converted, and taken as they are
        metric.update(**given | {"weights": weights})
    found = metric.compute()["ne-a|window_ne"]
    assert found == pytest.approx(1.0)
    assert not found.requires_grad


@pytest.mark.parametrize("mode", list(RecComputeMode))
def test_results_are_of_one_element_or_scalars(mode):
    shape = [1] if mode is RecComputeMode.UNFUSED_TASKS_COMPUTATION else []
    for kind, dtypes in (
        (CTRMetric, {torch.float64}),
        (AUCMetric, {torch.float32}),
        (ServingNEMetric, {torch.float64, torch.int64}),
    ):
        metric = build(kind, compute_mode=mode)
        metric.update(**batch(a=[1.0, 0.0], b=[1.0, 1.0]))
        results = metric.compute().values()
        assert {value.dtype for value in results} == dtypes
        assert all(list(value.shape) == shape for value in results)
    segments = build(SegmentedNEMetric, compute_mode=mode)
    segments.update(**batch(a=[1.0], b=[0.0]), grouping_keys=torch.zeros(1))
    [first, *_] = segments.compute().values()
    assert (first.dtype, first.dim()) == (torch.float32, 0)


def test_sums_of_windows_are_float64():
    """Float32 rounds at 2 ** 24."""
    metric = build(WeightedSumPredictionsMetric, tasks=("a",), window_size=100)
    for value in (2.0**24, 1.0, 1.0):
        prediction = {"a": torch.tensor([value])}
        metric.update(predictions=prediction, labels=prediction, weights=None)
        metric.compute()  # adds up each batch by itself
    found = metric.compute()["weighted_sum_predictions-a|window_weighted_sum_predictions"]
    assert found.item() == 2.0**24 + 2


def test_required_inputs_come_together_or_alone():
    expected = build(AUCMetric, tasks=("a",), grouped_auc=True)
    found = build(AUCMetric, tasks=("a",), grouped_auc=True)
    keys = torch.tensor([0, 1, 1, 0])
    given = batch(a=[1.0, 0.0, 1.0, 0.0]) | {"predictions": {"a": torch.rand(4)}}
    expected.update(**given, grouping_keys=keys)
    found.update(**given, required_inputs={"grouping_keys": keys})
    assert found.compute() == expected.compute()


def test_memory_usage_counts_what_is_kept():
    metric = build(AUCMetric)
    assert sum(metric.get_memory_usage().values()) == 0
    metric.update(**batch(a=[1.0, 0.0], b=[1.0, 1.0]))
    assert sum(metric.get_memory_usage().values()) == 3 * 2 * 2 * 4
    metric = build(CTRMetric)
    metric.update(**batch(a=[1.0, 0.0], b=[1.0, 1.0]))
    # Two sums of two tasks, over the lifetime and over a window of one part.
    assert sum(metric.get_memory_usage().values()) == 2 * (2 * 2 * 8)


def test_no_weight_at_all_may_be_allowed():
    for kind in (NEMetric, NEPositiveMetric, CaliFreeNEMetric):
        for allowed in (False, True):
            metric = build(kind, allow_missing_label_with_zero_weight=allowed)
            weights = {"a": torch.zeros(2), "b": torch.ones(2)}
            metric.update(**{**batch(a=[1.0, 0.0], b=[1.0, 0.0]), "weights": weights})
            for key, value in metric.compute().items():
                if "-b" in key:
                    assert value.item() > 0.1
                else:
                    assert value.item() == 1e-12 if allowed else value.isnan()


MASKED = (
    RecTaskInfo("a", "a_label", "a_prediction", "a_weight", mask_name="a_mask"),
    RecTaskInfo("b", "b_label", "b_prediction", "b_weight"),
    RecTaskInfo("c", "c_label", "c_prediction", "c_weight", mask_name="c_mask"),
)


@pytest.mark.parametrize("is_alone", [True, False])
def test_tasks_have_masks_of_their_own(is_alone):
    """Float64 sums of the labeled samples; other samples have NaN labels."""
    torch.manual_seed(0)
    options = {"world_size": 1, "my_rank": 0, "batch_size": 9, "window_size": 99, "tasks": MASKED}
    metrics = [CTRMetric(**options), NEMetric(**options), AUCMetric(**options)]
    together = RecMetricList([CTRMetric(**options), NEMetric(**options), AUCMetric(**options)])
    rows = {task.name: [] for task in MASKED}
    for size in (9, 0, 5, 8):
        labels, predictions, weights = torch.rand(3, 3, size).double()
        labels = (labels < 0.5).double()
        inputs = {"a_mask": torch.rand(size) < 0.6, "c_mask": torch.rand(size, 1) < 0.3}
        if size == 8:
            inputs["a_mask"] = None  # all labels
        for index, task in enumerate(MASKED):
            mask = inputs.get(task.mask_name)
            mask = torch.ones(size).bool() if mask is None else mask.view(-1)
            rows[task.name].append((predictions[index], labels[index], weights[index], mask))
        kept = {name: torch.stack([parts[-1][3]]) for name, parts in rows.items()}
        labels = labels.masked_fill(~torch.cat([*kept.values()]), math.nan)
        for metric in metrics if is_alone else [together]:
            given = {"predictions": predictions, "labels": labels, "weights": weights}
            metric.update(**given, required_inputs=inputs)
    found = {
        k: v.item() for m in (metrics if is_alone else [together]) for k, v in m.compute().items()
    }
    for name, parts in rows.items():
        columns = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
        p, y, w, mask = columns
        p, y, w = p[mask], y[mask], w[mask]
        rate = np.average(y, weights=w)
        loss = -np.average(np.where(y == 1, np.log(p), np.log(1 - p)), weights=w)
        entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
        pairs = (w * (y == 1))[:, None] * (w * (y == 0))
        auc = (pairs * (p[:, None] > p)).sum() / pairs.sum()
        assert found[f"ctr-{name}|window_ctr"] == pytest.approx(rate)
        assert found[f"ne-{name}|lifetime_ne"] == pytest.approx(loss / entropy)
        assert found[f"auc-{name}|window_auc"] == pytest.approx(auc)
    if is_alone:
        again = NEMetric(**options)
        again.load_state_dict(metrics[1].state_dict())
        assert again.compute()["ne-c|lifetime_ne"] == found["ne-c|lifetime_ne"]


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({}, ValueError, "the label mask 'a_mask'.* Pass None"),
        ({"a_mask": torch.ones(2)}, TypeError, "mask 'a_mask' must be .*bool"),
        ({"a_mask": torch.ones(3).bool()}, ValueError, "one value per label, 2; received"),
    ],
)
def test_wrong_masks(inputs, error, message):
    options = {"world_size": 1, "my_rank": 0, "batch_size": 2, "window_size": 9}
    metric = CTRMetric(**options, tasks=MASKED[:1])
    ones = torch.ones(1, 2)
    with pytest.raises(error, match=message):
        metric.update(predictions=ones, labels=ones, weights=ones, required_inputs=inputs)
