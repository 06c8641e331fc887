"""`BinaryMetrics` equals scikit-learn, with weights and several tasks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from recsys.training import BinaryMetrics

CPU = torch.device("cpu")
N = 400


def data(num_tasks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_tasks)
    logits = torch.randn(N, num_tasks)
    labels = (logits + torch.randn(N, num_tasks) > 0).float()
    return logits, labels, torch.rand(N) * 3


def update(metrics: BinaryMetrics, *columns: torch.Tensor, weighted: bool) -> None:
    for logits, labels, weights in zip(*(column.split(90) for column in columns), strict=True):
        batch = SimpleNamespace(sample_weights=weights if weighted else None)
        metrics.update((torch.tensor(0.0), logits, labels), batch)


@pytest.mark.parametrize("weighted", [True, False])
def test_one_task(weighted: bool) -> None:
    logits, labels, weights = data(1)
    metrics = BinaryMetrics(CPU)
    update(metrics, logits[:, 0], labels[:, 0], weights, weighted=weighted)
    found, scores = metrics.compute(), logits[:, 0].double().sigmoid().numpy()
    actual, sample_weight = labels[:, 0].numpy(), weights.numpy() if weighted else None
    expected = roc_auc_score(actual, scores, sample_weight=sample_weight)
    assert found["auc"] == pytest.approx(expected, abs=1e-6)
    loss = log_loss(actual, scores, sample_weight=sample_weight)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    base = np.full(N, np.average(actual, weights=sample_weight))
    entropy = log_loss(actual, base, sample_weight=sample_weight)
    assert found["ne"] == pytest.approx(loss / entropy, rel=1e-5)


def test_several_tasks() -> None:
    logits, labels, weights = data(2)
    metrics = BinaryMetrics(CPU, tasks=["click", "buy"])
    update(metrics, logits, labels, weights, weighted=True)
    found = metrics.compute()
    assert len(found) == 7
    for column, task in enumerate(["click", "buy"]):
        alone = BinaryMetrics(CPU)
        update(alone, logits[:, column], labels[:, column], weights, weighted=True)
        of_task = {name: found[f"{name}/{task}"] for name in ("auc", "ne", "loss")}
        assert of_task == pytest.approx(alone.compute(), rel=1e-6)
    assert found["loss"] == found["loss/click"] + found["loss/buy"]


def test_wrong_tasks_are_errors() -> None:
    logits, labels, weights = data(2)
    with pytest.raises(ValueError, match=r"received no names and logits of shape \[90, 2\]"):
        update(BinaryMetrics(CPU), logits, labels, weights, weighted=False)
    with pytest.raises(ValueError, match=r"distinct names; received \['a'\] more than once"):
        BinaryMetrics(CPU, tasks=["a", "a"])
    with pytest.raises(TypeError, match="tasks"):
        BinaryMetrics(CPU, tasks=3)  # type: ignore[arg-type]
