"""A training loop: pipeline, evaluation, early stopping, checkpoints, exact resume, logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from recsys.base import contact
from recsys.base.arguments import choice, path_of, whole, writable_folder
from recsys.base.checked import checked_but
from recsys.distributed.checkpoint import NewRows
from recsys.distributed.monitoring.loss_guard import LossGuard
from recsys.distributed.monitoring.preemption import Preemption
from recsys.distributed.monitoring.watchdog import Watchdog
from recsys.distributed.train_pipeline import UnevenPolicy
from recsys.distributed.types import ShardingEnv
from recsys.modules.modes import training_mode
from recsys.modules.tables.fingerprints import check_spec
from recsys.training.best import Best, FitResult
from recsys.training.data_check import DataCheck
from recsys.training.evaluation import BinaryMetrics, Metrics, device_of
from recsys.training.job import Job, Start, TrainerSettings, evaluate
from recsys.training.loggers import JsonLines, Lines, Logger, check_loggers
from recsys.training.named_metrics import NamedMetrics
from recsys.training.optimizer import check_all_are_updated, whole_optimizer
from recsys.training.progressive import ProgressiveValidation

if TYPE_CHECKING:
    from recsys.features import FeatureSpec


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
        start_from: Checkpoint of another job, such as `best` of yesterday's, whose weights training
            starts with: `path` of `load_checkpoint`. Tables of another fit, or with hashed ids
            in place of a vocabulary or the reverse, get each row at the place of its value. A job
            that resumes does not read it.
        start_spec: The spec of `start_from`, if it was saved without one.
        start_states: Whether the optimizer's state is loaded from it, too; learning rates and other
            settings stay.
        new_rows: Weights of the values that `start_from` lacks, as of `load_checkpoint`.
        spec: The fitted spec of the model's tables, which checkpoints then contain. None: the spec
            of the reader `train`, if it has one. For prepared files, pass the spec of the raw
            columns.
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
        preemption: Requests of a scheduler to end: all ranks end after the same step, save `last`,
            and exit with its `exit_code`. None: SIGTERM and SIGUSR1, unless the script handles
            them, with code 75.
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

    @checked_but("optimizer", "folder", "loggers", "start_from", "start_spec", "spec")
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
        start_from: str | Path | None = None,
        start_spec: FeatureSpec | None = None,
        start_states: bool = True,
        new_rows: NewRows = "init",
        spec: FeatureSpec | None = None,
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
        preemption: Preemption | None = None,
        progressive: ProgressiveValidation | None = None,
    ) -> None:
        if (epochs is None) == (steps is None):
            raise ValueError(
                "Trainer needs either epochs or steps, the length of the training; received "
                f"epochs={epochs} and steps={steps}."
            )
        if start_from is not None:
            start_from = path_of("Trainer.start_from", start_from)
        if spec is not None:
            check_spec("Trainer.spec", spec, model)
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
        make_best = partial(Best, monitor, maximize, patience)
        _check_mode(schedule, make_best().maximize)
        policy = None if uneven is None else choice("Trainer.uneven", uneven, UnevenPolicy)
        if policy is UnevenPolicy.PAD and (save_every or progressive):
            raise ValueError(
                "uneven='pad' repeats batches: it excludes save_every and progressive. Use 'join'."
            )
        env = ShardingEnv.default()
        log = JsonLines(self.folder / "log.jsonl")
        check_loggers("Trainer.loggers", loggers)
        guard = LossGuard(self.folder / "bad_batches") if loss_guard is None else loss_guard
        guard.around(model)  # raises if it skips
        self._watchdog = Watchdog() if watchdog is None else watchdog
        self._settings = TrainerSettings(
            model=model,
            optimizer=self.optimizer,
            folder=self.folder,
            epochs=epochs,
            steps=steps,
            evaluate_every=evaluate_every,
            metrics=metrics if callable(metrics) else _named(metrics),
            monitor=monitor,
            make_best=make_best,
            load_best=load_best,
            save_every=save_every,
            resume=resume,
            start=None
            if start_from is None
            else Start(Path(start_from), start_spec, start_states, new_rows),
            spec=spec,
            overwrite=overwrite,
            schedule=schedule,
            pipeline=pipeline,
            uneven=policy,
            log_every=log_every,
            loggers=(log, *loggers) if env.rank == 0 else (),
            shows_bar=shows_bar and env.rank == 0,
            loss_guard=guard,
            preemption=Preemption(model) if preemption is None else preemption,
            progressive=progressive,
            data_check=DataCheck(model),
            env=env,
            device=device_of(model),
        )

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
            PreemptedExit: The scheduler has asked a rank to end, and `last` is saved.
        """
        settings = self._settings
        reads_scores = settings.make_best().patience or isinstance(
            settings.schedule, ReduceLROnPlateau
        )
        if validation is None and reads_scores:
            raise ValueError("patience and ReduceLROnPlateau need validation; received None.")
        check_all_are_updated(self.model, self.optimizer, settings.env)
        with ExitStack() as parts:
            if not settings.preemption.is_open:
                parts.enter_context(settings.preemption)
            if contact.ask_watchdog is None:
                parts.enter_context(self._watchdog)
            for logger in settings.loggers:
                parts.callback(logger.close)
            job = Job(settings, train, validation)
            parts.callback(job.progress.close)
            parts.enter_context(training_mode(self.model))
            return job.run()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Evaluate the model on the batches of all ranks together; every rank calls it.

        Args:
            batches: Batches of this rank.

        Returns:
            The metrics by name, the same on all ranks.
        """
        return evaluate(self._settings, batches)


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
