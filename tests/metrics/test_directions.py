"""Directions of metrics, against their values of a good and a bad model."""

from __future__ import annotations

import pytest
import torch

from recsys.metrics.directions import is_larger_better
from recsys.metrics.metrics_namespace import MetricName
from recsys.metrics.retrieval import RetrievalMetrics
from recsys.training import BinaryMetrics


def test_better_predictions_move_each_metric_in_its_direction() -> None:
    torch.manual_seed(0)
    labels = torch.randint(2, (200, 2)).float()
    found = []
    for strength in (0.2, 3.0):
        metrics = BinaryMetrics(torch.device("cpu"), tasks=["click", "buy"])
        logits = strength * (labels - 0.5) + 0.5 * torch.randn(200, 2)
        metrics.update((torch.tensor(0.0), logits, labels), None)
        items = RetrievalMetrics([3], torch.device("cpu"))
        ids = torch.stack([torch.randperm(9) for _ in range(50)])
        if strength == 3.0:
            ids = ids.sort(1).values
        items.update(ids, torch.zeros(50).long(), torch.arange(51))
        found.append({**metrics.compute(), **items.compute()})
    worse, better = found
    assert len(better) > 8
    for name, value in better.items():
        assert (value > worse[name]) == is_larger_better(name), name


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("ne-click|lifetime_ne", False), ("auc-click|window_auc", True), ("loss/auc", False),
        ("NDCG@10", True), ("recall@5/films", True), ("calibration", None), ("area", None),
        ("mean_auc", None), ("", None), ("rmse", False),
    ],
)  # fmt: skip
def test_directions(name: str, direction: bool | None) -> None:
    assert is_larger_better(name) is direction


def test_names_of_qualities_have_a_direction() -> None:
    """All names of metrics except counts, averages and calibration."""
    without = {str(name) for name in MetricName if is_larger_better(str(name)) is None}
    words = "average avg batch calibration ctr examples label missing model num optim qps recali"
    words += " scalar sum tensor throughput weighted"
    assert {n for n in without if n and not any(w in n for w in words.split())} == set()
