"""Output stage for pooled embeddings: sends them to the ranks of their samples.

There is one exchange forward and one backward for any mix of strategies. Each rank sends to
rank `q` the rows of `q`'s samples from its lookups' output. The received buffer has one gather,
which produces the columns of the unsharded module and adds up the partial sums of row-split tables.
Backward is the transposed gather and the reverse exchange. Both exchanges overlap with the model's
computation between the call and the first use of the output.

If the rows of a table are on the ranks of one of several nodes, its partial sums are added up
within the node first (see `NodeHop`).

Shapes: `B` samples of this rank, `T` samples of all ranks, `D` output columns, `C`
columns of one rank's lookups.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import islice
from math import inf
from typing import Any, Generic, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from recsys.base import step_stages
from recsys.base.step_stages import Stage
from recsys.distributed.placement.layout import Layout, merge_ranges
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.ranks.wire import EXACT, QuantizedCommCodecs
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.stages.column_gather import ColumnGather, MeanSlot, PooledRows
from recsys.distributed.stages.exchanged_rows import (
    Backward,
    Codecs,
    ExchangedRows,
    ExchangeStage,
    Ranges,
    SentBlocks,
)
from recsys.distributed.stages.node_hop import (
    NodeHop,
    may_add_up,
    node_columns,
    output_columns_of,
    width_of,
)
from recsys.distributed.stages.ragged_gather import RaggedGather, RaggedRows
from recsys.kernels.scaled_loss import TABLE_UPDATES
from recsys.modules.tables.embedding_inputs import expand_bags
from recsys.sparse import KeyedTensor

T = TypeVar("T")


@final
class Exchange:
    """Differentiable exchange of one batch's embeddings.

    It has four steps. `start_forward` starts the exchange and returns the receive buffer.
    `finish_forward` waits and computes the output. In backward, `start_backward` computes the
    buffer's gradient and starts the reverse exchange, and `finish_backward` waits for it. Between
    start and finish, the model can run other layers.

    Args:
        stage: The output stage.
        env: The ranks.
        rows: The rows.
        path: Path of the module, for messages.
    """

    def __init__(
        self, stage: ExchangeStage, env: ShardingEnv, rows: ExchangedRows, path: str
    ) -> None:
        self.stage, self.env, self.rows, self.path = stage, env, rows, path
        self.num_received = sum(rows.receives)
        self._pending: comm.Pending
        self._replica_shapes: list[torch.Size] = []

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
        # without this input, a rank whose lookups need no gradient would miss the reverse exchange
        anchor = [] if anchors else [torch.empty(0, device=self.stage.device, requires_grad=trains)]
        arriving = _ToBuffer.apply(  # type: ignore[no-untyped-call]
            self, len(lookups), *anchors, *anchor, *lookups, *replicas
        )
        with_grad = torch.is_grad_enabled()

        def finish() -> Tensor:
            # the first reader, such as a log under no_grad, must not decide about gradients
            with torch.inference_mode(False), torch.set_grad_enabled(with_grad):
                output: Tensor = _ToOutput.apply(self, arriving)  # type: ignore[no-untyped-call]
            return output

        return finish

    def start_forward(self, lookups: Sequence[Tensor], replicas: Sequence[Tensor]) -> Tensor:
        """Start the exchange; return the buffer, which `finish_forward` completes.

        Outputs of replicated tables follow the received elements in the buffer.
        """
        stage, rows, at = self.stage, self.rows, self.num_received
        sent = rows.pack(lookups)
        self._replica_shapes = [replica.shape for replica in replicas]
        sizes = list(map(torch.numel, replicas))
        buffer = torch.empty(at + sum(sizes), device=stage.device)
        if stage.has_exchange and rows.adds_up:
            self._pending = comm.reduce_scatter(self.env, stage.tasks[0], sent, buffer[:at])
        elif stage.has_exchange:
            sizes_R, wire = (rows.sends, rows.receives), stage.codecs[0]
            self._pending = comm.all_to_all(
                self.env, stage.tasks[0], sent, *sizes_R, buffer[:at], wire
            )
        # after the start, so that the copies overlap with the exchange
        for replica, size in zip(replicas, sizes, strict=True):
            buffer[at : at + size].copy_(replica.reshape(-1))
            at += size
        return buffer

    def finish_forward(self, buffer: Tensor) -> Tensor:
        """Wait for the exchange; return the output, gathered from the buffer of `start_forward`."""
        arrived = self._wait(decode=self.rows.read_codecs[0] is EXACT)
        return self.rows.gather(buffer, arrived)

    def start_backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of the buffer, given the output's; start the reverse exchange."""
        stage, rows = self.stage, self.rows
        buffer_grad, sent = rows.scatter_grad(grad, self.num_received)
        if stage.has_exchange and rows.adds_up:
            self._pending = comm.all_gather(self.env, stage.tasks[1], sent)
        elif stage.has_exchange:
            sizes_R, wire = (rows.receives, rows.sends), stage.codecs[1]
            self._pending = comm.all_to_all(self.env, stage.tasks[1], sent, *sizes_R, wire=wire)
        return buffer_grad

    def finish_backward(self, buffer_grad: Tensor) -> list[Tensor]:
        """Wait for the reverse exchange; return the gradients of the lookups, then of replicas."""
        stage, sizes, grads = self.stage, [shape.numel() for shape in self._replica_shapes], []
        if stage.has_exchange:
            grad = self._wait()
            if stage.grad_scale != 1.0 and not self.rows.scales_early:
                grad = grad.mul_(stage.grad_scale)
            grads = self.rows.unpack(grad)
        if sizes:
            of_replicas = buffer_grad[self.num_received :].split(sizes)
            grads += map(Tensor.view, of_replicas, self._replica_shapes)
        return grads

    def _wait(self, decode: bool = True) -> Tensor:
        """Wait for the exchange, if there is one, and return the received tensor."""
        if not self.stage.has_exchange:
            return _nothing(self.stage.device)
        arrived = self._pending.wait(decode)
        del self._pending  # and its buffers
        return arrived


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


