"""One run of a `Trainer`: its state, its steps, evaluations, records and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recsys.base.loaders import epoch_length, spec_of
from recsys.base.step_stages import long_section
from recsys.distributed.checkpoint import (
    NewRows,
    RandomState,
    Stateful,
    load_checkpoint,
    newest_version,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.checkpoint.versions import remove_versions
from recsys.distributed.monitoring.loss_guard import LossGuard
from recsys.distributed.monitoring.preemption import Preemption
from recsys.distributed.train_pipeline import EvenBatches, TrainPipelineSparseDist, UnevenPolicy
from recsys.distributed.types import ShardingEnv
from recsys.modules.modes import evaluation_mode
from recsys.training.batches import Pausing, ResumableBatches, outputs
from recsys.training.best import Best, FitResult
from recsys.training.buffers import OwnBuffers
from recsys.training.data_check import DataCheck
from recsys.training.evaluation import BinaryMetrics, Metrics, sums_by_task
from recsys.training.folder import clear_folder, load_newest
from recsys.training.loggers import Logger
from recsys.training.named_metrics import NamedMetrics
from recsys.training.progress import MeanLoss, Progress, total_steps
from recsys.training.progressive import ProgressiveValidation

if TYPE_CHECKING:
    from recsys.features import FeatureSpec

__all__ = ["Job", "Start", "TrainerSettings", "evaluate"]

_Pipeline = TrainPipelineSparseDist[Any, Any]


@final
class Start(NamedTuple):
    """The checkpoint of another job with whose weights a job starts."""

    path: Path
    spec: FeatureSpec | None
    """The spec of the checkpoint, if it has none."""
    has_states: bool
    """True if the optimizer's state is loaded, too."""
    new_rows: NewRows


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerSettings:
    """Checked arguments of a `Trainer`, with the ranks and the device of the model."""

    model: nn.Module
    optimizer: Any
    """The whole optimizer of the model."""
    folder: Path
    epochs: int | None
    steps: int | None
    evaluate_every: int | None
    metrics: Callable[[torch.device], Metrics]
    monitor: str
    make_best: Callable[[], Best]
    load_best: bool
    save_every: int | None
    resume: bool
    start: Start | None
    spec: FeatureSpec | None
    overwrite: bool
    schedule: LRScheduler | None
    pipeline: bool
    uneven: UnevenPolicy | None
    log_every: int | None
    loggers: tuple[Logger, ...]
    """Loggers of this rank; none on other ranks than 0."""
    shows_bar: bool
    loss_guard: LossGuard
    preemption: Preemption
    progressive: ProgressiveValidation | None
    data_check: DataCheck
    env: ShardingEnv
    device: torch.device

    def new_pipeline(self, forward: Callable[[Any], tuple[Tensor, Any]]) -> _Pipeline:
        """Return a pipeline of the model."""
        pipeline = _Pipeline(self.model, self.optimizer, self.device, custom_model_fwd=forward)
        if not self.pipeline:
            pipeline.attach(sparse_dist=False)
        return pipeline

    def may_save_at(self, step: int) -> bool:
        """Return whether training may save within an epoch after a step."""
        intervals = (self.save_every, self.evaluate_every, self.steps)
        return any(interval is not None and step % interval == 0 for interval in intervals)


class _PreemptedEvaluationError(Exception):
    """An evaluation ended before its last batch, on all ranks."""


@torch.no_grad()
def evaluate(settings: TrainerSettings, batches: Iterable[Any]) -> dict[str, float]:
    """Return the metrics of the batches of all ranks; every rank calls it.

    Raises:
        _PreemptedEvaluationError: All ranks have seen a request to end.
    """
    metrics, model = settings.metrics(settings.device), settings.model

    def forward(batch: Any) -> tuple[Tensor, tuple[Any, Any]]:
        loss, output = model(batch)
        return loss, (output, batch)

    with evaluation_mode(model), long_section("evaluation"):
        if settings.uneven is not None:
            batches = EvenBatches(batches, model, UnevenPolicy.JOIN)
        pausing = Pausing(batches, check=settings.data_check)
        for output, batch in outputs(settings.new_pipeline(forward), pausing):
            metrics.update(output, batch)
            if settings.preemption.agrees(may_exchange=False):
                raise _PreemptedEvaluationError
        if settings.env.world_size > 1:
            metrics.sync()
    return metrics.compute()


