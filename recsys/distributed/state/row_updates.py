"""Post-backward updates: exchanges row gradients if necessary, and applies them.

Backward leaves row gradients without duplicates of three kinds of tables:

- Replicated tables: the gradients of all ranks are averaged first, in one all-reduce for all of
  these tables.
- Tables split by columns under an optimizer with one value per row: the row's statistic is added up
  over the owners of its columns first, in one all-to-all for all of these tables.
- Deferred tables: gradients accumulate over several backward passes until the user steps.

`PostBackwardUpdater` ends a backward pass: it updates the tables that are not deferred.
`DeferredUpdates` holds the gradients of the deferred tables. Gradients of replicated tables are
all-reduced in every backward pass, as in DistributedDataParallel: one all-reduce serves both kinds,
and accumulated gradients include all ranks, so that they can be clipped and applied without another
exchange. Row statistics are exchanged by the step, because they depend on the whole gradient.

Shapes: `R` rows of a table, `D` its columns here, `K` touched rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.base import step_stages
from recsys.base.step_stages import Stage
from recsys.distributed.placement.layout import Layout
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.exchanged_rows import Backward
from recsys.distributed.stages.lookup import GroupSettings, Lookup
from recsys.kernels.scaled_loss import TableUpdates
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.optim.clipping import power_sum


@final
class PostBackwardUpdater:
    """Exchanges and applies gradients that backward itself does not apply, after each pass.

    Args:
        lookups: Lookups of this rank.
        replicas: Lookups of the replicated tables.
        layout: The compiled placement.
        env: The ranks.
        device: Device of the tables.

    Attributes:
        deferred: Gradients of deferred tables.
        under_way: Backward passes that have begun and not ended, including failed ones.
        backward: Hooks of the output stage.
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
        self.under_way: set[int] = set()  # graph tasks that end in _finish
        self._replicas = [_Replicas(lookup) for lookup in replicas if lookup.settings.requires_grad]
        self._columns = _ColumnSplits(lookups, layout, env, device, deferred=False)
        settings = [(table.name, cast(GroupSettings, table.group)) for table in layout.tables]
        self.deferred = DeferredUpdates(
            env=env,
            device=device,
            exist=any(replica_part.deferred for _, replica_part in settings),
            kernels=[lookup.kernel for lookup in lookups if lookup.settings.deferred],
            columns=_ColumnSplits(lookups, layout, env, device, deferred=True),
            replicas=[
                replica_part
                for replica_part in self._replicas
                if replica_part.lookup.settings.deferred
            ],
        )
        self._unfinished = [  # their gradients do not outlive a backward pass
            *(replica_part.lookup.kernel for replica_part in self._replicas),
            *self._columns.kernels,
        ]
        in_backward = tuple(
            name
            for name, replica_part in settings
            if replica_part.requires_grad
            and replica_part.optimizer is not None
            and not replica_part.deferred
        )
        self.backward = Backward(begins=self._schedule, updates=TableUpdates(in_backward))
        self._needed = bool(self._replicas) or self._columns.exist or self.deferred.exist

    def _schedule(self) -> None:
        """Schedule the updates for the end of a backward pass; called within it on every rank."""
        task = torch._C._current_graph_task_id()
        if self._needed and task not in self.under_way:
            self.under_way.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def reset(self) -> None:
        """Drop gradients of a failed backward pass; called if one is `under_way`.

        Deferred tables keep its gradients, as a parameter's `.grad` does.
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
        """Average the dense gradients of all ranks in one all-reduce, and distribute them."""
        if not self._replicas:
            return
        gradients = [replicas.lookup.kernel.deferred.take_dense() for replicas in self._replicas]
        flat = [part for parts in gradients for part in parts]
        buffer = flat[0] if len(flat) == 1 else torch.cat(flat)
        what = ExchangeName.GRADIENTS_OF_REPLICAS
        comm.all_reduce(self._env.for_embeddings, what, buffer).wait()
        if self._env.world_size > 1:
            buffer.mul_(1.0 / self._env.world_size)
        averaged = iter(buffer.split([part.numel() for part in flat]))
        for replicas, parts in zip(self._replicas, gradients, strict=True):
            replicas.receive([next(averaged) for _ in parts])


@final
@dataclass(slots=True, eq=False, kw_only=True)
class DeferredUpdates:
    """Gradients of deferred tables, which accumulate, may be clipped, and are applied by a step.

    Every rank must call `step`. It implements `TableGradients`.

    Attributes:
        env: The ranks.
        device: Device of the tables.
        exist: Whether any table is deferred, on any rank.
        kernels: Kernels of the deferred tables on this rank.
        columns: Deferred tables split by columns.
        replicas: Deferred replicated tables.
    """

    env: ShardingEnv
    device: torch.device
    exist: bool
    kernels: list[TableBatchedEmbedding]
    columns: _ColumnSplits
    replicas: list[_Replicas]
    _has_gradients: bool = field(default=False, init=False)

    @property
    def wait_for_step(self) -> bool:
        """True if there are gradients."""
        return self._has_gradients or any(kernel.deferred.exist for kernel in self.kernels)

    def end_backward(self) -> None:
        """Record, on every rank, that a backward pass has ended; not needed with one rank."""
        self._has_gradients = self.exist

    def step(self) -> None:
        """Apply the gradients to the tables and drop them; without gradients do nothing."""
        if not self.wait_for_step:
            return
        self.columns.apply()
        for kernel in self.kernels:  # column splits have been applied already
            kernel.deferred.step()
        for replicas in self.replicas:
            replicas.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for kernel in self.kernels:
            kernel.deferred.drop()
        for replicas in self.replicas:
            replicas.held = None
        self._has_gradients = False

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Ranks that add up `power_sum`; None for one rank."""
        return self.env.process_group if self.env.world_size > 1 else None

    def power_sum(self, norm_type: float) -> Tensor:
        """Return this rank's share of the sum of `|g| ** norm_type`, or of the maximum for inf.

        Args:
            norm_type: Order of the norm.

        Raises:
            ValueError: The ranks are one of several groups with different gradients.
        """
        if self.env.replicas is not None:
            raise ValueError(
                "Gradients of tables cannot be clipped by their norm in a DMPCollection: its "
                f"{self.env.replicas.world_size} groups of ranks have different gradients, and "
                "would scale gradients of replicated parameters differently. Clip by value, or use "
                "DistributedModelParallel."
            )
        values = [values for kernel in self.kernels for values in kernel.deferred.values]
        if self.env.rank == 0:  # gradients of replicated tables are the same on every rank
            values.extend(self._replicated())
        return power_sum(values, norm_type, self.device)

    def scale_(self, factor: Tensor) -> None:
        """Multiply the gradients, in place.

        Args:
            factor: A scalar.
        """
        factor = factor.to(self.device)
        for values in self._values():
            values.mul_(factor)

    def clamp_(self, limit: float) -> None:
        """Limit each value of the gradients to `[-limit, limit]`, in place."""
        for values in self._values():
            values.clamp_(-limit, limit)

    def _replicated(self) -> Iterator[Tensor]:
        return (replicas.held[0] for replicas in self.replicas if replicas.held is not None)

    def _values(self) -> Iterator[Tensor]:
        of_lookups = (values for kernel in self.kernels for values in kernel.deferred.values)
        return itertools.chain(of_lookups, self._replicated())


