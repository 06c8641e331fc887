"""What must follow backward: row gradients are exchanged where they must be, and applied.

Backward leaves duplicate-free row gradients of three kinds of tables:

- replicated ones: the gradients of all ranks are added up first, in one all-reduce for all of them;
- those split by columns under an optimizer that keeps one value per row: the row's statistic is
  added up over the owners of its columns first, in one all-to-all for all of them;
- deferred ones: they add up over several backward passes until the user steps.

`BackwardFinisher` ends a backward pass: it updates the tables that are not deferred.
`DeferredUpdates` holds the gradients of those that are. The all-reduce of replicated tables
is made in every backward pass, as DistributedDataParallel makes its own: one serves both kinds, and
gradients that are held are always those of all ranks, so that they can be clipped and applied
without another. Row statistics are exchanged by the step: they are of the whole gradient.

Shape names: `R` rows of a table, `D` its columns here, `K` touched rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys import step_stages
from recsys.distributed.placement.layout import Layout, LookupGroup
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.exchanged_rows import Backward
from recsys.distributed.stages.lookup import GroupSettings, Lookup
from recsys.kernels.scaled_loss import TableUpdates
from recsys.optim.clipping import power_sum
from recsys.step_stages import Stage


@final
class BackwardFinisher:
    """Exchanges and applies what backward could not apply by itself, once per backward pass.

    Args:
        lookups: of this rank.
        replicas: of the replicated tables.
        layout: the compiled placement.
        env: the ranks.
        device: where the tables are.

    Attributes:
        deferred: the gradients of deferred tables.
        under_way: the backward passes that have begun and not ended; of one that raised, too.
        backward: what the output stage tells of.
    """

    def __init__(
        self,
        lookups: Sequence[Lookup],
        replicas: Sequence[Lookup],
        layout: Layout,
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        self._env = env
        self._device = device
        self.under_way: set[int] = set()  # graph tasks that end in _finish
        self._replicas = [_Replicas(lookup) for lookup in replicas if lookup.settings.requires_grad]
        self._columns = _ColumnSplits(lookups, layout, env, device, deferred=False)
        self.deferred = DeferredUpdates(lookups, self._replicas, layout, env, device)
        self._unfinished = [  # nothing of these outlives a backward pass
            *(replica.lookup.kernel for replica in self._replicas),
            *self._columns.kernels,
        ]
        self.backward = Backward(begins=self._schedule, updates=_table_updates(layout))
        self._needed = bool(self._replicas) or self._columns.exist or self.deferred.exist

    def _schedule(self) -> None:
        """Arrange, within a backward pass and on every rank, to finish when it ends."""
        task = torch._C._current_graph_task_id()
        if self._needed and task not in self.under_way:
            self.under_way.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def forget_failed_backward(self) -> None:
        """Drop what a backward that raised has left behind; asked if one is `under_way`.

        Deferred tables keep what it has added to their gradients, as a parameter's `.grad` does.
        """
        if torch._C._current_graph_task_id() < 0:
            self.under_way.clear()
            for kernel in self._unfinished:
                kernel.deferred.drop()

    @torch.no_grad()
    def _finish(self) -> None:
        with step_stages.running((Stage.TABLE_UPDATE, "")):
            self.under_way.clear()
            self._finish_replicas()
            self._columns.apply()
            self.deferred.end_backward()

    def _finish_replicas(self) -> None:
        """Add up the dense gradients of all ranks in one all-reduce, and hand out their mean."""
        if not self._replicas:
            return
        given = [replicas.lookup.kernel.deferred.take_dense() for replicas in self._replicas]
        flat = [part for parts in given for part in parts]
        buffer = flat[0] if len(flat) == 1 else torch.cat(flat)
        what = ExchangeName.GRADIENTS_OF_REPLICAS
        comm.all_reduce(self._env.for_embeddings, what, buffer).wait()
        if self._env.world_size > 1:
            buffer.mul_(1.0 / self._env.world_size)
        summed = iter(buffer.split([part.numel() for part in flat]))
        for replicas, parts in zip(self._replicas, given, strict=True):
            replicas.receive([next(summed) for _ in parts])


def _table_updates(layout: Layout) -> TableUpdates:
    in_backward = []
    for table in layout.tables:
        settings: GroupSettings = table.group  # type: ignore[assignment]
        if settings.requires_grad and settings.optimizer is not None and not settings.deferred:
            in_backward.append(table.name)
    return TableUpdates(tuple(in_backward))


@final
class DeferredUpdates:
    """The gradients of deferred tables: they add up, may be clipped, and are applied by a step.

    Every rank calls `step` alike. It satisfies
    `TableGradients`.

    Args:
        lookups: of this rank.
        replicas: of the replicated tables, whether deferred or not.
        layout: the compiled placement.
        env: the ranks.
        device: where the tables are.

    Attributes:
        exist: whether any table is deferred, on any rank.
        device: as given.
    """

    def __init__(
        self,
        lookups: Sequence[Lookup],
        replicas: list[_Replicas],
        layout: Layout,
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        self._env = env
        self.device = device
        self._kernels = [lookup.kernel for lookup in lookups if lookup.settings.deferred]
        self._columns = _ColumnSplits(lookups, layout, env, device, deferred=True)
        self._replicas = [r for r in replicas if r.lookup.settings.deferred]
        self.exist = any(table.group.deferred for table in layout.tables)  # type: ignore[attr-defined]
        self._arrived = False

    @property
    def wait_for_step(self) -> bool:
        """Whether there are gradients."""
        return self._arrived or any(kernel.deferred.exist for kernel in self._kernels)

    def end_backward(self) -> None:
        """Note, on every rank, that a backward pass has ended; not needed with one rank."""
        self._arrived = self.exist

    def step(self) -> None:
        """Apply the gradients to the tables and drop them; without any it does nothing."""
        if not self.wait_for_step:
            return
        self._columns.apply()
        for kernel in self._kernels:  # those of column splits have nothing left
            kernel.deferred.step()
        for replicas in self._replicas:
            replicas.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for kernel in self._kernels:
            kernel.deferred.drop()
        for replicas in self._replicas:
            replicas.held = None
        self._arrived = False

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks among which `power_sum` is to be added up; None for one rank."""
        return self._env.process_group if self._env.world_size > 1 else None

    def power_sum(self, norm_type: float) -> Tensor:
        """Return this rank's share of the sum of `|g| ** norm_type`, of the maximum for inf.

        Args:
            norm_type: which norm.

        Raises:
            ValueError: if the ranks are one of several groups, each with gradients of its own.
        """
        if self._env.replicas is not None:
            raise ValueError(
                "Gradients of tables cannot be clipped by their norm in a DMPCollection: its "
                f"{self._env.replicas.world_size} groups of ranks have gradients of their own, and "
                "would scale those of replicated parameters differently. Clip by value, or use "
                "DistributedModelParallel."
            )
        values = [values for kernel in self._kernels for values in kernel.deferred.values]
        if self._env.rank == 0:  # every rank holds the same of replicated tables
            values.extend(self._replicated())
        return power_sum(values, norm_type, self.device)

    def scale_(self, factor: Tensor) -> None:
        """Multiply the gradients, in place.

        Args:
            factor: a scalar.
        """
        factor = factor.to(self.device)
        for values in self._values():
            values.mul_(factor)

    def clamp_(self, limit: float) -> None:
        """Limit each value of the gradients to `[-limit, limit]`, in place."""
        for values in self._values():
            values.clamp_(-limit, limit)

    def _replicated(self) -> Iterator[Tensor]:
        return (replicas.held[0] for replicas in self._replicas if replicas.held is not None)

    def _values(self) -> Iterator[Tensor]:
        of_lookups = (values for kernel in self._kernels for values in kernel.deferred.values)
        return itertools.chain(of_lookups, self._replicated())


