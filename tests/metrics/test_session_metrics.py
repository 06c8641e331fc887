"""Metrics of sessions equal loops over the sessions of each batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn import metrics as sk

from recsys.metrics.metric_module import RecMetricModule, generate_metric_module
from recsys.metrics.metrics_config import (
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    SessionMetricDef,
)
from recsys.metrics.session_metrics import GAUCMetric, XAUCMetric
from tests.metrics.data import Batch, batches_of_rank, in_window
from tests.metrics.formulas import area, of_the_first
from tests.ranks import RankPool

WINDOW = 40


def build(
    metric: RecMetricEnum,
    arguments: dict[str, Any] | None = None,
    session: SessionMetricDef | None = None,
    num_ranks: int = 1,
    rank: int = 0,
    **of_task: Any,
) -> RecMetricModule:
    tasks = [
        RecTaskInfo(t, f"{t}_label", f"{t}_prediction", f"{t}_weight", session, **of_task)
        for t in ("click", "buy")
    ]
    definition = RecMetricDef(rec_tasks=tasks, window_size=WINDOW * num_ranks, arguments=arguments)
    config = MetricsConfig(
        rec_tasks=tasks, rec_metrics={metric: definition}, compute_on_all_ranks=True
    )
    return generate_metric_module(
        RecMetricModule, config, 16, num_ranks, rank, {}, torch.device("cpu")
    )


def sessions(batches: list[Batch], task: str) -> Iterator[tuple[np.ndarray, ...]]:
    for batch in batches:
        of_batch = [
            batch[f"{task}_{k}"].double().numpy() for k in ("prediction", "label", "weight")
        ]
        key = batch["session_id"].numpy()
        for session in np.unique(key):
            yield tuple(values[key == session] for values in of_batch)


def ndcg(batches: list[Batch], task: str, **arguments: Any) -> float:
    values = []
    for p, y, w in sessions(batches, task):
        if arguments.get("remove_single_length_sessions") and len(p) == 1:
            continue
        if arguments.get("scale_by_weights_tensor"):
            y, p, w = y * w, p * w, w * 0 + 1
        gain = 2**y - 1 if arguments.get("exponential_gain") else y
        k = arguments.get("k", -1)
        value = 0.0
        if gain.any() and len(p) > 1:
            value = sk.ndcg_score([gain], [p], k=None if k < 0 else k, ignore_ties=False)
        elif gain.any():
            value = 1.0
        if arguments.get("report_ndcg_as_decreasing_curve", True):
            value = 1 - value
        values.append(value * w.max())
    return float(np.mean(values))


def top(batches: list[Batch], task: str, limit: int, by_rank: bool) -> tuple[float, float]:
    hits = predicted = positives = 0.0
    for p, y, w in sessions(batches, task):
        chances = np.array(of_the_first(p.tolist(), limit))
        positive = np.array(of_the_first(y.tolist(), limit)) if by_rank else y
        hits += (w * chances * positive).sum()
        predicted += (w * chances).sum()
        positives += (w * positive).sum()
    return hits / positives, hits / predicted


def compute_on_rank(metric: RecMetricEnum, *settings: Any) -> dict[str, float]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module = build(metric, *settings, num_ranks=num_ranks, rank=rank)
    for batch in batches_of_rank(rank):
        module.update(batch)
    return {key: float(value) for key, value in module.compute().items()}


def spans(num_ranks: int) -> dict[str, list[Batch]]:
    of_ranks = [batches_of_rank(rank) for rank in range(num_ranks)]
    return {
        "lifetime": [batch for batches in of_ranks for batch in batches],
        "window": [batch for batches in of_ranks for batch in in_window(batches, WINDOW)],
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"exponential_gain": True, "k": 2},
        {"report_ndcg_as_decreasing_curve": False, "remove_single_length_sessions": True},
        {"scale_by_weights_tensor": True},
        {"scale_by_weights_tensor": True, "exponential_gain": True},
    ],
)
def test_ndcg(arguments: dict[str, Any], ranks: RankPool) -> None:
    expected = {
        f"ndcg-{task}|{span}_ndcg": ndcg(batches, task, **arguments)
        for span, batches in spans(2).items()
        for task in ("click", "buy")
    }
    for found in ranks(2, compute_on_rank, RecMetricEnum.NDCG, arguments):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("limit", "by_rank"), [(1, False), (2, False), (2, True)])
def test_top_of_sessions(limit: int, by_rank: bool, ranks: RankPool) -> None:
    session = SessionMetricDef("session_id", limit, by_rank)
    for place, metric in enumerate(
        (RecMetricEnum.RECALL_SESSION_LEVEL, RecMetricEnum.PRECISION_SESSION_LEVEL)
    ):
        expected = {
            f"{metric}-{task}|{span}_{metric}": top(batches, task, limit, by_rank)[place]
            for span, batches in spans(2).items()
            for task in ("click", "buy")
        }
        for found in ranks(2, compute_on_rank, metric, None, session):
            assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (RecMetricEnum.PRECISION_SESSION_LEVEL, 1 / 3),
        (RecMetricEnum.RECALL_SESSION_LEVEL, 1 / 6),
        # The positive is at one of three ranks, the other at the fourth.
        (RecMetricEnum.NDCG, 1 - ((1 + 0.63093 + 0.5) / 3 + 0.43068) / 1.63093),
    ],
)
def test_equal_predictions_share_the_top(metric: RecMetricEnum, expected: float) -> None:
    module = build(metric, None, SessionMetricDef("session_id", 1))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 2, 3, 0]):
        out = {"session_id": torch.zeros(4, dtype=torch.int64)}
        for task in ("click", "buy"):
            out[f"{task}_prediction"] = torch.tensor([0.5, 0.5, 0.5, 0.1])[order]
            out[f"{task}_label"] = torch.tensor([1.0, 0.0, 0.0, 1.0])[order]
            out[f"{task}_weight"] = torch.ones(4)
        module.update(out)
        found = module.compute()[f"{metric}-buy|window_{metric}"].item()
        assert found == pytest.approx(expected, abs=1e-4)


def test_xauc() -> None:
    module = build(RecMetricEnum.XAUC)
    batches = batches_of_rank(0)
    hits = pairs = 0.0
    for batch in batches:
        batch["click_prediction"] = batch["click_prediction"].mul(4).round()  # ties
        batch["click_label"] = batch["click_label"] + batch["grouping_keys"]
        module.update(batch)
        p, y, w = (batch[f"click_{k}"].double().numpy() for k in ("prediction", "label", "weight"))
        for i, j in itertools.combinations(range(len(p)), 2):
            pairs += w[i] * w[j]
            right = np.sign(p[i] - p[j]) == np.sign(y[i] - y[j])
            hits += w[i] * w[j] * (0.5 if p[i] == p[j] and y[i] != y[j] else right)
    found = module.compute()["xauc-click|lifetime_xauc"].item()
    assert found == pytest.approx(hits / pairs, abs=1e-6)


def test_gauc_is_over_sessions_of_both_classes() -> None:
    module = build(RecMetricEnum.GAUC)
    areas = []
    for batch in batches_of_rank(0):
        num_samples = len(batch["click_label"])
        if num_samples < 16:
            continue
        sizes = [5, 1, 6, 4]
        batch["click_label"][:5] = 1.0  # one class
        batch["num_candidates"] = torch.tensor(sizes)
        module.update(batch)
        begin = 0
        for size in sizes:
            p, y, w = (
                batch[f"click_{k}"][begin : begin + size] for k in ("prediction", "label", "weight")
            )
            begin += size
            if len(y.unique()) == 2:
                areas.append(sk.roc_auc_score(y, p, sample_weight=w))
    found = module.compute()
    assert found["gauc-click|lifetime_gauc"].item() == pytest.approx(np.mean(areas), abs=1e-6)
    assert found["gauc-click|lifetime_gauc_num_samples"] == len(areas) > 0
    batch["num_candidates"] = torch.tensor([3])
    batch = {**batches_of_rank(0)[0], "num_candidates": torch.tensor([15])}
    with pytest.raises(ValueError, match=r"to the samples, 16; .*15"):
        module.update(batch)
    batch["num_candidates"] = torch.tensor([17, -1])
    with pytest.raises(ValueError, match=r"num_candidates must .*negative.*\[17, -1\]"):
        module.update(batch)


@pytest.mark.parametrize("kind", ["tenths", "random", "of any size"])
def test_gauc_of_weights_that_are_not_whole(kind: str) -> None:
    """The rounding of sums over sessions does not count as weight of a session's missing class."""
    generator = torch.Generator().manual_seed(0)
    p, w = torch.rand(2, 400, generator=generator, dtype=torch.float64)
    y = (torch.rand(400, generator=generator) < 0.5).double()
    if kind == "tenths":
        w = torch.full_like(w, 0.1)
    elif kind == "of any size":
        w = 10 ** (w * 18 - 9)
    task = RecTaskInfo("t")
    metric = GAUCMetric(world_size=1, my_rank=0, batch_size=400, tasks=[task], window_size=400)
    metric.update(
        predictions={"t": p},
        labels={"t": y},
        weights={"t": w},
        num_candidates=torch.full((100,), 4),
    )
    sessions = [(p[of : of + 4], y[of : of + 4], w[of : of + 4]) for of in range(0, 400, 4)]
    areas = [area(*map(torch.Tensor.tolist, session)) for session in sessions]
    defined = [value for value in areas if not math.isnan(value)]
    found = metric.compute()
    assert found["gauc-t|lifetime_gauc_num_samples"] == len(defined) < 100
    assert found["gauc-t|lifetime_gauc"].item() == pytest.approx(np.mean(defined), rel=1e-9)


