"""Third stage: looked-up embeddings go back to the samples they belong to, into their final
columns.

One exchange forward and one backward, whatever the mix of strategies. Each rank sends to rank
``q`` the rows of ``q``'s samples as they lie in its lookup's output; ``q`` adds up the parts of
row-split tables and lays every stretch of columns where the unsharded module would have put it.

Shape names: ``B`` samples of this rank, ``T`` samples of all ranks, ``D`` output columns, ``C``
columns of one rank's lookups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from recsys.distributed import comm
from recsys.distributed.input_dist import Receipt
from recsys.distributed.layout import Layout
from recsys.distributed.types import LazyAwaitable, ShardingEnv


@final
class OutputDist:
    """Sends pooled embeddings to the samples' ranks and lays them out.

    Args:
        layout: the compiled placement.
        mean_slots: positions within ``layout.split_slots`` of the slots whose sums are divided by
            the bag length.
        env: the ranks.
        device: where the embeddings are.
        dtype: of the embeddings.
        on_backward: called in every backward pass, on every rank in the same order.
    """

    def __init__(
        self,
        layout: Layout,
        mean_slots: tuple[int, ...],
        env: ShardingEnv,
        device: torch.device,
        dtype: torch.dtype,
        on_backward: Callable[[], None],
    ) -> None:
        self.layout = layout
        self.env = env
        self.device = device
        self.dtype = dtype
        self.mean_slots = mean_slots
        self.on_backward = on_backward
        self.has_exchange = any(layout.rank_widths)
        # a backward pass must reach every rank, also one whose own tables are frozen or that owns none
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        self._is_identity = (
            env.world_size == 1
            and not mean_slots
            and not layout.replica_groups
            and len(layout.groups[0]) == 1
            and layout.placement == ((0, 0, layout.width),)
        )

    def start(
        self, lookups: list[Tensor], replicas: list[Tensor], receipt: Receipt, trains: bool
    ) -> LazyAwaitable[Tensor]:
        """Starts the exchange.

        Args:
            lookups: per lookup group of this rank, ``[T, C_g]``.
            replicas: per replica group, ``[B, C_g]``.
            receipt: what the input stage said of the batch.
            trains: whether any table of the module, on any rank, takes gradients.

        Returns:
            The pending ``[B, D]``.
        """
        if self._is_identity:
            (whole,) = lookups
            return LazyAwaitable(lambda: whole)
        anchor = self._anchor if trains else self._anchor.detach()
        exchange = _Exchange(self, receipt)
        output: Tensor = _ExchangeFunction.apply(exchange, anchor, *lookups, *replicas)
        return LazyAwaitable(lambda: exchange.finish(output))


@final
class _Exchange:
    """One batch's way through the output stage, forward and backward."""

    def __init__(self, stage: OutputDist, receipt: Receipt) -> None:
        self.stage = stage
        self.layout = stage.layout
        self.rank = stage.env.rank
        self.batch_sizes = receipt.batch_sizes
        self.batch_size = receipt.batch_sizes[self.rank]
        self.inverse_counts = self._invert(receipt)
        self.pending: comm.Pending | None = None
        self.replicas: tuple[Tensor, ...] = ()

    def _invert(self, receipt: Receipt) -> Tensor | None:
        """Returns ``[B, slots]`` one over the bag lengths of mean-pooled row-split slots (1 for an empty bag)."""
        if not self.stage.mean_slots:
            return None
        assert receipt.counts is not None
        counts = receipt.counts.view(len(self.layout.split_slots), self.batch_size)
        counts = counts[list(self.stage.mean_slots)].clamp(min=1)
        return counts.to(self.stage.dtype).reciprocal_().t()

    def _scale_means(self, values_BD: Tensor) -> None:
        if self.inverse_counts is None:
            return
        for i, place in enumerate(self.stage.mean_slots):
            slot = self.layout.slots[self.layout.split_slots[place]]
            values_BD[:, slot.col : slot.col + slot.dim].mul_(self.inverse_counts[:, i : i + 1])

    def _sizes(self) -> tuple[list[int], list[int]]:
        """Elements this rank sends to, and receives from, each rank in the forward exchange."""
        own_width = self.layout.rank_widths[self.rank]
        send = [size * own_width for size in self.batch_sizes]
        receive = [self.batch_size * width for width in self.layout.rank_widths]
        return send, receive

    def send(self, lookups: tuple[Tensor, ...], replicas: tuple[Tensor, ...]) -> None:
        self.replicas = replicas
        if not self.stage.has_exchange:
            return
        if not lookups:
            sent = torch.empty(0, dtype=self.stage.dtype, device=self.stage.device)
        elif len(lookups) == 1:
            sent = lookups[0]
        else:
            sent = torch.cat(lookups, dim=1)
        self.pending = comm.all_to_all(self.stage.env, sent.reshape(-1), *self._sizes())

    def finish(self, output_BD: Tensor) -> Tensor:
        """Waits, adds up and places; fills the output in place."""
        layout = self.layout
        with torch.no_grad():
            sources: list[Tensor] = []
            if self.pending is not None:
                received = self.pending.wait().split(self._sizes()[1])
                by_rank = [
                    part.view(self.batch_size, width)
                    for part, width in zip(received, layout.rank_widths, strict=True)
                ]
                for run in layout.runs:
                    pieces = [
                        by_rank[rank].narrow(1, start, run.width)
                        for rank, start in zip(run.ranks, run.starts, strict=True)
                    ]
                    sources.append(pieces[0] if len(pieces) == 1 else _add_up(pieces))
            sources += self.replicas
            torch.cat(
                [sources[s].narrow(1, start, width) for s, start, width in layout.placement],
                dim=1,
                out=output_BD.detach(),
            )
            self._scale_means(output_BD)
        self.pending = None
        self.replicas = ()
        return output_BD

    def backward(self, grad_BD: Tensor) -> list[Tensor | None]:
        """Returns the gradients of the lookups' and replicas' outputs."""
        layout, env = self.layout, self.stage.env
        self.stage.on_backward()
        if self.inverse_counts is not None:
            grad_BD = grad_BD.clone()
            self._scale_means(grad_BD)
        grads: list[Tensor | None] = []
        if self.stage.has_exchange:
            receive, send = self._sizes()
            sent = grad_BD.new_empty(sum(send))
            parts = sent.split(send)
            for part, width, columns in zip(
                parts, layout.rank_widths, layout.source_columns, strict=True
            ):
                if width:
                    _gather_columns(grad_BD, columns, part.view(self.batch_size, width))
            if env.world_size > 1:  # the mean over ranks, as DistributedDataParallel takes it
                sent.mul_(1.0 / env.world_size)
            arrived = comm.all_to_all(env, sent, send, receive).wait()
            groups = layout.groups[self.rank]
            if groups:
                arrived = arrived.view(-1, layout.rank_widths[self.rank])
                widths = [group.width for group in groups]
                grads += [grad.contiguous() for grad in arrived.split(widths, dim=1)]
        for group, columns in zip(layout.replica_groups, layout.replica_columns, strict=True):
            local = grad_BD.new_empty(self.batch_size, group.width)
            _gather_columns(grad_BD, columns, local)
            grads.append(local)
        return grads


def _add_up(pieces: list[Tensor]) -> Tensor:
    total = pieces[0] + pieces[1]
    for piece in pieces[2:]:
        total += piece
    return total


def _gather_columns(source: Tensor, columns: tuple[tuple[int, int], ...], out: Tensor) -> None:
    torch.cat([source.narrow(1, start, end - start) for start, end in columns], dim=1, out=out)


class _ExchangeFunction(torch.autograd.Function):
    """Autograd node of the stage. Its output is filled later, by ``_Exchange.finish``."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, anchor: Tensor, *outputs: Tensor) -> Tensor:
        num_lookups = len(exchange.layout.groups[exchange.rank])
        exchange.send(outputs[:num_lookups], outputs[num_lookups:])
        ctx.exchange = exchange
        return torch.empty(
            exchange.batch_size,
            exchange.layout.width,
            dtype=exchange.stage.dtype,
            device=exchange.stage.device,
        )

    @staticmethod
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.exchange.backward(grad_BD))