@final
@dataclass(slots=True, eq=False)
class _Replicas:
    """Replicated tables of one lookup, and the gradients of all ranks that they hold."""

    lookup: Lookup
    held: list[Tensor] | None = None

    def receive(self, gradients: list[Tensor]) -> None:
        """Take the gradients of all ranks, as `take_dense` has them."""
        kernel, settings = self.lookup.kernel, self.lookup.settings
        if settings.optimizer is None:
            grads = kernel.layout.table_views(gradients[0])
            for parameter, grad in zip(self.lookup.parameters, grads, strict=True):
                _accumulate_grad(parameter, grad)
        elif not settings.deferred:
            kernel.deferred.step_dense(*gradients)
        elif self.held is None:
            self.held = gradients
        else:
            torch._foreach_add_(self.held, gradients)

    def step(self) -> None:
        """Apply what is held."""
        if self.held is not None:
            self.lookup.kernel.deferred.step_dense(*self.held)


def _accumulate_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad.clone()
    else:
        parameter.grad += grad
    hooks = parameter._post_accumulate_grad_hooks or {}
    for hook in list(hooks.values()):  # an optimizer attached after sharding, say
        hook(parameter)


@final
class _ColumnSplits:
    """Tables split by columns whose owners exchange row statistics before they update.

    Args:
        lookups: of this rank.
        layout: the compiled placement.
        env: the ranks.
        device: where the tables are.
        deferred: whether to take the deferred tables or the others.

    Attributes:
        kernels: that serve them on this rank.
        exist: whether there are such tables, on any rank.
    """

    def __init__(
        self,
        lookups: Sequence[Lookup],
        layout: Layout,
        env: ShardingEnv,
        device: torch.device,
        *,
        deferred: bool,
    ) -> None:
        self._env = env
        self._device = device

        def is_meant(settings: GroupSettings) -> bool:
            return settings.exchanges_row_statistics and settings.deferred is deferred

        own = [lookup for lookup in lookups if is_meant(lookup.settings)]
        self.kernels = [lookup.kernel for lookup in own]
        self.exist = any(t.rects and is_meant(t.group) for t in layout.tables)  # type: ignore[arg-type]
        self._shared = self._find_shared([lookup.group for lookup in own], layout)
        of_ranks: dict[int, list[int]] = {env.rank: []}
        for place, (*_, peers) in enumerate(self._shared):
            for rank in peers:
                of_ranks.setdefault(rank, []).append(place)
        # this rank, and those that it shares blocks with, each with these blocks
        self._by_rank = sorted(of_ranks.items())

    def apply(self) -> None:
        """Add up one float per touched row among the column owners, and apply the row updates.

        The owners of a row block's columns were sent the same ids, so they hold the same rows in
        the same order and only the values travel. Every rank takes part, also one without a part.
        """
        if not self.exist:
            return
        env = self._env
        empty = torch.zeros(0, dtype=torch.float32, device=self._device)
        statistics = [kernel.deferred.row_statistics() for kernel in self.kernels]
        partials = [  # several column parts on one rank count as one
            statistics[parts[0][0]][parts[0][1]]
            if len(parts) == 1
            else torch.stack([statistics[k][i] for k, i in parts]).sum(0)
            for _, parts, _ in self._shared
        ]
        by_rank, sizes = self._by_rank, [0] * env.world_size
        counts = [partial_K.numel() for partial_K in partials]
        for rank, shared in by_rank:
            sizes[rank] = sum(counts[place] for place in shared)
        sent = torch.cat([empty, *(partials[place] for _, shared in by_rank for place in shared)])
        what = ExchangeName.ROW_STATISTICS
        pending = comm.all_to_all(env.for_embeddings, what, sent, sizes, sizes)
        received = pending.wait().split([sizes[rank] for rank, _ in by_rank])
        totals = empty.new_zeros(sum(counts)).split(counts)
        # in rank order: every owner adds up alike
        for (rank, shared), of_rank in zip(by_rank, received, strict=True):
            if rank == env.rank and partials:
                torch._foreach_add_(totals, partials)
            elif shared:
                arrived = of_rank.split([counts[place] for place in shared])
                torch._foreach_add_([totals[place] for place in shared], arrived)
        moments = [[empty] * len(kernel.weights) for kernel in self.kernels]
        if totals:
            torch._foreach_div_(totals, [float(dim) for dim, *_ in self._shared])
        for (_, parts, _), moments_K in zip(self._shared, totals, strict=True):
            for k, i in parts:
                moments[k][i] = moments_K
        for kernel, moments_TK in zip(self.kernels, moments, strict=True):
            kernel.deferred.step(moments_TK)

    def _find_shared(
        self, groups: Sequence[LookupGroup], layout: Layout
    ) -> list[tuple[int, list[tuple[int, int]], set[int]]]:
        """Find the row blocks whose columns this rank shares, in the same order on every rank.

        Returns:
            Per block the whole table's dim, this rank's parts as (kernel, place in it), and the
            other ranks that hold a part.
        """
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for kernel, group in enumerate(groups):
            for i, (table, rect) in enumerate(zip(group.tables, group.rects, strict=True)):
                found.setdefault((table, rect.row_start), []).append((kernel, i))
        shared = []
        for table, row_start in sorted(found):
            placed = layout.tables[table]
            owners = {r.rank for r in placed.rects if r.row_start == row_start}
            peers = owners - {self._env.rank}
            shared.append((placed.dim, found[table, row_start], peers))
        return shared
