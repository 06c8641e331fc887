"""Second stage: one fused lookup per group of tables, and what must follow its backward.

A table that this rank owns alone updates itself in backward. Two kinds cannot: a replicated table
must first add up the gradients of all ranks, and a table that is split by columns under an
optimizer that keeps one value per row must first add up that row's statistic over the owners of
its columns. Both leave duplicate-free row gradients in backward, and :class:`BackwardFinisher`
exchanges and applies them when backward ends: one all-reduce for all replicated tables, one
all-to-all for all row statistics of the module.

Shape names: ``R`` rows of a table, ``D`` its columns here, ``K`` touched rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from recsys.distributed import comm
from recsys.distributed.input_dist import Bags
from recsys.distributed.layout import Layout, LookupGroup, PlacedTable, Rect
from recsys.distributed.types import ShardingEnv
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.types import (
    EmbeddingLocation,
    EmbOptimType,
    OptimizerSpec,
    PoolingMode,
    TableSpec,
    UpdateMode,
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """What tables must have in common to be served by one lookup.

    Attributes:
        pooling: as the shards do it; a row-split table sums, and is divided at the end.
        weights_dtype: of the tables.
        output_dtype: of the embeddings.
        optimizer: the tables' own optimizer, or None if they are plain parameters.
        requires_grad: whether the tables train.
        location: where the weights live.
        exchanges_row_statistics: whether row statistics are added up over column owners.
    """

    pooling: PoolingMode
    weights_dtype: torch.dtype
    output_dtype: torch.dtype
    optimizer: OptimizerSpec | None
    requires_grad: bool
    location: EmbeddingLocation | None
    exchanges_row_statistics: bool


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LocalShard:
    """A rectangle on this rank: its parameter, and its optimizer state (live tensors)."""

    table: int
    rect: Rect
    parameter: nn.Parameter
    states: dict[str, Tensor]
    kernel: TableBatchedEmbedding


@final
class Lookups:
    """The lookups of one rank (or of the replicated tables).

    Args:
        groups: from the layout; each ``key`` is a :class:`GroupSettings`.
        tables: the layout's tables, for names.
        device: where the tables are allocated.
        replicated: whether gradients are those of this rank's batch only, to be added up later.
        sparse_grad: whether plain parameters get sparse gradients.
    """

    def __init__(
        self,
        groups: Sequence[LookupGroup],
        tables: Sequence[PlacedTable],
        device: torch.device,
        *,
        replicated: bool = False,
        sparse_grad: bool = False,
    ) -> None:
        self.groups = tuple(groups)
        self.kernels: list[TableBatchedEmbedding] = []
        self.parameters: list[list[nn.Parameter]] = []
        for group in groups:
            settings = group.key
            assert isinstance(settings, GroupSettings)
            kernel = TableBatchedEmbedding(
                [
                    TableSpec(name=tables[t].name, num_rows=r.num_rows, dim=r.num_cols)
                    for t, r in zip(group.tables, group.rects, strict=True)
                ],
                feature_table_map=group.feature_table_map,
                pooling=settings.pooling,
                weights_dtype=settings.weights_dtype,
                output_dtype=settings.output_dtype,
                optimizer=_kernel_optimizer(settings, replicated),
                update_mode=_update_mode(settings, replicated),
                device=device,
                location=settings.location,
                sparse_grad=sparse_grad,
            )
            self.kernels.append(kernel)
            self.parameters.append(
                [nn.Parameter(w, requires_grad=settings.requires_grad) for w in kernel.weights]
            )

    def forward(self, bags: Sequence[Bags]) -> list[Tensor]:
        """Looks up each group's bags: per group ``[T, width]``."""
        return [
            kernel.forward(bag.indices, bag.offsets, bag.weights, parameters)
            for kernel, parameters, bag in zip(self.kernels, self.parameters, bags, strict=True)
        ]

    def shards(self) -> Iterator[LocalShard]:
        """Yields every rectangle of this rank."""
        for group, kernel, parameters in zip(
            self.groups, self.kernels, self.parameters, strict=True
        ):
            keeps_state = group.key.optimizer is not None  # type: ignore[attr-defined]
            for i, (table, rect) in enumerate(zip(group.tables, group.rects, strict=True)):
                yield LocalShard(
                    table=table,
                    rect=rect,
                    parameter=parameters[i],
                    states=kernel.states[i] if keeps_state else {},
                    kernel=kernel,
                )


_PLACEHOLDER = OptimizerSpec(algorithm=EmbOptimType.SGD)


def _update_mode(settings: GroupSettings, replicated: bool) -> UpdateMode:
    if not settings.requires_grad:
        return UpdateMode.GRADIENT
    if replicated or settings.exchanges_row_statistics:
        return UpdateMode.DEFERRED
    return UpdateMode.GRADIENT if settings.optimizer is None else UpdateMode.FUSED


def _kernel_optimizer(settings: GroupSettings, replicated: bool) -> OptimizerSpec | None:
    if not settings.requires_grad:
        return None
    if settings.optimizer is None and replicated:
        return _PLACEHOLDER  # row gradients are collected, then put into `.grad`
    return settings.optimizer


