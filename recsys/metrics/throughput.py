"""Samples per second, over the whole run and over its last moments."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

import torch

from recsys.kernels.arguments import finite, whole, wrong_type
from recsys.metrics.batch import MetricBatch, Quantity
from recsys.metrics.metrics_config import BatchSizeStage, validate_batch_size_stages
from recsys.metrics.metrics_namespace import (
    MetricName,
    MetricNamespace,
    MetricPrefix,
    compose_metric_key,
)
from recsys.metrics.rec_metric import Value
from recsys.metrics.sum_metrics import SAMPLES, SumMetric, Sums, total_examples

_COUNTS = ("total_examples", "warmup_examples", "time_lapse_after_warmup", "num_batch")


@final
class ThroughputMetric(torch.nn.Module):
    """Count samples of all ranks per second.

    The first steps are left out: they build caches and compile kernels. Time is the host's; on a
    GPU it is right once the queue of launched work is full, not for single steps. A state dict has
    the counts, so that a run that goes on from a checkpoint counts on; the results that begin with
    `attempt_` are of this process alone.

    Args:
        batch_size: samples per rank and step.
        world_size: number of ranks.
        window_seconds: span of the recent rate.
        warmup_steps: steps left out at the start.
        batch_size_stages: batch sizes that change with the steps, in place of `batch_size`.
        clock: gives seconds.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument is not positive (`warmup_steps` may be 0), or the stages end.

    Example:
        >>> ticks = iter([0.0, 1.0, 2.0])
        >>> metric = ThroughputMetric(
        ...     batch_size=8, world_size=2, window_seconds=10, warmup_steps=0,
        ...     clock=lambda: next(ticks),
        ... )
        >>> for _ in range(3):
        ...     metric.update()
        >>> metric.compute()["throughput-throughput|window_throughput"].item()
        16.0
    """

    def __init__(
        self,
        *,
        batch_size: int,
        world_size: int,
        window_seconds: int,
        warmup_steps: int = 100,
        batch_size_stages: Sequence[BatchSizeStage] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        whole("batch_size", batch_size)
        whole("world_size", world_size)
        finite("window_seconds", window_seconds, least=1)
        whole("warmup_steps", warmup_steps, least=0)
        validate_batch_size_stages(batch_size_stages)
        if not callable(clock):
            wrong_type("clock", "a function that gives seconds", clock)
        self._batch_size = batch_size
        self._world_size = world_size
        self._window_seconds = window_seconds
        self._warmup_steps = max(1, warmup_steps)
        self._stages = list(batch_size_stages or ())
        self._clock = clock
        self._steps = 0
        self._num_batch = 0
        self._total = self._warmup = self._attempt = self._attempt_warmup = 0
        self._elapsed_s = self._attempt_s = 0.0
        self._last_s = 0.0
        # When each recent step ended, and its samples.
        self._recent: deque[tuple[float, int]] = deque()
        self._recent_samples = 0

    def set_num_batch(self, num_batch: int) -> None:
        """Say how many batches earlier processes have seen, for the stages of the batch size.

        Args:
            num_batch: their number.

        Raises:
            TypeError: it is no whole number.
            ValueError: it is negative.
        """
        self._num_batch = whole("num_batch", num_batch, least=0)

    def _current_batch_size(self) -> int:
        end = 0
        for stage in self._stages:
            if stage.max_iters is None or self._num_batch <= (end := end + stage.max_iters):
                return stage.batch_size
        return self._batch_size

    def update(self) -> None:
        """Say that a step has ended."""
        now_s = self._clock()
        self._steps += 1
        self._num_batch += 1
        samples = self._current_batch_size() * self._world_size
        self._total += samples
        self._attempt += samples
        if self._steps <= self._warmup_steps:
            self._warmup += samples
            self._attempt_warmup += samples
            self._recent.clear()
            self._recent_samples = 0
        else:
            self._elapsed_s += now_s - self._last_s
            self._attempt_s += now_s - self._last_s
            self._recent_samples += samples
        self._last_s = now_s
        self._recent.append((now_s, samples))
        while now_s - self._recent[0][0] > self._window_seconds:
            self._recent.popleft()
            # The first that is left only says when the window begins.
            self._recent_samples -= self._recent[0][1]

    def compute(self) -> dict[str, torch.Tensor]:
        """Compute the rates.

        Returns:
            Scalars by key, as of the namespace and task `throughput`: `total_examples` and
            `attempt_examples` since the start, warm-up included; once something has been timed,
            `lifetime_throughput` since the warm-up, `window_throughput` and
            `attempt_throughput` in samples per second; `batch_size` if it has stages.
        """
        found: dict[tuple[MetricName, MetricPrefix], torch.Tensor] = {
            (MetricName.TOTAL_EXAMPLES, MetricPrefix.DEFAULT): torch.tensor(self._total),
            (MetricName.ATTEMPT_EXAMPLES, MetricPrefix.DEFAULT): torch.tensor(self._attempt),
        }
        window_s = self._last_s - self._recent[0][0] if self._recent else 0.0
        for prefix, samples, seconds in (
            (MetricPrefix.LIFETIME, self._total - self._warmup, self._elapsed_s),
            (MetricPrefix.WINDOW, self._recent_samples, window_s),
            (MetricPrefix.ATTEMPT, self._attempt - self._attempt_warmup, self._attempt_s),
        ):
            if self._steps > self._warmup_steps:
                rate = samples / seconds if seconds > 0 else 0.0
                found[MetricName.THROUGHPUT, prefix] = torch.tensor(rate, dtype=torch.float64)
        if self._stages:
            size = torch.tensor(self._current_batch_size(), dtype=torch.int32)
            found[MetricName.BATCH_SIZE, MetricPrefix.DEFAULT] = size
        namespace = MetricNamespace.THROUGHPUT
        return {
            compose_metric_key(namespace, str(namespace), name, prefix): value
            for (name, prefix), value in found.items()
        }

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        values = (self._total, self._warmup, self._elapsed_s, self._num_batch)
        for name, value in zip(_COUNTS, values, strict=True):
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            destination[prefix + name] = torch.tensor(value, dtype=dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = [prefix + name for name in _COUNTS]
        # TorchRec saves the number of batches only if there are stages.
        missing = [key for key in keys[: None if self._stages else -1] if key not in state_dict]
        missing_keys += missing
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in keys]
        if not missing:
            total, warmup, elapsed_s = (state_dict[key].item() for key in keys[:-1])
            self._total, self._warmup = int(total), int(warmup)
            self._elapsed_s = float(elapsed_s)
            if keys[-1] in state_dict:
                self._num_batch = int(state_dict[keys[-1]].item())


@final
class TowerQPSMetric(SumMetric):
    """Samples of all ranks per second, of each task: those that came divided by the time between.

    `ThroughputMetric` counts what the batch size says instead, whatever came. The argument
    `warmup_steps` says how many updates are not timed, one at least; `batch_size_stages` has no
    effect, since samples are counted. Results: `qps`, NaN until something is timed, and
    `total_examples`, warm-up included. Seconds are the mean of the ranks'; a `local_` result
    is what all ranks do if they are as fast as this one.
    """

    namespace = MetricNamespace.TOWER_QPS
    arguments: ClassVar[Mapping[str, Any]] = {"warmup_steps": 100, "batch_size_stages": None}

    @staticmethod
    def clock() -> float:
        """Give the time, in seconds."""
        return time.perf_counter()

    def _prepare(self) -> None:
        validate_batch_size_stages(self.options["batch_size_stages"])
        self._untimed = max(1, whole("warmup_steps", self.options["warmup_steps"], least=0))
        self._last_s = 0.0

    def quantities(self) -> Sequence[Quantity]:
        """Name the sums."""
        return Quantity("timed", self._time, width=2), SAMPLES

    def _time(self, batch: MetricBatch) -> torch.Tensor:
        now_s, num_samples = self.clock(), batch.rows.size(2)
        seconds, self._last_s = now_s - self._last_s, now_s
        if self._untimed:
            self._untimed -= 1
            seconds = num_samples = 0
        # A share of the mean, so that the ranks' sum is the mean. Filling waits for no device.
        mean_T1 = batch.labels.new_full((len(batch.tasks), 1), seconds / self.world_size)
        return torch.cat([torch.full_like(mean_T1, num_samples), mean_T1], dim=1)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        num_samples_T, seconds_T = sums["timed"].unbind(1)
        yield Value(MetricName.TOWER_QPS, num_samples_T / seconds_T)
        yield total_examples(sums[SAMPLES.name])
