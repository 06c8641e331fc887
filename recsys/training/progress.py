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
    """Mean loss per sample, and of each task, over steps and ranks, since the last report.

    It is part of a checkpoint, so that a job that resumes reports the same numbers. The sums stay
    on the device until they are read.

    Args:
        device: Device of the losses.
        tasks: Names of T tasks; empty for one task.

    Example:
        >>> mean = MeanLoss(torch.device("cpu"))
        >>> mean.add(torch.tensor(0.5), num_samples=3)
        >>> mean.add(torch.tensor(0.9), num_samples=1)
        >>> {name: round(value, 4) for name, value in mean.take().items()}
        {'loss': 0.6}
    """

    def __init__(self, device: torch.device, tasks: Sequence[str] = ()) -> None:
        self._names = ["loss", *(f"loss/{task}" for task in tasks)]
        # losses; and samples, or weights of a task
        self._sums = torch.zeros(2, len(self._names), dtype=torch.float64, device=device)

    def add(self, loss: Tensor, num_samples: int, task_sums: Tensor | None = None) -> None:
        """Add the mean loss of a batch; an empty batch adds nothing.

        Args:
            loss: The mean over samples.
            num_samples: Number of samples.
            task_sums: `[2, T]`, the sums of losses and of weights of each task.
        """
        if num_samples > 0:
            self._sums[0, 0] += loss.sum() * num_samples
            self._sums[1, 0] += num_samples
            if task_sums is not None:
                self._sums[:, 1:] += task_sums

    def take(self) -> dict[str, float]:
        """Return the means of all ranks by name, and restart. Every rank calls it.

        Means without samples are left out.
        """
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        if dist.is_initialized():
            with explained(None, "add up the loss"):
                dist.all_reduce(sums)
        columns = zip(self._names, *sums.tolist(), strict=True)
        return {name: loss / weight for name, loss, weight in columns if weight}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of this rank."""
        return {"sums": self._sums.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the sums of this rank."""
        self._load(state_dict["sums"])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from the sums of another number of ranks: rank 0 takes them all."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._load(torch.stack([state["sums"] for state in states]).sum(0))

    def _load(self, sums: Tensor) -> None:
        sums = sums.view(2, -1)  # [2] in older states
        if sums.shape == self._sums.shape:
            self._sums.copy_(sums)
        else:  # saved with other tasks
            self._sums[:, 0].copy_(sums[:, 0])


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
        figures = {"samples_per_second": self._samples * world_size / seconds}
        if self._total is not None and self._steps:
            figures["seconds_left"] = (self._total - self._done) * seconds / self._steps
        return figures

    def hide(self) -> None:
        """Remove the bar until the next step, so that other lines can be printed."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