def test_gauc_without_a_session_of_both_classes() -> None:
    metric = GAUCMetric(
        world_size=1, my_rank=0, batch_size=6, tasks=[RecTaskInfo("t")], window_size=6
    )
    metric.update(
        predictions={"t": torch.rand(6)},
        labels={"t": torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])},
        weights={"t": torch.tensor([0.1, 0.3, 0.1, 0.3, 0.7, 0.0])},  # one has no weight
        num_candidates=torch.tensor([2, 0, 2, 2]),
    )
    found = metric.compute()
    assert found["gauc-t|window_gauc"].isnan()
    assert found["gauc-t|window_gauc_num_samples"] == 0


def test_xauc_of_one_large_weight() -> None:
    """The square of the sum less the sum of squares would be zero."""
    metric = XAUCMetric(
        world_size=1, my_rank=0, batch_size=3, tasks=[RecTaskInfo("t")], window_size=3
    )
    metric.update(
        predictions={"t": torch.tensor([0.1, 0.2, 0.3])},
        labels={"t": torch.tensor([0.0, 2.0, 1.0])},
        weights={"t": torch.tensor([1e10, 1e-10, 3e-10], dtype=torch.float64)},
    )
    # Pairs with the first are in order, and of 1 and 3 in weight; the last two hardly count.
    assert metric.compute()["xauc-t|window_xauc"].item() == pytest.approx(1.0)


def test_bad_sessions() -> None:
    with pytest.raises(ValueError, match="top_threshold; received None for 'click'"):
        build(RecMetricEnum.RECALL_SESSION_LEVEL)
    with pytest.raises(ValueError, match=r"with a top_threshold; received SessionMetricDef"):
        build(RecMetricEnum.RECALL_SESSION_LEVEL, None, SessionMetricDef("session_id"))
    with pytest.raises(ValueError, match=r"tasks of NDCGMetric must .*\['click', 'buy'\]"):
        build(RecMetricEnum.NDCG, is_negative_task=True)
    module = build(RecMetricEnum.NDCG)
    batch = batches_of_rank(0)[0]
    with pytest.raises(ValueError, match=r"'session_id' must have .*per sample, 16;"):
        module.update(batch | {"session_id": torch.zeros(3)})
