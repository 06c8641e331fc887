"""Sum metrics equal formulas in numpy and scikit-learn, over batches, windows and ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn import metrics as sk

from recsys.metrics.metric_module import RecMetricModule, generate_metric_module
from recsys.metrics.metrics_config import MetricsConfig, RecMetricDef, RecMetricEnum, RecTaskInfo
from tests.metrics.data import TASKS, batches_of_rank, column, in_window, model_out
from tests.ranks import RankPool

RATE = 0.25  # of recalibration
LIMIT = 0.625  # what counts as predicted positive
WINDOW = 40  # samples of a rank

ARGUMENTS = {
    RecMetricEnum.NE: {"include_logloss": True},
    RecMetricEnum.MSE: {"include_r_squared": True},
    RecMetricEnum.SEGMENTED_NE: {"num_groups": 3, "include_logloss": True},
    RecMetricEnum.RECALIBRATED_NE: {"recalibration_coefficient": RATE},
    RecMetricEnum.RECALIBRATED_CALIBRATION: {"recalibration_coefficient": RATE},
    RecMetricEnum.ACCURACY: {"threshold": LIMIT},
    RecMetricEnum.PRECISION: {"threshold": LIMIT},
    RecMetricEnum.RECALL: {"threshold": LIMIT},
}
METRICS = [
    *ARGUMENTS,
    RecMetricEnum.AVERAGE,
    RecMetricEnum.CALIBRATION,
    RecMetricEnum.CALI_FREE_NE,
    RecMetricEnum.CTR,
    RecMetricEnum.LOG_LOSS,
    RecMetricEnum.MAE,
    RecMetricEnum.NE_POSITIVE,
    RecMetricEnum.NMSE,
    RecMetricEnum.NUM_MISSING_LABELS,
    RecMetricEnum.NUM_POSITIVE_SAMPLES,
    RecMetricEnum.SCALAR,
    RecMetricEnum.SUM_WEIGHTS,
    RecMetricEnum.TENSOR_WEIGHTED_AVG,
    RecMetricEnum.UNWEIGHTED_NE,
    RecMetricEnum.WEIGHTED_AVG,
    RecMetricEnum.WEIGHTED_SUM_PREDICTIONS,
]


def entropy(rate):
    return -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)


def ne(p, y, w):
    return sk.log_loss(y, p, sample_weight=w, labels=[0, 1]) / entropy(np.average(y, weights=w))


def oracle(batches, task):
    """Return all results over some batches, by their keys without task and span."""
    p, y, w = (column(batches, f"{task}_{kind}") for kind in ("prediction", "label", "weight"))
    segment, tensor = column(batches, "grouping_keys"), column(batches, "tensor")
    log_loss = sk.log_loss(y, p, sample_weight=w)
    recalibrated = RATE * p / (RATE * p + 1 - p)
    decided = p >= LIMIT
    mean = np.full_like(p, np.average(p, weights=w))
    mse = sk.mean_squared_error(y, p, sample_weight=w)
    found = {
        "ne|ne": ne(p, y, w),
        "ne|logloss": log_loss / math.log(2),
        "logloss|logloss": log_loss,
        "ne_positive|ne_positive": -np.sum(w * y * np.log(p))
        / w.sum()
        / entropy(np.average(y, weights=w)),
        "unweighted_ne|unweighted_ne": ne(p, y, np.ones_like(w)),
        "recalibrated_ne|ne": ne(recalibrated, y, w),
        "recalibrated_calibration|calibration": np.sum(recalibrated * w) / np.sum(y * w),
        "cali_free_ne|cali_free_ne": log_loss / sk.log_loss(y, mean, sample_weight=w),
        "calibration|calibration": np.sum(p * w) / np.sum(y * w),
        "ctr|ctr": np.average(y, weights=w),
        "average|label_average": np.average(y, weights=w),
        "average|prediction_average": np.average(p, weights=w),
        "weighted_avg|weighted_avg": np.average(p, weights=w),
        "weighted_avg|weighted_avg_of_tensor": np.average(tensor, weights=w),
        "scalar|scalar": y.mean(),
        "mse|mse": mse,
        "mse|rmse": math.sqrt(mse),
        "mse|r_squared": sk.r2_score(y, p, sample_weight=w),
        "nmse|nmse": mse / sk.mean_squared_error(y, np.ones_like(y), sample_weight=w),
        "mae|mae": sk.mean_absolute_error(y, p, sample_weight=w),
        "accuracy|accuracy": sk.accuracy_score(y, decided, sample_weight=w),
        "precision|precision": sk.precision_score(y, decided, sample_weight=w),
        "recall|recall": sk.recall_score(y, decided, sample_weight=w),
        "sum_weights|sum_weights": w.sum(),
        "num_positive_samples|num_positive_samples": np.sum(w * y),
        "num_missing_labels|num_missing_labels": 0.0,
        "weighted_sum_predictions|weighted_sum_predictions": np.sum(w * p),
    }
    found["nmse|nrmse"] = math.sqrt(found["nmse|nmse"])
    for place in range(3):
        of = segment == place
        found[f"segmented_ne|segmented_ne_{place}"] = ne(p[of], y[of], w[of])
        bits = sk.log_loss(y[of], p[of], sample_weight=w[of], labels=[0, 1]) / math.log(2)
        found[f"segmented_ne|logloss_{place}"] = bits
    return found


def build(metrics, world_size=1, my_rank=0, tasks=TASKS, window=WINDOW, **settings):
    infos = [
        RecTaskInfo(t, f"{t}_label", f"{t}_prediction", f"{t}_weight", tensor_name="tensor")
        for t in tasks
    ]
    arguments = ARGUMENTS | {RecMetricEnum.TENSOR_WEIGHTED_AVG: {"description": "_of_tensor"}}
    config = MetricsConfig(
        rec_tasks=infos,
        rec_metrics={
            metric: RecMetricDef(
                rec_tasks=infos, window_size=window * world_size, arguments=arguments.get(metric)
            )
            for metric in metrics
        },
        **settings,
    )
    return generate_metric_module(
        RecMetricModule, config, 16, world_size, my_rank, {}, torch.device("cpu")
    )


def compute_on_rank():
    rank = dist.get_rank()
    module = build(METRICS, dist.get_world_size(), rank, compute_on_all_ranks=True)
    for batch in batches_of_rank(rank):
        module.update(batch)
    return {key: float(value) for key, value in module.compute().items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_equals_the_formulas(num_ranks: int, ranks: RankPool) -> None:
    of_ranks = [batches_of_rank(rank) for rank in range(num_ranks)]
    spans = {
        "lifetime": [batch for batches in of_ranks for batch in batches],
        "window": [batch for batches in of_ranks for batch in in_window(batches, WINDOW)],
    }
    expected = {}
    for span, batches in spans.items():
        for task in TASKS:
            for key, value in oracle(batches, task).items():
                namespace, name = key.split("|")
                expected[f"{namespace}-{task}|{span}_{name}"] = value
    for found in ranks(num_ranks, compute_on_rank):
        assert found == pytest.approx(expected, abs=1e-6, rel=1e-6)


def test_serving_metrics_count_samples_with_a_weight() -> None:
    module = build([RecMetricEnum.SERVING_NE, RecMetricEnum.SERVING_CALIBRATION], tasks=("click",))
    batches = batches_of_rank(0)
    for batch in batches:
        batch["click_weight"][::4] = 0.0
        module.update(batch)
    found = module.compute()
    expected = oracle(batches, "click")
    assert found["serving_ne-click|lifetime_ne"].item() == pytest.approx(expected["ne|ne"])
    calibration = found["serving_calibration-click|lifetime_calibration"].item()
    assert calibration == pytest.approx(expected["calibration|calibration"])
    num_weighted = np.count_nonzero(column(batches, "click_weight"))
    assert found["serving_ne-click|total_examples"] == num_weighted == 42
    assert found["serving_calibration-click|total_examples"] == num_weighted
    assert "serving_ne-click|window_total_examples" not in found


def test_multiclass_recall_is_for_each_k() -> None:
    config_arguments = {"number_of_classes": 4}
    task = RecTaskInfo()
    config = MetricsConfig(
        rec_tasks=[task],
        rec_metrics={
            RecMetricEnum.MULTICLASS_RECALL: RecMetricDef(
                rec_tasks=[task], arguments=config_arguments
            )
        },
    )
    module = generate_metric_module(RecMetricModule, config, 8, 1, 0, {}, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(24, 4, generator=generator)
    label = torch.randint(0, 4, (24,), generator=generator)
    weight = torch.rand(24, generator=generator)
    for part in range(0, 24, 8):
        of = slice(part, part + 8)
        module.update({"prediction": scores[of], "label": label[of], "weight": weight[of]})
    found = module.compute()["multiclass_recall-DefaultTask|lifetime_multiclass_recall"]
    expected = [
        sk.top_k_accuracy_score(label, scores, k=k, sample_weight=weight) for k in (1, 2, 3)
    ]
    assert found.tolist() == [pytest.approx([*expected, 1.0], abs=1e-6)]
    module.reset()
    for place in range(4):  # equal predictions have the recall of chance
        label = torch.full((8,), place)
        module.update({"prediction": torch.ones(8, 4), "label": label, "weight": torch.ones(8)})
        found = module.compute()["multiclass_recall-DefaultTask|window_multiclass_recall"]
        assert found.tolist() == [pytest.approx([0.25, 0.5, 0.75, 1.0])]


def test_labels_that_are_missing_are_counted() -> None:
    module = build(
        [RecMetricEnum.NUM_MISSING_LABELS, RecMetricEnum.NUM_POSITIVE_SAMPLES], tasks=("click",)
    )
    batch = model_out(0, 4)
    batch["click_label"] = torch.tensor([1.0, math.nan, 0.0, math.nan])
    batch["click_weight"] = torch.tensor([1.0, 2.0, 4.0, 8.0])
    module.update(batch)
    found = module.compute()
    assert found["num_missing_labels-click|window_num_missing_labels"] == 10.0
    assert found["num_positive_samples-click|window_num_positive_samples"] == 1.0


def test_a_segment_that_does_not_exist_is_left_out() -> None:
    module = build([RecMetricEnum.SEGMENTED_NE], tasks=("click",), window=64)
    batch = model_out(0, 64)
    segment = batch["grouping_keys"].clone()
    expected = oracle([batch], "click")["segmented_ne|segmented_ne_0"]
    batch["grouping_keys"] = segment.where(segment == 0, torch.where(segment == 1, -1, 3))
    module.update(batch)
    found = module.compute()
    assert found["segmented_ne-click|lifetime_segmented_ne_0"].item() == pytest.approx(expected)
    assert found["segmented_ne-click|lifetime_segmented_ne_1"].isnan()


@pytest.mark.parametrize("kind", ["no positives", "no weight", "nothing"])
def test_what_is_not_defined_is_not_a_number(kind: str) -> None:
    module = build([RecMetricEnum.NE, RecMetricEnum.CALIBRATION, RecMetricEnum.CTR], tasks=("a",))
    if kind != "nothing":
        batch = model_out(0, 8, tasks=("a",))
        batch["a_label" if kind == "no positives" else "a_weight"].zero_()
        module.update(batch)
    found = {key.partition("|")[2]: float(v) for key, v in module.compute().items()}
    expected = {"ne": math.inf, "calibration": math.inf, "ctr": 0.0}
    if kind != "no positives":
        expected = dict.fromkeys(expected, math.nan)
    for name, value in expected.items():
        assert found[f"window_{name}"] == pytest.approx(value, nan_ok=True), name


def test_nan_leaves_the_window_with_its_batch() -> None:
    module = build([RecMetricEnum.NE], tasks=("click",))
    bad = model_out(0, 16)
    bad["click_prediction"][3] = math.nan
    batches = [model_out(seed, 16) for seed in (1, 2)]
    module.update(bad)
    assert module.compute()["ne-click|window_ne"].isnan()
    for batch in batches:
        module.update(batch)
    expected = oracle(batches, "click")["ne|ne"]
    assert module.compute()["ne-click|window_ne"].item() == pytest.approx(expected)
    assert module.compute()["ne-click|lifetime_ne"].isnan()


def test_bad_arguments() -> None:
    task = RecTaskInfo()

    def of(metric: RecMetricEnum, **arguments: object) -> None:
        definition = RecMetricDef(rec_tasks=[task], arguments=arguments)
        config = MetricsConfig(rec_tasks=[task], rec_metrics={metric: definition})
        generate_metric_module(RecMetricModule, config, 8, 1, 0, {}, torch.device("cpu"))

    with pytest.raises(ValueError, match=r"takes the arguments \['threshold'\]; received \['limit"):
        of(RecMetricEnum.RECALL, limit=1)
    with pytest.raises(ValueError, match="needs the argument number_of_classes"):
        of(RecMetricEnum.MULTICLASS_RECALL)
    with pytest.raises(ValueError, match="num_labels must be positive; received 0"):
        of(RecMetricEnum.MULTI_LABEL_PRECISION, num_labels=0)
    with pytest.raises(ValueError, match=r"name for each label, 2; .*\['a'\]"):
        of(RecMetricEnum.MULTI_LABEL_PRECISION, num_labels=2, label_names=["a"])
    with pytest.raises(ValueError, match=r"must have a tensor_name; received \['DefaultTask'\]"):
        of(RecMetricEnum.TENSOR_WEIGHTED_AVG)


def test_float32_is_enough_where_sums_cancel_or_losses_are_small() -> None:
    rng = np.random.default_rng(0)
    given = {
        "a_prediction": 1000.0 + rng.standard_normal(1024),
        "a_label": 1000.0 + rng.standard_normal(1024),
        "a_weight": rng.random(1024),
        "b_prediction": rng.random(1024) * 1e-9,
        "b_label": np.zeros(1024),
        "b_weight": rng.random(1024),
    }
    given = {name: torch.tensor(values, dtype=torch.float32) for name, values in given.items()}
    values = {name: tensor.double().numpy() for name, tensor in given.items()}
    module = build([RecMetricEnum.MSE, RecMetricEnum.LOG_LOSS], tasks=("a", "b"), window=1024)
    module.update(given)
    found = module.compute()

    p, y, w = (values[f"a_{kind}"] for kind in ("prediction", "label", "weight"))
    expected = sk.r2_score(y, p, sample_weight=w)
    assert found["mse-a|window_r_squared"].item() == pytest.approx(expected, rel=1e-6)
    p, w = values["b_prediction"], values["b_weight"]
    expected = np.average(-np.log1p(-p), weights=w)
    assert found["logloss-b|window_logloss"].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_labels_of_any_dtype_are_computed_in_float32_or_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = build([RecMetricEnum.NE, RecMetricEnum.MSE], tasks=("a",))
    wanted = build([RecMetricEnum.NE, RecMetricEnum.MSE], tasks=("a",))
    given = {"a_prediction": torch.rand(16), "a_label": (torch.arange(16) % 2).to(dtype)}
    given["a_weight"] = torch.ones(16)
    module.update(given)
    wanted.update({name: tensor.double() for name, tensor in given.items()})
    expected = wanted.compute()
    for name, value in module.compute().items():
        assert value.item() == pytest.approx(expected[name].item(), rel=1e-6, abs=1e-6), name


def one_class_on_rank(label: float) -> dict[str, float]:
    """Results of samples of one class, whose weights are not whole."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for tasks in (("a",), tuple("abcde")):
        generator = torch.Generator().manual_seed(rank)
        module = build(ONE_CLASS, num_ranks, rank, tasks, window=128, compute_on_all_ranks=True)
        for seed in range(8):
            batch = {k: v.double() for k, v in model_out(seed, 16, tasks).items()}
            for task in tasks:
                batch[f"{task}_label"].fill_(label)
                weights = torch.rand(16, generator=generator, dtype=torch.float64)
                batch[f"{task}_weight"] = weights * 0.1
            module.update(batch)
        found |= {f"{key} of {len(tasks)}": float(v) for key, v in module.compute().items()}
    return found