@final
class Job:
    """A run of `Trainer.fit`, from its start or from a checkpoint; every rank creates it.

    Args:
        settings: Settings of the trainer.
        train: Batches of this rank.
        validation: Batches of this rank to evaluate, or None.

    Attributes:
        progress: The bar, which the caller closes.

    Raises:
        FileExistsError: The folder has a job, and neither `resume` nor `overwrite` is set.
    """

    def __init__(
        self, settings: TrainerSettings, train: Iterable[Any], validation: Iterable[Any] | None
    ) -> None:
        self._settings, self._train, self._validation = settings, train, validation
        self._batches = ResumableBatches(train, self._may_save_at)
        metrics = settings.metrics(settings.device)
        tasks = metrics.tasks if isinstance(metrics, BinaryMetrics | NamedMetrics) else []
        self._has_tasks = bool(tasks)
        self._loss, self._best = MeanLoss(settings.device, tasks), settings.make_best()
        self._own_buffers = OwnBuffers(settings.model, settings.env)
        self._state: dict[str, Stateful] = {
            "batches": self._batches,
            "loss": self._loss,
            "best": self._best,
            "random": RandomState(),
            "buffers": self._own_buffers,
        }
        if settings.progressive is not None:
            self._state["progressive"] = settings.progressive
        self._spec = settings.spec or spec_of(train)
        self._saved = (-1, -1)  # step and epoch of the last save
        self._is_recorded = True  # False: the last step waits for its evaluation and record
        self._last_steps: list[int] = []  # read since all ranks have seen a request to end
        self._wait_for_save: Callable[[], object] = lambda: None
        log = settings.folder / "log.jsonl"
        if settings.resume and newest_version(settings.folder / "last") is not None:
            self._load()
        else:
            if not settings.resume:
                clear_folder(settings.folder, settings.env, overwrites=settings.overwrite)
            elif settings.env.rank == 0:
                log.unlink(missing_ok=True)  # of a job that did not save
            if settings.start is not None:
                self._start(settings.start)
        total = total_steps(train, settings.epochs) if settings.epochs else settings.steps
        self.progress = Progress(total, self._batches.step, has_bar=settings.shows_bar)

    def run(self) -> FitResult:
        """Train, evaluate and save until the end; the model is in training mode."""
        settings = self._settings
        pipeline = settings.new_pipeline(self._forward)
        if not self._is_recorded:
            self._record()
        while not self._is_done():
            self._train_epoch(pipeline)
        settings.loss_guard.finish()
        if self._validation is not None and self._best.last_step != self._batches.step:
            self._evaluate(self._validation)
        self._save()
        self._wait_for_save()
        if settings.load_best and self._best.step:
            load_checkpoint(settings.folder / "best", settings.model, settings.optimizer)
        has_ended = settings.uneven is None and self._batches.batch == epoch_length(self._train)
        return self._best.result(self._batches.step, self._batches.epoch + has_ended)

    def _train_epoch(self, pipeline: _Pipeline) -> None:
        """Train until the end of the epoch or of the job."""
        settings, validation = self._settings, self._validation
        batches: Iterable[Any] = self._batches
        if settings.uneven is not None:
            is_resumed = self._batches.batch > 0  # perhaps after the last batch of the epoch
            batches = EvenBatches(
                self._batches, settings.model, settings.uneven, may_be_empty=is_resumed
            )
        pausing = Pausing(batches, self._batches.step, self._pauses_after, settings.data_check)
        for output, batch in outputs(pipeline, pausing):
            self._count(output, batch)
            if self._last_steps[1:] == [self._batches.step]:
                self._is_recorded = False
                self._leave()
            self._record()
            if self._is_at(settings.save_every):
                self._save()
            if self._is_done():
                pipeline.reset()
                return
        if self._batches.batch == 0:
            raise ValueError(
                "train must yield batches in each epoch; received none in epoch "
                f"{self._batches.epoch + 1}. Pass an iterable, such as a DataLoader: an iterator "
                "ends after one epoch."
            )
        is_evaluated = self._best.last_step == self._batches.step  # before a resume
        if validation is not None and settings.evaluate_every is None and not is_evaluated:
            self._evaluate(validation)
        self._batches.end_epoch()
        self._save()
        if settings.preemption.is_due and not self._is_done():
            self._leave()

    def _may_save_at(self, step: int) -> bool:
        return self._settings.may_save_at(step) or self._settings.preemption.is_due

    def _pauses_after(self, step: int) -> bool:
        """Return whether to pause after a step.

        A request to end pauses after the second batch that is read after it: the first one was
        perhaps read before, by `EvenBatches`, without the state of its loader.
        """
        settings = self._settings
        if settings.preemption.agrees() and settings.uneven is not UnevenPolicy.PAD:
            self._last_steps.append(step)
        return settings.may_save_at(step) or len(self._last_steps) == 2

    def _record(self) -> None:
        """Evaluate after a step, or log its numbers, if it is time."""
        settings, self._is_recorded = self._settings, False
        if self._validation is not None and self._is_at(settings.evaluate_every):
            self._evaluate(self._validation)
        elif self._is_at(settings.log_every):
            self._log(self._numbers())
        self._is_recorded = True

    def _forward(self, batch: Any) -> tuple[Tensor, tuple[Any, Any]]:
        """Return the loss for backward; and the output with its batch."""
        model = self._settings.model
        loss, output = model(batch)
        if model.training and len(output[1]):  # the mean loss of an empty batch is NaN
            self._settings.loss_guard.check(loss, batch, self._batches.step + 1)
        return loss, (output, batch)

    def _count(self, output: Any, batch: Any) -> None:
        """Count a step, and set the learning rate of the next one."""
        loss, num_samples = output[0], len(output[1])
        schedule, progressive = self._settings.schedule, self._settings.progressive
        self._batches.trained()
        task_sums = None
        if self._has_tasks and num_samples:
            task_sums = sums_by_task(output, batch)
        self._loss.add(loss, num_samples, task_sums)
        self.progress.step(num_samples)
        if schedule is not None and not isinstance(schedule, ReduceLROnPlateau):
            schedule.step()
        window = None if progressive is None else progressive.update(output, batch)
        if window is not None:
            self._log({f"progressive/{name}": value for name, value in window.items()})

    def _is_at(self, interval: int | None) -> bool:
        return interval is not None and self._batches.step % interval == 0

    def _is_done(self) -> bool:
        steps, epochs = self._settings.steps, self._settings.epochs
        if steps is not None and self._batches.step >= steps:
            return True
        is_last = epochs is not None and self._batches.epoch >= epochs
        return is_last or self._best.is_final

    # -- evaluation -------------------------------------------------------------------------------

    def _evaluate(self, validation: Iterable[Any]) -> None:
        """Evaluate between two steps; save the best."""
        settings, changed = self._settings, ("loss", "random")
        before = {name: deepcopy(self._state[name].state_dict()) for name in changed}
        numbers, step, epoch = self._numbers(), self._batches.step, self._batches.last_epoch
        try:
            scores = evaluate(settings, validation)
        except _PreemptedEvaluationError:
            for name, state in before.items():
                self._state[name].load_state_dict(state)
            self._leave()
        self._log(numbers | {f"validation/{name}": value for name, value in scores.items()})
        is_better = self._best.update(step, epoch, scores)
        if isinstance(settings.schedule, ReduceLROnPlateau):
            settings.schedule.step(scores[settings.monitor])
        if is_better:
            about = {"step": step, "epoch": epoch, "scores": scores}
            best = settings.folder / "best"
            if settings.env.rank == 0:
                remove_versions(best, least=step)  # a job that resumes repeats steps
            save_checkpoint(
                best,
                settings.model,
                settings.optimizer,
                about,
                step=step,
                keep=1,
                spec=self._spec,
            )
        self._saved = (-1, -1)  # the state of the evaluation has changed
        self.progress.restart()

    # -- records ----------------------------------------------------------------------------------

    def _numbers(self) -> dict[str, float]:
        """Return the numbers of training since the last record."""
        rate = max(float(group["lr"]) for group in self._settings.optimizer.param_groups)
        numbers = {"epoch": self._batches.last_epoch, "learning_rate": rate}
        losses = self._loss.take()
        if losses:
            numbers |= losses | self.progress.rate(self._settings.env.world_size)
        return numbers

    def _log(self, numbers: dict[str, float]) -> None:
        self.progress.hide()
        for logger in self._settings.loggers:
            logger.log(self._batches.step, numbers)
        self.progress.restart()

    # -- checkpoints ------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save `last` in the background, unless it is saved already."""
        settings, at = self._settings, (self._batches.step, self._batches.epoch)
        if at != self._saved:
            self._own_buffers.compare()
            schedule = settings.schedule
            self._wait_for_save = save_checkpoint_async(
                settings.folder / "last",
                settings.model,
                settings.optimizer,
                {
                    "schedule": None if schedule is None else schedule.state_dict(),
                    "fingerprints": settings.data_check.fingerprints,
                    "is_recorded": self._is_recorded,
                },
                progress=self._state,
                spec=self._spec,
            ).wait
            self._saved = at

    def _leave(self) -> NoReturn:
        """Save `last` and end this rank, as all other ranks do at the same step."""
        self._settings.loss_guard.finish()
        self._save()
        self._wait_for_save()
        if self._settings.env.rank == 0:
            last, step = self._settings.folder / "last", self._batches.step
            print(f"Preempted: saved step {step} in {last}. Resume from it.", flush=True)
        self._settings.preemption.leave()

    def _start(self, start: Start) -> None:
        """Load the weights of another job."""
        settings = self._settings
        load_checkpoint(
            start.path,
            settings.model,
            settings.optimizer if start.has_states else None,
            keep_settings=True,
            spec=self._spec,
            saved_spec=start.spec,
            new_rows=start.new_rows,
        )
        if settings.env.rank == 0:
            print(f"Started from {start.path}", flush=True)

    def _load(self) -> None:
        """Continue from `last`."""
        settings = self._settings
        last, schedule = settings.folder / "last", settings.schedule
        extra = load_newest(last, settings.model, settings.optimizer, self._state)
        if schedule is not None and extra["schedule"] is not None:
            schedule.load_state_dict(extra["schedule"])
        settings.data_check.fingerprints |= extra.get("fingerprints", {})
        self._is_recorded = extra.get("is_recorded", True)
        at = self._batches
        self._saved = at.step, at.epoch
        if settings.env.rank == 0:
            print(f"Resumed from {last}: epoch {at.epoch + 1}, step {at.batch}", flush=True)
