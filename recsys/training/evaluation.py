"""Metrics of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.kernels.arguments import repeated
from recsys.kernels.checked import checked
from recsys.metrics import AUC, NormalizedEntropy


class Metrics(Protocol):
    """Metrics of one evaluation, over many batches and ranks."""

    def update(self, output: Any, batch: Any) -> None:
        """Add a batch.

        Args:
            output: The second output of the model, beside the loss.
            batch: The batch, on the device of the model.
        """

    def sync(self) -> None:
        """Add the state of all ranks; every rank calls it, if there are several."""

    def compute(self) -> dict[str, float]:
        """Return the metrics by name."""


@final
class BinaryMetrics:
    """AUC, normalized entropy and log loss of a model that predicts clicks.

    The output of the model is `(loss, logits, labels)`, as of `DLRMTrain`, with logits and labels
    `[B]`, or `[B, T]` for T tasks. Samples have the weights of the batch, if its `sample_weights`
    are not None. AUC keeps all predictions of the evaluation in memory, 24 bytes each.

    Args:
        device: Device of the model's output.
        tasks: Names of the tasks of `[B, T]` labels; empty for one task. The metrics of a task are
            named such as `auc/click`, and `loss` is the sum over tasks.

    Raises:
        TypeError: `device` is not a device, or `tasks` are not names.
        ValueError: Two tasks have the same name; at an update, the output has another number of
            tasks.

    Example:
        >>> from types import SimpleNamespace
        >>> metrics, logits = BinaryMetrics(torch.device("cpu")), torch.tensor([0.0, 2.0])
        >>> labels = torch.tensor([0.0, 1.0])
        >>> metrics.update((torch.tensor(0.4), logits, labels), SimpleNamespace())
        >>> {name: round(value, 3) for name, value in metrics.compute().items()}
        {'auc': 1.0, 'ne': 0.592, 'loss': 0.41}
    """

    @checked
    def __init__(self, device: torch.device, tasks: Sequence[str] = ()) -> None:
        if twice := repeated(tasks):
            raise ValueError(
                f"BinaryMetrics.tasks must be distinct names; received {twice} more than once."
            )
        self._tasks = list(tasks)
        self._auc = [AUC() for _ in self._tasks or [""]]
        self._entropy = [NormalizedEntropy(device) for _ in self._auc]

    def update(self, output: tuple[Tensor, Tensor, Tensor], batch: Any) -> None:
        """Add a batch; see `Metrics`."""
        _, logits, labels = output
        num_tasks, num_columns = len(self._auc), logits.size(1) if logits.dim() > 1 else 1
        if num_columns != num_tasks:
            raise ValueError(
                "BinaryMetrics.tasks must name each column of the logits; received "
                f"{self._tasks or 'no names'} and logits of shape {list(logits.shape)}."
            )
        weights = getattr(batch, "sample_weights", None)
        columns = zip(
            logits.sigmoid().view(-1, num_tasks).unbind(1),
            labels.view(-1, num_tasks).unbind(1),
            self._auc,
            self._entropy,
            strict=True,
        )
        for predictions, truth, auc, entropy in columns:
            auc.update(predictions, truth, weights)
            entropy.update(predictions, truth, weights)

    def sync(self) -> None:
        """Add the state of all ranks."""
        for metric in (*self._auc, *self._entropy):
            metric.sync()

    def compute(self) -> dict[str, float]:
        """Return `auc`, `ne` and `loss`, by task if there are several."""
        found = {}
        for task, auc, entropy in zip(self._tasks or [""], self._auc, self._entropy, strict=True):
            values = (auc.compute(), entropy.compute(), entropy.log_loss())
            for name, value in zip(("auc", "ne", "loss"), values, strict=True):
                found[f"{name}/{task}" if task else name] = value.item()
        if self._tasks:
            found["loss"] = sum(found[f"loss/{task}"] for task in self._tasks)
        return found


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model."""
    if isinstance(model, DistributedModelParallel):
        return model.device
    return next(chain(model.parameters(), model.buffers()), torch.empty(0)).device