ONE_CLASS = [
    RecMetricEnum.NE,
    RecMetricEnum.SERVING_NE,
    RecMetricEnum.NE_POSITIVE,
    RecMetricEnum.UNWEIGHTED_NE,
    RecMetricEnum.RECALIBRATED_NE,
    RecMetricEnum.SEGMENTED_NE,
    RecMetricEnum.NMSE,
    RecMetricEnum.MSE,
]


ENTROPIES = ("ne", "unweighted_ne", *(f"segmented_ne_{place}" for place in range(3)))
UNDEFINED = {
    0.0: dict.fromkeys(ENTROPIES, math.inf) | {"r_squared": -math.inf},
    1.0: dict.fromkeys((*ENTROPIES, "ne_positive", "nmse", "nrmse"), math.inf)
    | {"r_squared": -math.inf},
}


@pytest.mark.parametrize("label", UNDEFINED)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_one_class_divides_by_zero_and_not_by_rounding(
    num_ranks: int, label: float, ranks: RankPool
) -> None:
    """Each place of a reduced tensor is rounded in an order of its own."""
    expected = UNDEFINED[label]
    for found in ranks(num_ranks, one_class_on_rank, label):
        names = {key: key.partition("|")[2].partition(" ")[0] for key in found}
        names = {key: name.partition("_")[2] for key, name in names.items()}  # without the span
        assert {*names.values()} >= {*expected}
        for key, name in names.items():
            if name in expected:
                assert found[key] == expected[name], key


