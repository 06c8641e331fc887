"""The best evaluation of a job, which decides about early stopping, and the job's result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.metrics.directions import is_larger_better


@final
@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of a training job.

    Args:
        steps: Number of steps, with the steps before a resume.
        epochs: Number of complete epochs. An epoch that the last of `steps` completes counts if
            `train` knows its length, as lists, and readers of Parquet without filter and split do,
            and `uneven` is None.
        best_step: Step of the best evaluation; 0 without validation.
        best_epoch: Epoch of the best evaluation, from 1; 0 without validation.
        best_scores: Metrics of the best evaluation.
        stopped_early: Whether training ended because of `patience`.
    """

    steps: int
    epochs: int
    best_step: int
    best_epoch: int
    best_scores: dict[str, float]
    stopped_early: bool


@final
class Best:
    """Best evaluation so far, by one metric.

    Args:
        monitor: Name of the metric.
        maximize: Whether a larger value is better; None for the direction of the metric's name.
        patience: Number of evaluations without a better value after which training ends; None for
            no end.

    Attributes:
        step: Step of the best evaluation; 0 before the first one.
        epoch: Its epoch, from 1.
        scores: Its metrics.
        last_step: Step of the last evaluation.
        maximize: Whether a larger value is better.
        patience: As given.

    Raises:
        TypeError: An argument has another type.
        ValueError: `patience` is not positive, or the direction of the metric is unknown.

    Example:
        >>> best = Best("auc", patience=1)
        >>> best.update(100, 1, {"auc": 0.7}), best.update(200, 2, {"auc": 0.6})
        (True, False)
        >>> best.step, best.is_final
        (100, True)
    """

    @checked
    def __init__(
        self, monitor: str, maximize: bool | None = None, patience: int | None = None
    ) -> None:
        is_larger = is_larger_better(monitor) if maximize is None else maximize
        if is_larger is None:
            raise ValueError(
                "Trainer.maximize must be given for a metric whose direction is unknown; received "
                f"monitor={monitor!r}. Pass maximize=True if a larger value is better, else False."
            )
        self._monitor, self.maximize = monitor, is_larger
        self.patience = None if patience is None else whole("patience", patience)
        self.step = self.epoch = self.last_step = self._num_worse = 0
        self.scores: dict[str, float] = {}

    @property
    def is_final(self) -> bool:
        """True after `patience` evaluations without a better value."""
        return self.patience is not None and self._num_worse >= self.patience

    def update(self, step: int, epoch: int, scores: Mapping[str, float]) -> bool:
        """Add an evaluation.

        Args:
            step: Number of steps before it.
            epoch: Its epoch, from 1.
            scores: Its metrics, the same on all ranks.

        Returns:
            Whether it is the best so far.

        Raises:
            ValueError: The metric is missing or NaN.
        """
        if self._monitor not in scores:
            raise ValueError(
                f"Trainer.monitor must be a metric, one of {sorted(scores)}; received "
                f"{self._monitor!r}."
            )
        score, self.last_step = scores[self._monitor], step
        if math.isnan(score):
            raise ValueError(
                f"The monitored metric, {self._monitor!r}, must be a number; received NaN at step "
                f"{step}. Check that validation has samples, with both labels for an AUC."
            )
        before = self.scores.get(self._monitor, -math.inf if self.maximize else math.inf)
        is_better = score > before if self.maximize else score < before
        if not is_better and self.step:
            self._num_worse += 1
            return False
        self.step, self.epoch, self.scores, self._num_worse = step, epoch, dict(scores), 0
        return True

    def result(self, steps: int, epochs: int) -> FitResult:
        """Return the result of a job of a number of steps and of complete epochs."""
        return FitResult(
            steps=steps,
            epochs=epochs,
            best_step=self.step,
            best_epoch=self.epoch,
            best_scores=self.scores,
            stopped_early=self.is_final,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluation and the number of evaluations since."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""
        for name in _STATE:
            setattr(self, name, state_dict[name])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the state of another number of ranks, which all have the same."""
        self.load_state_dict(states[0])


_STATE = ("step", "epoch", "scores", "last_step", "_num_worse")
