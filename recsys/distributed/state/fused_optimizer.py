"""The optimizers of all tables as one keyed optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from recsys.distributed.placement.fused_params import (
    optimizer_from_fused_params,
    optimizer_of_table,
)
from recsys.distributed.stages.lookup import LocalShard
from recsys.distributed.state.row_updates import DeferredUpdates
from recsys.distributed.state.table_shards import TableShards
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.optim.fused import FusedOptimizer, TablesGroup
from recsys.optim.specs import TableOptimizer
from recsys.optim.table_gradients import TableGradients

__all__ = ["FusedTablesOptimizer", "optimizer_from_fused_params", "optimizer_of_table"]


@final
class FusedTablesOptimizer(FusedOptimizer):
    """Learning rates, state and accumulated gradients of the tables with their own optimizer.

    Fused tables are updated in the backward pass: for them `step` and `zero_grad` do nothing.
    Deferred tables are updated by `step`, which also drops their gradients, so that each is applied
    once. Setting a group's `lr` takes effect at the next update; tables with equal settings share a
    group. Every rank lists every table, also tables without a shard on it, and must make the same
    steps.

    Args:
        tables: Shards of each table, by the name of its weight in the state dict.
        optimizers: Optimizer of each table, None for none; in the same order.
        deferred: Gradients of deferred tables.
    """

    def __init__(
        self,
        tables: Mapping[str, TableShards],
        optimizers: Sequence[TableOptimizer | None],
        deferred: DeferredUpdates,
    ) -> None:
        owned = {
            name: optimizer
            for name, optimizer in zip(tables, optimizers, strict=True)
            if optimizer is not None
        }
        params: dict[str, Tensor] = {name: tables[name].whole() for name in owned}
        state = {params[name]: tables[name].states() for name in owned}
        names_by_optimizer: dict[TableOptimizer, list[str]] = {}
        for name, optimizer in owned.items():
            names_by_optimizer.setdefault(optimizer, []).append(name)
        groups: list[dict[str, Any]] = [
            _group_of(
                optimizer,
                [params[name] for name in names],
                [shard for name in names for shard in tables[name].shards],
            )
            for optimizer, names in names_by_optimizer.items()
        ]
        super().__init__(params, state, groups)
        self._tables = list(tables.values())
        self._fused = [name for name, optimizer in owned.items() if not optimizer.is_deferred]
        self._deferred = deferred

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of deferred tables; other tables were updated in backward."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._deferred.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of deferred tables; other tables keep none."""
        self._deferred.zero_grad()

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Do nothing: the state of the tables exists from the start."""

    def follow(self, other: FusedTablesOptimizer) -> None:
        """Rebind to the resharded tables of `other`.

        References to this optimizer and its groups, for example in a scheduler, stay valid.

        Args:
            other: Optimizer of the same tables in their new placement; not used afterwards.
        """
        self.params, self.state = other.params, other.state
        self._tables, self._deferred = other._tables, other._deferred
        for group, new in zip(self.param_groups, other.param_groups, strict=True):
            group.follow(new)  # type: ignore[attr-defined]

    def table_gradients(self) -> list[TableGradients]:
        """Return the gradients of the deferred tables.

        Raises:
            ValueError: There are fused tables, whose gradients are never kept.
        """
        if self._fused:
            raise ValueError(
                "Gradients can be clipped or unscaled only of deferred tables; received "
                f"{len(self._fused)} whose optimizer updates them in backward: {self._fused[:5]}. "
                "Attach it by apply_optimizer_in_backward(..., update_mode='deferred'), or set "
                "fused_params['update_mode'] = 'deferred'."
            )
        return [self._deferred]

    def state_dict(self) -> dict[str, Any]:
        """Return the tables' live optimizer state by name."""
        for table in self._tables:
            table.flush()
        return super().state_dict()

    def optimizer_kinds(self) -> dict[str, str]:
        """Return each table's algorithm."""
        names = {id(param): name for name, param in self.params.items()}
        return {
            names[id(param)]: group["algorithm"]
            for group in self.param_groups
            for param in group["params"]
        }

    def post_load_state_dict(self) -> None:
        """Invalidate the device caches, which hold state from before the load."""
        for table in self._tables:
            for shard in table.shards:
                shard.kernel.drop_cache()


def _group_of(
    optimizer: TableOptimizer, params: list[Tensor], shards: Sequence[LocalShard]
) -> TablesGroup:
    """Return a group whose `lr` sets the learning rate of the kernels."""
    places: dict[int, tuple[TableBatchedEmbedding, list[int]]] = {}
    for shard in shards:
        places.setdefault(id(shard.kernel), (shard.kernel, []))[1].append(shard.place)

    def use_rate(rate: float) -> None:
        for kernel, tables in places.values():
            kernel.set_learning_rate(rate, tables)

    spec = optimizer.spec
    settings = {
        "algorithm": spec.algorithm.value,
        "update_mode": optimizer.update_mode.value,
        "row_state": optimizer.row_state.value,
        **spec.settings(),
    }
    return TablesGroup(params, spec.learning_rate, settings, use_rate)
