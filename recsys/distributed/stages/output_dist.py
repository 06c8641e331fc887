"""Output stage for pooled embeddings: sends them to the ranks of their samples.

There is one exchange forward and one backward for any mix of strategies. Each rank sends to
rank `q` the rows of `q`'s samples from its lookups' output. The received buffer has one gather,
which produces the columns of the unsharded module and adds up the partial sums of row-split tables.
Backward is the transposed gather and the reverse exchange. Both exchanges overlap with the model's
computation between the call and the first use of the output.

If the rows of a table are on the ranks of one of several nodes, its partial sums are added up
within the node first (see `NodeHop`).

Shape names: `B` samples of this rank, `T` samples of all ranks, `D` output columns, `C`
columns of one rank's lookups.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from math import inf
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from recsys import step_stages
from recsys.distributed.placement.layout import Layout, Stream, merge_ranges
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.ranks.wire import QuantizedCommCodecs, WireFormat
from recsys.distributed.stages.bags import in_order, joined
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.stages.column_gather import ColumnGather, MeanSlot, Ranges
from recsys.distributed.stages.ragged_gather import (
    NO_IDS,
    NO_SEGMENT,
    RaggedBatch,
    RaggedGather,
    SplitIds,
)
from recsys.kernels import ops
from recsys.kernels.scaled_loss import TABLE_UPDATES, TableUpdates
from recsys.modules.embedding_inputs import expand_bags
from recsys.sparse import KeyedTensor
from recsys.step_stages import Stage


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """Callbacks and facts for the backward pass of an output stage.

    Attributes:
        begins: Called in every backward pass, on every rank in the same order.
        updates: Tables that take gradients on any rank.
    """

    begins: Callable[[], None]
    updates: TableUpdates


NO_UPDATES = Backward(begins=lambda: None, updates=TableUpdates())
"""Backward pass of an exchange whose gradients go through another exchange first."""


class ExchangeStage(Protocol):
    """Properties of a stage that its exchanges use.

    Attributes:
        device: Device of the embeddings.
        codecs: Wire formats of embeddings and of gradients; None for as they are.
        tasks: Names of the exchanges of embeddings and of gradients.
        has_exchange: Whether any rank sends anything.
        backward: Callbacks for backward passes.
        grad_scale: Factor for the gradients of the lookups.
    """

    device: torch.device
    codecs: tuple[WireFormat | None, WireFormat | None]
    tasks: tuple[ExchangeName, ExchangeName]
    has_exchange: bool
    backward: Backward
    grad_scale: float


@final
class SentBlocks(NamedTuple):
    """Elements that a rank sends: rows of all samples, in one block or several.

    Attributes:
        group_widths: Columns of each lookup in the first block.
        widths_R: `[R]` elements per sample for each rank.
        blocks: Per block the ranks whose samples it has, and its columns.
        order: int32, the parts of the blocks (one per rank) in the order of sending; empty for the
            order in which they are.
    """

    group_widths: list[int]
    widths_R: np.ndarray
    blocks: list[tuple[np.ndarray, int]]
    order: np.ndarray


class PooledStage(ExchangeStage, Protocol):
    """A stage that exchanges columns of samples and adds up partial sums.

    Attributes:
        sent: Elements that this rank sends.
        widths: `[R]` elements per sample from each rank.
        gather: Computes the output from the received buffer.
        read_codecs: The codecs that the gathers apply themselves.
        adds_up: Whether a reduce-scatter is used for equal batch sizes.
        sums: The gather after it; `gather` if there is no reduce-scatter.
    """

    sent: SentBlocks
    widths: np.ndarray
    gather: ColumnGather
    read_codecs: tuple[WireFormat | None, WireFormat | None]
    adds_up: bool
    sums: ColumnGather


S = TypeVar("S", bound=ExchangeStage)
T = TypeVar("T")


class Exchange(abc.ABC, Generic[S]):
    """Differentiable exchange of one batch's embeddings.

    It has four steps. `start_forward` starts the exchange and returns the receive buffer.
    `finish_forward` waits and computes the output. In backward, `start_backward` computes the
    buffer's gradient and starts the reverse exchange, and `finish_backward` waits for it. Between
    the two steps of a direction the model computes what does not need the result.

    Args:
        stage: The output stage.
        env: The ranks.
        sends: Elements for each rank in the forward pass.
        receives: Elements from each rank, or of their sum.
        path: Path of the module, for messages.

    Attributes:
        adds_up: Whether the exchange is a reduce-scatter.
        scales_early: Whether gradients are multiplied by their scale before they are sent.
    """

    adds_up = False
    scales_early = False

    def __init__(
        self, stage: S, env: ShardingEnv, sends: list[int], receives: list[int], path: str
    ) -> None:
        self.stage, self.path = stage, path
        self.env = env
        self.sends = sends
        self.receives = receives
        self.num_received = sum(receives)
        self.pending: comm.Pending
        self._replica_shapes: list[torch.Size] = []

    @abc.abstractmethod
    def start_forward(self, lookups: Sequence[Tensor], replicas: Sequence[Tensor]) -> Tensor:
        """Start the exchange; return the buffer, which `finish_forward` completes."""

    @abc.abstractmethod
    def finish_forward(self, buffer: Tensor) -> Tensor:
        """Wait for the exchange and return the output."""

    @abc.abstractmethod
    def start_backward(self, grad: Tensor) -> Tensor:
        """Return the buffer's gradient, given the output's; start the reverse exchange."""

    @abc.abstractmethod
    def finish_backward(self, grad: Tensor) -> list[Tensor]:
        """Wait for the reverse exchange; return the gradients of the lookups, then of replicas."""

    def start(
        self,
        lookups: Sequence[Tensor],
        replicas: Sequence[Tensor],
        trains: bool,
        anchors: Sequence[Tensor] = (),
    ) -> Callable[[], Tensor]:
        """Start the exchange.

        Args:
            lookups: Outputs of this rank's lookups.
            replicas: Outputs of the lookups in replicated tables.
            trains: Whether any table of the module, on any rank, takes gradients. If so, backward
                must reach every rank, even one without trained tables.
            anchors: `[0]`, further tensors that every backward pass must reach; one at most.

        Returns:
            Function that waits for the output; call it once.
        """
        own = [] if anchors else [torch.empty(0, device=self.stage.device, requires_grad=trains)]
        arriving = _Send.apply(  # type: ignore[no-untyped-call]
            self, len(lookups), *anchors, *own, *lookups, *replicas
        )
        with_grad = torch.is_grad_enabled()

        def finish() -> Tensor:
            # the first reader, such as a log under no_grad, must not decide about gradients
            with torch.inference_mode(False), torch.set_grad_enabled(with_grad):
                output: Tensor = _Place.apply(self, arriving)  # type: ignore[no-untyped-call]
            return output

        return finish

    def start_sending(self, sent: Tensor, replicas: Sequence[Tensor] = ()) -> Tensor:
        """Start the exchange into one buffer; outputs of replicas follow the received elements."""
        stage, at = self.stage, self.num_received
        size = at
        for replica in replicas:
            self._replica_shapes.append(replica.shape)
            size += replica.numel()
        buffer = torch.empty(size, device=stage.device)
        if stage.has_exchange and self.adds_up:
            self.pending = comm.reduce_scatter(self.env, stage.tasks[0], sent, buffer[:at])
        elif stage.has_exchange:
            self.pending = comm.all_to_all(
                self.env,
                stage.tasks[0],
                sent,
                self.sends,
                self.receives,
                buffer[:at],
                stage.codecs[0],
            )
        for replica in replicas:
            buffer[at : at + replica.numel()].copy_(replica.reshape(-1))
            at += replica.numel()
        return buffer

    def wait(self, decode: bool = True) -> Tensor:
        """Wait for the exchange, if there is one, and return the received tensor."""
        if not self.stage.has_exchange:
            return _nothing(self.stage.device)
        arrived = self.pending.wait(decode)
        del self.pending  # and its buffers
        return arrived

    def start_sending_back(self, grad: Tensor, sent: Tensor) -> Tensor:
        """Start to send the gradient of the received elements; return the buffer's gradient."""
        stage = self.stage
        if stage.has_exchange and self.adds_up:
            self.pending = comm.all_gather(self.env, stage.tasks[1], sent)
        elif stage.has_exchange:
            self.pending = comm.all_to_all(
                self.env, stage.tasks[1], sent, self.receives, self.sends, wire=stage.codecs[1]
            )
        return grad

    def wait_for_grads(self) -> Tensor:
        """Wait for the reverse exchange, if there is one, and return the received gradients."""
        arrived, scale = self.wait(), self.stage.grad_scale
        if self.scales_early or scale == 1.0:
            return arrived
        return arrived.mul_(scale)

    def replica_grads(self, grad: Tensor) -> list[Tensor]:
        """Return the gradients of the replicas' outputs, given the buffer's gradient."""
        sizes = [shape.numel() for shape in self._replica_shapes]
        parts = grad[self.num_received :].split(sizes) if sizes else ()
        return [part.view(s) for part, s in zip(parts, self._replica_shapes, strict=True)]


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