@final
@dataclass(slots=True, eq=False)
class _Replicas:
    """Replicated tables of one lookup, and their accumulated gradients of all ranks."""

    lookup: Lookup
    held: list[Tensor] | None = None

    def receive(self, gradients: list[Tensor]) -> None:
        """Apply or accumulate the gradients of all ranks, in the format of `take_dense`."""
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
        """Apply the accumulated gradients."""
        if self.held is not None:
            self.lookup.kernel.deferred.step_dense(*self.held)


def _accumulate_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad.clone()
    else:
        parameter.grad += grad
    hooks = parameter._post_accumulate_grad_hooks or {}
    for hook in list(hooks.values()):  # for example an optimizer attached after sharding
        hook(parameter)


@final
class _ColumnSplits:
    """Tables split by columns whose owners exchange row statistics before an update.

    Args:
        lookups: Lookups of this rank.
        layout: The compiled placement.
        env: The ranks.
        device: Device of the tables.
        deferred: Whether to select the deferred tables or the others.

    Attributes:
        kernels: Kernels of these tables on this rank.
        exist: Whether there are such tables, on any rank.
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

        chosen = [lookup for lookup in lookups if is_meant(lookup.settings)]
        self.kernels = [lookup.kernel for lookup in chosen]
        self.exist = any(t.rects and is_meant(t.group) for t in layout.tables)  # type: ignore[arg-type]
        # this rank's shards as (kernel, index in it), by table and first row
        shards: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for k, lookup in enumerate(chosen):
            group = lookup.group
            for i, (table, rect) in enumerate(zip(group.tables, group.rects, strict=True)):
                shards.setdefault((table, rect.row_start), []).append((k, i))
        # the row blocks whose columns this rank shares, in the same order on every rank: the whole
        # table's dim, and this rank's shards
        self._shared: list[tuple[int, list[tuple[int, int]]]] = []
        of_ranks: dict[int, list[int]] = {env.rank: []}
        for (table, row_start), parts in sorted(shards.items()):
            placed = layout.tables[table]
            owners = {rect.rank for rect in placed.rects if rect.row_start == row_start}
            for rank in owners - {env.rank}:
                of_ranks.setdefault(rank, []).append(len(self._shared))
            self._shared.append((placed.dim, parts))
        self._by_rank = sorted(of_ranks.items())  # ranks, and the blocks shared with each

    def apply(self) -> None:
        """Add up one float per touched row among the column owners, and apply the row updates.

        The owners of a row block's columns receive the same ids, so they hold the same rows in the
        same order and exchange only values. Every rank must call it, also without a shard.
        """
        if not self.exist:
            return
        env = self._env
        empty = torch.zeros(0, dtype=torch.float32, device=self._device)
        statistics = [kernel.deferred.row_statistics() for kernel in self.kernels]
        partials = [  # several column shards on one rank count as one
            statistics[parts[0][0]][parts[0][1]]
            if len(parts) == 1
            else torch.stack([statistics[k][i] for k, i in parts]).sum(0)
            for _, parts in self._shared
        ]
        by_rank, sizes = self._by_rank, [0] * env.world_size
        counts = [partial_K.numel() for partial_K in partials]
        for rank, shared in by_rank:
            sizes[rank] = sum(counts[block] for block in shared)
        sent = torch.cat([empty, *(partials[block] for _, shared in by_rank for block in shared)])
        what = ExchangeName.ROW_STATISTICS
        pending = comm.all_to_all(env.for_embeddings, what, sent, sizes, sizes)
        received = pending.wait().split([sizes[rank] for rank, _ in by_rank])
        totals = empty.new_zeros(sum(counts)).split(counts)
        # in rank order, so that every owner computes the same sum
        for (rank, shared), of_rank in zip(by_rank, received, strict=True):
            if rank == env.rank and partials:
                torch._foreach_add_(totals, partials)
            elif shared:
                values = of_rank.split([counts[block] for block in shared])
                torch._foreach_add_([totals[block] for block in shared], values)
        moments = [[empty] * len(kernel.weights) for kernel in self.kernels]
        if totals:
            torch._foreach_div_(totals, [float(dim) for dim, _ in self._shared])
        for (_, parts), moments_K in zip(self._shared, totals, strict=True):
            for k, i in parts:
                moments[k][i] = moments_K
        for kernel, moments_TK in zip(self.kernels, moments, strict=True):
            kernel.deferred.step(moments_TK)
