"""Samples per second, over the whole run and over its last moments."""

import time
from collections import deque
from collections.abc import Callable
from typing import final


@final
class ThroughputMetric:
    """Count samples of all ranks per second.

    The first steps are left out: they build caches and compile kernels. Time is the host's; on a
    GPU it is right once the queue of launched work is full, not for single steps.

    Args:
        batch_size: samples per rank and step.
        world_size: number of ranks.
        window_seconds: span of the recent rate.
        warmup_steps: steps left out at the start.
        clock: gives seconds.

    Raises:
        ValueError: an argument is not positive (``warmup_steps`` may be 0).

    Example:
        >>> ticks = iter([0.0, 1.0, 2.0])
        >>> metric = ThroughputMetric(
        ...     batch_size=8, world_size=2, window_seconds=10, warmup_steps=0,
        ...     clock=lambda: next(ticks),
        ... )
        >>> for _ in range(3):
        ...     metric.update()
        >>> metric.compute()
        {'total_examples': 48, 'throughput': 16.0, 'window_throughput': 16.0}
    """

    def __init__(
        self,
        *,
        batch_size: int,
        world_size: int,
        window_seconds: int,
        warmup_steps: int = 100,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        given = {
            "batch_size": batch_size,
            "world_size": world_size,
            "window_seconds": window_seconds,
        }
        for name, value in given.items():
            if value < 1:
                raise ValueError(f"{name} must be positive; received {value}.")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be 0 or more; received {warmup_steps}.")
        self._samples_per_step = batch_size * world_size
        self._window_seconds = window_seconds
        self._warmup_steps = warmup_steps
        self._clock = clock
        self._steps = 0
        self._start_s = 0.0
        self._recent_s: deque[float] = deque()

    def update(self) -> None:
        """Say that a step has ended."""
        now_s = self._clock()
        self._steps += 1
        if self._steps <= max(1, self._warmup_steps):
            self._start_s = now_s
            self._recent_s.clear()
        self._recent_s.append(now_s)
        while now_s - self._recent_s[0] > self._window_seconds:
            self._recent_s.popleft()

    def compute(self) -> dict[str, float]:
        """Compute the rates.

        Returns:
            ``total_examples`` since the start, warm-up included; ``throughput`` since the warm-up
            and ``window_throughput`` in samples per second, 0 while nothing has been timed.
        """
        timed_steps = self._steps - max(1, self._warmup_steps)
        now_s = self._recent_s[-1] if self._recent_s else 0.0
        first_s = self._recent_s[0] if self._recent_s else 0.0
        return {
            "total_examples": self._steps * self._samples_per_step,
            "throughput": self._rate(timed_steps, now_s - self._start_s),
            "window_throughput": self._rate(len(self._recent_s) - 1, now_s - first_s),
        }

    def _rate(self, steps: int, elapsed_s: float) -> float:
        return steps * self._samples_per_step / elapsed_s if elapsed_s > 0 else 0.0
