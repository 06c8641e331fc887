"""`NamedMetrics` equals each metric over all samples, and formulas in numpy for groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.metrics import ndcg_score, roc_auc_score
from torch import nn

from recsys.datasets.utils import Batch
from recsys.metrics.metrics_config import RecMetricEnum, RecTaskInfo
from recsys.metrics.rec_metric import METRICS
from recsys.sparse import KeyedJaggedTensor
from recsys.training import BinaryMetrics, NamedMetrics
from tests.ranks import RankPool
from tests.training.test_trainer import Recorder, TwoTasks, plain

CPU = torch.device("cpu")
N = 300
USER = {"group_by": "user"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "segmented_ne": {"num_groups": 4, **USER},
    "gauc": USER,
    "ndcg": USER,
    "recall_session_level": {"top_threshold": 2, **USER},
    "precision_session_level": {"top_threshold": 2, **USER},
    "tensor_weighted_avg": {"tensor_name": "watched"},
    "auprc": {"grouped_auprc": True, **USER},
    "recall": {"threshold": 0.3},
}
BY_GROUP = ("gauc", "ndcg", "recall_session_level", "precision_session_level", "xauc")
BINARY = [e.value for e in RecMetricEnum if e.value != "multiclass_recall"]


def data(num_tasks: int = 1) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(N, num_tasks, generator=random)
    labels = (logits + torch.randn(N, num_tasks, generator=random) > 0).float()
    return {
        "logits": logits,
        "labels": labels,
        "sample_weights": torch.rand(N, generator=random) + 0.1,
        "user": torch.randint(40, (N,), generator=random),
        "watched": torch.rand(N, generator=random),
        "label_mask": torch.rand(N, num_tasks, generator=random) < 0.7,
    }


def batches(columns: dict[str, torch.Tensor], size: int = 37) -> list[tuple[Any, Any]]:
    """Outputs of a model and batches; the user is a feature."""
    found = []
    for first in range(0, N, size):
        part = {name: column[first : first + size] for name, column in columns.items()}
        output = torch.tensor(0.5), part.pop("logits"), part.pop("labels")
        user = part.pop("user")
        features = KeyedJaggedTensor(["user"], user, lengths=torch.ones_like(user))
        found.append((output, SimpleNamespace(sparse_features=features, **part)))
    return found


def flat(columns: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    """Columns of one task with the given ones beside logits, labels and users."""
    kept = {name: columns[name] for name in ("user", *names)}
    return kept | {name: columns[name][:, 0] for name in ("logits", "labels")}


def computed(metrics: NamedMetrics, columns: dict[str, torch.Tensor]) -> dict[str, float]:
    for output, batch in batches(columns):
        metrics.update(output, batch)
    return metrics.compute()


def of_class(name: str, columns: dict[str, torch.Tensor]) -> dict[str, float]:
    """The results of the metric's class, which gets all samples at once."""
    arguments = {k: v for k, v in ARGUMENTS.get(name, {}).items() if k != "group_by"}
    tensor_name = arguments.pop("tensor_name", None)
    metric = METRICS[RecMetricEnum(name)](
        world_size=1,
        my_rank=0,
        batch_size=1,
        tasks=[RecTaskInfo("t", tensor_name=tensor_name)],
        window_size=N,
        **arguments,
    )
    metric.update(
        predictions={"t": columns["logits"].sigmoid()},
        labels={"t": columns["labels"]},
        weights={"t": columns["sample_weights"]},
        required_inputs={"grouping_keys": columns["user"], "watched": columns["watched"]},
    )
    found = {}
    for key, value in metric.compute().items():
        result = key.partition("|")[2]
        if result.startswith("lifetime_") or metric.ranks_rows:
            short = result.removeprefix("lifetime_").removeprefix("window_")
            found[name if short == str(metric.name) else short] = float(value)
    return found


