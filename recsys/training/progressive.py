"""Progressive validation: training batches are scored before the model trains on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.training.evaluation import BinaryMetrics, Metrics

__all__ = ["ProgressiveValidation"]

_Kept: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Logits, labels, sample weights and label mask of a batch."""


@final
class ProgressiveValidation:
    """Metrics of windows of training batches, from the scores of the training forward.

    On data in the order of time each sample is new to the model when it is scored. So the curve is
    an honest estimate of the quality on the next data, and no data are set aside (Blum, Kalai and
    Langford, "Beating the hold-out", COLT 1999). `Trainer(..., progressive=...)` updates it, logs
    each window as `progressive/...`, and saves it: in a job that resumes each batch counts once.
    The metrics of a window are computed at its end; a step only keeps its output.

    Args:
        window: Steps of a window.
        metrics: Function that creates the metrics of a window on a device. They read the loss of
            the last batch, the logits and the labels of all, sample weights and label masks.

    Attributes:
        curve: Metrics of each complete window, equal on all ranks.

    Raises:
        ValueError: `window` is below 1.

    Example:
        >>> progressive = ProgressiveValidation(window=2)
        >>> logits, labels = torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0])
        >>> output = torch.tensor(0.4), logits, labels
        >>> progressive.update(output, None)
        >>> sorted(progressive.update(output, None))
        ['auc', 'loss', 'ne']
        >>> len(progressive.curve)
        1
    """

    @checked
    def __init__(
        self, window: int, metrics: Callable[[torch.device], Metrics] = BinaryMetrics
    ) -> None:
        self._window, self._metrics = whole("ProgressiveValidation.window", window), metrics
        self.curve: list[dict[str, float]] = []
        self._count = 0  # batches of the window
        self._kept: list[_Kept] = []

    def update(self, output: tuple[Tensor, Tensor, Tensor], batch: Any) -> dict[str, float] | None:
        """Add a batch, before or after the optimizer's step; every rank adds one in each step.

        Args:
            output: The output of the training forward: loss, logits and labels.
            batch: The batch, with or without `sample_weights` and `label_mask`.

        Returns:
            The metrics of the window if this batch completes it, else None.
        """
        loss, logits, labels = output
        weights, mask = (getattr(batch, name, None) for name in ("sample_weights", "label_mask"))
        self._kept.append((logits, labels, weights, mask))
        self._count += 1
        if self._count < self._window:
            return None
        metrics = self._metrics(loss.device)
        all_logits, all_labels, weights, mask = self._joined(loss.device)
        joined = SimpleNamespace(sample_weights=weights, label_mask=mask)
        metrics.update((loss, all_logits, all_labels), joined)
        if dist.is_initialized() and dist.get_world_size() > 1:
            metrics.sync()
        self.curve.append(metrics.compute())
        self._kept, self._count = [], 0
        return self.curve[-1]

    def _joined(self, device: torch.device) -> _Kept:
        """Return the outputs of the window on a device; a loaded state is on the CPU."""
        logits, labels, weights, masks = zip(*self._kept, strict=True)

        def joined(parts: Sequence[Tensor | None], ones: Callable[[Tensor], Tensor]) -> Any:
            if all(part is None for part in parts):
                return None
            pairs = zip(parts, labels, strict=True)
            return torch.cat([(ones(y) if x is None else x).to(device) for x, y in pairs])

        return (
            joined(logits, torch.ones_like),
            joined(labels, torch.ones_like),
            joined(weights, lambda of_batch: torch.ones(len(of_batch))),
            joined(masks, lambda of_batch: torch.ones_like(of_batch, dtype=torch.bool)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the curve and the outputs of the window, on the CPU."""
        parts = None
        if self._kept:
            parts = [*self._joined(torch.device("cpu"))]
        return {"curve": [dict(point) for point in self.curve], "count": self._count, "kept": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Args:
            state: Result of `state_dict`.
        """
        self._load(state, [state])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the states of all ranks of a job, on another number of ranks.

        Args:
            states: Result of `state_dict` of each rank.
        """
        rank, world_size = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        self._load(states[0], states[rank::world_size])

    def _load(self, any_rank: dict[str, Any], own: Sequence[dict[str, Any]]) -> None:
        self.curve = [dict(point) for point in any_rank["curve"]]
        self._count = any_rank["count"]
        self._kept = [tuple(state["kept"]) for state in own if state["kept"] is not None]
