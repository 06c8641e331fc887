"""State of one batch in a pipeline, and the CUDA streams on which it is prepared."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from recsys.distributed.train_pipeline.input_prefetch import PrefetchedBatch


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Return a context manager that runs its block on a CUDA stream; None changes nothing."""
    return torch.cuda.stream(stream) if _is_cuda(stream) else nullcontext()


def record_event(stream: Any) -> Any:
    """Return an event after the current work of a CUDA stream; None without a stream."""
    if not _is_cuda(stream):
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _is_cuda(stream: Any) -> bool:
    return stream is not None and stream.device.type == "cuda"


@final
@dataclasses.dataclass(slots=True)
class TrainPipelineContext:
    """State of one batch in a pipeline.

    Attributes:
        batch: The batch on the device.
        copied: CUDA event after the copy to the device; None on a CPU.
        started: The batch with its input stages; None before they start.
        stream: CUDA stream of the input stages; None on a CPU.
        sent: CUDA event after sending the ids; None on a CPU.
    """

    batch: Any
    copied: Any = None
    started: PrefetchedBatch | None = None
    stream: Any = None
    sent: Any = None

    def send(self) -> None:
        """Start sending the ids if the header was sent."""
        if self.started is not None:
            with on_stream(self.stream):
                self.started.send()
            self.sent = record_event(self.stream)

    def join(self) -> None:
        """Make the current stream wait for the stream of the input stages."""
        if self.stream is not None and self.started is not None:
            if self.sent is None:
                self.send()
            now = torch.cuda.current_stream(self.stream.device)
            now.wait_event(self.sent)
            self.started.record_stream(now)

    def look_up(self) -> None:
        """Look up the ids."""
        if self.started is not None:
            self.join()
            self.started.look_up()

    def prefetch(self) -> None:
        """Fetch the rows of the batch into caches."""
        if self.started is not None:
            self.join()
            self.started.prefetch()

    def drop(self) -> None:
        """Wait for pending exchanges and drop their results."""
        if self.started is not None:
            self.started.drop()
