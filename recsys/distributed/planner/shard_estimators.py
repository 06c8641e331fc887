"""Costs of a user's own, in place of the planner's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Protocol

from recsys.distributed.planner.options import Part, TableOption
from recsys.distributed.planner.tables import PlannedTable


class ShardEstimator(Protocol):
    """Says what parts of tables cost."""

    def estimate(self, table: PlannedTable, option: TableOption, part: Part) -> Part:
        """Returns a part with other costs or storage.

        Args:
            table: what it is a part of.
            option: how the table is placed.
            part: rows, columns, and the planner's own figures: ``costs`` on a rank of each kind,
                ``storage``. Change them with ``dataclasses.replace``.
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
        replace(option, parts=tuple(_estimated(estimator, table, option, p) for p in option.parts))
        for option in options
    ]


def _estimated(
    estimator: ShardEstimator, table: PlannedTable, option: TableOption, part: Part
) -> Part:
    found = estimator.estimate(table, option, part)
    if replace(found, costs=part.costs, storage=part.storage) != part or len(found.costs) != len(
        part.costs
    ):
        raise ValueError(
            f"{type(estimator).__name__}.estimate must return the part that it is given with "
            f"costs for {len(part.costs)} kinds of rank and storage; received {found} for {part} "
            f"of table {table.name!r}. Use dataclasses.replace(part, costs=..., storage=...)."
        )
    milliseconds = [getattr(cost, field.name) for cost in found.costs for field in fields(cost)]
    if not all(math.isfinite(ms) and ms >= 0 for ms in milliseconds):
        raise ValueError(
            f"{type(estimator).__name__}.estimate must return costs that are finite and not "
            f"negative; received {found.costs} for table {table.name!r}, "
            f"{option.sharding_type.value}."
        )
    return found