class _ToBuffer(torch.autograd.Function):
    """Autograd edge from lookups to the receive buffer: starts forward, finishes backward."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, num_lookups: int, anchor: Tensor, *outputs: Tensor
    ) -> Tensor:
        ctx.exchange = exchange
        with step_stages.running((Stage.OUTPUT_DIST, exchange.path)):
            return exchange.start_forward(outputs[:num_lookups], outputs[num_lookups:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with step_stages.running((Stage.GRADIENT_DIST, ctx.exchange.path)):
            return (None, None, grad.new_empty(0), *ctx.exchange.finish_backward(grad))


# a node of its own: layers between the call and the first use of the output overlap
# docs/decisions/output.md, "Lazy results overlap exchange and compute"
class _ToOutput(torch.autograd.Function):
    """Autograd edge from the receive buffer to the output: finishes forward, starts backward."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, buffer: Tensor) -> Tensor:
        ctx.exchange = exchange
        # recsys.optim.GradScaler finds tables that are updated in backward by this entry
        ctx.metadata[TABLE_UPDATES] = exchange.stage.backward.updates
        with step_stages.running((Stage.OUTPUT_DIST, exchange.path)):
            return exchange.finish_forward(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        exchange: Exchange = ctx.exchange
        with step_stages.running((Stage.GRADIENT_DIST, exchange.path)):
            exchange.stage.backward.begins()
            return None, exchange.start_backward(grad)


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
    codecs: Codecs
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
            sent = [output_columns_of(layout, streams, in_node=False)]
            if any(rank in hop.sample_ranks for hop in self.hops):
                sent.append(node_columns(layout, rank // layout.node_size))
            blocks += sent
            self.widths[rank] = sum(map(width_of, sent))
        of_ranks = list(blocks)
        self.replica_blocks: list[Ranges] = []
        for group in layout.replica_groups:
            members = (layout.replica_streams[i] for i in group.streams)
            self.replica_blocks.append(merge_ranges(stream.cols for stream in members))
        blocks += self.replica_blocks
        self.gather = ColumnGather(blocks, layout.width, device, self.means)
        self.codecs = codecs.fitted(self.gather.chunk)
        self.read_codecs = self.gather.of_codecs(self.codecs, env.world_size)
        self.adds_up = not self.hops and may_add_up(of_ranks, env, device, self.codecs)
        self.sums = self.gather
        if self.adds_up:
            summed = [blocks[0], *self.replica_blocks]
            self.sums = ColumnGather(summed, layout.width, device, self.means)
            # see docs/decisions/row_split.md, "Short bags: rows return by id"
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
                # stable: a rank's rows of lookups precede its sums, as in `blocks` of the receiver
                order = np.argsort(np.concatenate([ranks, sample_ranks]), kind="stable")
                sent = sent._replace(blocks=[*sent.blocks, sums], order=order.astype(np.int32))
            else:  # this rank sends the node's sums only
                sent = sent._replace(group_widths=[hop.width], blocks=[sums])
        return sent

    def connect(self) -> None:
        """Create the process groups of the module's exchanges; a collective call."""
        super().connect()
        # created while the model is built, where a lost rank ends the job at once
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
                # the layout puts these lookups first; others run during the exchange in the node
                in_node = list(islice(lookups, len(hop.sent.group_widths)))
                rows_in_node = hop.rows(node.rank, ctx)
                exchange = Exchange(hop, node, rows_in_node, ctx.stage.module.path)
                sums.append(exchange.start(in_node, (), trains))
        outputs = list(lookups)  # looked up during the node's exchange
        for wait_for_sums in sums:
            outputs.append(wait_for_sums())
        env = self.env.for_embeddings
        rows: ExchangedRows
        if ctx.shape.is_ragged:
            rows = RaggedRows(self.ragged, self.layout, self.env.rank, ctx)
        else:
            rows = PooledRows(self, self.env.rank, ctx, ctx.shape.batch_sizes_R)
        exchange = Exchange(self, env, rows, ctx.stage.module.path)
        wait = exchange.start(outputs, replicas, trains, ctx.received.anchors)
        return lambda: self._keyed(wait(), ctx)

    def _keyed(self, pooled_BD: Tensor, ctx: BatchContext) -> KeyedTensor:
        if ctx.checked.safe.variable_stride_per_key():
            pooled_BD = expand_bags(pooled_BD, *self._bags, ctx.checked.safe)
        if pooled_BD.dtype is not self.dtype:
            pooled_BD = pooled_BD.to(self.dtype)
        return KeyedTensor.from_parts(self.names, self._dims, pooled_BD)
