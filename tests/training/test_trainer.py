"""`Trainer`: the same weights as a loop by hand, on one rank and on two, also after a resume."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from recsys.base import contact
from recsys.datasets.utils import Batch
from recsys.distributed.checkpoint import CheckpointError, load_checkpoint, read_checkpoint
from recsys.distributed.checkpoint.versions import complete_versions
from recsys.distributed.monitoring.loss_guard import BadLossError, LossGuard
from recsys.distributed.monitoring.watchdog import Watchdog
from recsys.distributed.types import ShardingEnv
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.modules.hashed_ids import HashedIds
from recsys.modules.losses import mean_loss
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.training import BinaryMetrics, Trainer
from recsys.training import job as job_of_trainers
from recsys.training.buffers import OwnBuffers
from tests.distributed import job
from tests.ranks import RankPool
from tests.training.job import (
    LOADERS,
    NUM_BATCHES,
    Shuffled,
    WithState,
    adam_of,
    model_of,
    saved_in,
    trainer_of,
    validation,
)

ROOT = Path(__file__).parents[2]


class Model(nn.Module):
    """A model of one layer, on batches `[B, 3]`: two features and the label."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(2, 1)

    def forward(self, batch: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits, labels = self.layer(batch[:, :2]).squeeze(1), batch[:, 2]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return loss, (loss.detach(), logits.detach(), labels)


def rows(num_batches: int, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    features = torch.randn(num_batches, 16, 2)
    labels = (features[..., :1] + 0.5 * torch.randn(num_batches, 16, 1) > 0).float()
    return list(torch.cat([features, labels], 2))


def plain(folder: str | Path, **settings: Any) -> Trainer:
    """A trainer of an unsharded model."""
    model = settings.pop("model", None) or Model()
    optimizer = settings.pop("optimizer", None) or torch.optim.Adam(model.parameters(), lr=0.1)
    quiet = {"loggers": (), "shows_bar": False, "log_every": None}
    return Trainer(model, optimizer, folder, **{**quiet, **settings})


class Recorder:
    """A logger that keeps the records."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.records.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


def values_in(folder: str | Path) -> dict[str, Tensor]:
    return read_checkpoint(Path(folder) / "last", optimizer=True)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# -- the loop --------------------------------------------------------------------------------------


def _by_hand(num_epochs: int) -> dict[str, Tensor]:
    model = model_of(dropout=False)
    dense, loader = adam_of(model), Shuffled()
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            dense.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            dense.step()
    return _weights(model)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of the weights."""
    found = {}
    for name, value in model.state_dict().items():
        parts = value.local_shards() if hasattr(value, "local_shards") else [("", value)]
        found |= {f"{name} {offsets}": part.clone() for offsets, part in parts}
    return found


def _trained(folder: str, num_epochs: int, pipeline: bool) -> dict[str, Tensor]:
    trainer = trainer_of(
        folder, model=model_of(dropout=False), epochs=num_epochs, pipeline=pipeline
    )
    result = trainer.fit(Shuffled())
    assert (result.steps, result.epochs) == (num_epochs * NUM_BATCHES, num_epochs)
    return _weights(trainer.model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_pipeline_and_plain_loop_equal_a_loop_by_hand(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    expected = ranks(world_size, _by_hand, 2)
    for pipeline in (True, False):
        found = ranks(world_size, _trained, str(tmp_path / f"{pipeline}"), 2, pipeline)
        for of_rank, expected_of_rank in zip(found, expected, strict=True):
            assert_equal(of_rank, expected_of_rank)


@pytest.mark.parametrize("pipeline", [True, False])
def test_a_pipeline_reads_ahead_but_not_over_a_save(tmp_path: Path, pipeline: bool) -> None:
    loader, found = WithState(), []

    class Reads(Recorder):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            found.append(loader.num_reads)

    settings = {"steps": 8, "save_every": 6, "log_every": 1, "loggers": [Reads()]}
    trainer_of(tmp_path, pipeline=pipeline, **settings).fit(loader)
    ahead = [1, 4, 5, 6, 6, 6, 8, 8]  # the first step shows the inputs of the model
    assert found == (ahead if pipeline else [1, 2, 3, 4, 5, 6, 7, 8])


def test_epochs_and_steps(tmp_path: Path) -> None:
    by_epochs = plain(tmp_path / "epochs", epochs=3).fit(rows(4))
    assert (by_epochs.steps, by_epochs.epochs) == (12, 3)
    by_steps = plain(tmp_path / "steps", steps=6).fit(rows(4))
    assert (by_steps.steps, by_steps.epochs) == (6, 1)
    exact = plain(tmp_path / "exact", steps=8).fit(rows(4))
    assert (exact.steps, exact.epochs) == (8, 2)
    with pytest.raises(ValueError, match="either epochs or steps"):
        plain(tmp_path, epochs=1, steps=1)
    with pytest.raises(ValueError, match="either epochs or steps"):
        plain(tmp_path)


def test_a_loader_without_batches_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="received none in epoch 1"):
        plain(tmp_path, steps=3).fit([])
    with pytest.raises(ValueError, match="received none in epoch 2"):
        plain(tmp_path, epochs=2).fit(iter(rows(2)))


def test_a_forgotten_parameter_is_an_error(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD([model.layer.bias], lr=0.1)
    trainer = plain(tmp_path, epochs=1, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"1 that nothing updates, \['layer.weight'\]"):
        trainer.fit(rows(3))
    model.layer.weight.requires_grad_(False)
    assert trainer.fit(rows(3)).steps == 3


def test_a_schedule_equals_torchs(tmp_path: Path) -> None:
    def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=12)

    expected, batches = Model(), rows(4)
    optimizer = torch.optim.Adam(expected.parameters(), lr=0.1)
    schedule, rates = schedule_of(optimizer), []
    for batch in batches * 3:
        optimizer.zero_grad()
        expected(batch)[0].backward()
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    found, recorder = Model(), Recorder()
    optimizer = torch.optim.Adam(found.parameters(), lr=0.1)
    settings = {"model": found, "optimizer": optimizer, "schedule": schedule_of(optimizer)}
    plain(tmp_path, **settings, epochs=3, log_every=1, loggers=[recorder]).fit(batches)
    assert_equal(found.state_dict(), expected.state_dict())
    assert [values["learning_rate"] for _, values in recorder.records] == rates


def test_a_plateau_lowers_the_rate(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    settings = {"model": model, "optimizer": optimizer, "schedule": schedule, "monitor": "auc"}
    settings["metrics"] = scores_of(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match=r"monitored metric, mode='max'; .* mode='min'"):
        plain(tmp_path, **settings, epochs=3)
    plain(tmp_path, **settings, epochs=3, maximize=False).fit(rows(2), rows(1))
    assert optimizer.param_groups[0]["lr"] == 0.1  # of the best evaluation, the first one
    assert schedule.get_last_lr() == [0.025]


def test_clipping_equals_the_formula(tmp_path: Path) -> None:
    limit, batches, expected = 0.05, rows(6), Model()
    for batch in batches:
        gradients = torch.autograd.grad(expected(batch)[0], list(expected.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).double().norm()
        for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
            parameter.data -= 0.5 * gradient * min(1.0, limit / norm.item())
    found = Model()
    optimizer = torch.optim.SGD(found.parameters(), lr=0.5)
    plain(tmp_path, model=found, optimizer=optimizer, clip_norm=limit, epochs=1).fit(batches)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found.layer.weight, Model().layer.weight, atol=1e-3)


def test_fused_tables_are_not_clipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="deferred"):
        trainer_of(tmp_path, clip_norm=1.0, epochs=1)


def _train_uneven(folder: str) -> tuple[int, dict[str, float]]:
    loader, rank = Shuffled(), ShardingEnv.default().rank
    loader.batches = loader.batches[: NUM_BATCHES - 3 * rank]
    loader.order = lambda: list(range(len(loader.batches)))  # type: ignore[method-assign]
    trainer = trainer_of(folder, epochs=2, uneven="join", evaluate_every=5)
    result = trainer.fit(loader, validation()[: 4 - 3 * rank])
    return result.steps, result.best_scores


def test_ranks_may_have_different_numbers_of_batches(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2, _train_uneven, str(tmp_path))
    assert first == second
    assert first[0] == 2 * NUM_BATCHES
    assert all(map(math.isfinite, first[1].values()))


def test_an_empty_batch_changes_nothing(tmp_path: Path) -> None:
    """Its mean loss is NaN and its gradients are zero, as at the end of an uneven epoch."""
    batches = rows(4)
    weights = []
    for chosen in (batches, [*batches[:2], batches[0][:0], *batches[2:]]):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plain(tmp_path / str(len(chosen)), model=model, optimizer=optimizer, epochs=2).fit(chosen)
        weights.append(model.state_dict())
    assert_equal(*weights)


# -- evaluation ------------------------------------------------------------------------------------


def _evaluated(folder: str) -> dict[str, float]:
    trainer = trainer_of(folder, model=model_of(dropout=False), epochs=1)
    return trainer.evaluate(validation())


def test_evaluation_on_two_ranks_equals_one(ranks: RankPool, tmp_path: Path) -> None:
    alone = _evaluated(str(tmp_path))
    assert 0 < alone["auc"] < 1
    for found in ranks(2, _evaluated, str(tmp_path)):
        assert found == pytest.approx(alone, rel=1e-5)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    trainer = plain(tmp_path, epochs=1)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.model.train()
    trainer.evaluate(rows(3))
    assert trainer.model.training
    assert_equal(trainer.model.state_dict(), before)
    trainer.model.eval()
    trainer.evaluate(rows(3))
    assert not trainer.model.training


def _frozen(folder: str) -> list[dict[str, Tensor]]:
    """Statistics of two norms after training; the first is frozen, in evaluation mode."""
    model = job.model_of()
    frozen, trained = nn.BatchNorm1d(16).requires_grad_(False).eval(), nn.BatchNorm1d(16)
    model.model.over_arch.model.insert(1, nn.Sequential(trained, frozen))
    model = DistributedModelParallel(model, device=torch.device("cpu"))
    before = [module.training for module in model.modules()]
    trainer = trainer_of(folder, model=model, epochs=2)
    trainer.evaluate(validation())
    assert [module.training for module in model.modules()] == before
    trainer.fit(Shuffled(), validation())
    assert [module.training for module in model.modules()] == before
    model.eval()
    again = trainer_of(folder, model=model, epochs=1, overwrite=True)
    again.fit(Shuffled())  # as a whole in training mode
    assert not any(module.training for module in model.modules())
    return [{k: v.clone() for k, v in norm.named_buffers()} for norm in (frozen, trained)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_part_in_evaluation_mode_stays_in_it(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    for frozen, trained in ranks(world_size, _frozen, str(tmp_path)):
        assert frozen["num_batches_tracked"] == NUM_BATCHES  # of the last training
        assert trained["num_batches_tracked"] == 3 * NUM_BATCHES


class Scores:
    """Metrics that return the next of the scores of a test."""

    def __init__(self, scores: Iterator[float]) -> None:
        self._scores = scores

    def update(self, output: Any, batch: Any) -> None:
        pass

    def compute(self) -> dict[str, float]:
        return {"auc": next(self._scores)}


def scores_of(*scores: float) -> Callable[[torch.device], Any]:
    each = iter(scores)
    return lambda device: Scores(each)


def test_early_stopping_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"epochs": 50, "monitor": "auc", "patience": 2}
    scores = scores_of(0.5, 0.7, 0.6, 0.8, 0.8, 0.7, 0.9)
    trainer = plain(tmp_path, **settings, metrics=scores, evaluate_every=3)
    after: list[dict[str, Tensor]] = []
    evaluate = job_of_trainers.evaluate

    def spy(settings: Any, batches: Any) -> dict[str, float]:
        after.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
        return evaluate(settings, batches)

    monkeypatch.setattr(job_of_trainers, "evaluate", spy)
    result = trainer.fit(rows(4), rows(1))
    assert result.stopped_early
    assert (result.steps, result.best_step, result.best_epoch) == (18, 12, 3)
    assert result.best_scores == {"auc": 0.8}
    assert len(after) == 6
    assert_equal(trainer.model.state_dict(), after[3])
    found = Model()
    about = load_checkpoint(trainer.best, found)
    assert about == {"step": 12, "epoch": 3, "scores": {"auc": 0.8}}
    assert_equal(found.state_dict(), after[3])
    load_checkpoint(trainer.last, found)
    assert_equal(found.state_dict(), after[5])
    again = plain(tmp_path, **settings, metrics=scores_of(), resume=True)
    assert again.fit(rows(4), rows(1)) == result  # it is at its end


def test_the_end_is_evaluated_and_belongs_to_the_last_epoch(tmp_path: Path) -> None:
    settings = {"metrics": scores_of(0, 1, 2, 3), "monitor": "auc"}
    result = plain(tmp_path, **settings, epochs=2, evaluate_every=3).fit(rows(4), rows(1))
    assert (result.best_scores, result.best_step, result.best_epoch) == ({"auc": 2}, 8, 2)


def test_the_last_weights_stay_on_request(tmp_path: Path) -> None:
    trainer = plain(tmp_path, epochs=3, metrics=scores_of(3, 2, 1), monitor="auc", load_best=False)
    assert trainer.fit(rows(4), rows(1)).best_step == 4
    values = values_in(tmp_path)
    assert torch.equal(trainer.model.state_dict()["layer.weight"], values["layer.weight"])


def test_wrong_metrics_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one of \['auc'\]; received 'loss'"):
        plain(tmp_path, epochs=1, metrics=scores_of(0.5)).fit(rows(2), rows(1))
    with pytest.raises(ValueError, match="received NaN at step 2"):
        plain(tmp_path, epochs=1, metrics=scores_of(math.nan), monitor="auc").fit(rows(2), rows(1))
    rule = "patience and ReduceLROnPlateau need validation"
    with pytest.raises(ValueError, match=rule):
        plain(tmp_path, epochs=1, patience=1).fit(rows(2))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    settings = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with pytest.raises(ValueError, match=rule):
        plain(tmp_path, epochs=1, **settings).fit(rows(2))


# -- records ---------------------------------------------------------------------------------------


def test_records(tmp_path: Path) -> None:
    recorder, batches = Recorder(), rows(4)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)  # the weights stay
    losses = [model(batch)[0].item() for batch in batches]
    settings = {"model": model, "optimizer": optimizer, "loggers": [recorder]}
    plain(tmp_path, **settings, epochs=2, log_every=3).fit(batches, rows(1))
    assert recorder.is_closed
    assert [step for step, _ in recorder.records] == [3, 4, 6, 8]
    first, second, third, last = (values for _, values in recorder.records)
    assert first["loss"] == pytest.approx(sum(losses[:3]) / 3)
    assert second["loss"] == pytest.approx(losses[3])
    assert third["loss"] == pytest.approx(sum(losses[:2]) / 2)
    assert {"epoch", "learning_rate", "samples_per_second", "seconds_left"} < first.keys()
    assert {"validation/auc", "validation/ne", "validation/loss"} < last.keys()
    assert [values["epoch"] for _, values in recorder.records] == [1, 1, 2, 2]
    assert last["seconds_left"] == 0
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": step, **values} for step, values in recorder.records
    ]


class TwoTasks(nn.Module):
    """Two tasks on batches of two features; the loss of `DLRMTrain`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(2, 2)

    def forward(self, batch: Batch) -> Any:
        logits = self.layer(batch.dense_features)
        loss = mean_loss(logits, batch.labels, batch.sample_weights, batch.label_mask)
        return loss, (loss.detach(), logits.detach(), batch.labels)


@pytest.mark.parametrize("has_weights", [False, True])
def test_losses_of_tasks_have_one_meaning(tmp_path: Path, has_weights: bool) -> None:
    torch.manual_seed(0)
    batches = []
    for number in range(6):
        features, labels = torch.randn(50, 2), torch.randint(2, (50, 2)).float()
        mask = torch.rand(50, 2) < torch.tensor([1.0, 0.4]) if number % 3 else None
        weights = torch.rand(50) + 0.5 if has_weights else None
        if weights is not None:
            weights *= 50 / weights.sum()
        empty = KeyedJaggedTensor([], torch.empty(0).long(), lengths=torch.empty(0).long())
        batches.append(Batch(features, empty, labels, sample_weights=weights, label_mask=mask))
    model, recorder = TwoTasks(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    metrics = partial(BinaryMetrics, tasks=["click", "buy"])
    settings = {"model": model, "optimizer": optimizer, "metrics": metrics}
    plain(tmp_path, **settings, epochs=1, loggers=[recorder]).fit(batches, batches)
    ((_, found),) = recorder.records
    for name in ("loss", "loss/click", "loss/buy"):
        assert found[name] == pytest.approx(found[f"validation/{name}"], rel=1e-6)
    if not has_weights:
        masks = [
            torch.ones(50, 2).bool() if b.label_mask is None else b.label_mask for b in batches
        ]
        terms = nn.functional.binary_cross_entropy_with_logits(
            model.layer(torch.cat([b.dense_features for b in batches])),
            torch.cat([b.labels for b in batches]),
            reduction="none",
        )
        for column, task in enumerate(["click", "buy"]):
            of_task = terms[torch.cat(masks)[:, column], column].mean().item()
            assert found[f"validation/loss/{task}"] == pytest.approx(of_task, rel=1e-5)


def _logged(folder: str) -> list[float]:
    recorder = Recorder()
    trainer = trainer_of(
        folder, model=model_of(dropout=False), epochs=1, loggers=[recorder], log_every=4
    )
    trainer.fit(Shuffled())
    return [values["loss"] for _, values in recorder.records]


def test_the_loss_is_the_mean_of_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    alone = _logged(str(tmp_path / "one"))
    first, second = ranks(2, _logged, str(tmp_path / "two"))
    assert len(alone) == 3
    assert first == pytest.approx(alone, rel=1e-4)
    assert second == []  # rank 0 logs


# -- resume ----------------------------------------------------------------------------------------


def _train(folder: str, kind: str, stops: list[int]) -> int:
    """Train up to some steps, each time with new objects; return the number of batches read."""
    random.seed(5)
    torch.manual_seed(5)
    for stop in stops:
        loader = LOADERS[kind]()
        trainer = trainer_of(
            folder,
            steps=stop,
            save_every=4,
            evaluate_every=9,
            resume=True,
            schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5),
        )
        trainer.fit(loader, validation())
    return loader.num_reads if isinstance(loader, WithState) else 0


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_job_equals_an_unbroken_one(
    ranks: RankPool, tmp_path: Path, world_size: int, kind: str
) -> None:
    broken, unbroken = str(tmp_path / "broken"), str(tmp_path / "unbroken")
    ranks(world_size, _train, unbroken, kind, [30])
    num_reads = ranks(world_size, _train, broken, kind, [4, 13, 13, 27, 30])
    assert_equal(values_in(broken), values_in(unbroken))
    if kind == "state":  # it reads no batch twice
        assert num_reads == [3] * world_size


class Counting(nn.Module):
    """A model whose output depends on buffers that are updated by the rank's batches."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.inner = job.model_of()
        self.norm = nn.BatchNorm1d(3) if has_norm else nn.Identity()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("constant", torch.ones(3))

    def forward(self, batch: Batch) -> Any:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * batch.dense_features.mean(0)
        dense = self.norm(batch.dense_features - self.mean)
        return self.inner(dataclasses.replace(batch, dense_features=dense))


def _train_counting(folder: str, has_norm: bool, stops: list[int]) -> dict[str, Tensor]:
    for stop in stops:
        model = DistributedModelParallel(Counting(has_norm), device=torch.device("cpu"))
        trainer = trainer_of(
            folder, model=model, steps=stop, save_every=4, evaluate_every=9, resume=True
        )
        trainer.fit(Shuffled(), validation())
        own = OwnBuffers(model, ShardingEnv.default())
        load_checkpoint(trainer.last, model, progress={"buffers": own})
        own.compare()
        assert "constant" not in own.state_dict()
    return _weights(model)


@pytest.mark.parametrize("has_norm", [True, False])
def test_buffers_of_each_rank_resume_exactly(
    ranks: RankPool, tmp_path: Path, has_norm: bool
) -> None:
    broken = ranks(2, _train_counting, str(tmp_path / "broken"), has_norm, [7, 9, 17, 30])
    unbroken = ranks(2, _train_counting, str(tmp_path / "unbroken"), has_norm, [30])
    for found, expected in zip(broken, unbroken, strict=True):
        assert_equal(found, expected)
    assert_equal(values_in(tmp_path / "broken"), values_in(tmp_path / "unbroken"))
    assert torch.equal(unbroken[0]["mean "], unbroken[1]["mean "]) == has_norm  # by evaluation


def _train_hashed(folder: str, stops: list[int]) -> None:
    for stop in stops:
        torch.manual_seed(0)
        table = EmbeddingBagConfig(64, 8, "t", feature_names=["u"], ids=HashedIds())
        dlrm = DLRM(EmbeddingBagCollection(tables=[table]), 3, [8], [8, 1])
        apply_optimizer_in_backward(RowWiseAdagrad, dlrm.sparse_arch.parameters(), {"lr": 0.1})
        batches = []
        for _ in range(12):
            ids = torch.randint(-200, 200, (16,))  # more than rows
            features = KeyedJaggedTensor(["u"], ids, lengths=torch.ones(16).int())
            batches.append(Batch(torch.randn(16, 3), features, (ids % 2).float()))
        model = DistributedModelParallel(DLRMTrain(dlrm), device=torch.device("cpu"))
        trainer_of(folder, model=model, steps=stop, save_every=4, resume=True).fit(batches)


def test_tables_of_hashed_ids_resume_exactly(tmp_path: Path) -> None:
    _train_hashed(str(tmp_path / "broken"), [7, 17, 30])
    _train_hashed(str(tmp_path / "unbroken"), [30])
    assert_equal(values_in(tmp_path / "broken"), values_in(tmp_path / "unbroken"))


def _resume_on_other_ranks(folder: str, until: int) -> None:
    trainer = trainer_of(folder, model=model_of(dropout=False), epochs=until, resume=True)
    trainer.fit(Shuffled(), validation())


def test_a_job_resumes_on_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    changing, one = tmp_path / "changing", tmp_path / "one"
    _resume_on_other_ranks(str(one), 4)
    for until, world_size in enumerate((1, 2, 3, 2), start=1):
        ranks(world_size, _resume_on_other_ranks, str(changing), until)
    found, expected = values_in(changing), values_in(one)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def _content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_new_job_refuses_the_folder_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job"
    first = plain(job, epochs=2, log_every=1).fit(rows(3), rows(1))
    before = _content(job)
    rule = r"job, which has last/step-\d+.*best/step-6.*log\.jsonl\..*resume=True"
    with pytest.raises(FileExistsError, match=rule):
        plain(job, epochs=1).fit(rows(3))
    plain(job, epochs=1).evaluate(rows(1))
    with pytest.raises(ValueError, match=r"overwrite must be False with resume=True"):
        plain(job, epochs=1, resume=True, overwrite=True)
    assert _content(job) == before
    (job / "notes.txt").write_text("of the user")
    second = plain(job, epochs=1, log_every=1, overwrite=True).fit(rows(3), rows(1))
    assert f"Overwrites the job in {job}: last/step-" in capsys.readouterr().out
    assert (first.steps, second.steps, second.best_step) == (6, 3, 3)
    assert [path.name for path in (job / "best").iterdir()] == ["step-3"]
    assert len((job / "log.jsonl").read_text().splitlines()) == 4
    assert (job / "notes.txt").exists()
    undisturbed = plain(tmp_path / "undisturbed", epochs=1)
    undisturbed.fit(rows(3), rows(1))
    assert_equal(values_in(job), values_in(tmp_path / "undisturbed"))
    failed = tmp_path / "failed"
    failed.mkdir()
    for number in (1, 2):
        (failed / "log.jsonl").write_text(f'{{"step": {number}}}\n')
        with pytest.raises(KeyboardInterrupt):  # before its first save
            plain(failed, epochs=1).fit(itertools.chain(rows(1), _interrupt()))
        assert json.loads((failed / f"log-{number}.jsonl").read_text()) == {"step": number}


def _refused(folder: str) -> str:
    trainer_of(folder, epochs=1).fit(Shuffled())
    try:
        trainer_of(folder, epochs=1).fit(Shuffled())
    except FileExistsError as error:
        trainer_of(folder, epochs=1, overwrite=True).fit(Shuffled())
        return str(error)
    return ""


def test_all_ranks_refuse_the_folder_of_another_job(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks(2, _refused, str(tmp_path)):
        assert text.startswith("On rank 0: Trainer.folder must have no other job; received")


def test_a_job_that_overwrites_another_does_not_resume_it(tmp_path: Path) -> None:
    """The new job ends before its first save."""
    plain(tmp_path / "job", epochs=3).fit(rows(4), rows(1))
    torch.manual_seed(7)
    start = Model()
    ended = plain(tmp_path / "job", steps=9, model=copy.deepcopy(start), overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        ended.fit(itertools.chain(rows(2), _interrupt()))
    expected = plain(tmp_path / "undisturbed", steps=9, model=copy.deepcopy(start))
    expected.fit(rows(4))
    resumed = plain(tmp_path / "job", steps=9, model=copy.deepcopy(start), resume=True)
    assert resumed.fit(rows(4)).steps == 9
    assert_equal(resumed.model.state_dict(), expected.model.state_dict())


def test_the_best_checkpoint_has_the_number_of_its_step(tmp_path: Path) -> None:
    settings = {"monitor": "auc", "evaluate_every": 4, "load_best": False}
    scores = scores_of(0.5, 0.6, 0.7, 0.6)
    result = plain(tmp_path, **settings, epochs=4, metrics=scores).fit(rows(4), rows(1))
    assert [path.name for path in (tmp_path / "best").iterdir()] == [f"step-{result.best_step}"]
    assert result.best_step == 12
    # killed after the best checkpoint of step 12, and before the save of it
    shutil.rmtree(tmp_path / "last")
    shutil.rmtree(tmp_path / "best")
    plain(tmp_path, **settings, epochs=2, metrics=scores_of(0.5, 0.6), overwrite=True).fit(
        rows(4), rows(1)
    )
    shutil.copytree(tmp_path / "best" / "step-8", tmp_path / "best" / "step-12")
    again = plain(tmp_path, **settings, epochs=4, metrics=scores_of(0.7, 0.6), resume=True)
    assert again.fit(rows(4), rows(1)) == result
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-12"]
    assert load_checkpoint(tmp_path / "best", Model())["step"] == 12


@pytest.mark.parametrize("damage", ["file", "manifest"])
def test_a_damaged_save_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    settings = {"save_every": 4, "steps": 16}
    plain(tmp_path / "unbroken", **settings).fit(rows(20))
    plain(tmp_path / "job", save_every=4, steps=12).fit(rows(20))
    older, newest = complete_versions(tmp_path / "job" / "last")[::-1]
    pattern = "manifest.json" if damage == "manifest" else "*.distcp"
    (file,) = newest.glob(pattern)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    resumed = plain(tmp_path / "job", **settings, resume=True)
    assert resumed.fit(rows(20)).steps == 16
    assert f"Training resumes from the version before it, {older}." in caplog.text
    assert f"It is now {newest.parent}/damaged-{newest.name}." in caplog.text
    assert_equal(values_in(tmp_path / "job"), values_in(tmp_path / "unbroken"))
    for version in complete_versions(tmp_path / "job" / "last"):
        for file in version.glob("*.distcp"):
            file.write_bytes(b"")
    newest = complete_versions(tmp_path / "job" / "last")[0]
    with pytest.raises(CheckpointError, match=f"{newest} cannot be loaded"):
        plain(tmp_path / "job", steps=20, resume=True).fit(rows(20))


def _interrupt() -> Iterator[Tensor]:
    raise KeyboardInterrupt
    yield


def test_a_job_that_resumes_after_an_epoch_does_not_evaluate_it_again(tmp_path: Path) -> None:
    settings = {"monitor": "auc", "patience": 2}
    scores = (0.5, 0.4, 0.6, 0.7)
    unbroken = plain(tmp_path / "unbroken", **settings, steps=16, metrics=scores_of(*scores))
    expected = unbroken.fit(rows(4), rows(1))
    for number, score in enumerate(scores, start=1):
        metrics = scores_of(score)
        again = plain(tmp_path / "b", **settings, steps=4 * number, metrics=metrics, resume=True)
        found = again.fit(rows(4), rows(1))
    assert found == expected
    assert_equal(values_in(tmp_path / "b"), values_in(tmp_path / "unbroken"))


def test_the_last_evaluation_is_saved(tmp_path: Path) -> None:
    settings = {"monitor": "auc", "maximize": False, "save_every": 5, "evaluate_every": 6}
    first = plain(tmp_path, **settings, steps=10, metrics=scores_of(0.9, 0.5))
    first.fit(rows(20), rows(1))
    again = plain(tmp_path, **settings, steps=18, resume=True, metrics=scores_of(0.7, 0.8))
    assert again.fit(rows(20), rows(1)).best_step == 10


def _resume_at_the_end_of_an_epoch(folder: str, policy: str) -> int:
    loader = Shuffled()
    loader.batches = loader.batches[:5]
    loader.order = lambda: list(range(5))  # type: ignore[method-assign]
    trainer_of(folder, steps=5, uneven=policy).fit(loader)
    return trainer_of(folder, steps=8, uneven=policy, resume=True).fit(loader).steps


@pytest.mark.parametrize("policy", ["join", "drop"])
def test_a_job_resumes_after_the_last_batch_of_an_epoch(
    ranks: RankPool, tmp_path: Path, policy: str
) -> None:
    assert ranks(2, _resume_at_the_end_of_an_epoch, str(tmp_path), policy) == [8, 8]


def test_a_killed_job_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """Killed at random moments; the last save has all its weights, states and positions."""

    def run(folder: Path, *arguments: str) -> int:
        command = [sys.executable, "-m", "tests.training.job", str(folder), *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, -9), done.stderr
        return done.returncode

    chance, kind = random.Random(3), "state"
    assert run(tmp_path / "undisturbed", "--loader", kind) == 0
    for _ in range(4):
        after = f"{chance.uniform(0.02, 0.4):.3f}"
        if run(tmp_path / "killed", "--loader", kind, "--fault", "kill", "--after", after) == 0:
            break
    run(tmp_path / "killed", "--loader", kind)
    for name in ("last", "best"):
        assert saved_in(tmp_path / "killed", name) == saved_in(tmp_path / "undisturbed", name)
    records = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("killed", "undisturbed")
    ]
    for killed, undisturbed in zip(*records, strict=True):
        for values in (killed, undisturbed):
            values.pop("samples_per_second", None)
        assert killed == undisturbed


def test_wrong_settings_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Trainer\.loggers\[0\] must be a logger"):
        plain(tmp_path, epochs=1, loggers=["tensorboard"])
    with pytest.raises(TypeError, match=r"Trainer\.loggers must be a list"):
        plain(tmp_path, epochs=1, loggers=Recorder())
    with pytest.raises(ValueError, match=r"Trainer\.uneven must .*drop, pad, join"):
        plain(tmp_path, epochs=1, uneven="wait")
    with pytest.raises(ValueError, match="uneven='pad' repeats batches: it excludes save_every"):
        plain(tmp_path, epochs=1, uneven="pad", save_every=2)
    with pytest.raises(ValueError, match=r"direction is unknown; received monitor='lift'"):
        plain(tmp_path, epochs=1, monitor="lift")
    with pytest.raises(ValueError, match=r"Trainer\.save_every must be"):
        plain(tmp_path, epochs=1, save_every=0)
    with pytest.raises(NotADirectoryError, match=r"Trainer\.folder"):
        plain("/dev/null/runs", epochs=1)


# -- faults ----------------------------------------------------------------------------------------


def test_a_bad_loss_is_reported_with_its_step(tmp_path: Path) -> None:
    batches = rows(5)
    batches[3][0, 0] = math.nan
    with pytest.raises(BadLossError, match=r"step 4 on rank 0.*nan"):
        plain(tmp_path, epochs=1).fit(batches)
    saved = torch.load(tmp_path / "bad_batches" / "step-4-rank-0.pt")
    assert torch.equal(saved["batch"].isnan(), batches[3].isnan())
    with pytest.raises(ValueError, match="skip=False"):
        plain(tmp_path, epochs=1, loss_guard=LossGuard(tmp_path, skip=True))


def _is_watched(folder: str) -> list[bool]:
    found = []

    class Watched(Shuffled):
        def __iter__(self) -> Iterator[Any]:
            found.append(contact.ask_watchdog is not None)
            return super().__iter__()

    trainer_of(folder, epochs=1).fit(Watched())
    with Watchdog():
        trainer_of(folder, epochs=1, overwrite=True).fit(Watched())  # in one that is open
    found.append(contact.ask_watchdog is not None)
    return found


def test_a_watchdog_is_open(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, _is_watched, str(tmp_path)) == [[True, True, False]] * 2
