"""Metrics of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from recsys.base.arguments import repeated
from recsys.base.checked import checked
from recsys.base.contact import explained
from recsys.distributed.model_parallel import DistributedModelParallel
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
    are not None, and labels that its `label_mask` leaves out count in no metric of their task. AUC
    keeps all predictions of the evaluation in memory, 24 bytes each. `Trainer` also records the
    loss of each task on the training batches.

    Args:
        device: Device of the model's output.
        tasks: Names of the tasks of `[B, T]` labels; empty for one task. The metrics of a task are
            named such as `auc/click`. `loss` is the mean over samples and tasks, as of `mean_loss`:
            the mean of the losses of the tasks, or, if labels are missing, the mean with the loss 0
            of these labels.
        auc: Whether to compute the AUC.

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
    def __init__(
        self, device: torch.device, tasks: Sequence[str] = (), *, auc: bool = True
    ) -> None:
        if twice := repeated(tasks):
            raise ValueError(
                f"BinaryMetrics.tasks must be distinct names; received {twice} more than once."
            )
        self.tasks = list(tasks)
        self._entropy = [NormalizedEntropy(device) for _ in self.tasks or [""]]
        self._auc = [AUC() for _ in self._entropy] if auc else []
        # sums of weights of all samples, and of the samples that have the label of a task
        self._weights = torch.zeros(1 + len(self._entropy), dtype=torch.float64, device=device)

    def update(self, output: tuple[Tensor, Tensor, Tensor], batch: Any) -> None:
        """Add a batch; see `Metrics`."""
        _, logits, labels = output
        num_tasks, num_columns = len(self._entropy), logits.size(1) if logits.dim() > 1 else 1
        if num_columns != num_tasks:
            raise ValueError(
                "BinaryMetrics.tasks must name each column of the logits; received "
                f"{self.tasks or 'no names'} and logits of shape {list(logits.shape)}."
            )
        weights = getattr(batch, "sample_weights", None)
        columns = zip(
            logits.sigmoid().view(-1, num_tasks).unbind(1),
            labels.view(-1, num_tasks).unbind(1),
            self._weights_of_tasks(weights, getattr(batch, "label_mask", None), len(logits)),
            strict=True,
        )
        for i, column in enumerate(columns):
            self._entropy[i].update(*column)
            if self._auc:
                self._auc[i].update(*column)

    def _weights_of_tasks(
        self, weights: Tensor | None, mask: Tensor | None, size: int
    ) -> Sequence[Tensor | None]:
        """Return the weights of a batch by task, and add them up; None for ones."""
        num_tasks = len(self._entropy)
        if mask is None:
            self._weights += size if weights is None else weights.double().sum()
            return [weights] * num_tasks
        whole = torch.ones_like(mask[:, 0] if mask.dim() > 1 else mask, dtype=torch.float32)
        whole = whole if weights is None else weights
        of_tasks = [whole * column for column in mask.view(-1, num_tasks).unbind(1)]
        self._weights += torch.stack([part.double().sum() for part in (whole, *of_tasks)])
        return of_tasks

    def sync(self) -> None:
        """Add the state of all ranks."""
        for metric in (*self._auc, *self._entropy):
            metric.sync()
        with explained(None, "synchronize a metric"):
            torch.distributed.all_reduce(self._weights)

    def compute(self) -> dict[str, float]:
        """Return `auc`, `ne` and `loss`, by task if there are several."""
        results = {}
        for i, (task, entropy) in enumerate(zip(self.tasks or [""], self._entropy, strict=True)):
            values = {"auc": self._auc[i].compute()} if self._auc else {}
            values |= {"ne": entropy.compute(), "loss": entropy.log_loss()}
            for name, value in values.items():
                results[f"{name}/{task}" if task else name] = value.item()
        whole, *of_tasks = self._weights.tolist()
        losses = [results[f"loss/{task}" if task else "loss"] for task in self.tasks or [""]]
        parts = [n / whole * loss for n, loss in zip(of_tasks, losses, strict=True) if n]
        return results | {"loss": sum(parts) / len(losses) if whole else math.nan}


def sums_by_task(output: tuple[Tensor, Tensor, Tensor], batch: Any) -> Tensor:
    """Return the sums of losses and of weights of each task, [2, T] float64, of one batch.

    Args:
        output: Loss, logits and labels, `[B, T]` each, or `[B]` of one task.
        batch: The batch.
    """
    _, *columns = output
    logits, labels = (column.view(len(column), -1) for column in columns)
    losses = nn.functional.binary_cross_entropy_with_logits(
        logits.double(), labels.double(), reduction="none"
    )
    weights = torch.ones_like(losses)
    if getattr(batch, "sample_weights", None) is not None:
        weights = weights * batch.sample_weights.unsqueeze(1)
    if getattr(batch, "label_mask", None) is not None:
        weights = weights * batch.label_mask.view_as(weights)
    return torch.stack([(losses * weights).sum(0), weights.sum(0)])


@final
class MeanOfLosses:
    """Mean of the losses of batches, over all ranks.

    Args:
        device: Device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def update(self, output: Sequence[Any], batch: Any) -> None:
        """Add the loss of a batch; see `Metrics`."""
        loss = output[0].double()
        self._sums += torch.stack([loss, torch.ones_like(loss)])

    def sync(self) -> None:
        """Add the losses of all ranks."""
        with explained(None, "synchronize a metric"):
            torch.distributed.all_reduce(self._sums)

    def compute(self) -> dict[str, float]:
        """Return the mean as `loss`."""
        return {"loss": float(self._sums[0] / self._sums[1])}


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model."""
    if isinstance(model, DistributedModelParallel):
        return model.device
    return next(chain(model.parameters(), model.buffers()), torch.empty(0)).device
