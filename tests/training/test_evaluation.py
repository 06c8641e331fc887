"""`BinaryMetrics` equals scikit-learn, with weights and several tasks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import log_loss, roc_auc_score

from recsys.modules.losses import mean_loss
from recsys.training import BinaryMetrics
from recsys.training.evaluation import sums_by_task
from tests.ranks import RankPool

CPU = torch.device("cpu")
N = 400


def data(num_tasks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_tasks)
    logits = torch.randn(N, num_tasks)
    labels = (logits + torch.randn(N, num_tasks) > 0).float()
    return logits, labels, torch.rand(N) * 3


def mask_of_labels() -> torch.Tensor:
    return torch.rand(N, 2, generator=torch.Generator().manual_seed(1)) < torch.tensor([0.9, 0.3])


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
    assert found["loss"] == (found["loss/click"] + found["loss/buy"]) / 2


def _masked(part: slice) -> tuple[BinaryMetrics, BinaryMetrics]:
    """Metrics of two tasks with missing labels, without and with sample weights."""
    logits, labels, weights = data(2)
    mask = mask_of_labels()
    hostile = labels.where(mask, 1 - labels)
    plain, weighted = (BinaryMetrics(CPU, tasks=["click", "buy"]) for _ in range(2))
    for own in (slice(part.start, 100, part.step), slice(100 + part.start, N, part.step)):
        output = (torch.tensor(0.0), logits[own], hostile[own])
        plain.update(output, SimpleNamespace(sample_weights=None, label_mask=mask[own]))
        weighted.update(output, SimpleNamespace(sample_weights=weights[own], label_mask=mask[own]))
    return plain, weighted


def _masked_on_ranks() -> list[dict[str, float]]:
    found = _masked(slice(dist.get_rank(), None, dist.get_world_size()))
    for metrics in found:
        metrics.sync()
    return [metrics.compute() for metrics in found]


def test_missing_labels_count_in_no_metric_of_their_task(ranks: RankPool) -> None:
    logits, labels, weights = data(2)
    mask = mask_of_labels()
    found = [metrics.compute() for metrics in _masked(slice(0, None, 1))]
    for values, is_weighted in zip(found, (False, True), strict=True):
        terms = torch.nn.functional.binary_cross_entropy_with_logits(
            logits.double(), labels.double(), reduction="none"
        )
        for column, task in enumerate(["click", "buy"]):
            kept = mask[:, column]
            alone = BinaryMetrics(CPU)
            columns = (logits[kept, column], labels[kept, column], weights[kept])
            update(alone, *columns, weighted=is_weighted)
            of_task = {name: values[f"{name}/{task}"] for name in ("auc", "ne", "loss")}
            assert of_task == pytest.approx(alone.compute(), rel=1e-6)
        scale = weights.double() if is_weighted else torch.ones(N, dtype=torch.float64)
        whole = (terms * mask * scale[:, None]).sum() / (2 * scale.sum())
        assert values["loss"] == pytest.approx(whole.item(), rel=1e-6)
        if not is_weighted:  # as in training
            assert values["loss"] == pytest.approx(mean_loss(logits, labels, mask=mask).item())
    for of_rank in ranks(3, _masked_on_ranks):
        for values, expected in zip(of_rank, found, strict=True):
            assert values == pytest.approx(expected, rel=1e-6)


def test_a_task_without_labels_has_no_metrics() -> None:
    metrics = BinaryMetrics(CPU, tasks=["click", "buy"])
    mask = torch.tensor([[True, False], [True, False]])
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    output = (torch.tensor(0.0), torch.zeros(2, 2), labels)
    metrics.update(output, SimpleNamespace(label_mask=mask))
    found = metrics.compute()
    assert found["loss"] == pytest.approx(math.log(2) / 2)
    assert math.isnan(found["loss/buy"])
    assert math.isnan(found["auc/buy"])
    assert math.isnan(BinaryMetrics(CPU).compute()["loss"])


def test_wrong_tasks_are_errors() -> None:
    logits, labels, weights = data(2)
    with pytest.raises(ValueError, match=r"no names and .*shape \[90, 2\]"):
        update(BinaryMetrics(CPU), logits, labels, weights, weighted=False)
    with pytest.raises(ValueError, match=r"distinct names; received \['a'\] more"):
        BinaryMetrics(CPU, tasks=["a", "a"])
    with pytest.raises(TypeError, match="tasks"):
        BinaryMetrics(CPU, tasks=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3)])
def test_task_sums_equal_the_formula(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels, weights = (
        torch.rand(size, generator=generator) for size in (shape, shape, shape[:1])
    )
    mask = torch.rand(shape, generator=generator) < 0.6
    batch = SimpleNamespace(sample_weights=weights, label_mask=mask)
    found = sums_by_task((logits.sum(), logits, labels), batch)
    x, y = (part.double().numpy().reshape(7, -1) for part in (logits, labels))
    counted = weights.double().numpy()[:, None] * mask.numpy().reshape(7, -1)
    losses = np.log1p(np.exp(x)) - x * y
    expected = np.stack([(losses * counted).sum(0), counted.sum(0)])
    np.testing.assert_allclose(found.numpy(), expected)
