"""Third stage: looked-up embeddings go back to their samples, into their final columns.

One exchange forward and one backward, whatever the mix of strategies. Each rank sends to rank ``q``
the rows of ``q``'s samples as they lie in its lookups' output. What arrives is one buffer, seen as
rows of ``chunk`` columns (the largest width that divides every stretch of columns); one gather lays
those rows out as the unsharded module would have them, adding up the parts of row-split tables on
the way. Backward is the transposed gather, which starts the reverse exchange, and later its end.
What a model computes between the call and the first use of the output runs meanwhile, both ways.

Shape names: ``B`` samples of this rank, ``T`` samples of all ranks, ``D`` output columns, ``C``
columns of one rank's lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from recsys.distributed import comm
from recsys.distributed.input_dist import Receipt
from recsys.distributed.layout import Layout
from recsys.distributed.types import LazyAwaitable, ShardingEnv

_MAX_CACHED_PLACEMENTS = 4  # one per batch size seen; datasets have few


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Placement:
    """The gathers for one batch size.

    ``collect`` lists, for each chunk of the output ``[B, D]``, the chunks of the buffer that add up
    to it; ``offsets`` says where each list begins, None if every list has one entry.
    ``spread`` lists, for each chunk of the buffer, the chunk of the output it went to.
    """

    collect: Tensor
    offsets: Tensor | None
    spread: Tensor


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
        self.mean_index = torch.tensor(mean_slots, dtype=torch.int64, device=device)
        self.on_backward = on_backward
        self.has_exchange = any(layout.rank_widths)
        # the columns of the received buffer, block by block: each rank's, then the replicas'
        self._blocks = [*layout.source_columns, *layout.replica_columns]
        edges = [edge for block in self._blocks for columns in block for edge in columns]
        self.chunk = gcd(*edges)
        self._placements: dict[int, _Placement] = {}
        # a backward pass must reach every rank, also one whose own tables are frozen or that owns
        # none
        self._anchor = torch.zeros(0, device=device, requires_grad=True)
        self._is_identity = (
            env.world_size == 1
            and not mean_slots
            and not layout.replica_groups
            and layout.source_columns == (((0, layout.width),),)
            and len(layout.groups[0]) == 1
        )

    def start(
        self,
        lookups: Sequence[Tensor],
        replicas: Sequence[Tensor],
        receipt: Receipt,
        trains: bool,
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
        exchange = _Exchange(self, receipt)
        anchor = self._anchor if trains else self._anchor.detach()
        arriving = _Send.apply(exchange, anchor, *lookups, *replicas)  # type: ignore[no-untyped-call]
        with_grad = torch.is_grad_enabled()

        def finish() -> Tensor:
            # whoever looks first, say a log under no_grad, must not decide about gradients
            with torch.inference_mode(False), torch.set_grad_enabled(with_grad):
                output: Tensor = _Place.apply(exchange, arriving)  # type: ignore[no-untyped-call]
            return output

        return LazyAwaitable(finish)

    def placement(self, batch_size: int) -> _Placement:
        """Returns the gathers for a batch size; built once, kept on the device."""
        found = self._placements.get(batch_size)
        if found is None:
            if len(self._placements) >= _MAX_CACHED_PLACEMENTS:
                self._placements.pop(next(iter(self._placements)))
            found = self._placements[batch_size] = self._build_placement(batch_size)
        return found

    def _build_placement(self, batch_size: int) -> _Placement:
        """Numbers the chunks of the buffer ``[block][sample][column]`` by where they go."""
        num_chunks = self.layout.width // self.chunk
        samples = np.arange(batch_size)[:, None] * num_chunks
        spread = np.concatenate(
            [np.zeros(0, dtype=np.int64)]
            + [(samples + self._chunks_of(block)[None, :]).reshape(-1) for block in self._blocks]
        )
        collect = np.argsort(spread, kind="stable")
        offsets = None
        if spread.size != batch_size * num_chunks:
            offsets = np.searchsorted(spread[collect], np.arange(batch_size * num_chunks + 1))
        return _Placement(
            collect=torch.from_numpy(collect).to(self.device),
            offsets=None if offsets is None else torch.from_numpy(offsets).to(self.device),
            spread=torch.from_numpy(spread).to(self.device),
        )

    def _chunks_of(self, columns: Sequence[tuple[int, int]]) -> np.ndarray:
        stretches = [np.arange(start // self.chunk, end // self.chunk) for start, end in columns]
        return np.concatenate([np.zeros(0, dtype=np.int64), *stretches])


@final
class _Exchange:
    """One batch's way through the stage, forward and backward."""

    def __init__(self, stage: OutputDist, receipt: Receipt) -> None:
        self.stage = stage
        self.env = stage.env
        self.batch_sizes = receipt.batch_sizes
        self.batch_size = receipt.batch_sizes[stage.env.rank]
        self.widths = stage.layout.rank_widths
        self.own_width = self.widths[stage.env.rank]
        self.lookup_widths = [group.width for group in stage.layout.groups[stage.env.rank]]
        self.replica_widths = [group.width for group in stage.layout.replica_groups]
        self.sends = [size * self.own_width for size in self.batch_sizes]
        self.receives = [self.batch_size * width for width in self.widths]
        self.num_received = sum(self.receives)
        self.scales = self._mean_scales(receipt)
        self.pending: comm.Pending | None = None

    def _mean_scales(self, receipt: Receipt) -> Tensor | None:
        """Returns ``[slots, B, 1]``, one over the bag length, of mean-pooled row-split slots."""
        if not self.stage.mean_slots:
            return None
        assert receipt.counts is not None
        counts = receipt.counts.view(-1, self.batch_size) if self.batch_size else receipt.counts
        counts = counts.index_select(0, self.stage.mean_index).clamp(min=1)
        return counts.to(self.stage.dtype).reciprocal_().unsqueeze(2)

    def scale_means(self, values_BD: Tensor) -> None:
        if self.scales is None or not self.batch_size:
            return
        layout = self.stage.layout
        for place, scale_B1 in zip(self.stage.mean_slots, self.scales, strict=True):
            slot = layout.slots[layout.split_slots[place]]
            values_BD[:, slot.col : slot.col + slot.dim].mul_(scale_B1)

    def send(self, lookups: Sequence[Tensor], replicas: Sequence[Tensor]) -> Tensor:
        """Starts the exchange into one buffer; the replicas' output lies behind what arrives."""
        stage = self.stage
        num_local = self.batch_size * sum(self.replica_widths)
        buffer = torch.empty(self.num_received + num_local, dtype=stage.dtype, device=stage.device)
        if stage.has_exchange:
            sent = buffer.new_empty(0)
            if len(lookups) == 1:
                sent = lookups[0].reshape(-1)
            elif lookups:
                sent = torch.cat(tuple(lookups), dim=1).view(-1)
            self.pending = comm.all_to_all(
                self.env, sent, self.sends, self.receives, out=buffer[: self.num_received]
            )
        at = self.num_received
        for replica in replicas:
            buffer[at : at + replica.numel()].copy_(replica.reshape(-1))
            at += replica.numel()
        return buffer

    def place(self, buffer: Tensor) -> Tensor:
        """Waits and lays the buffer out: ``[B, D]``."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        stage, width = self.stage, self.stage.layout.width
        placement = stage.placement(self.batch_size)
        rows = buffer.view(-1, stage.chunk)
        if placement.offsets is None or not self.batch_size:
            output = rows.index_select(0, placement.collect)
        else:
            output = functional.embedding_bag(
                placement.collect, rows, placement.offsets, mode="sum", include_last_offset=True
            )
        output = output.view(self.batch_size, width)
        self.scale_means(output)
        return output

    def spread(self, grad_BD: Tensor) -> Tensor:
        """Transposed :meth:`place`: the gradient of the buffer; starts sending it back."""
        self.stage.on_backward()
        if self.scales is not None:
            grad_BD = grad_BD.clone()
            self.scale_means(grad_BD)
        placement = self.stage.placement(self.batch_size)
        rows = grad_BD.reshape(-1, self.stage.chunk)
        grad = rows.index_select(0, placement.spread).view(-1)
        if self.stage.has_exchange:
            sent = grad[: self.num_received]
            if self.env.world_size > 1:  # the mean over ranks, as DistributedDataParallel takes it
                sent.mul_(1.0 / self.env.world_size)
            self.pending = comm.all_to_all(self.env, sent, self.receives, self.sends)
        return grad

    def send_back(self, grad: Tensor) -> list[Tensor]:
        """Transposed :meth:`send`: the gradients of the lookups' and replicas' outputs."""
        grads: list[Tensor] = []
        if self.pending is not None:
            arrived = self.pending.wait()
            self.pending = None
            if self.lookup_widths:
                arrived = arrived.view(-1, self.own_width)
                parts = arrived.split(self.lookup_widths, dim=1)
                grads += [part.contiguous() for part in parts]
        if self.replica_widths:
            sizes = [self.batch_size * width for width in self.replica_widths]
            grads += [
                part.view(self.batch_size, width)
                for part, width in zip(
                    grad[self.num_received :].split(sizes), self.replica_widths, strict=True
                )
            ]
        return grads


class _Send(torch.autograd.Function):
    """Local embeddings to the buffer they arrive in; the buffer is complete after ``_Place``."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, anchor: Tensor, *outputs: Tensor) -> Tensor:
        ctx.exchange = exchange
        num_lookups = len(exchange.lookup_widths)
        return exchange.send(outputs[:num_lookups], outputs[num_lookups:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.exchange.send_back(grad))


class _Place(torch.autograd.Function):
    """The arriving buffer to the samples' rows."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, buffer: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.place(buffer)

    @staticmethod
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.spread(grad_BD)
