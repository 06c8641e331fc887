"""Loss guard: stops training or skips a step if a loss is NaN, infinite or a spike."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.base.arguments import finite, whole, writable_folder
from recsys.base.checked import checked, checked_late
from recsys.base.logs import logger

__all__ = ["BadLossError", "LossGuard"]

_MOST_UNREAD = 3
"""Losses that may be pending on a GPU; the host waits for older ones. Their batches are kept."""
_LEAST_KNOWN = 10
"""Losses that are needed to recognize a spike."""


class BadLossError(ValueError):
    """The loss of a batch is not a number, infinite, or a spike."""


@final
class LossGuard:
    """Checks the loss of each step and saves the batch of a bad loss.

    A loss is bad if it is NaN, infinite, or larger than `spike` times the median of this rank's
    last losses. A median is robust against the spikes themselves. Large models recover from a spike
    if training restarts from a checkpoint before it and leaves out those batches (PaLM, Chowdhery
    et al. 2022, section 5.1).

    On a CPU a bad loss is raised before backward, so no table is updated. On a GPU the host does
    not wait: the loss is copied, and read and raised a step later. With `skip` every rank reads its
    loss at once, and the ranks agree: all skip the step, or none.

    Args:
        folder: Folder for batches, created for the first one.
        spike: Ratio of a loss to the median that makes it bad, such as 10; None for no limit. For
            positive losses.
        window: Number of losses for the median.
        skip: Whether to skip the steps of bad batches instead of raising.
        most: Largest number of steps skipped in a row, and of batches saved.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a number is not positive, or `spike` is not above 1.
        OSError: If the folder is not writable.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> guard = LossGuard(folder.name)
        >>> guard.check(torch.tensor(0.7), torch.ones(2))
        False
        >>> try:
        ...     guard.check(torch.tensor(float("nan")), torch.zeros(2))
        ... except BadLossError:
        ...     saved = torch.load(f"{folder.name}/step-2-rank-0.pt")
        >>> saved["loss"], saved["batch"]
        (nan, tensor([0., 0.]))
        >>> folder.cleanup()
    """

    @checked
    def __init__(
        self,
        folder: str | Path,
        *,
        spike: float | None = None,
        window: int = 100,
        skip: bool = False,
        most: int = 10,
    ) -> None:
        if spike is not None and not finite("LossGuard.spike", spike) > 1:
            raise ValueError(f"LossGuard.spike must be above 1, or None; received {spike}.")
        self._folder = writable_folder("LossGuard.folder", folder)
        self._spike, self._skip = spike, skip
        self._most = whole("LossGuard.most", most)
        self._losses: deque[float] = deque(maxlen=whole("LossGuard.window", window))
        self._unread: deque[tuple[int, Tensor, Any, Any]] = deque()
        self._step = self._skipped = self._saved = 0

    @checked_late
    def check(self, loss: Tensor, batch: Any, step: int | None = None) -> bool:
        """Check a loss; call it before `backward`. On a GPU it checks the loss of an earlier step.

        Args:
            loss: Loss of the batch; summed if it is not a scalar.
            batch: The batch, which is saved if the loss is bad.
            step: Number of the step; None for the next one, from 1 on.

        Returns:
            Whether to skip backward and the optimizer's step, equal on all ranks; False without
            `skip`.

        Raises:
            BadLossError: On the rank of a bad loss, with step, rank, loss and the file of the
                batch. With `skip`, on all ranks, if too many steps were skipped in a row.
        """
        self._step = self._step + 1 if step is None else whole("LossGuard.check: step", step, 0)
        value = loss.detach().sum()
        if self._skip:
            return self._agree(value, batch)
        if value.is_cpu:
            self._raise_if_bad(self._step, value.item(), batch)
            return False
        host, copied = _copy_aside(value)
        self._unread.append((self._step, host, copied, batch))
        while self._unread and (self._unread[0][2].query() or len(self._unread) > _MOST_UNREAD):
            self._read_one()
        return False

    def finish(self) -> None:
        """Read the pending losses of a GPU; call it after the last step.

        Raises:
            BadLossError: As `check`.
        """
        while self._unread:
            self._read_one()

    @checked
    def around(self, model: nn.Module) -> Callable[[Any], tuple[Tensor, Any]]:
        """Return a `custom_model_fwd` for pipelines: it calls a model and checks the loss.

        Args:
            model: Model that is called with a batch and returns a loss and an output.

        Raises:
            ValueError: If the guard skips: a pipeline makes every step.
        """
        if self._skip:
            raise ValueError(
                "LossGuard.around needs skip=False, because a pipeline makes every step; received "
                "skip=True. To skip steps, write the training loop yourself."
            )

        def forward(batch: Any) -> tuple[Tensor, Any]:
            loss, output = model(batch)
            if model.training:
                self.check(loss, batch)
            return loss, output

        return forward

    def _read_one(self) -> None:
        step, host, copied, batch = self._unread.popleft()
        copied.synchronize()
        self._raise_if_bad(step, host.item(), batch)

    def _fault_of(self, value: float) -> str:
        """Return the fault of a loss; "" for a good one, which is recorded."""
        if not math.isfinite(value):
            return f"is {value}"
        usual = median(self._losses) if self._spike and len(self._losses) >= _LEAST_KNOWN else 0.0
        if self._spike and usual > 0 and value > self._spike * usual:
            times = f"{value / usual:.1f} times the median of the last {len(self._losses)}"
            return f"is {value:g}, {times} ({usual:g}), above spike={self._spike:g}"
        self._losses.append(value)
        return ""

    def _raise_if_bad(self, step: int, value: float, batch: Any) -> None:
        wrong = self._fault_of(value)
        if wrong:
            raise BadLossError(self._describe(step, value, batch, wrong))

    def _agree(self, value: Tensor, batch: Any) -> bool:
        """Return whether the loss of any rank is bad; a collective call."""
        wrong = self._fault_of(value.item())
        is_bad = torch.tensor(float(bool(wrong)), device=value.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        if wrong:
            logger.warning(
                "%s It is skipped.", self._describe(self._step, value.item(), batch, wrong)
            )
        self._skipped = self._skipped + 1 if is_bad.item() else 0
        if self._skipped > self._most:
            raise BadLossError(
                f"At most {self._most} steps may be skipped in a row; received {self._skipped}, up "
                f"to step {self._step}. Load a checkpoint from before these steps; the model "
                "probably has weights that are not finite."
            )
        return bool(self._skipped)

    def _describe(self, step: int, value: float, batch: Any, wrong: str) -> str:
        """Save a batch and return the message."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        subject = f"The loss of step {step} on rank {rank} {wrong}."
        if self._saved >= self._most:
            return f"{subject} {self._saved} batches are saved in {self._folder} already."
        path = self._folder / f"step-{step}-rank-{rank}.pt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save({"step": step, "rank": rank, "loss": value, "batch": batch}, path)
        except Exception as error:  # the message about the loss is more important
            return f"{subject} Its batch cannot be saved in {path}: {error}."
        self._saved += 1
        return f"{subject} Its batch is in {path}: torch.load(path, weights_only=False)['batch']."


def _copy_aside(value: Tensor) -> tuple[Tensor, Any]:
    """Start to copy a value to the host; return the copy and the event after it."""
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied
