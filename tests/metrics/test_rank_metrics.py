"""Metrics of the window's rows, over ranks: the gathered rows, and the results of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from recsys.metrics import BinnedAUC
from recsys.metrics.metrics_config import RecMetricDef, RecMetricEnum
from tests.metrics.data import TASKS, batches_of_rank, column, model_out
from tests.metrics.test_metric_module import BUY, CLICK, SUMS, build, count_collectives
from tests.metrics.test_ranking import area, inverted, precision
from tests.ranks import RankPool

WINDOW = 40  # rows of a rank: not a multiple of the batches' sizes
ORACLES = {"auc": area, "auprc": precision}


def definitions(num_ranks: int = 1, window: int = WINDOW) -> dict[RecMetricEnum, RecMetricDef]:
    return {
        metric: RecMetricDef(
            rec_tasks=[CLICK, BUY],
            window_size=window * num_ranks,
            arguments={f"grouped_{metric}": True},
        )
        for metric in (RecMetricEnum.AUC, RecMetricEnum.AUPRC, RecMetricEnum.RAUC)
    }


def oracle(rows: dict[str, Any]) -> dict[str, float]:
    expected = {}
    segment = rows["grouping_keys"]
    for task in TASKS:
        p, y, w = (rows[f"{task}_{kind}"] for kind in ("prediction", "label", "weight"))
        pairs = len(y) * (len(y) - 1) / 2
        expected[f"rauc-{task}|window_rauc"] = 1 - inverted(p, y, w * 0 + 1) / pairs
        for name, metric in ORACLES.items():
            expected[f"{name}-{task}|window_{name}"] = metric(p, y, w)
            of_groups = [
                metric(p[of], y[of], w[of]) for of in (segment == place for place in range(3))
            ]
            expected[f"{name}-{task}|window_grouped_{name}"] = sum(of_groups) / 3
    return expected


def compute_on_rank() -> dict[str, float]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module = build(definitions(num_ranks), num_ranks, rank, compute_on_all_ranks=True)
    for batch in batches_of_rank(rank):
        module.update(batch)
    return {key: float(value) for key, value in module.compute().items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_equals_scikit_learn_on_the_window(num_ranks: int, ranks: RankPool) -> None:
    parts = [batches_of_rank(rank) for rank in range(num_ranks)]
    names = parts[0][0].keys()
    rows = {
        name: torch.cat([torch.tensor(column(part, name)[-WINDOW:]) for part in parts]).numpy()
        for name in names
    }
    expected = oracle(rows)
    for found in ranks(num_ranks, compute_on_rank):
        assert {k: v for k, v in found.items() if k in expected} == pytest.approx(
            expected, abs=1e-6
        )
        assert len(found) == len(expected) + 2  # and the groups of RAUC


def test_rows_are_gathered_at_compute_only(ranks: RankPool) -> None:
    wanted = SUMS | definitions(2)
    first, second = ranks(2, count_collectives, wanted, False)
    # Sums and counts in one, rows and groupings to the first rank.
    assert first[0] == second[0] == ["all_reduce", "gather", "gather"]
    assert second[1] == 0
    first, second = ranks(2, count_collectives, wanted, True)
    assert first[0] == second[0] == ["all_reduce", "all_gather", "all_gather"]


def update_some(kind: str) -> dict[str, float]:
    rank = dist.get_rank()
    wanted = {RecMetricEnum.AUC: RecMetricDef(rec_tasks=[CLICK], window_size=64)}
    module = build(wanted, 2, rank, compute_on_all_ranks=True)
    if rank == 0 and kind != "none":
        batch = model_out(0, 16)
        if kind == "float64":
            batch["click_prediction"] = batch["click_prediction"].double()
        module.update(batch)
    return {key: float(value) for key, value in module.compute().items()}


@pytest.mark.parametrize("kind", ["none", "float32", "float64"])
def test_a_rank_without_rows(kind: str, ranks: RankPool) -> None:
    batch = model_out(0, 16)
    expected = sk.roc_auc_score(
        batch["click_label"], batch["click_prediction"], sample_weight=batch["click_weight"]
    )
    for found in ranks(2, update_some, kind):
        value = math.nan if kind == "none" else expected
        assert found == pytest.approx({"auc-click|window_auc": value}, nan_ok=True)


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 16), min_size=1, max_size=8),
    window=st.integers(16, 60),
    seed=st.integers(0, 1000),
)
def test_any_window_of_any_batches(sizes: list[int], window: int, seed: int) -> None:
    module = build(definitions(window=window))
    batches = [model_out(seed + place, size) for place, size in enumerate(sizes)]
    for batch in batches:
        module.update(batch)
    found = module.compute()
    for task in TASKS:
        p, y, w = (
            column(batches, f"{task}_{kind}")[-window:]
            for kind in ("prediction", "label", "weight")
        )
        for name, metric in ORACLES.items():
            value = found[f"{name}-{task}|window_{name}"].item()
            assert value == pytest.approx(metric(p, y, w), abs=1e-6, nan_ok=True)


def test_groups_without_a_value_are_left_out() -> None:
    module = build(definitions())
    batch = model_out(0, 5)
    batch["grouping_keys"] = torch.tensor([2**60, 2**60, 2**60, 2**60 + 1, 7])  # beyond float64
    for task in TASKS:
        batch[f"{task}_prediction"] = torch.tensor([0.1, 0.3, 0.2, 0.4, 0.5])
        batch[f"{task}_label"] = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0])
        batch[f"{task}_weight"] = torch.ones(5)
    module.update(batch)
    found = module.compute()
    assert found["auc-buy|window_grouped_auc"] == 1.0
    assert found["auprc-buy|window_grouped_auprc"] == 1.0
    assert found["rauc-buy|window_grouped_rauc"] == 1.0
    with pytest.raises(ValueError, match="needs the model output 'grouping_keys'; received"):
        module.update({k: v for k, v in batch.items() if k != "grouping_keys"})


def test_a_mean_over_no_group_is_not_a_number() -> None:
    module = build(definitions())
    batch = model_out(0, 4)
    batch["grouping_keys"] = torch.arange(4)
    for task in TASKS:
        batch[f"{task}_label"] = torch.zeros(4)
    module.update(batch)
    found = module.compute()
    for name in ("auc", "auprc", "rauc"):
        assert found[f"{name}-buy|window_grouped_{name}"].isnan(), name


@pytest.mark.parametrize("seed", range(4))
def test_weights_of_groups_may_be_of_any_size(seed: int) -> None:
    """Running sums over all groups would lose the small ones beside the large ones."""
    generator = torch.Generator().manual_seed(seed)
    batch = {k: v.double() for k, v in model_out(seed, 16).items()}
    batch["grouping_keys"] = torch.randint(0, 3, (16,), generator=generator)
    size = 10.0 ** torch.tensor([9.0, -9.0, 0.0], dtype=torch.float64)[batch["grouping_keys"]]
    for task in TASKS:
        batch[f"{task}_weight"] = torch.rand(16, generator=generator).double() * size
        batch[f"{task}_prediction"] = batch[f"{task}_prediction"].mul(4).round().div(4)
    module = build(definitions())
    module.update(batch)
    found = module.compute()
    for task in TASKS:
        p, y, w = (column([batch], f"{task}_{kind}") for kind in ("prediction", "label", "weight"))
        key = batch["grouping_keys"].numpy()
        for name, metric in ORACLES.items():
            values = [metric(p[of], y[of], w[of]) for of in (key == g for g in range(3))]
            expected = float(np.nanmean(values))
            value = found[f"{name}-{task}|window_grouped_{name}"].item()
            assert value == pytest.approx(expected, rel=1e-6), name


def test_binned_area_is_that_of_the_accumulator() -> None:
    wanted = {
        RecMetricEnum.BINNED_AUC: RecMetricDef(
            rec_tasks=[CLICK], window_size=32, arguments={"num_bins": 200}
        )
    }
    module = build(wanted)
    batches = [model_out(seed, 16) for seed in range(6)]
    for batch in batches:
        module.update(batch)
    found = module.compute()
    for span, of in (("lifetime", batches), ("window", batches[-2:])):
        whole = BinnedAUC(num_bins=200)
        for batch in of:
            whole.update(batch["click_prediction"], batch["click_label"], batch["click_weight"])
        value = found[f"binned_auc-click|{span}_binned_auc"].item()
        assert value == pytest.approx(whole.compute().item())
        exact = area(*(column(of, f"click_{kind}") for kind in ("prediction", "label", "weight")))
        assert value == pytest.approx(exact, abs=0.01)
    wanted[RecMetricEnum.BINNED_AUC].arguments = {"num_bins": 1}
    with pytest.raises(ValueError, match=r"num_bins must be .*2; received 1"):
        build(wanted)


def test_hindsight_without_a_threshold_that_reaches_the_target() -> None:
    wanted = {RecMetricEnum.HINDSIGHT_TARGET_PR: RecMetricDef(rec_tasks=[CLICK], window_size=16)}
    module = build(wanted)
    names = [f"hindsight_target_{name}" for name in ("pr", "precision", "recall")]
    batch = model_out(0, 4)
    batch["click_prediction"] = torch.tensor([0.0, 0.5, 0.5, 1.0])  # on a threshold: 0 and 1
    batch["click_label"] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    module.update(batch)
    found = module.compute()
    assert all(found[f"hindsight_target_pr-click|window_{name}"].isnan() for name in names)
    batch["click_label"] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    batch["click_weight"] = torch.ones(4)
    for _ in range(4):
        module.update(batch)
    found = module.compute()
    values = [found[f"hindsight_target_pr-click|window_{name}"].item() for name in names]
    assert values == [pytest.approx(500 / 999), 1.0, 1.0]


def test_a_prediction_that_is_no_number_shows_in_bins() -> None:
    wanted = {
        metric: RecMetricDef(rec_tasks=[CLICK], window_size=16)
        for metric in (RecMetricEnum.HINDSIGHT_TARGET_PR, RecMetricEnum.BINNED_AUC)
    }
    module = build(wanted)
    batch = model_out(0, 16)
    batch["click_prediction"][3] = math.nan
    module.update(batch)
    assert all(value.isnan() for value in module.compute().values())


def test_predictions_beyond_all_bins_are_in_the_last() -> None:
    wanted = {RecMetricEnum.BINNED_AUC: RecMetricDef(rec_tasks=[CLICK], window_size=16)}
    module = build(wanted)
    batch = model_out(0, 3)
    batch["click_prediction"] = torch.tensor([-1e30, 0.5, 1e30])
    batch["click_label"] = torch.tensor([0.0, 0.0, 1.0])
    module.update(batch)
    assert module.compute()["binned_auc-click|window_binned_auc"] == 1.0


def test_equal_predictions_have_half_of_the_pairs_in_order() -> None:
    module = build({RecMetricEnum.RAUC: RecMetricDef(rec_tasks=[CLICK, BUY], window_size=16)})
    batch = model_out(0, 8)
    for task in TASKS:
        batch[f"{task}_prediction"] = torch.full((8,), 0.5)
        batch[f"{task}_label"] = torch.arange(8.0)
    module.update(batch)
    assert module.compute()["rauc-buy|window_rauc"] == 0.5
