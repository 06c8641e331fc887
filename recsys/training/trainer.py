"""A training loop: pipeline, evaluation, early stopping, checkpoints, exact resume, logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recsys.base import contact
from recsys.base.arguments import choice, whole, writable_folder
from recsys.base.checked import checked_but
from recsys.base.loaders import epoch_length
from recsys.base.step_stages import long_section
from recsys.distributed.checkpoint import (
    PendingSave,
    RandomState,
    Stateful,
    load_checkpoint,
    newest_version,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.checkpoint.versions import remove_versions
from recsys.distributed.monitoring.loss_guard import LossGuard
from recsys.distributed.monitoring.watchdog import Watchdog
from recsys.distributed.train_pipeline import EvenBatches, TrainPipelineSparseDist, UnevenPolicy
from recsys.distributed.types import ShardingEnv
from recsys.modules.modes import evaluation_mode, training_mode
from recsys.training.batches import Pausing, ResumableBatches, outputs
from recsys.training.best import Best, FitResult
from recsys.training.buffers import OwnBuffers
from recsys.training.evaluation import BinaryMetrics, Metrics, device_of, sums_by_task
from recsys.training.folder import clear_folder, load_newest
from recsys.training.loggers import JsonLines, Lines, Logger, check_loggers
from recsys.training.named_metrics import NamedMetrics
from recsys.training.optimizer import check_all_are_updated, whole_optimizer
from recsys.training.progress import MeanLoss, Progress, total_steps
from recsys.training.progressive import ProgressiveValidation


@final
class Trainer:
    """Trains a model, evaluates it, and keeps its best and its last checkpoint.

    Every rank creates it with the same settings and calls `fit`. Files in `folder`: `best` and
    `last`, folders of checkpoints; `log.jsonl`, the numbers of the job; and `bad_batches`, written
    by the loss guard. A job that is killed at any moment and started again with `resume=True` ends
    with the weights of an undisturbed job, bit for bit on a CPU.

    Args:
        model: A `DistributedModelParallel` or another module. It is called with a batch and returns
            a loss and an output `(loss, logits, labels)`, detached, as `DLRMTrain` does. Custom
            `metrics` may read other outputs that begin with the loss and with a tensor that has one
            row per sample.
        optimizer: All optimizers of the model as one `KeyedOptimizer`; or a torch optimizer, which
            is joined with the `fused_optimizer` of the model.
        folder: Folder of the job, created if missing.
        epochs: Number of epochs; or None, with `steps`.
        steps: Number of steps; or None, with `epochs`.
        evaluate_every: Steps between two evaluations; None for the end of each epoch. The end of
            training is always evaluated.
        metrics: Names of metrics, such as `["auc", "ne", "calibration"]`, or their arguments by
            name (`NamedMetrics`); or a function that creates the metrics of an evaluation on a
            device.
        monitor: Name of the metric that selects the best checkpoint.
        maximize: Whether a larger value of it is better. None: the direction of its name; names
            of `recsys.metrics` have one, such as "auc/click", "ne" and "ndcg@10".
        patience: Number of evaluations without a better value after which training ends; None for
            no early stopping.
        load_best: Whether the model has the weights of the best evaluation after training, not the
            last ones.
        save_every: Steps between two saves of `last`, in the background. None saves only at the end
            of each epoch and of training.
        resume: Whether to continue from `last`, if it exists.
        overwrite: Whether `fit` removes `best`, `last` and `log.jsonl` of an older job in the
            folder, and prints a line about it. Otherwise, and without `resume`, it raises an error.
        schedule: Scheduler of torch for the optimizer, stepped after each step;
            `ReduceLROnPlateau` after each evaluation, by the monitored metric.
        clip_norm: Largest norm of all gradients together; None for no clipping. Tables must have
            `update_mode="deferred"` for it.
        pipeline: Whether to exchange the ids of the next batches during a step.
        uneven: Policy for ranks with different numbers of batches, as of `EvenBatches`; None if all
            ranks have the same number.
        log_every: Steps between two records of the loss and the rate; None for records at
            evaluations only.
        loggers: Destinations of records besides `log.jsonl`. They are closed when `fit` ends.
        shows_bar: Whether rank 0 shows a progress bar if stderr is a terminal and tqdm installed.
        watchdog: Watchdog of the job; None for one with default settings. It is not opened inside
            another one.
        loss_guard: Guard of the losses, which must not skip; None for one with default settings.
        progressive: Metrics of training batches, scored before the model trains on them; None for
            none.

    Raises:
        TypeError: An argument has another type.
        ValueError: Not exactly one of `epochs` and `steps` is given; a number is not positive;
            `optimizer` and `model` do not fit together; clipped tables are fused; or the direction
            of the monitored metric is unknown, or not the one of `ReduceLROnPlateau`.
        OSError: The folder is not writable.

    Example:
        >>> import tempfile
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 1)
        ...
        ...     def forward(self, batch):
        ...         logits, labels = self.layer(batch).squeeze(1), (batch[:, 0] > 0).float()
        ...         loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        ...         return loss, (loss.detach(), logits.detach(), labels)
        >>> model, batches = Model(), [torch.randn(32, 2) for _ in range(50)]
        >>> adam = torch.optim.Adam(model.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = Trainer(model, adam, folder, epochs=2, log_every=None, loggers=())
        ...     result = trainer.fit(batches, validation=batches[:5])
        >>> result.steps, result.best_scores["auc"] > 0.95
        (100, True)
    """

    @checked_but("optimizer", "folder", "loggers")
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        folder: str | Path,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        evaluate_every: int | None = None,
        metrics: Callable[[torch.device], Metrics]
        | Sequence[str]
        | Mapping[str, Mapping[str, Any]] = BinaryMetrics,
        monitor: str = "loss",
        maximize: bool | None = None,
        patience: int | None = None,
        load_best: bool = True,
        save_every: int | None = None,
        resume: bool = False,
        overwrite: bool = False,
        schedule: LRScheduler | None = None,
        clip_norm: float | None = None,
        pipeline: bool = True,
        uneven: UnevenPolicy | str | None = None,
        log_every: int | None = 100,
        loggers: Sequence[Logger] = (Lines(),),
        shows_bar: bool = True,
        watchdog: Watchdog | None = None,
        loss_guard: LossGuard | None = None,
        progressive: ProgressiveValidation | None = None,
    ) -> None:
        if (epochs is None) == (steps is None):
            raise ValueError(
                "Trainer needs either epochs or steps, the length of the training; received "
                f"epochs={epochs} and steps={steps}."
            )
        if resume and overwrite:
            raise ValueError(
                "Trainer.overwrite must be False with resume=True, which continues the job in the "
                "folder; received True. Pass one of them."
            )
        lengths = {"epochs": epochs, "steps": steps, "patience": patience, "log_every": log_every}
        intervals = {"evaluate_every": evaluate_every, "save_every": save_every}
        for name, value in (lengths | intervals).items():
            if value is not None:
                whole(f"Trainer.{name}", value)
        self.model, self.optimizer = model, whole_optimizer(model, optimizer, clip_norm)
        self.folder = writable_folder("Trainer.folder", folder)
        self.best, self.last = self.folder / "best", self.folder / "last"
        self._epochs, self._num_steps, self._log_every = epochs, steps, log_every
        self._save_every, self._evaluate_every = save_every, evaluate_every
        self._metrics: Callable[[torch.device], Metrics] = (
            metrics if callable(metrics) else _named(metrics)
        )
        self._monitor, self._patience = monitor, patience
        self._make_best = partial(Best, monitor, maximize, patience)
        _check_mode(schedule, self._make_best().maximize)
        self._loads_best, self._schedule = load_best, schedule
        self._resumes, self._overwrites = resume, overwrite
        self._overlaps, self._shows_bar = pipeline, shows_bar
        self._uneven = None if uneven is None else choice("Trainer.uneven", uneven, UnevenPolicy)
        if self._uneven is UnevenPolicy.PAD and (save_every or progressive):
            raise ValueError(
                "uneven='pad' repeats batches: it excludes save_every and progressive. Use 'join'."
            )
        self._env, self._device = ShardingEnv.default(), device_of(model)
        log = JsonLines(self.folder / "log.jsonl")
        check_loggers("Trainer.loggers", loggers)
        self._loggers = [log, *loggers] if self._env.rank == 0 else []
        self._watchdog = Watchdog() if watchdog is None else watchdog
        self._guard = LossGuard(self.folder / "bad_batches") if loss_guard is None else loss_guard
        self._guard.around(model)  # raises if it skips
        self._progressive = progressive
        self._own_buffers = OwnBuffers(model, self._env)

    # -- training ---------------------------------------------------------------------------------

    def fit(self, train: Iterable[Any], validation: Iterable[Any] | None = None) -> FitResult:
        """Train, evaluate and save until the end; every rank calls it.

        Parts of the model in evaluation mode, such as a frozen batch norm, stay in it. Only a model
        none of whose trainable parts is in training mode is put into it as a whole.

        Args:
            train: Batches of this rank, iterated once per epoch. Its `set_epoch` is called before
                each epoch. A loader with `state_dict` and `load_state_dict` resumes from its state;
                otherwise batches are skipped.
            validation: Batches of this rank to evaluate; None for no evaluation and no best
                checkpoint.

        Raises:
            FileExistsError: The folder has a job, and neither `resume` nor `overwrite` is set.
            ValueError: Nothing updates a trainable parameter, an epoch has no batches, or the
                monitored metric is missing or NaN.
            BadLossError: A loss is NaN or infinite.
            CheckpointError: A checkpoint cannot be saved or loaded.
            LostContactError: Contact with another rank is lost.
        """
        if validation is None and (self._patience or isinstance(self._schedule, ReduceLROnPlateau)):
            raise ValueError("patience and ReduceLROnPlateau need validation; received None.")
        check_all_are_updated(self.model, self.optimizer, self._env)
        with ExitStack() as parts:
            if contact.ask_watchdog is None:
                parts.enter_context(self._watchdog)
            for logger in self._loggers:
                parts.callback(logger.close)
            self._start(train)
            parts.callback(self._progress.close)
            parts.enter_context(training_mode(self.model))
            pipeline = self._new_pipeline()
            while not self._is_done():
                self._train_epoch(pipeline, validation)
            self._guard.finish()
            if validation is not None and self._best.last_step != self._batches.step:
                self._evaluate(validation)
            self._save()
            self._finish_save()
            if self._loads_best and self._best.step:
                load_checkpoint(self.best, self.model, self.optimizer)
        has_ended = self._uneven is None and self._batches.batch == epoch_length(train)
        return self._best.result(self._batches.step, self._batches.epoch + has_ended)

    def _start(self, train: Iterable[Any]) -> None:
        """Create the state of a job, or load it."""
        self._batches = ResumableBatches(train, self._may_save_at)
        metrics = self._metrics(self._device)
        tasks = metrics.tasks if isinstance(metrics, BinaryMetrics | NamedMetrics) else []
        self._has_tasks = bool(tasks)
        self._loss, self._best = MeanLoss(self._device, tasks), self._make_best()
        self._state: dict[str, Stateful] = {
            "batches": self._batches,
            "loss": self._loss,
            "best": self._best,
            "random": RandomState(),
            "buffers": self._own_buffers,
        }
        if self._progressive is not None:
            self._state["progressive"] = self._progressive
        self._saved: tuple[int, int] | None = None
        self._pending: PendingSave | None = None
        if not self._resumes:
            clear_folder(self.folder, self._env, overwrites=self._overwrites)
        elif newest_version(self.last) is not None:
            self._load()
        elif self._env.rank == 0:
            (self.folder / "log.jsonl").unlink(missing_ok=True)  # of a job that did not save
        total = total_steps(train, self._epochs) if self._epochs else self._num_steps
        has_bar = self._shows_bar and self._env.rank == 0
        self._progress = Progress(total, self._batches.step, has_bar=has_bar)

    def _train_epoch(self, pipeline: Any, validation: Iterable[Any] | None) -> None:
        """Train until the end of the epoch or of the job."""
        batches: Iterable[Any] = self._batches
        if self._uneven is not None:
            is_resumed = self._batches.batch > 0  # perhaps after the last batch of the epoch
            batches = EvenBatches(self._batches, self.model, self._uneven, may_be_empty=is_resumed)
        pausing = Pausing(batches, self._batches.step, self._may_save_at)
        for output, batch in outputs(pipeline, pausing):
            self._count(output, batch)
            if validation is not None and self._is_at(self._evaluate_every):
                self._evaluate(validation)
            elif self._is_at(self._log_every):
                self._log(self._numbers())
            if self._is_at(self._save_every):
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
        if validation is not None and self._evaluate_every is None and not is_evaluated:
            self._evaluate(validation)
        self._batches.end_epoch()
        self._save()

    def _forward(self, batch: Any) -> tuple[Tensor, tuple[Any, Any]]:
        """Return the loss for backward; and the output with its batch."""
        loss, output = self.model(batch)
        if self.model.training and len(output[1]):  # the mean loss of an empty batch is NaN
            self._guard.check(loss, batch, self._batches.step + 1)
        return loss, (output, batch)

    def _new_pipeline(self) -> TrainPipelineSparseDist[Any, Any]:
        pipeline: TrainPipelineSparseDist[Any, Any] = TrainPipelineSparseDist(
            self.model, self.optimizer, self._device, custom_model_fwd=self._forward
        )
        if not self._overlaps:
            pipeline.attach(sparse_dist=False)
        return pipeline

    def _count(self, output: Any, batch: Any) -> None:
        """Count a step, and set the learning rate of the next one."""
        loss, num_samples = output[0], len(output[1])
        self._batches.trained()
        task_sums = None
        if self._has_tasks and num_samples:
            task_sums = sums_by_task(output, batch)
        self._loss.add(loss, num_samples, task_sums)
        self._progress.step(num_samples)
        if self._schedule is not None and not isinstance(self._schedule, ReduceLROnPlateau):
            self._schedule.step()
        window = None if self._progressive is None else self._progressive.update(output, batch)
        if window is not None:
            self._log({f"progressive/{name}": value for name, value in window.items()})

    def _is_at(self, interval: int | None) -> bool:
        return interval is not None and self._batches.step % interval == 0

    def _is_done(self) -> bool:
        if self._num_steps is not None and self._batches.step >= self._num_steps:
            return True
        is_last = self._epochs is not None and self._batches.epoch >= self._epochs
        return is_last or self._best.is_final

    # -- evaluation -------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Evaluate the model on the batches of all ranks together; every rank calls it.

        Args:
            batches: Batches of this rank.

        Returns:
            The metrics by name, the same on all ranks.
        """
        metrics = self._metrics(self._device)
        with evaluation_mode(self.model), long_section("evaluation"):
            if self._uneven is not None:
                batches = EvenBatches(batches, self.model, UnevenPolicy.JOIN)
            for output, batch in outputs(self._new_pipeline(), Pausing(batches)):
                metrics.update(output, batch)
            if self._env.world_size > 1:
                metrics.sync()
        return metrics.compute()

    def _evaluate(self, validation: Iterable[Any]) -> None:
        """Evaluate between two steps; save the best."""
        numbers, step, epoch = self._numbers(), self._batches.step, self._batches.last_epoch
        scores = self.evaluate(validation)
        self._log(numbers | {f"validation/{name}": value for name, value in scores.items()})
        is_better = self._best.update(step, epoch, scores)
        if isinstance(self._schedule, ReduceLROnPlateau):
            self._schedule.step(scores[self._monitor])
        if is_better:
            about = {"step": step, "epoch": epoch, "scores": scores}
            if self._env.rank == 0:
                remove_versions(self.best, least=step)  # a job that resumes repeats steps
            save_checkpoint(self.best, self.model, self.optimizer, about, step=step, keep=1)
        self._saved = None  # the state of the evaluation has changed
        self._progress.restart()

    # -- records ----------------------------------------------------------------------------------

    def _numbers(self) -> dict[str, float]:
        """Return the numbers of training since the last record."""
        rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
        numbers = {"epoch": self._batches.last_epoch, "learning_rate": rate}
        losses = self._loss.take()
        if losses:
            numbers |= losses | self._progress.rate(self._env.world_size)
        return numbers

    def _log(self, numbers: dict[str, float]) -> None:
        self._progress.hide()
        for logger in self._loggers:
            logger.log(self._batches.step, numbers)
        self._progress.restart()

    # -- checkpoints ------------------------------------------------------------------------------

    def _may_save_at(self, step: int) -> bool:
        """Return whether training may save within an epoch after a step."""
        intervals = (self._save_every, self._evaluate_every, self._num_steps)
        return any(interval is not None and step % interval == 0 for interval in intervals)

    def _save(self) -> None:
        """Save `last` in the background, unless it is saved already."""
        at = self._batches.step, self._batches.epoch
        if at != self._saved:
            self._own_buffers.compare()
            extra = {"schedule": None if self._schedule is None else self._schedule.state_dict()}
            self._pending = save_checkpoint_async(
                self.last, self.model, self.optimizer, extra, progress=self._state
            )
            self._saved = at

    def _finish_save(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def _load(self) -> None:
        """Continue from `last`."""
        extra = load_newest(self.last, self.model, self.optimizer, self._state)
        if self._schedule is not None and extra["schedule"] is not None:
            self._schedule.load_state_dict(extra["schedule"])
        at = self._batches
        self._saved = at.step, at.epoch
        if self._env.rank == 0:
            print(f"Resumed from {self.last}: epoch {at.epoch + 1}, step {at.batch}", flush=True)


def _named(
    metrics: Sequence[str] | Mapping[str, Mapping[str, Any]],
) -> Callable[[torch.device], Metrics]:
    NamedMetrics(metrics, torch.device("cpu"))  # raises for wrong names
    return partial(NamedMetrics, metrics)


def _check_mode(schedule: LRScheduler | None, maximize: bool) -> None:
    """Check that a schedule that reads the monitored metric has the direction of the metric."""
    mode = "max" if maximize else "min"
    if isinstance(schedule, ReduceLROnPlateau) and schedule.mode != mode:
        raise ValueError(
            f"Trainer.schedule must have the direction of the monitored metric, mode={mode!r}; "
            f"received a ReduceLROnPlateau with mode={schedule.mode!r}. Create it with "
            f"mode={mode!r}, or pass maximize."
        )
