"""Mean loss, rate and remaining time of a training job, and its progress bar."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.base.contact import explained
from recsys.base.loaders import epoch_length


def total_steps(train: Iterable[Any], epochs: int) -> int | None:
    """Return the number of steps of some epochs; None if the loader does not know its length.

    Example:
        >>> total_steps([1, 2, 3], epochs=2), total_steps(iter([1]), epochs=2)
        (6, None)
    """
    length = epoch_length(train)
    return None if length is None else epochs * length


@final
class MeanLoss:
    """Mean loss per sample over steps and ranks, since the last report.

    It is part of a checkpoint, so that a job that resumes reports the same numbers. The sums stay
    on the device until they are read.

    Args:
        device: Device of the losses.

    Example:
        >>> mean = MeanLoss(torch.device("cpu"))
        >>> mean.add(torch.tensor(0.5), num_samples=3)
        >>> mean.add(torch.tensor(0.9), num_samples=1)
        >>> round(mean.take(), 4)
        0.6
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, samples

    def add(self, loss: Tensor, num_samples: int) -> None:
        """Add the mean loss of a batch; an empty batch adds nothing."""
        if num_samples > 0:
            self._sums[0] += loss.sum() * num_samples
            self._sums[1] += num_samples

    def take(self) -> float | None:
        """Return the mean of all ranks, and restart; None without samples. Every rank calls it."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        if dist.is_initialized():
            with explained(None, "add up the loss"):
                dist.all_reduce(sums)
        loss, num_samples = sums.tolist()
        return loss / num_samples if num_samples else None

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of this rank."""
        return {"sums": self._sums.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the sums of this rank."""
        self._sums.copy_(state_dict["sums"])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the sums of another number of ranks: rank 0 takes them all."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._sums.copy_(torch.stack([state["sums"] for state in states]).sum(0))


@final
class Progress:
    """Rate and remaining time, and a bar on a terminal where tqdm is installed.

    Args:
        total: Number of steps of the job; None if it is unknown.
        done: Number of steps before.
        has_bar: Whether to show a bar, if stderr is a terminal.

    Example:
        >>> progress = Progress(total=10, done=0, has_bar=False)
        >>> progress.step(num_samples=64)
        >>> sorted(progress.rate(world_size=2))
        ['samples_per_second', 'seconds_left']
    """

    def __init__(self, total: int | None, done: int, *, has_bar: bool) -> None:
        self._total, self._done = total, done
        self._bar: Any = None
        if has_bar and sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit=" steps", leave=False)
        self.restart()

    def restart(self) -> None:
        """Start to measure the rate, such as after an evaluation."""
        self._began, self._steps, self._samples = time.perf_counter(), 0, 0

    def step(self, num_samples: int) -> None:
        """Count a step."""
        self._done, self._steps = self._done + 1, self._steps + 1
        self._samples += num_samples
        if self._bar is not None:
            self._bar.update()

    def rate(self, world_size: int) -> dict[str, float]:
        """Return the rate over all ranks since the last restart, and the remaining time."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        found = {"samples_per_second": self._samples * world_size / seconds}
        if self._total is not None and self._steps:
            found["seconds_left"] = (self._total - self._done) * seconds / self._steps
        return found

    def hide(self) -> None:
        """Remove the bar until the next step, so that other lines can be printed."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
