"""The optimizers that tables own, seen as one keyed optimizer."""

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
from recsys.optim.keyed import TableGradients
from recsys.optim.specs import TableOptimizer

__all__ = ["FusedTablesOptimizer", "optimizer_from_fused_params", "optimizer_of_table"]


@final
class FusedTablesOptimizer(FusedOptimizer):
    """Learning rates, state and held gradients of the tables that own an optimizer.

    Fused tables update themselves in the backward pass: for them `step` and
    `zero_grad` have nothing left to do. Deferred tables are updated by `step`, which
    also drops their gradients: each is applied once. Setting a group's `lr` takes effect at the
    next update; there is one group for tables that have all settings in common. Every rank lists
    every table, also those it holds no part of, and must step alike.

    Args:
        tables: the parts of each table, by the name of its weight in the state dict.
        optimizers: what each table owns, None if it owns nothing; in the same order.
        deferred: the gradients of deferred tables.
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
        alike: dict[TableOptimizer, list[str]] = {}
        for name, optimizer in owned.items():
            alike.setdefault(optimizer, []).append(name)
        groups: list[dict[str, Any]] = [
            _group_of(
                optimizer,
                [params[name] for name in names],
                [shard for name in names for shard in tables[name].shards],
            )
            for optimizer, names in alike.items()
        ]
        super().__init__(params, state, groups)
        self._tables = list(tables.values())
        self._fused = [name for name, optimizer in owned.items() if not optimizer.is_deferred]
        self._deferred = deferred

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of deferred tables; the others were updated in backward."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._deferred.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of deferred tables; the others keep none."""
        self._deferred.zero_grad()

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Do nothing: the tables have their state from the start."""

    def follow(self, other: FusedTablesOptimizer) -> None:
        """Be the optimizer of another one's tables, which are the same and have moved.

        Whoever holds this one or its groups, such as a scheduler, has what it wants.

        Args:
            other: of the tables in their new place; it is not used any more.
        """
        self.params, self.state = other.params, other.state
        self._tables, self._deferred = other._tables, other._deferred
        for own, new in zip(self.param_groups, other.param_groups, strict=True):
            own.follow(new)  # type: ignore[attr-defined]

    def table_gradients(self) -> list[TableGradients]:
        """Return the gradients of the deferred tables.

        Raises:
            ValueError: if there are fused tables, whose gradients are never kept.
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
        """Return the tables' optimizer state by name; live."""
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
        """Drop what device caches hold of the state before the load."""
        for table in self._tables:
            for shard in table.shards:
                shard.kernel.drop_cache()


def _group_of(
    optimizer: TableOptimizer, params: list[Tensor], shards: Sequence[LocalShard]
) -> TablesGroup:
    """Return a group whose `lr` is the kernels' own, so that schedulers reach them."""
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
