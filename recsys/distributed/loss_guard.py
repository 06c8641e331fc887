"""Stops training, or skips a step, when the loss of a batch is not a number or jumps."""

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

from recsys.kernels.arguments import finite, whole, writable_folder
from recsys.kernels.checked import checked, checked_late
from recsys.logs import logger

__all__ = ["BadLossError", "LossGuard"]

_MOST_UNREAD = 3
"""Steps that a GPU may be behind before the host waits for it: so many batches are kept."""
_LEAST_KNOWN = 10
"""Losses before one is called a spike."""


class BadLossError(ValueError):
    """The loss of a batch is not a number, infinite, or a spike."""


@final
class LossGuard:
    """Looks at the loss of each step, and saves the batch of one that is bad.

    A loss is bad if it is NaN or infinite, or larger than `spike` times the median of the last
    losses of this rank. The median does not follow the spikes themselves, as a mean would. Large
    models are known to recover if training goes on from a save before the spike without those
    batches (PaLM, Chowdhery et al. 2022, section 5.1).

    On a CPU a bad loss is raised before backward, so that no table has learned from it. On a GPU
    the host does not wait: the loss is copied aside, read a step later, and raised then. With
    `skip` every rank reads it at once, and hears of the others': all skip the step, or none.

    Args:
        folder: for batches; made when the first is saved.
        spike: how many times the median is too much, such as 10; None: no loss is a spike. For
            losses that are positive.
        window: how many losses the median is of.
        skip: whether to skip the steps of bad batches in place of raising.
        most: how many steps may be skipped in a row, and how many batches are saved.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a number is not positive, or `spike` not above 1.
        OSError: if the folder cannot be written to.

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
        """Look at a loss before `backward`; on a GPU at one of a step before.

        Args:
            loss: of the batch; what is no scalar is added up.
            batch: is kept until the loss is read, and saved if it is bad.
            step: its number; None: one more than the last, from 1 on.

        Returns:
            Whether to skip backward and the optimizer's step, on every rank alike; False without
            `skip`.

        Raises:
            BadLossError: on the rank of a bad loss, naming step, rank, loss and the file of the
                batch; with `skip`, on all ranks, if too many steps were skipped in a row.
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
        while self._unread[0][2].query() or len(self._unread) > _MOST_UNREAD:
            self._read_one()
            if not self._unread:
                break
        return False

    def finish(self) -> None:
        """Read the losses that a GPU was behind with; call it after the last step.

        Raises:
            BadLossError: as `check`.
        """
        while self._unread:
            self._read_one()

    @checked
    def around(self, model: nn.Module) -> Callable[[Any], tuple[Tensor, Any]]:
        """Return a function that calls the model and checks its loss while it trains.

        Args:
            model: is called with a batch and returns a loss and something else, as pipelines want
                it: pass what is returned as their `custom_model_fwd`.

        Raises:
            ValueError: if the guard skips: a pipeline makes every step.
        """
        if self._skip:
            raise ValueError(
                "A pipeline makes every step; received a LossGuard with skip=True. Let it raise, "
                "or write the loop yourself."
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

    def _what_is_wrong(self, value: float) -> str:
        """Return it in words, or "" of a good loss, which is remembered."""
        if not math.isfinite(value):
            return f"is {value}"
        usual = median(self._losses) if self._spike and len(self._losses) >= _LEAST_KNOWN else 0.0
        if self._spike and usual > 0 and value > self._spike * usual:
            times = f"{value / usual:.1f} times the median of the last {len(self._losses)}"
            return f"is {value:g}, {times} ({usual:g}), above spike={self._spike:g}"
        self._losses.append(value)
        return ""

    def _raise_if_bad(self, step: int, value: float, batch: Any) -> None:
        wrong = self._what_is_wrong(value)
        if wrong:
            raise BadLossError(self._say(step, value, batch, wrong))

    def _agree(self, value: Tensor, batch: Any) -> bool:
        """Return whether the loss of any rank is bad."""
        wrong = self._what_is_wrong(value.item())
        is_bad = torch.tensor(float(bool(wrong)), device=value.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        if wrong:
            logger.warning("%s It is skipped.", self._say(self._step, value.item(), batch, wrong))
        self._skipped = self._skipped + 1 if is_bad.item() else 0
        if self._skipped > self._most:
            raise BadLossError(
                f"At most {self._most} steps may be skipped in a row; received {self._skipped}, up "
                f"to step {self._step}. Go back to a save before them: the model itself is "
                "probably no longer finite."
            )
        return bool(self._skipped)

    def _say(self, step: int, value: float, batch: Any, wrong: str) -> str:
        """Save a batch, and return what is to be said of it."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        subject = f"The loss of step {step} on rank {rank} {wrong}."
        if self._saved >= self._most:
            return f"{subject} {self._saved} batches are saved in {self._folder} already."
        path = self._folder / f"step-{step}-rank-{rank}.pt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save({"step": step, "rank": rank, "loss": value, "batch": batch}, path)
        except Exception as error:  # the loss is what matters
            return f"{subject} Its batch cannot be saved in {path}: {error}."
        self._saved += 1
        return f"{subject} Its batch is in {path}: torch.load(path, weights_only=False)['batch']."


def _copy_aside(value: Tensor) -> tuple[Tensor, Any]:
    """Start copying a value on a GPU to the host; return it, and the event after which it is."""
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied
