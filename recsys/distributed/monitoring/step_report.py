"""Step report: time of training steps by stage, as numbers and as a trace.

    with StepReport() as report:
        for batch in report.data(loader):
            ...  # a step, plain or of a pipeline
            report.step(samples=len(batch.labels))
    print(report)

A report observes the engine's stages (`recsys.step_stages`). A profiler shows them as ranges such
as `recsys lookup`. Times are measured on the host: on a CPU they include computing and waiting. On
a GPU the host only launches work; the trace shows the device's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, final

import torch

from recsys.base import step_stages
from recsys.base.arguments import whole, wrong_type
from recsys.base.checked import checked
from recsys.base.step_stages import Stage, observe
from recsys.distributed.ranks.comm import Pending

B = TypeVar("B")
STAGES = ("data", "input dist", "lookup", "output dist", "dense", "optimizer")
_NAMES = {
    Stage.DATA: "data",
    Stage.INPUT_DIST: "input dist",
    Stage.LOOKUP: "lookup",
    Stage.TABLE_UPDATE: "lookup",
    Stage.OUTPUT_DIST: "output dist",
    Stage.GRADIENT_DIST: "output dist",
    Stage.OPTIMIZER: "optimizer",
}
"""Name in `STAGES` of each stage; the remaining time is "dense"."""


class ScalarWriter(Protocol):
    """Writer of scalars, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Write a number of a step."""


@final
class StepReport:
    """Measurement of the time of training steps by stage.

    The stages are `data` (waiting for batches), `input dist`, `lookup` (with the tables' update in
    backward), `output dist` (with the exchange of gradients), `optimizer`, and `dense` for the
    remaining time. Only one report may be open in a process.

    Args:
        writer: Writer of the numbers of every `every` steps; None for no writer.
        every: Steps between two writes.
        trace: File for a Chrome trace (chrome://tracing, Perfetto) of the first steps; None for no
            trace.
        traced_steps: Number of steps in the trace.

    Attributes:
        steps: Number of steps.
        samples: Number of samples in these steps.

    Raises:
        ValueError: If a number is below 1.

    Example:
        >>> with StepReport() as report:
        ...     for batch in report.data([torch.ones(4)] * 3):
        ...         report.step(samples=len(batch))
        >>> report.steps, report.samples, list(report.shares()) == list(STAGES)
        (3, 12, True)
    """

    @checked
    def __init__(
        self,
        writer: ScalarWriter | None = None,
        every: int = 100,
        trace: str | Path | None = None,
        traced_steps: int = 10,
    ) -> None:
        self._writer, self._every = writer, whole("StepReport.every", every)
        self._trace = trace
        self._traced_steps = whole("StepReport.traced_steps", traced_steps)
        self._profiler: Any = None
        self._closing = ExitStack()
        self._stages: list[tuple[str, AbstractContextManager[Any] | None]] = []
        self._at = 0.0  # end of the measured time
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._arrivals: dict[int, Callable[[Any], None]] = {}
        self._under_way = self._waited = self._wait_began = 0.0
        self.steps = self.samples = 0
        self._last_write = self.numbers()

    def __enter__(self) -> Self:
        self._closing.enter_context(observe(self))
        if self._trace is not None:
            # there is one cycle; acc_events avoids a warning of torch 2.11 about several
            self._profiler = torch.profiler.profile(acc_events=True)
            self._profiler.start()
        self._at = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        self._end_trace()

    def data(self, batches: Iterable[B]) -> Iterator[B]:
        """Yield batches and measure the time to read them."""
        is_scalar = isinstance(batches, torch.Tensor) and not batches.dim()
        if is_scalar or isinstance(batches, str | bytes) or not isinstance(batches, Iterable):
            wrong_type("StepReport.data: batches", "an iterable of batches", batches)
        source = iter(batches)
        while True:
            with step_stages.running((Stage.DATA, "")):
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield batch

    def step(self, samples: int) -> None:
        """End a step.

        Args:
            samples: Number of samples in this rank's batch.
        """
        whole("StepReport.step: samples", samples, least=0)
        self._count()
        self._stages.clear()  # left by a step that raised an error
        self.steps += 1
        self.samples += samples
        if self.steps == self._traced_steps:
            self._end_trace()
        if self._writer is not None and self.steps % self._every == 0:
            for name, value in self._since(self._last_write).items():
                self._writer.add_scalar(f"step/{name}", value, self.steps)
            self._last_write = self.numbers()

    def shares(self) -> dict[str, float]:
        """Return the share of each of `STAGES` in the time; shares add up to 1."""
        total = sum(self._seconds.values()) or 1.0
        return {name: seconds / total for name, seconds in self._seconds.items()}

    @property
    def overlap(self) -> float:
        """Share of the time of exchanges in which the host did other work; 0 without exchanges."""
        return max(0.0, 1 - self._waited / self._under_way) if self._under_way else 0.0

    def numbers(self) -> dict[str, float]:
        """Return the numbers of steps and samples, and the seconds of stages and of exchanges."""
        return self._seconds | {
            "steps": self.steps,
            "samples": self.samples,
            "under way": self._under_way,
            "waited": self._waited,
        }

    def _since(self, before: dict[str, float]) -> dict[str, float]:
        more = {name: value - before[name] for name, value in self.numbers().items()}
        seconds = sum(more[name] for name in STAGES) or 1.0
        figures = {"samples per second": more["samples"] / seconds}
        figures["milliseconds"] = seconds / (more["steps"] or 1) * 1e3
        figures |= {f"share of {name}": more[name] / seconds for name in STAGES}
        if more["under way"]:
            figures["overlap"] = max(0.0, 1 - more["waited"] / more["under way"])
        return figures

    def __str__(self) -> str:
        seconds = sum(self._seconds.values())
        if not self.steps or not seconds:
            return "StepReport: no step yet"
        lines = [
            f"{self.steps} steps, {seconds / self.steps * 1e3:.2f} ms each, "
            f"{self.samples / seconds:,.0f} samples/s on this rank"
        ]
        for name, share in self.shares().items():
            lines.append(f"  {name:<12}{share:>7.1%}  {'#' * round(40 * share)}")
        if self._under_way:
            lines.append(
                f"  exchanges took {self._under_way / self.steps * 1e3:.2f} ms per step, "
                f"{self.overlap:.0%} of it overlapped with other work"
            )
        return "\n".join(lines)

    def enter(self, stage: Stage, subject: str) -> None:
        """Record the start of a stage."""
        if stage is Stage.WAIT:
            self._wait_began = time.perf_counter()
        if stage not in _NAMES:
            return
        self._count()
        profiled = torch.autograd.profiler._is_profiler_enabled  # by the report or the user
        name = _NAMES[stage]
        span = torch.profiler.record_function(f"recsys {name}") if profiled else None
        if span is not None:
            span.__enter__()
        self._stages.append((name, span))

    def leave(self, stage: Stage, subject: str, *, failed: bool) -> None:
        """Record the end of a stage."""
        if stage not in _NAMES:
            return
        self._count()
        if self._stages:  # empty if the stage began before a step that raised an error
            _, span = self._stages.pop()
            if span is not None:
                span.__exit__(None, None, None)

    def exchange_started(self, pending: Pending) -> None:
        """Measure an exchange on a CPU until its result arrives."""
        if pending.work is None or not pending.tensor.is_cpu:
            return
        began = [time.perf_counter()]

        def arrived(_: Any) -> None:
            if began:  # called by the future and at the end of the wait
                self._under_way += time.perf_counter() - began.pop()

        pending.work.get_future().add_done_callback(arrived)
        self._arrivals[id(pending)] = arrived

    def exchange_finished(self, pending: Pending) -> None:
        """Add the time of a wait."""
        self._waited += time.perf_counter() - self._wait_began
        arrived = self._arrivals.pop(id(pending), None)
        if arrived is not None:
            arrived(None)

    def _count(self) -> None:
        """Add the time since the last call to the innermost stage."""
        now = time.perf_counter()
        self._seconds[self._stages[-1][0] if self._stages else "dense"] += now - self._at
        self._at = now

    def _end_trace(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._trace))
            self._profiler = None
