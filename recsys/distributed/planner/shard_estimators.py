"""Costs of a user's own, in place of the planner's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from recsys.distributed.planner.options import Shards, TableOption
from recsys.distributed.planner.tables import PlannedTable


class ShardEstimator(Protocol):
    """Says what shards of tables cost."""

    def estimate(self, table: PlannedTable, option: TableOption, shards: Shards, /) -> Shards:
        """Returns shards with other costs or storage.

        Args:
            table: what they are shards of.
            option: how the table is placed.
            shards: rows, columns, and the planner's own figures, each of one shard: ``costs`` on a
                rank of each kind, ``storage``. Change them with ``dataclasses.replace``.
        """


def estimated(
    estimator: ShardEstimator, table: PlannedTable, options: Iterable[TableOption]
) -> list[TableOption]:
    """Returns a table's options with an estimator's figures.

    Raises:
        ValueError: if the estimator changes more than costs and storage, or a cost is not a finite
            number of milliseconds for each kind of rank.
    """
    return [
        replace(
            option, shards=tuple(_estimated(estimator, table, option, s) for s in option.shards)
        )
        for option in options
    ]


def _estimated(
    estimator: ShardEstimator, table: PlannedTable, option: TableOption, given: Shards
) -> Shards:
    name = f"{type(estimator).__name__}.estimate"
    try:
        found = estimator.estimate(table, option, given)
    except ValueError as error:
        raise ValueError(
            f"{name} of table {table.name!r}, {option.sharding_type.value}: {error}"
        ) from error
    kinds = len(given.costs)
    if replace(found, costs=given.costs, storage=given.storage) != given or (
        len(found.costs) != kinds
    ):
        raise ValueError(
            f"{name} must return the shards that it is given with costs for {kinds} kinds of rank "
            f"and storage; received {found} for {given} of table {table.name!r}. Use "
            "dataclasses.replace(shards, costs=..., storage=...)."
        )
    return found