@final
class BackwardFinisher:
    """Exchanges and applies what backward could not apply by itself, once per backward pass.

    Args:
        lookups: of this rank.
        replicas: of the replicated tables.
        layout: the compiled placement.
        env: the ranks.
        device: where the tables are.
    """

    def __init__(
        self,
        lookups: Lookups,
        replicas: Lookups,
        layout: Layout,
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        self._lookups = lookups
        self._replicas = replicas
        self._layout = layout
        self._env = env
        self._device = device
        self._backwards: set[int] = set()  # graph tasks under way that end in _finish
        self._exchanges = any(
            table.rects and table.group.exchanges_row_statistics  # type: ignore[attr-defined]
            for table in layout.tables
        )
        self._shared = self._find_shared()
        self.needed = self._exchanges or any(
            group.key.requires_grad  # type: ignore[attr-defined]
            for group in replicas.groups
        )

    def schedule(self) -> None:
        """Called from within a backward pass, on every rank: finish when it ends."""
        task = torch._C._current_graph_task_id()
        if self.needed and task not in self._backwards:
            self._backwards.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def forget_failed_backward(self) -> None:
        """Called before a forward pass: drops what a backward that raised has left behind."""
        if self._backwards and torch._C._current_graph_task_id() < 0:
            self._backwards.clear()
            for kernel in (*self._lookups.kernels, *self._replicas.kernels):
                kernel.zero_grad()

    def _finish(self) -> None:
        self._backwards.clear()
        with torch.no_grad():
            self._finish_replicas()
            if self._exchanges:
                self._finish_column_splits()

    # -- replicated tables -----------------------------------------------------------------------

    def _finish_replicas(self) -> None:
        """Adds up the dense gradients, and how many ranks touched each row, in one all-reduce."""
        trained = [
            (kernel, group.key.optimizer, parameters)  # type: ignore[attr-defined]
            for kernel, group, parameters in zip(
                self._replicas.kernels,
                self._replicas.groups,
                self._replicas.parameters,
                strict=True,
            )
            if group.key.requires_grad  # type: ignore[attr-defined]
        ]
        if not trained:
            return
        sizes = [
            size
            for kernel, *_ in trained
            for size in (kernel.layout.num_elements, kernel.layout.num_rows)
        ]
        buffer = torch.zeros(sum(sizes), dtype=torch.float32, device=self._device)
        parts = buffer.split(sizes)
        for (kernel, *_), summed, touched in zip(trained, parts[::2], parts[1::2], strict=True):
            kernel.add_dense_gradients(summed, touched)
        comm.all_reduce(self._env, buffer).wait()
        buffer.div_(self._env.world_size)
        for (kernel, optimizer, parameters), summed, touched in zip(
            trained, parts[::2], parts[1::2], strict=True
        ):
            if optimizer is not None:
                kernel.step_dense(summed, touched)
                continue
            for parameter, grad in zip(parameters, kernel.layout.table_views(summed), strict=True):
                _accumulate_grad(parameter, grad)

    # -- row statistics of column splits ---------------------------------------------------------

    def _finish_column_splits(self) -> None:
        """Adds up one float per touched row among the column owners, and applies the row updates.

        The owners of a row block's columns were sent the same ids, so they hold the same rows in
        the same order and only the values travel.
        """
        env = self._env
        empty = torch.zeros(0, dtype=torch.float32, device=self._device)
        kernels = [
            kernel
            for group, kernel in zip(self._lookups.groups, self._lookups.kernels, strict=True)
            if group.key.exchanges_row_statistics  # type: ignore[attr-defined]
        ]
        statistics = [kernel.row_statistics() for kernel in kernels]
        partials = [  # several column parts on one rank count as one
            statistics[parts[0][0]][parts[0][1]]
            if len(parts) == 1
            else torch.stack([statistics[k][i] for k, i in parts]).sum(0)
            for _, parts, _ in self._shared
        ]
        by_rank = [
            [place for place, (*_, peers) in enumerate(self._shared) if rank in peers]
            for rank in range(env.world_size)
        ]
        sizes = [sum(partials[place].numel() for place in shared) for shared in by_rank]
        sent = torch.cat([empty, *(partials[place] for shared in by_rank for place in shared)])
        received = comm.all_to_all(env, sent, sizes, sizes).wait().split(sizes)
        totals = [torch.zeros_like(partial_K) for partial_K in partials]
        for rank, shared in enumerate(by_rank):  # in rank order: every owner adds up alike
            if rank == env.rank and partials:
                torch._foreach_add_(totals, partials)
            elif shared:
                arrived = received[rank].split([partials[place].numel() for place in shared])
                torch._foreach_add_([totals[place] for place in shared], arrived)
        moments = [[empty] * len(kernel.weights) for kernel in kernels]
        for (dim, parts, _), total_K in zip(self._shared, totals, strict=True):
            for k, i in parts:
                moments[k][i] = total_K / dim
        for kernel, moments_TK in zip(kernels, moments, strict=True):
            kernel.step(moments_TK)

    def _find_shared(self) -> list[tuple[int, list[tuple[int, int]], set[int]]]:
        """Finds the row blocks whose columns this rank shares, in the same order on every rank.

        Returns:
            Per block the whole table's dim, this rank's parts as (kernel, place in it), and the
            other ranks that hold a part.
        """
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        kernel = -1
        for group in self._lookups.groups:
            if not group.key.exchanges_row_statistics:  # type: ignore[attr-defined]
                continue
            kernel += 1
            for i, (table, rect) in enumerate(zip(group.tables, group.rects, strict=True)):
                found.setdefault((table, rect.row_start), []).append((kernel, i))
        shared = []
        for table, row_start in sorted(found):
            placed = self._layout.tables[table]
            owners = {r.rank for r in placed.rects if r.row_start == row_start}
            peers = owners - {self._env.rank}
            shared.append((placed.dim, found[table, row_start], peers))
        return shared


def _accumulate_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad.clone()
    else:
        parameter.grad += grad
    hooks = parameter._post_accumulate_grad_hooks or {}
    for hook in list(hooks.values()):  # an optimizer attached after sharding, say
        hook(parameter)
