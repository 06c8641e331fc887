"""Every metric that a configuration can ask for equals an independent formula, over 1 to 4 ranks.

A metric without an entry in `expected_of` fails here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn import metrics as sk

from recsys.metrics.metric_module import (
    REC_METRICS_MAPPING,
    RecMetricModule,
    generate_metric_module,
)
from recsys.metrics.metrics_config import (
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    SessionMetricDef,
)
from recsys.metrics.throughput import TowerQPSMetric
from tests.metrics import test_sum_metrics
from tests.metrics.data import Batch, column, in_window, model_out
from tests.metrics.test_ranking import area, inverted, precision
from tests.metrics.test_session_metrics import ndcg, top
from tests.offenders import check_each
from tests.ranks import RankPool

WINDOW = 40  # samples of a rank
NUM_CLASSES, NUM_LABELS, NUM_BINS, TARGET, WARMUP = 4, 3, 50, 0.6, 2
CLICK = RecTaskInfo(
    "click",
    "click_label",
    "click_prediction",
    "click_weight",
    SessionMetricDef("session_id", 2),
    tensor_name="tensor",
)
CLASS = RecTaskInfo("class", "class_label", "class_scores", "click_weight")
BITS = RecTaskInfo("bits", "bits_label", "bits_given", "click_weight")
ARGUMENTS: dict[Any, dict[str, Any]] = {
    **test_sum_metrics.ARGUMENTS,
    RecMetricEnum.AUC: {"grouped_auc": True},
    RecMetricEnum.AUPRC: {"grouped_auprc": True},
    RecMetricEnum.BINNED_AUC: {"num_bins": NUM_BINS},
    RecMetricEnum.HINDSIGHT_TARGET_PR: {"target_precision": TARGET},
    RecMetricEnum.MULTICLASS_RECALL: {"number_of_classes": NUM_CLASSES},
    RecMetricEnum.MULTI_LABEL_PRECISION: {"num_labels": NUM_LABELS},
    RecMetricEnum.RAUC: {"grouped_rauc": True},
    RecMetricEnum.TOWER_QPS: {"warmup_steps": WARMUP},
    RecMetricEnum.TENSOR_WEIGHTED_AVG: {"description": "_of_tensor"},
}
TASKS = {RecMetricEnum.MULTICLASS_RECALL: CLASS, RecMetricEnum.MULTI_LABEL_PRECISION: BITS}


def batches_of_rank(seed: int, rank: int) -> list[Batch]:
    batches = []
    for place, size in enumerate([16, 11, 0, 16, 13][rank % 2 :]):
        batch = model_out(1000 * seed + 10 * rank + place, size)
        generator = torch.Generator().manual_seed(place)
        batch["class_scores"] = torch.rand(size, NUM_CLASSES, generator=generator)
        batch["class_label"] = torch.randint(0, NUM_CLASSES, (size,), generator=generator)
        for name in ("bits_given", "bits_label"):
            batch[name] = torch.randint(0, 2**NUM_LABELS, (size,), generator=generator).float()
        batch["seconds"] = torch.tensor(float((place + 1) * (rank + 1)))
        batch["num_candidates"] = torch.tensor([size // 2, size - size // 2])
        batches.append(batch)
    return batches


def with_masks(batches: list[Batch], seed: int) -> list[Batch]:
    """Batches with more samples, which a mask leaves out; their values would change all results."""
    found = []
    for place, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(seed + place)
        size = len(batch["tensor"])
        more = 1 + place % 3 if size else 0
        order = torch.randperm(size + more, generator=generator)
        mask = (order < size) if place % 4 else None
        if mask is None:  # all labels
            found.append({**batch, "mask": None})
            continue
        taken = torch.zeros(size + more).long().masked_scatter(mask, torch.arange(size))
        wide = {"mask": mask}
        for name, values in batch.items():
            if name == "seconds":
                wide[name] = values
            elif name == "num_candidates":
                ends = torch.where(mask.cumsum(0) >= values[0], 1, 0)
                first = int((ends == 0).sum()) + int(bool(size))
                wide[name] = torch.tensor([first, size + more - first])
            else:
                wide[name] = values[taken]
                fill = 1 if name in ("session_id", "grouping_keys") else 7.0
                wide[name][~mask] = torch.tensor(fill).to(values.dtype)
        for name in ("click_label", "class_label", "click_weight"):
            wide[name] = wide[name].double().masked_fill(~mask, math.nan)
        found.append(wide)
    return found


def compute_on_rank(seed: int, is_masked: bool = False) -> dict[str, Any]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    masked = {
        task: replace(task, mask_name="mask") if is_masked else task
        for task in (CLICK, CLASS, BITS)
    }
    config = MetricsConfig(
        rec_tasks=[*masked.values()],
        rec_metrics={
            metric: RecMetricDef(
                rec_tasks=[masked[TASKS.get(metric, CLICK)]],
                window_size=WINDOW * num_ranks,
                arguments=ARGUMENTS.get(metric),
            )
            for metric in REC_METRICS_MAPPING
            if isinstance(metric, RecMetricEnum)
        },
        compute_on_all_ranks=True,
    )
    module = generate_metric_module(
        RecMetricModule, config, 16, num_ranks, rank, {}, torch.device("cpu")
    )
    now_s = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TowerQPSMetric, "clock", lambda self: now_s)
        batches = batches_of_rank(seed, rank)
        for batch in with_masks(batches, seed) if is_masked else batches:
            now_s += batch["seconds"].item() if len(batch["tensor"]) else 0.0
            module.update(batch)
    return {
        key: torch.as_tensor(value).squeeze().tolist() for key, value in module.compute().items()
    }


def rows_of(batches: list[Batch], *names: str) -> list[np.ndarray]:
    return [column(batches, name) for name in names]


def hindsight(p: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[float, float, float]:
    for threshold in np.linspace(0, 1, 1000):
        taken = p >= threshold
        if taken.any() and np.average(y[taken], weights=w[taken]) >= TARGET:
            return (
                threshold,
                np.average(y[taken], weights=w[taken]),
                np.sum((y * w)[taken]) / np.sum(y * w),
            )
    return math.nan, math.nan, math.nan


def in_order_of_batch(p: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    pairs = list(itertools.combinations(range(len(p)), 2))
    right = sum(w[i] * w[j] * (np.sign(p[i] - p[j]) == np.sign(y[i] - y[j])) for i, j in pairs)
    return right, sum(w[i] * w[j] for i, j in pairs)


def areas_of_sessions(batches: list[Batch]) -> list[float]:
    areas = []
    for batch in batches:
        p, y, w = rows_of([batch], "click_prediction", "click_label", "click_weight")
        half = len(p) // 2
        areas += [area(p[of], y[of], w[of]) for of in (slice(half), slice(half, None))]
    return [value for value in areas if not math.isnan(value)]


def expected_of(batches: list[Batch]) -> dict[str, Any]:
    """Return results of sums over some batches, by their keys without task and span."""
    p, y, w = rows_of(batches, "click_prediction", "click_label", "click_weight")
    expected: dict[str, Any] = test_sum_metrics.oracle(batches, "click")
    expected["serving_ne|ne"] = expected["ne|ne"]
    expected["serving_calibration|calibration"] = expected["calibration|calibration"]
    expected["ndcg|ndcg"] = ndcg(batches, "click")
    found, chosen = top(batches, "click", 2, by_rank=False)
    expected["recall_session_level|recall_session_level"] = found
    expected["precision_session_level|precision_session_level"] = chosen
    areas = areas_of_sessions(batches)
    expected["gauc|gauc"], expected["gauc|gauc_num_samples"] = np.mean(areas), len(areas)
    pairs = [
        in_order_of_batch(*rows_of([b], "click_prediction", "click_label", "click_weight"))
        for b in batches
    ]
    right, all_pairs = np.sum(pairs, axis=0)
    expected["xauc|xauc"] = right / all_pairs
    # In bins, samples of one bin are ties.
    expected["binned_auc|binned_auc"] = area(np.floor(p * NUM_BINS), y, w)
    for name, value in zip(("pr", "precision", "recall"), hindsight(p, y, w), strict=True):
        expected[f"hindsight_target_pr|hindsight_target_{name}"] = value
    scores = torch.cat([batch["class_scores"] for batch in batches])
    (label,) = rows_of(batches, "class_label")
    expected["multiclass_recall|multiclass_recall"] = [
        sk.top_k_accuracy_score(
            label, scores, k=k, sample_weight=w, labels=range(NUM_CLASSES)
        )
        for k in range(1, NUM_CLASSES)
    ] + [1.0]  # fmt: skip
    given, has = (c.astype(int) for c in rows_of(batches, "bits_given", "bits_label"))
    for place in range(NUM_LABELS):
        key = f"multi_label_precision|multi_label_precisionlabel_{place}"
        bits = ((has >> place) & 1, (given >> place) & 1)
        expected[key] = sk.precision_score(*bits, sample_weight=w)
    return expected


def samples_per_second(parts: list[list[Batch]], in_spans: list[list[Batch]]) -> float:
    """Return the rate over the batches of a span after the warm-up."""
    samples = seconds = 0.0
    for part, span in zip(parts, in_spans, strict=True):
        timed = [batch for batch in part if len(batch["tensor"])][WARMUP:]
        counted = [batch for batch in timed if any(batch is other for other in span)]
        samples += sum(len(batch["tensor"]) for batch in counted)
        seconds += sum(batch["seconds"].item() for batch in counted) / len(parts)
    return samples / seconds


def expected_of_rows(parts: list[list[Batch]]) -> dict[str, float]:
    """Return the areas over the last rows of each rank."""
    names = ("click_prediction", "click_label", "click_weight", "grouping_keys")
    of_ranks = [[c[-WINDOW:] for c in rows_of(part, *names)] for part in parts]
    p, y, w, group = (np.concatenate(columns) for columns in zip(*of_ranks, strict=True))

    def in_order(p: np.ndarray, y: np.ndarray, w: np.ndarray) -> float:
        pairs = len(p) * (len(p) - 1) / 2
        return 1 - inverted(p, y, np.ones_like(w)) / pairs if pairs else math.nan

    expected = {}
    for name, metric, undefined in (
        ("auc", area, 0.5),
        ("auprc", precision, 0.0),
        ("rauc", in_order, 1.0),
    ):
        expected[f"{name}|{name}"] = metric(p, y, w)
        values = [metric(p[of], y[of], w[of]) for of in (group == g for g in np.unique(group))]
        expected[f"{name}|grouped_{name}"] = np.mean(np.nan_to_num(values, nan=undefined))
    return expected


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("num_ranks", "is_masked"), [(1, False), (1, True), (2, True), (3, False), (4, False)]
)
def test_equals_the_formula(num_ranks: int, is_masked: bool, seed: int, ranks: RankPool) -> None:
    """With masks, of the samples whose mask is True."""
    parts = [batches_of_rank(seed, rank) for rank in range(num_ranks)]
    everything = [batch for part in parts for batch in part]
    in_windows = [in_window(part, WINDOW) for part in parts]
    spans = {
        "lifetime_": expected_of(everything),
        "window_": expected_of([batch for part in in_windows for batch in part])
        | expected_of_rows(parts),
    }
    spans["lifetime_"]["qps|qps"] = samples_per_second(parts, parts)
    spans["window_"]["qps|qps"] = samples_per_second(parts, in_windows)
    names = {str(metric): task.name for metric, task in TASKS.items()}
    expected = {
        key.replace("|", f"-{names.get(key.split('|')[0], 'click')}|{span}"): value
        for span, of_span in spans.items()
        for key, value in of_span.items()
    }
    for metric in ("serving_ne", "serving_calibration"):
        (weights,) = rows_of(everything, "click_weight")
        expected[f"{metric}-click|total_examples"] = np.count_nonzero(weights)
    expected["qps-click|total_examples"] = len(weights)
    for found in ranks(num_ranks, compute_on_rank, seed, is_masked):
        assert sorted(set(found) - set(expected)) == []  # metrics without a formula here
        assert sorted(set(expected) - set(found)) == []
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, abs=1e-6, rel=1e-6), key


# What metrics do not read, or count as missing: a NaN there is no part of their results.
UNREAD: dict[Any, set[str]] = {
    RecMetricEnum.CTR: {"prediction"},
    RecMetricEnum.SUM_WEIGHTS: {"prediction", "label"},
    RecMetricEnum.WEIGHTED_AVG: {"label"},
    RecMetricEnum.WEIGHTED_SUM_PREDICTIONS: {"label"},
    RecMetricEnum.TENSOR_WEIGHTED_AVG: {"prediction", "label"},
    RecMetricEnum.NUM_POSITIVE_SAMPLES: {"prediction", "label"},
    RecMetricEnum.NUM_MISSING_LABELS: {"prediction", "label"},
    RecMetricEnum.SCALAR: {"prediction", "weight"},
    RecMetricEnum.UNWEIGHTED_NE: {"weight"},
    RecMetricEnum.RAUC: {"weight"},
}
# Results that leave out a part of the metric's inputs.
UNREAD_BY = {
    "label_average": {"prediction"},
    "prediction_average": {"label"},
    "total_examples": {"prediction", "label", "weight"},  # a whole number
}


def update_with_nan(metric: RecMetricEnum, part: str, dtype: torch.dtype) -> dict[str, Any]:
    """Results over a batch with a NaN and two without."""
    task = TASKS.get(metric, CLICK)
    module = REC_METRICS_MAPPING[metric](
        world_size=1,
        my_rank=0,
        batch_size=16,
        tasks=[task],
        window_size=48,
        **ARGUMENTS.get(metric, {}),
    )
    for seed, place in enumerate((None, 5, None)):
        batch = batches_of_rank(seed, 0)[0]
        columns = {
            kind: batch[getattr(task, f"{kind}_name")].to(dtype)
            for kind in ("prediction", "label", "weight")
        }
        if place is not None:
            columns[part][place] = math.nan
        given = {f"{kind}s": {task.name: column} for kind, column in columns.items()}
        inputs = {name: batch[name] for name in ("session_id", "num_candidates", "tensor")}
        module.update(**given, **inputs, grouping_keys=torch.zeros(16))
    return {key.partition("|")[2]: value for key, value in module.compute().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", ["prediction", "label", "weight"])
def test_a_nan_shows_in_every_result_that_it_is_part_of(part: str, dtype: torch.dtype) -> None:
    def check(metric: RecMetricEnum) -> None:
        for key, value in update_with_nan(metric, part, dtype).items():
            name = key.removeprefix("window_").removeprefix("lifetime_")
            is_read = part not in UNREAD.get(metric, set()) | UNREAD_BY.get(name, set())
            assert bool(value.isnan().all()) is is_read, (key, value)

    check_each(check, [metric for metric in RecMetricEnum if metric is not RecMetricEnum.TOWER_QPS])