class _Send(torch.autograd.Function):
    """Autograd edge from lookups' outputs to the receive buffer, which `_Place` completes."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange[Any], num_lookups: int, anchor: Tensor, *outputs: Tensor
    ) -> Tensor:
        ctx.exchange = exchange
        with step_stages.running((Stage.OUTPUT_DIST, exchange.path)):
            return exchange.start_forward(outputs[:num_lookups], outputs[num_lookups:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with step_stages.running((Stage.GRADIENT_DIST, ctx.exchange.path)):
            return (None, None, grad.new_empty(0), *ctx.exchange.finish_backward(grad))


class _Place(torch.autograd.Function):
    """Autograd edge from the receive buffer to the output."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange[Any], buffer: Tensor) -> Tensor:
        ctx.exchange = exchange
        ctx.metadata[TABLE_UPDATES] = exchange.stage.backward.updates
        with step_stages.running((Stage.OUTPUT_DIST, exchange.path)):
            return exchange.finish_forward(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        exchange: Exchange[Any] = ctx.exchange
        with step_stages.running((Stage.GRADIENT_DIST, exchange.path)):
            exchange.stage.backward.begins()
            return None, exchange.start_backward(grad)


def _columns(
    layout: Layout, streams: Iterable[Stream], *, in_node: bool
) -> Iterator[tuple[int, int]]:
    """Return the output columns of streams: those added up within a node, or the others."""
    return (
        stream.cols
        for stream in streams
        if (layout.slots[stream.slot].table in layout.node_tables) is in_node
    )


def _ranges(layout: Layout, streams: Iterable[Stream], *, in_node: bool) -> Ranges:
    return merge_ranges(_columns(layout, streams, in_node=in_node))


def _width(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def _join(outputs: Sequence[Tensor], batch_sizes: np.ndarray, device: torch.device) -> Tensor:
    """Join outputs `[T, C_g]` into `[T, C]`."""
    if not outputs:
        return torch.empty(int(batch_sizes.sum()), 0, device=device)
    return outputs[0] if len(outputs) == 1 else torch.cat(tuple(outputs), dim=1)


class OutputStage(abc.ABC, Generic[T]):
    """Base class of the output stages for pooled embeddings and for sequences.

    Args:
        layout: The compiled placement.
        env: The ranks.
        device: Device of the embeddings.
        backward: Callbacks for backward passes.
        codecs: Wire formats of embeddings and of gradients.
        feature_names: The module's distinct features, in the layout's numbering.
        names: Names of the output's features.
        dtype: dtype of the output.
    """

    tasks = ExchangeName.EMBEDDINGS, ExchangeName.GRADIENTS
    codecs: tuple[WireFormat | None, WireFormat | None]
    most_ids: float = inf
    """Ids per bag and row block above which a row per id is more than partial sums."""

    def __init__(
        self,
        layout: Layout,
        env: ShardingEnv,
        device: torch.device,
        backward: Backward,
        codecs: QuantizedCommCodecs,
        feature_names: Sequence[str],
        names: list[str],
        dtype: torch.dtype,
    ) -> None:
        self.layout, self.env, self.device = layout, env, device
        self.backward = backward
        self.feature_names, self.names, self.dtype = feature_names, names, dtype
        self.has_exchange = any(layout.rank_widths)
        self.grad_scale = 1.0 / env.world_size  # as DistributedDataParallel does
        self._prepare(codecs)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(returns {len(self.names)} features' embeddings, {self.dtype})"
        )

    @abc.abstractmethod
    def _prepare(self, codecs: QuantizedCommCodecs) -> None:
        """Compute the constants of the stage and set `codecs`."""

    def connect(self) -> None:
        """Create the process groups of the module's exchanges; a collective call."""
        _ = self.env.for_ids, self.env.for_embeddings

    @abc.abstractmethod
    def start(
        self, ctx: BatchContext, lookups: Iterator[Tensor], replicas: Sequence[Tensor], trains: bool
    ) -> Callable[[], T]:
        """Start the exchange.

        Args:
            ctx: The batch.
            lookups: Iterator that looks up, per lookup of this rank: `[T, C_g]`, or a row per id.
            replicas: Outputs of replicated tables for this rank's samples.
            trains: Whether any table of the module, on any rank, takes gradients.

        Returns:
            Function that waits for the output; call it once.
        """


@final
class OutputDist(OutputStage[KeyedTensor]):
    """Output stage for pooled embeddings."""

    def _prepare(self, codecs: QuantizedCommCodecs) -> None:
        layout, env, device = self.layout, self.env, self.device
        self._dims = [slot.dim for slot in layout.slots]
        self._bags = tuple(self._dims), tuple(self.feature_names[s.feature] for s in layout.slots)
        self.means: Sequence[MeanSlot] = [
            (place, slot.col, slot.col + slot.dim)
            for place in layout.averaged_slots
            for slot in [layout.slots[layout.split_slots[place]]]
        ]
        self.hops = [NodeHop(layout, env, device, codecs)] if layout.is_hierarchical else []
        # columns of the receive buffer by block: one per rank, then one per replicated lookup
        blocks: list[Ranges] = []
        self.widths = np.zeros(env.world_size, dtype=np.int64)  # per sample, from each rank
        for rank, streams in enumerate(layout.streams):
            sent = [_ranges(layout, streams, in_node=False)]
            if any(rank in hop.sample_ranks for hop in self.hops):
                sent.append(node_columns(layout, rank // layout.node_size))
            blocks += sent
            self.widths[rank] = sum(map(_width, sent))
        of_ranks = list(blocks)
        self.replica_blocks: list[Ranges] = []
        for group in layout.replica_groups:
            members = (layout.replica_streams[i] for i in group.streams)
            self.replica_blocks.append(merge_ranges(stream.cols for stream in members))
        blocks += self.replica_blocks
        self.gather = ColumnGather(blocks, layout.width, device, self.means)
        self.codecs = codecs.fitted(self.gather.chunk)
        self.read_codecs = self.gather.of_codecs(self.codecs, env.world_size)
        self.adds_up = not self.hops and _may_add_up(of_ranks, env, device, self.codecs)
        self.sums = self.gather
        if self.adds_up:
            summed = [blocks[0], *self.replica_blocks]
            self.sums = ColumnGather(summed, layout.width, device, self.means)
            if env.node_size < env.world_size:  # sums are made in each node first
                self.most_ids = 1 / env.node_size
        self.sent = self._sent_blocks()
        self._is_identity = (
            env.world_size == 1
            and not self.means
            and blocks == [((0, layout.width),)]
            and len(layout.groups[0]) == 1
        )

    def _sent_blocks(self) -> SentBlocks:
        ranks, groups = np.arange(self.env.world_size), self.layout.groups[self.env.rank]
        group_widths = [group.width for group in groups if not group.in_node]
        flat_width, unsorted = sum(group_widths), np.zeros(0, dtype=np.int32)
        widths_R = np.full(len(ranks), flat_width)
        sent = SentBlocks(group_widths, widths_R, [(ranks, flat_width)], unsorted)
        for hop in self.hops:
            if not hop.width:
                continue
            sample_ranks = np.array(hop.sample_ranks)
            widths_R[sample_ranks] += hop.width
            sums = sample_ranks, hop.width
            if flat_width:
                order = np.argsort(np.concatenate([ranks, sample_ranks]), kind="stable")
                sent = sent._replace(blocks=[*sent.blocks, sums], order=order.astype(np.int32))
            else:  # this rank sends the node's sums only
                sent = sent._replace(group_widths=[hop.width], blocks=[sums])
        return sent

    def connect(self) -> None:
        """Create the process groups of the module's exchanges; a collective call."""
        super().connect()
        for hop in self.hops:
            _ = hop.env

    @cached_property
    def ragged(self) -> RaggedGather:
        """The gather for ragged batches: each stream is a block with its own number of rows."""
        arriving: list[Ranges] = [[s.cols] for streams in self.layout.streams for s in streams]
        blocks = [*arriving, *self.replica_blocks]
        return RaggedGather(blocks, self.layout.width, self.device, self.means)

    def start(
        self, ctx: BatchContext, lookups: Iterator[Tensor], replicas: Sequence[Tensor], trains: bool
    ) -> Callable[[], KeyedTensor]:
        """Start the exchange of `[T, C_g]` per lookup; see the base class."""
        if self._is_identity:
            (whole,) = lookups
            return lambda: self._keyed(whole, ctx)
        sums = list[Callable[[], Tensor]]()  # of a node; one at most
        for hop in self.hops:
            node = hop.env  # created by all ranks, also of nodes without sums
            if hop.width:
                in_node = list(islice(lookups, len(hop.sent.group_widths)))
                sums.append(hop.start(node, ctx, in_node, trains))
        outputs = list(lookups)  # looked up during the node's exchange
        for wait_for_sums in sums:
            outputs.append(wait_for_sums())
        env = self.env.for_embeddings
        exchange: Exchange[OutputDist] | Exchange[PooledStage]
        if ctx.shape.is_ragged:
            exchange = _RaggedExchange(self, env, ctx)
        else:
            exchange = _PooledExchange(self, env, ctx, ctx.shape.batch_sizes_R)
        wait = exchange.start(outputs, replicas, trains, ctx.received.anchors)
        return lambda: self._keyed(wait(), ctx)

    def _keyed(self, pooled_BD: Tensor, ctx: BatchContext) -> KeyedTensor:
        if ctx.checked.safe.variable_stride_per_key():
            pooled_BD = expand_bags(pooled_BD, *self._bags, ctx.checked.safe)
        if pooled_BD.dtype is not self.dtype:
            pooled_BD = pooled_BD.to(self.dtype)
        return KeyedTensor.from_parts(self.names, self._dims, pooled_BD)


@final
class _PooledExchange(Exchange[PooledStage]):
    """Exchange of a batch with one row per sample, among all ranks or within a node.

    Args:
        stage: The stage or hop.
        env: The ranks: all, or the ranks of a node.
        ctx: The batch.
        samples: Samples of each rank; within a node, of all its `sample_ranks`.
    """

    def __init__(
        self, stage: PooledStage, env: ShardingEnv, ctx: BatchContext, samples: np.ndarray
    ) -> None:
        self.batch_sizes = ctx.shape.batch_sizes_R
        self.num_samples = int(samples[env.rank])
        self.gather, receives = stage.gather, stage.widths * self.num_samples
        if stage.adds_up and self.num_samples and np.ptp(samples) == 0:
            self.adds_up, self.gather, receives = True, stage.sums, receives[:1]
        sends = samples * stage.sent.widths_R
        super().__init__(stage, env, sends.tolist(), receives.tolist(), ctx.stage.module.path)
        self._bag_counts = ctx.prepared.bag_counts
        # in a narrow format scaled gradients may underflow: they are scaled after the exchange
        self.scales_early = stage.codecs[1] is None

    def start_forward(self, lookups: Sequence[Tensor], replicas: Sequence[Tensor]) -> Tensor:
        """Start the exchange."""
        stage, num_groups = self.stage, len(self.stage.sent.group_widths)
        sent = _join(lookups[:num_groups], self.batch_sizes, stage.device).reshape(-1)
        if stage.sent.order.size:
            blocks = [sent, *(block.reshape(-1) for block in lookups[num_groups:])]
            sent = in_order(blocks, self._block_sizes(), stage.sent.order)
        return self.start_sending(sent, replicas)

    def _block_sizes(self) -> list[np.ndarray]:
        """Return per block the number of values for each of its ranks."""
        return [self.batch_sizes[ranks] * width for ranks, width in self.stage.sent.blocks]

    def finish_forward(self, buffer: Tensor) -> Tensor:
        """Wait and gather the output `[B, D]`."""
        wire = self.stage.read_codecs[0]
        arrived = self.wait(decode=wire is None)
        rest = (arrived, wire) if wire is not None else ()
        return self.gather.gather(buffer, self.num_samples, self._bag_counts, *rest)

    def start_backward(self, grad_BD: Tensor) -> Tensor:
        """Compute the gradient of the buffer and start the reverse exchange."""
        scale = self.stage.grad_scale if self.scales_early else 1.0
        sent = self._bag_counts, scale, self.num_received, self.stage.read_codecs[1]
        return self.start_sending_back(*self.gather.scatter_grad(grad_BD, *sent))

    def finish_backward(self, grad: Tensor) -> list[Tensor]:
        """Wait and return the gradients of the lookups' and replicas' outputs."""
        stage, arrived, sums = self.stage, self.wait_for_grads(), []
        if not stage.has_exchange:
            return self.replica_grads(grad)
        if stage.sent.order.size:
            sizes, back = self._block_sizes(), np.argsort(stage.sent.order).astype(np.int32)
            whole = in_order([arrived], [np.concatenate(sizes)[stage.sent.order]], back)
            arrived, *others = whole.split([int(of_block.sum()) for of_block in sizes])
            sums = [x.view(-1, w) for x, (_, w) in zip(others, stage.sent.blocks[1:], strict=True)]
        parts: Sequence[Tensor] = ()
        if stage.sent.group_widths:
            parts = arrived.view(-1, stage.sent.blocks[0][1]).split(stage.sent.group_widths, dim=1)
        return [*(part.contiguous() for part in parts), *sums, *self.replica_grads(grad)]


@final
class _RaggedExchange(Exchange["OutputDist"]):
    """Exchange of a ragged batch, in which streams have their own numbers of rows.

    A stream has a row per bag of a feature with its own batch size, or a row per id if bags of a
    row-split table have few ids. Lookups produce these rows rank by rank, so the output of a single
    lookup is sent without a copy.

    Args:
        stage: The stage.
        env: The ranks.
        ctx: The batch.
    """

    def __init__(self, stage: OutputDist, env: ShardingEnv, ctx: BatchContext) -> None:
        given, shape = ctx.stage, ctx.shape
        received_RS, own_S = shape.bags_received_RS, shape.bags_sent_D
        firsts = [group.streams.start for group in stage.layout.groups[env.rank]]
        looked_up_RS = received_RS * given.streams.own_dims
        self._looked_up_RL = np.add.reduceat(looked_up_RS, firsts, 1) if firsts else looked_up_RS
        batch_size = ctx.prepared.bags.stride
        rows_K = np.concatenate([own_S, np.full(len(stage.replica_blocks), batch_size)])
        ids = self._split_ids(ctx, len(rows_K)) if shape.is_by_id else NO_IDS
        self._arriving = RaggedBatch(stage.ragged, rows_K, batch_size, ids)
        sends = self._looked_up_RL.sum(1).tolist()
        receives = given.per_rank(own_S * given.streams.dims_D)
        super().__init__(stage, env, sends, receives, ctx.stage.module.path)
        self._bag_counts = ctx.prepared.bag_counts

    @staticmethod
    def _split_ids(ctx: BatchContext, num_blocks: int) -> SplitIds:
        """Return the segments of ids that return as rows."""
        routes, segment_K = ctx.checked.routes, np.full(num_blocks, NO_SEGMENT)
        by_id_S, prepared = ctx.shape.by_id_D, ctx.prepared
        of_streams = routes.segments - routes.num_keys  # whole features are before the others
        segment_K[: len(by_id_S)] = np.where(by_id_S, of_streams, NO_SEGMENT)
        shape = len(routes.rounds), ctx.stage.module.layout.num_buckets, -1
        counts_XWF = ctx.header.counts_G[routes.num_keys :].reshape(shape)
        return SplitIds(
            segment_K, counts_XWF, joined(prepared.segments.moved_to), prepared.split_offsets
        )

    def start_forward(self, lookups: Sequence[Tensor], replicas: Sequence[Tensor]) -> Tensor:
        """Start the exchange."""
        stage = self.stage
        sent = joined(lookups) if lookups else torch.empty(0, device=stage.device)
        if len(lookups) > 1:
            sent = ops.swap_segments(sent, self._looked_up_RL.T)
        return self.start_sending(sent, replicas)

    def finish_forward(self, buffer: Tensor) -> Tensor:
        """Wait and gather the output `[B, D]`."""
        self.wait()
        return self._arriving.gather(buffer, self._bag_counts)

    def start_backward(self, grad_BD: Tensor) -> Tensor:
        """Compute the gradient of the buffer and start the reverse exchange."""
        grad = self._arriving.scatter_grad(grad_BD, self._bag_counts)
        return self.start_sending_back(grad, grad[: self.num_received])

    def finish_backward(self, grad: Tensor) -> list[Tensor]:
        """Wait and return the gradients of the lookups' and replicas' outputs."""
        arrived = self.wait_for_grads()
        if not self.stage.has_exchange:
            return self.replica_grads(grad)
        sizes = self._looked_up_RL.sum(0).tolist()
        if len(sizes) > 1:
            arrived = ops.swap_segments(arrived, self._looked_up_RL)
        return [*arrived.split(sizes), *self.replica_grads(grad)]


def _may_add_up(
    blocks: Sequence[Ranges],
    env: ShardingEnv,
    device: torch.device,
    codecs: tuple[WireFormat | None, WireFormat | None],
) -> bool:
    """Return whether a reduce-scatter replaces the all-to-all and the sums.

    All ranks must send the same columns, in fp32: sums of narrow formats would lose precision.

    Args:
        blocks: Columns that each rank sends.
        env: The ranks.
        device: Device of the embeddings.
        codecs: Wire formats of embeddings and of gradients.
    """
    is_exact = codecs == (None, None)
    is_uniform = len(blocks) > 1 and blocks[0] and all(block == blocks[0] for block in blocks)
    return bool(env.adds_up_on_the_way(device) and is_exact and is_uniform)


def node_columns(layout: Layout, node: int) -> Ranges:
    """Return the output columns, ascending, whose partial sums are added up within a node."""
    members = range(node * layout.node_size, (node + 1) * layout.node_size)
    streams = (stream for rank in members for stream in layout.streams[rank])
    return merge_ranges(sorted(set(_columns(layout, streams, in_node=True))))


@final
class NodeHop:
    """Sum of partial sums within a node, for tables whose rows are on the ranks of one node.

    Each rank receives the node's partial sums for the samples of the ranks with the same local rank
    (`sample_ranks`), adds them up and sends the sums on. Other tables are looked up, and updated in
    backward, during this exchange.

    Args:
        layout: The compiled placement.
        env: The ranks.
        device: Device of the embeddings.
        codecs: Wire formats of embeddings and of gradients.
    """

    tasks = ExchangeName.EMBEDDINGS_IN_NODE, ExchangeName.GRADIENTS_IN_NODE
    has_exchange = True
    grad_scale = 1.0
    backward = NO_UPDATES

    def __init__(
        self, layout: Layout, env: ShardingEnv, device: torch.device, codecs: QuantizedCommCodecs
    ) -> None:
        self.device = device
        self._whole_env, self.size = env, layout.node_size
        node, place = divmod(env.rank, self.size)
        self.sample_ranks = range(place, env.world_size, self.size)
        group_widths = [g.width for g in layout.groups[env.rank] if g.in_node]
        ranks, width = np.arange(env.world_size), sum(group_widths)
        by_place = ranks.reshape(-1, self.size).T.flatten().astype(np.int32)
        widths = np.full(self.size, width)
        self.sent = SentBlocks(group_widths, widths, [(ranks, width)], by_place)
        columns = node_columns(layout, node)
        self.width = _width(columns)
        members = range(node * self.size, (node + 1) * self.size)
        blocks = [_ranges(layout, layout.streams[rank], in_node=True) for rank in members]
        self.widths = np.array([_width(block) for block in blocks])
        parts = [_within(columns, block) for block in blocks]
        self.gather = ColumnGather(parts, self.width, device)
        self.codecs = codecs.fitted(self.gather.chunk or 1)
        self.read_codecs = self.gather.of_codecs(self.codecs, self.size)
        self.adds_up = _may_add_up(parts, env, device, self.codecs)
        self.sums = ColumnGather(parts[:1], self.width, device) if self.adds_up else self.gather

    @cached_property
    def env(self) -> ShardingEnv:
        """Process group of this node. The first access is a collective call."""
        return self._whole_env.for_embeddings.of_node(self.size)

    def start(
        self, env: ShardingEnv, ctx: BatchContext, lookups: Sequence[Tensor], trains: bool
    ) -> Callable[[], Tensor]:
        """Start the exchange of partial sums within the node.

        Args:
            env: The ranks of the node.
            ctx: The batch.
            lookups: Per lookup `[T, C_g]`, partial sums for the samples of all ranks.
            trains: Whether any table of the module, on any rank, takes gradients.

        Returns:
            Function that waits for `[samples of sample_ranks, width]`, in rank order.
        """
        samples = ctx.shape.batch_sizes_R.reshape(-1, self.size).sum(0)
        return _PooledExchange(self, env, ctx, samples).start(lookups, (), trains)


def _within(outer: Ranges, inner: Ranges) -> Ranges:
    """Return the positions of columns `inner` within the columns `outer`."""
    starts = np.cumsum([0] + [end - start for start, end in outer])
    found = []
    for start, end in inner:
        i = next(i for i, (low, high) in enumerate(outer) if low <= start and end <= high)
        found.append((int(starts[i]) + start - outer[i][0], int(starts[i]) + end - outer[i][0]))
    return found