def test_predictions_of_one_only() -> None:
    module = build([RecMetricEnum.CALI_FREE_NE, RecMetricEnum.RECALIBRATED_NE], tasks=("a",))
    batch = model_out(0, 16, tasks=("a",))
    batch["a_prediction"].fill_(1.0)
    batch["a_weight"] = torch.full((16,), 0.1)
    module.update(batch)
    found = module.compute()
    # All predictions equal their mean.
    assert found["cali_free_ne-a|window_cali_free_ne"].item() == pytest.approx(1.0)
    loss = -math.log(1e-12) * (1.0 - batch["a_label"].mean().item())
    rate = batch["a_label"].mean().item()
    assert found["recalibrated_ne-a|window_ne"].item() == pytest.approx(loss / entropy(rate))


def test_labels_that_differ_little_have_a_spread() -> None:
    module = build([RecMetricEnum.MSE], tasks=("a",))
    batch = {k: v.double() for k, v in model_out(0, 16, tasks=("a",)).items()}
    batch["a_label"] = 1e6 + (torch.arange(16) % 2).double()
    batch["a_prediction"] = batch["a_label"].flip(0) * 0.1 + batch["a_label"] * 0.9
    module.update(batch)
    labels, found, weight = (batch[f"a_{kind}"] for kind in ("label", "prediction", "weight"))
    mean = (labels * weight).sum() / weight.sum()
    wrong, spread = (weight * (labels - x).square() for x in (found, mean))
    expected = float(1 - wrong.sum() / spread.sum())
    r_squared = module.compute()["mse-a|window_r_squared"].item()
    assert r_squared == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("label", [0.0, 0.1, 0.7, 1.0, 2.3])
def test_labels_that_are_all_equal_have_no_spread(label: float) -> None:
    module = build([RecMetricEnum.MSE], tasks=("a",), window=1000)
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        batch = {k: v.double() for k, v in model_out(seed, 16, tasks=("a",)).items()}
        batch["a_label"].fill_(label)
        batch["a_weight"] = torch.rand(16, generator=generator, dtype=torch.float64)
        module.update(batch)
        found = module.compute()
        assert found["mse-a|window_r_squared"] == -math.inf
