"""Where the time of training steps goes, stage by stage, as numbers and as a trace.

    with StepReport() as report:
        for batch in report.data(loader):
            ...  # a step, plain or of a pipeline
            report.step(samples=len(batch.labels))
    print(report)

While a report is open, the engine's stages are wrapped and tell it when they begin and end; before
and after, they cost nothing. A profiler of your own that runs meanwhile shows them as ranges named
`recsys lookup` and so on. Times are the host's. On a CPU they are what was computed and waited
for; on a GPU the host launches work, and the trace shows the device beside the same names.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, final
from unittest import mock

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recsys.distributed.ranks import comm
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.input_dist import InputDist, Trip
from recsys.distributed.stages.output_dist import Exchange
from recsys.distributed.state.row_updates import BackwardFinisher
from recsys.kernels.arguments import whole, wrong_type
from recsys.kernels.checked import checked
from recsys.kernels.tbe import TableBatchedEmbedding

B = TypeVar("B")
STAGES = ("data", "input dist", "lookup", "output dist", "dense", "optimizer")


class ScalarWriter(Protocol):
    """What takes numbers, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Take a number of a step."""


@final
class StepReport:
    """Measures what the time of steps goes to, while it is open.

    The stages are `data` (waiting for batches), `input dist`, `lookup` (with the tables' update in
    backward), `output dist` (with the gradients' way back), `optimizer`, and `dense`, which is all
    else. One report may be open in a process at a time.

    Args:
        writer: takes the numbers of every `every` steps; None: nobody.
        every: steps between two writes.
        trace: a file for a Chrome trace (chrome://tracing, Perfetto) of the first steps; None:
            none.
        traced_steps: how many.

    Attributes:
        steps: that have ended.
        samples: in them.

    Raises:
        ValueError: if a number is below 1.

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
        self._patches = ExitStack()
        self._stages: list[str] = []  # that are running, the innermost last
        self._at = 0.0  # until when the time is counted
        self._seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._arrivals: dict[int, Callable[[Any], None]] = {}
        self._under_way = self._waited = 0.0
        self.steps = self.samples = 0
        self._last_write = self.numbers()

    def __enter__(self) -> Self:
        self._wrap_stages()
        if self._trace is not None:
            # one cycle; without this, torch 2.11 warns that only the last is kept
            self._profiler = torch.profiler.profile(acc_events=True)
            self._profiler.start()
        self._at = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        self._end_trace()

    def data(self, batches: Iterable[B]) -> Iterator[B]:
        """Yield batches, and count the time until they come."""
        if isinstance(batches, str | bytes) or not isinstance(batches, Iterable):
            wrong_type("StepReport.data: batches", "an iterable of batches", batches)
        source = iter(batches)
        while True:
            with self._stage("data"):
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield batch

    def step(self, samples: int) -> None:
        """End a step.

        Args:
            samples: of this rank's batch.
        """
        whole("StepReport.step: samples", samples, least=0)
        self._count()
        self._stages.clear()  # of a step that raised
        self.steps += 1
        self.samples += samples
        if self.steps == self._traced_steps:
            self._end_trace()
        if self._writer is not None and self.steps % self._every == 0:
            for name, value in self._since(self._last_write).items():
                self._writer.add_scalar(f"step/{name}", value, self.steps)
            self._last_write = self.numbers()

    def shares(self) -> dict[str, float]:
        """Return what share of the time each of `STAGES` took, by name; all add up to 1."""
        total = sum(self._seconds.values()) or 1.0
        return {stage: seconds / total for stage, seconds in self._seconds.items()}

    @property
    def overlap(self) -> float:
        """What share of the time of exchanges the host did something else; 0 without any."""
        return max(0.0, 1 - self._waited / self._under_way) if self._under_way else 0.0

    def numbers(self) -> dict[str, float]:
        """Return the sums so far: steps, samples, seconds of stages and of exchanges."""
        return self._seconds | {
            "steps": self.steps,
            "samples": self.samples,
            "under way": self._under_way,
            "waited": self._waited,
        }

    def _since(self, before: dict[str, float]) -> dict[str, float]:
        more = {name: value - before[name] for name, value in self.numbers().items()}
        seconds = sum(more[stage] for stage in STAGES) or 1.0
        found = {"samples per second": more["samples"] / seconds}
        found["milliseconds"] = seconds / (more["steps"] or 1) * 1e3
        found |= {f"share of {stage}": more[stage] / seconds for stage in STAGES}
        if more["under way"]:
            found["overlap"] = max(0.0, 1 - more["waited"] / more["under way"])
        return found

    def __str__(self) -> str:
        seconds = sum(self._seconds.values())
        if not self.steps or not seconds:
            return "StepReport: no step yet"
        lines = [
            f"{self.steps} steps, {seconds / self.steps * 1e3:.2f} ms each, "
            f"{self.samples / seconds:,.0f} samples/s on this rank"
        ]
        for stage, share in self.shares().items():
            lines.append(f"  {stage:<12}{share:>7.1%}  {'#' * round(40 * share)}")
        if self._under_way:
            lines.append(
                f"  exchanges were under way for {self._under_way / self.steps * 1e3:.2f} ms of a "
                f"step, {self.overlap:.0%} of it behind other work"
            )
        return "\n".join(lines)

    def _count(self) -> None:
        """Add the time since the last call to the stage that runs."""
        now = time.perf_counter()
        self._seconds[self._stages[-1] if self._stages else "dense"] += now - self._at
        self._at = now

    def _enter(self, stage: str) -> None:
        self._count()
        self._stages.append(stage)

    def _leave(self) -> None:
        self._count()
        if self._stages:
            self._stages.pop()

    @contextmanager
    def _stage(self, stage: str) -> Iterator[None]:
        profiled = torch.autograd.profiler._is_profiler_enabled  # the report's, or a user's own
        with torch.profiler.record_function(f"recsys {stage}") if profiled else nullcontext():
            self._enter(stage)
            try:
                yield
            finally:
                self._leave()

    def _end_trace(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._trace))
            self._profiler = None

    # -- what tells of stages ---------------------------------------------------------------------

    def _wrap_stages(self) -> None:
        ways = [
            (owner, name, "output dist")
            for owner in _subclasses(Exchange)
            for name in ("send", "place", "spread", "send_back")
            if name in vars(owner)
        ]
        for owner, name, stage in [
            (InputDist, "prepare", "input dist"),
            (InputDist, "header_of", "input dist"),
            (InputDist, "skip_header", "input dist"),
            (Trip, "send", "input dist"),
            (Trip, "ids", "input dist"),
            (BackwardFinisher, "_finish", "lookup"),
            *ways,
        ]:
            self._replace(owner, name, self._timed(getattr(owner, name), stage))
        self._replace(TableBatchedEmbedding, "forward", self._lookup(TableBatchedEmbedding.forward))
        for name in ("all_to_all", "reduce_scatter", "all_gather"):
            self._replace(comm, name, self._exchange(getattr(comm, name)))
        self._replace(comm.Pending, "wait", self._wait(comm.Pending.wait))
        for register, tell in [
            (register_optimizer_step_pre_hook, self._enter),
            (register_optimizer_step_post_hook, lambda _: self._leave()),
        ]:
            handle = register(lambda *_, tell=tell: tell("optimizer"))
            self._patches.callback(handle.remove)

    def _replace(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        self._patches.enter_context(mock.patch.object(owner, name, function))

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._stage(stage):
                return function(*args, **kwargs)

        return call

    def _lookup(self, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(function, "lookup")

        def call(*args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = timed(*args, **kwargs)
            node = out.grad_fn
            if node is not None:  # its backward is the tables' update
                node.register_prehook(lambda _: self._enter("lookup"))
                node.register_hook(lambda *_: self._leave())
            return out

        return call

    def _exchange(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(env: Any, what: ExchangeName, *args: Any, **kwargs: Any) -> comm.Pending:
            with self._stage("input dist" if what.is_of_ids else "output dist"):
                pending: comm.Pending = function(env, what, *args, **kwargs)
            if pending.work is not None and pending.tensor.is_cpu:
                began = [time.perf_counter()]

                def arrived(_: Any) -> None:
                    if began:  # whoever sees it first: who waits is told before this is called
                        self._under_way += time.perf_counter() - began.pop()

                pending.work.get_future().add_done_callback(arrived)
                self._arrivals[id(pending)] = arrived
            return pending

        return call

    def _wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(pending: comm.Pending, *args: Any, **kwargs: Any) -> Tensor:
            is_exchange = pending.work is not None
            began = time.perf_counter()
            tensor: Tensor = function(pending, *args, **kwargs)
            if is_exchange:
                self._waited += time.perf_counter() - began
                arrived = self._arrivals.pop(id(pending), None)
                if arrived is not None:
                    arrived(None)
            return tensor

        return call


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    direct: list[type[Any]] = kind.__subclasses__()
    return [*direct, *(further for derived in direct for further in _subclasses(derived))]