@pytest.mark.parametrize(
    "name", [n for n in BINARY if n not in (*BY_GROUP, "tower_qps", "multi_label_precision")]
)
def test_a_name_is_the_metric_over_all_samples(name: str) -> None:
    columns = flat(data(), "sample_weights", "watched")
    found = computed(NamedMetrics({name: ARGUMENTS.get(name, {})}, CPU), columns)
    expected = of_class(name, columns)
    assert expected
    assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-5, nan_ok=True)
    reference = BinaryMetrics(CPU)
    for output, batch in batches(columns):
        reference.update(output, batch)
    assert found["loss"] == reference.compute()["loss"]
    if name in ("auc", "ne"):
        assert found[name] == reference.compute()[name]


def _groups(columns: dict[str, torch.Tensor]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores and labels of each user."""
    user, scores, labels = (columns[name].double().numpy() for name in ("user", "logits", "labels"))
    return [(scores[user == u], labels[user == u]) for u in np.unique(user)]


def _top(scores: np.ndarray, labels: np.ndarray) -> tuple[float, float, float]:
    best = np.argsort(-scores)[:2]
    return labels[best].sum(), labels.sum(), len(best)


def test_groups_are_complete_across_batches() -> None:
    columns = flat(data())
    groups = _groups(columns)
    assert any(len(scores) > 1 for scores, _ in groups)
    areas = [roc_auc_score(y, x) for x, y in groups if 0 < y.sum() < len(y)]
    gains = [ndcg_score(y[None], x[None]) if len(y) > 1 else float(y[0] > 0) for x, y in groups]
    hits, positives, decided = np.sum([_top(*group) for group in groups], axis=0)
    found = computed(
        NamedMetrics({name: ARGUMENTS.get(name, {}) for name in BY_GROUP}, CPU), columns
    )
    assert found["gauc"] == pytest.approx(np.mean(areas))
    assert found["gauc_num_samples"] == len(areas)
    assert found["ndcg"] == pytest.approx(np.mean(gains))
    assert found["recall_session_level"] == pytest.approx(hits / positives)
    assert found["precision_session_level"] == pytest.approx(hits / decided)
    scores, labels = (columns[name].numpy() for name in ("logits", "labels"))
    right = np.sign(scores[:, None] - scores) == np.sign(labels[:, None] - labels)
    assert found["xauc"] == pytest.approx(right[np.triu_indices(N, 1)].mean())


def test_labels_that_are_missing_count_in_no_metric() -> None:
    columns = data(2)
    names = {
        name: ARGUMENTS.get(name, {})
        for name in BINARY
        if name not in ("tower_qps", "multi_label_precision")
    }
    found = computed(NamedMetrics(names, CPU, tasks=["click", "buy"]), columns)
    for column, task in enumerate(("click", "buy")):
        kept = columns["label_mask"][:, column]
        known = {k: v[kept] for k, v in columns.items() if k != "label_mask"}
        known |= {k: known[k][:, column] for k in ("logits", "labels")}
        alone = computed(NamedMetrics(names, CPU), known)
        assert alone == pytest.approx(
            {name: found[f"{name}/{task}"] for name in alone}, rel=1e-6, nan_ok=True
        )


def test_logits_of_classes() -> None:
    random = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(N, 3, generator=random), torch.randint(3, (N,), generator=random)
    metrics = NamedMetrics({"multiclass_recall": {"number_of_classes": 3}}, CPU)
    found = computed(metrics, {"logits": logits, "labels": labels, "user": labels})
    places = (logits.argsort(1, descending=True) == labels[:, None]).numpy().argmax(1)
    for k in (1, 2, 3):
        assert found[f"multiclass_recall@{k}"] == pytest.approx((places < k).mean())
    assert found["loss"] == 0.5


def test_precision_of_each_label() -> None:
    columns = data(2)
    del columns["label_mask"]
    metrics = NamedMetrics(["multi_label_precision"], CPU, tasks=["click", "buy"])
    found = computed(metrics, columns)
    weights = columns["sample_weights"].numpy()
    for column, task in enumerate(("click", "buy")):
        chosen = columns["logits"][:, column].numpy() >= 0
        precision = np.average(
            columns["labels"][:, column].numpy()[chosen], weights=weights[chosen]
        )
        assert found[f"multi_label_precision/{task}"] == pytest.approx(precision)
    with pytest.raises(ValueError, match="needs all labels"):
        computed(NamedMetrics(["multi_label_precision"], CPU, tasks=["a", "b"]), data(2))


NAMES = {name: ARGUMENTS.get(name, {}) for name in BINARY if name != "tower_qps"}


def _on_ranks(is_empty: bool) -> dict[str, float]:
    """The metrics where ranks get every third batch, or the first rank all of them."""
    columns = data(2)
    del columns["label_mask"]
    metrics = NamedMetrics(NAMES, CPU, tasks=["click", "buy"])
    rank, size = dist.get_rank(), dist.get_world_size()
    for i, (output, batch) in enumerate(batches(columns)):
        if (i % size if not is_empty else 0) == rank:
            metrics.update(output, batch)
    metrics.sync()
    return metrics.compute()


@pytest.mark.parametrize("is_empty", [False, True])
def test_ranks_compute_the_same(ranks: RankPool, is_empty: bool) -> None:
    columns = data(2)
    del columns["label_mask"]
    alone = computed(NamedMetrics(NAMES, CPU, tasks=["click", "buy"]), columns)
    for found in ranks(2 + is_empty, _on_ranks, is_empty):
        assert {name: found[name] for name in alone} == pytest.approx(alone, rel=1e-6, nan_ok=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch: torch.Tensor) -> Any:
        logits, labels = self.layer(batch).squeeze(1), (batch[:, 0] > 0).float()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return loss, (loss.detach(), logits.detach(), labels)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["auc", "lift"], "metrics must be one of .*'lift'"),
        (["auc", "auc"], "distinct names"),
        (["gauc"], 'gauc needs group_by, .*"group_by": "user"'),
        ({"auc": {"grouped_auc": True}}, "auc needs group_by"),
        ({"mse": USER}, "mse has no groups"),
        ({"recall_session_level": USER}, "needs top_threshold"),
        ({"recall": {"limit": 0.5}}, r"takes the arguments \['threshold'\]"),
        ({"recall": {"tensor_name": "watched"}}, "recall takes no tensor_name"),
        ({"multiclass_recall": {"number_of_classes": 3}, "auc": {}}, "multiclass_recall alone"),
    ],
)
def test_wrong_names(names: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plain(tmp_path, metrics=names, epochs=1)


def test_batches_without_groups() -> None:
    columns = flat(data())
    [(output, batch)] = batches(columns, N)
    with pytest.raises(ValueError, match=r"must have 'film' for metrics.*features \['user'\]"):
        NamedMetrics({"gauc": {"group_by": "film"}}, CPU).update(output, batch)
    lengths = torch.ones(N, dtype=torch.int64)
    lengths[0], lengths[1] = 0, 2
    batch.sparse_features = KeyedJaggedTensor(["user"], columns["user"], lengths=lengths)
    with pytest.raises(ValueError, match=r"'user' .*must have one id for"):
        NamedMetrics({"gauc": USER}, CPU).update(output, batch)


def test_a_trainer_shows_metrics_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    user = torch.arange(50) % 7
    features = KeyedJaggedTensor(["user"], user, lengths=torch.ones_like(user))
    train = []
    for _ in range(6):
        labels, dense = torch.randint(2, (50, 2)).float(), torch.randn(50, 2)
        train.append(Batch(dense, features, labels))
    recorder, model = Recorder(), TwoTasks()
    names = {"auc": {}, "calibration": {}, "gauc": USER}
    settings = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "metrics": partial(NamedMetrics, names, tasks=["click", "buy"]),
        "monitor": "gauc/click",
    }
    result = plain(tmp_path, **settings, epochs=2, loggers=[recorder]).fit(train, train)
    assert result.best_scores["gauc/click"] > 0
    logged = recorder.records[-1][1]
    for name in ("auc", "calibration", "gauc", "gauc_num_samples", "loss"):
        assert f"validation/{name}/click" in logged
    assert "loss/click" in logged


def test_a_trainer_takes_a_list_of_names(tmp_path: Path) -> None:
    layer = Layer()
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    trainer = plain(tmp_path, model=layer, optimizer=sgd, metrics=["ne", "mse"], epochs=1)
    scores = trainer.evaluate([torch.randn(20, 2)])
    assert sorted(scores) == ["loss", "mse", "ne", "rmse"]
