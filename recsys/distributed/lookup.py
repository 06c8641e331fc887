"""Second stage: one fused lookup per group of tables on each rank, and what must happen after
backward.

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
from recsys.kernels.row_update import row_statistic, update_rows
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
        self._scheduled = False
        self._exchanges = any(
            table.rects and table.group.exchanges_row_statistics  # type: ignore[attr-defined]
            for table in layout.tables
        )
        self.needed = self._exchanges or any(
            group.key.requires_grad  # type: ignore[attr-defined]
            for group in replicas.groups
        )

    def schedule(self) -> None:
        """Called from within a backward pass, on every rank: finish when it ends."""
        if self.needed and not self._scheduled:
            self._scheduled = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._scheduled = False
        with torch.no_grad():
            self._finish_replicas()
            if self._exchanges:
                self._finish_column_splits()

    # -- replicated tables -----------------------------------------------------------------------

    def _finish_replicas(self) -> None:
        """Adds up the dense gradients, and a count of the ranks that touched each row, in one all-reduce."""
        replicas = self._replicas
        trained = [i for i, g in enumerate(replicas.groups) if g.key.requires_grad]  # type: ignore[attr-defined]
        if not trained:
            return
        weights = [w for i in trained for w in replicas.kernels[i].weights]
        sizes = [w.numel() for w in weights] + [w.shape[0] for w in weights]
        summed = torch.zeros(sum(sizes), dtype=torch.float32, device=self._device)
        parts = summed.split(sizes)
        gradients = [g for i in trained for g in replicas.kernels[i].row_gradients]
        for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if gradient is not None:
                rows_K, grads_KD = gradient
                parts[place].view(weight.shape)[rows_K] = grads_KD.float()
                parts[len(weights) + place][rows_K] = 1.0
        comm.all_reduce(self._env, summed).wait()
        place = 0
        for i in trained:
            kernel, settings = replicas.kernels[i], replicas.groups[i].key
            assert isinstance(settings, GroupSettings)
            for weight, states, parameter in zip(
                kernel.weights, kernel.states, replicas.parameters[i], strict=True
            ):
                grad_RD = parts[place].view(weight.shape).div_(self._env.world_size)
                touched_R = parts[len(weights) + place]
                place += 1
                if settings.optimizer is None:
                    _accumulate_grad(parameter, grad_RD)
                    continue
                rows_K = touched_R.nonzero().flatten()
                grads_KD = grad_RD.index_select(0, rows_K)
                update_rows(
                    settings.optimizer, weight, states, rows_K, grads_KD, kernel.learning_rate
                )
            kernel.zero_grad()

    # -- row statistics of column splits ---------------------------------------------------------

    def _finish_column_splits(self) -> None:
        """Adds up one float per touched row among the column owners, and applies the row updates.

        The owners of a row block's columns were sent the same ids, so they hold the same rows in
        the same order and only the values travel.
        """
        env = self._env
        blocks = self._shared_blocks()
        peers = [
            sorted({r.rank for r in table.rects if r.row_start == row_start} - {env.rank})
            for (table, row_start), _ in blocks
        ]
        partials = [
            torch.stack([part.statistic_K() for part in parts]).sum(0) for _, parts in blocks
        ]
        empty = torch.zeros(0, dtype=torch.float32, device=self._device)
        by_rank: list[list[int]] = [
            [i for i, ranks in enumerate(peers) if rank in ranks] for rank in range(env.world_size)
        ]
        sizes = [sum(partials[i].numel() for i in shared) for shared in by_rank]
        sent = torch.cat([empty, *(partials[i] for shared in by_rank for i in shared)])
        received = comm.all_to_all(env, sent, sizes, sizes).wait().split(sizes)
        terms: list[list[Tensor]] = [[] for _ in blocks]  # in rank order: every owner adds up alike
        for rank, shared in enumerate(by_rank):
            if rank == env.rank:
                for i, partial_K in enumerate(partials):
                    terms[i].append(partial_K)
            arrived = received[rank].split([partials[i].numel() for i in shared])
            for i, statistic_K in zip(shared, arrived, strict=True):
                terms[i].append(statistic_K)
        moments: dict[TableBatchedEmbedding, list[Tensor]] = {}
        for ((table, _), parts), addends in zip(blocks, terms, strict=True):
            moment_K = torch.stack(addends).sum(0).div_(table.dim)
            for part in parts:
                of_kernel = moments.setdefault(part.kernel, [empty] * len(part.kernel.weights))
                of_kernel[part.index] = moment_K
        for kernel, moments_TK in moments.items():
            kernel.step(moments_TK)

    def _shared_blocks(self) -> list[tuple[tuple[PlacedTable, int], list[_Part]]]:
        """Returns this rank's column parts by (table, first row), in the same order on every rank."""
        found: dict[tuple[int, int], list[_Part]] = {}
        for group, kernel in zip(self._lookups.groups, self._lookups.kernels, strict=True):
            settings = group.key
            assert isinstance(settings, GroupSettings)
            if settings.exchanges_row_statistics:
                assert settings.optimizer is not None
                for i, (table, rect) in enumerate(zip(group.tables, group.rects, strict=True)):
                    part = _Part(kernel, i, settings.optimizer)
                    found.setdefault((table, rect.row_start), []).append(part)
        return [((self._layout.tables[t], start), found[t, start]) for t, start in sorted(found)]


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """Some columns of a row block on this rank, with its duplicate-free row gradients."""

    kernel: TableBatchedEmbedding
    index: int
    optimizer: OptimizerSpec

    def gradient(self) -> tuple[Tensor, Tensor]:
        gradient = self.kernel.row_gradients[self.index]
        if gradient is not None:
            return gradient
        weight = self.kernel.weights[self.index]
        no_rows = torch.zeros(0, dtype=torch.int64, device=weight.device)
        return no_rows, weight.new_zeros(0, weight.shape[1])

    def statistic_K(self) -> Tensor:
        rows_K, grads_KD = self.gradient()
        weight_KD = self.kernel.weights[self.index].index_select(0, rows_K)
        return row_statistic(self.optimizer, grads_KD, weight_KD)


def _accumulate_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad.clone()
    else:
        parameter.grad += grad
