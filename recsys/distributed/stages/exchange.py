"""What the pooled and the sequence output share: an exchange that autograd can follow, lazily.

An exchange has four steps. ``send`` starts it and returns the buffer that things will arrive in;
``place`` waits and lays the buffer out; in backward ``spread`` (transposed ``place``) starts the
reverse exchange, and ``send_back`` (transposed ``send``) ends it. Between the two steps of a
direction the model computes what does not need the result.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import QuantizedCommCodecs
from recsys.kernels.scaled_loss import TABLE_UPDATES, TableUpdates


class OutputStage(Protocol):
    """What an exchange needs of the stage it belongs to.

    Attributes:
        env: the ranks.
        device: where the embeddings are.
        on_backward: called in every backward pass, on every rank in the same order.
        codecs: what embeddings and gradients look like while they travel.
        has_exchange: whether any rank sends anything.
        updates: the tables that take gradients, on any rank.
    """

    env: ShardingEnv
    device: torch.device
    on_backward: Callable[[], None]
    codecs: QuantizedCommCodecs
    has_exchange: bool
    updates: TableUpdates


S = TypeVar("S", bound=OutputStage)


class Exchange(abc.ABC, Generic[S]):
    """One batch's way from the lookups' outputs to the module's output, and back.

    Args:
        stage: whose batch it is.
        sends: elements for each rank, in the forward pass.
        receives: elements from each rank.
    """

    def __init__(self, stage: S, sends: list[int], receives: list[int]) -> None:
        self.env = stage.env
        self.device = stage.device
        self.on_backward = stage.on_backward
        self.sends = sends
        self.receives = receives
        self.num_received = sum(receives)
        self.pending: comm.Pending | None = None
        self.stage = stage
        self._replica_shapes: list[torch.Size] = []

    @abc.abstractmethod
    def send(self, lookups: Sequence[Tensor], replicas: Sequence[Tensor]) -> Tensor:
        """Starts the exchange; returns the buffer that is complete after :meth:`place`."""

    @abc.abstractmethod
    def place(self, buffer: Tensor) -> Tensor:
        """Waits, and returns the output."""

    @abc.abstractmethod
    def spread(self, grad: Tensor) -> Tensor:
        """Turns the output's gradient into the buffer's, and starts sending it back."""

    @abc.abstractmethod
    def send_back(self, grad: Tensor) -> list[Tensor]:
        """Waits, and returns the gradients of the lookups, then of the replicas."""

    def wait(self) -> Tensor | None:
        """Ends the exchange that is under way, if any, and returns what arrived."""
        if self.pending is None:
            return None
        arrived = self.pending.wait()
        self.pending = None
        return arrived

    def start_sending(self, sent: Tensor, replicas: Sequence[Tensor]) -> Tensor:
        """Sends into one buffer; the replicas' outputs lie behind what arrives."""
        stage = self.stage
        self._replica_shapes = [replica.shape for replica in replicas]
        size = self.num_received + sum(replica.numel() for replica in replicas)
        buffer = torch.empty(size, device=stage.device)
        if stage.has_exchange:
            arrives = buffer[: self.num_received]
            self.pending = comm.all_to_all(
                self.env,
                "send embeddings back",
                sent,
                self.sends,
                self.receives,
                arrives,
                stage.codecs.forward,
            )
        at = self.num_received
        for replica in replicas:
            buffer[at : at + replica.numel()].copy_(replica.reshape(-1))
            at += replica.numel()
        return buffer

    def start_sending_back(self, grad: Tensor) -> None:
        """Sends back the gradient of what had arrived in the buffer."""
        if self.stage.has_exchange:
            sent = grad[: self.num_received]
            codec = self.stage.codecs.backward
            self.pending = comm.all_to_all(
                self.env,
                "send gradients to the tables",
                sent,
                self.receives,
                self.sends,
                wire=codec,
            )

    def wait_for_grads(self) -> Tensor | None:
        """Ends what :meth:`start_sending_back` started, if anything, and returns what arrived.

        It is divided by the number of ranks, as DistributedDataParallel does.
        """
        arrived = self.wait()
        if arrived is not None and self.env.world_size > 1:
            arrived.mul_(1.0 / self.env.world_size)
        return arrived

    def replica_grads(self, grad: Tensor) -> list[Tensor]:
        """Cuts the gradients of the replicas' outputs off the buffer's."""
        sizes = [shape.numel() for shape in self._replica_shapes]
        parts = grad[self.num_received :].split(sizes) if sizes else ()
        return [part.view(s) for part, s in zip(parts, self._replica_shapes, strict=True)]


def start_exchange(
    exchange: Exchange[Any],
    lookups: Sequence[Tensor],
    replicas: Sequence[Tensor],
    trains: bool,
    anchor: Tensor | None = None,
) -> Callable[[], Tensor]:
    """Starts an exchange.

    Args:
        exchange: of this batch.
        lookups: outputs of this rank's lookups.
        replicas: outputs of the replicated tables' lookups.
        trains: whether any table of the module, on any rank, takes gradients: a backward pass must
            reach every rank, also one whose own tables are frozen or that owns none.
        anchor: ``[0]``, what else every backward pass must reach.

    Returns:
        What waits for the output; call it once.
    """
    if anchor is None:
        anchor = torch.zeros(0, device=exchange.device, requires_grad=trains)
    arriving = _Send.apply(  # type: ignore[no-untyped-call]
        exchange, len(lookups), anchor, *lookups, *replicas
    )
    with_grad = torch.is_grad_enabled()

    def finish() -> Tensor:
        # whoever looks first, say a log under no_grad, must not decide about gradients
        with torch.inference_mode(False), torch.set_grad_enabled(with_grad):
            output: Tensor = _Place.apply(exchange, arriving)  # type: ignore[no-untyped-call]
        return output

    return finish


class _Send(torch.autograd.Function):
    """Local embeddings to the buffer they arrive in; the buffer is complete after ``_Place``."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange[Any], num_lookups: int, anchor: Tensor, *outputs: Tensor
    ) -> Tensor:
        ctx.exchange = exchange
        return exchange.send(outputs[:num_lookups], outputs[num_lookups:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, grad.new_zeros(0), *ctx.exchange.send_back(grad))


class _Place(torch.autograd.Function):
    """The arriving buffer to the output."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange[Any], buffer: Tensor) -> Tensor:
        ctx.exchange = exchange
        ctx.metadata[TABLE_UPDATES] = exchange.stage.updates
        return exchange.place(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.on_backward()
        return None, ctx.exchange.spread(grad)
