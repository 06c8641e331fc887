"""Samples per second, over the run and over a recent window."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

import torch

from recsys.base.arguments import finite, whole
from recsys.base.checked import checked
from recsys.metrics.batch import MetricBatch, Quantity
from recsys.metrics.metrics_config import (
    BatchSizeStage,
    RecMetricEnum,
    validate_batch_size_stages,
)
from recsys.metrics.metrics_namespace import (
    MetricName,
    MetricNamespace,
    MetricPrefix,
    compose_metric_key,
)
from recsys.metrics.rec_metric import Value, total_examples
from recsys.metrics.sum_metrics import SAMPLES, SumMetric, Sums

_COUNTS = ("total_examples", "warmup_examples", "time_lapse_after_warmup", "num_batch")


@final
class ThroughputMetric(torch.nn.Module):
    """Samples of all ranks per second.

    The first steps are not timed: they fill caches and compile kernels. Time is measured on the
    host; on a GPU, rates are right once the queue of launched kernels is full, not for single
    steps. The state dict has the counts, so a resumed run continues them. Results that begin with
    `attempt_` cover this process alone.

    Args:
        batch_size: Samples per rank and step.
        world_size: Number of ranks.
        window_seconds: Window of the recent rate, in seconds.
        warmup_steps: Number of first steps that are not timed.
        batch_size_stages: Batch sizes that change with the steps, instead of `batch_size`.
        clock: Function that returns the time in seconds.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is not positive (`warmup_steps` may be 0), or the last stage ends.

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

    @checked
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
        # End of each recent step, and its samples.
        self._recent: deque[tuple[float, int]] = deque()
        self._recent_samples = 0

    def set_num_batch(self, num_batch: int) -> None:
        """Set the number of batches of earlier processes, for the stages of the batch size.

        Args:
            num_batch: Number of batches.

        Raises:
            TypeError: `num_batch` is not a whole number.
            ValueError: `num_batch` is negative.
        """
        self._num_batch = whole("num_batch", num_batch, least=0)

    def _current_batch_size(self) -> int:
        end = 0
        for stage in self._stages:
            if stage.max_iters is None or self._num_batch <= (end := end + stage.max_iters):
                return stage.batch_size
        return self._batch_size

    def update(self) -> None:
        """Record the end of a step."""
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
            # The first remaining step marks the beginning of the window.
            self._recent_samples -= self._recent[0][1]

    def compute(self) -> dict[str, torch.Tensor]:
        """Compute the rates.

        Returns:
            Scalars by key, of the namespace and the task `throughput`. `total_examples` and
            `attempt_examples` include the warm-up. `lifetime_throughput`, `window_throughput` and
            `attempt_throughput`, in samples per second, exist after the warm-up, and `batch_size`
            if there are stages.
        """
        rates: dict[tuple[MetricName, MetricPrefix], torch.Tensor] = {
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
                rates[MetricName.THROUGHPUT, prefix] = torch.tensor(rate, dtype=torch.float64)
        if self._stages:
            size = torch.tensor(self._current_batch_size(), dtype=torch.int32)
            rates[MetricName.BATCH_SIZE, MetricPrefix.DEFAULT] = size
        namespace = MetricNamespace.THROUGHPUT
        return {
            compose_metric_key(namespace, str(namespace), name, prefix): value
            for (name, prefix), value in rates.items()
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


class TowerQPSMetric(
    SumMetric,
    metric=RecMetricEnum.TOWER_QPS,
    sums=[lambda metric: Quantity("timed", metric._time, width=2), SAMPLES],
    formula=lambda timed, _: timed[:, 0] / timed[:, 1],
):
    """Samples of all ranks per second, for each task.

    It counts the samples of the updates, unlike `ThroughputMetric`, which counts batch sizes. The
    argument `warmup_steps` is the number of first updates that are not timed, at least one.
    `batch_size_stages` is ignored. Results: `qps`, NaN until an update is timed, and
    `total_examples`, including the warm-up. Seconds are the mean over ranks. A `local_` result is
    the rate of all ranks if all are as fast as this one.
    """

    arguments: ClassVar[Mapping[str, Any]] = {"warmup_steps": 100, "batch_size_stages": None}

    @staticmethod
    def clock() -> float:
        """Return the time, in seconds."""
        return time.perf_counter()

    def _prepare(self) -> None:
        validate_batch_size_stages(self.options["batch_size_stages"])
        self._untimed = max(1, whole("warmup_steps", self.options["warmup_steps"], least=0))
        self._last_s = 0.0

    def _time(self, batch: MetricBatch) -> torch.Tensor:
        """Return `[T, 2]`: samples since the last update, and this rank's share of the seconds."""
        now_s, num_samples = self.clock(), batch.rows.size(2)
        seconds, self._last_s = now_s - self._last_s, now_s
        if self._untimed:
            self._untimed -= 1
            seconds = num_samples = 0
        # The sum over ranks is the mean of their seconds. Filling does not wait for the device.
        mean_T1 = batch.labels.new_full((len(batch.tasks), 1), seconds / self.world_size)
        return torch.cat([torch.full_like(mean_T1, num_samples), mean_T1], dim=1)

    def values(self, sums: Sums) -> Iterator[Value]:
        """Compute the results."""
        yield from super().values(sums)
        yield total_examples(sums[SAMPLES.name])
