"""A user's own costs and storage decide, in plans and in ratings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from recsys.distributed.planner import EmbeddingShardingPlanner, PlannerError, Topology
from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.options import Shards, TableOption
from recsys.distributed.planner.tables import Bytes, PlannedTable, RankMemory
from recsys.distributed.types import ShardingType
from tests.distributed.planner.test_planners import SHARDERS, collection

TOPOLOGY = Topology(2, "cpu", ddr_cap=1 << 30)
MODEL = collection({"a": (1000, 64), "b": (2000, 64)})


@dataclass
class Own:
    """Changes parts by a function."""

    change: Callable[[TableOption, Shards], Shards]

    def estimate(self, table: PlannedTable, option: TableOption, part: Shards) -> Shards:
        assert part in option.shards
        return self.change(option, part)


def planner(change: Callable[[TableOption, Shards], Shards]) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(TOPOLOGY, estimator=Own(change))


@pytest.mark.parametrize("cheap", [ShardingType.TABLE_WISE, ShardingType.ROW_WISE])
def test_the_cheapest_by_its_costs_is_chosen(cheap: ShardingType) -> None:
    def change(option: TableOption, part: Shards) -> Shards:
        return replace(part, costs=(Cost(forward=1.0 if option.sharding_type is cheap else 9.0),))

    plan = planner(change).plan(MODEL, SHARDERS)
    assert {entry.sharding_type for entry in plan.plan[""].values()} == {cheap.value}
    assert plan.rating is not None
    slowest = 1.0 if cheap is ShardingType.TABLE_WISE else 2.0
    assert plan.rating.slowest_ms == slowest
    again = planner(change).rate(MODEL, SHARDERS, plan)
    assert again.rating is not None
    assert again.rating.costs == plan.rating.costs


def test_its_storage_decides_what_fits() -> None:
    def change(option: TableOption, part: Shards) -> Shards:
        return replace(part, storage=RankMemory(weights=Bytes(2 << 30)))

    with pytest.raises(PlannerError, match=r"does not fit .*(?s:.*)2,048\.0 MiB"):
        planner(change).plan(MODEL, SHARDERS)


def test_parts_must_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match=r"Own\.estimate must return the given shards"):
        planner(lambda option, part: replace(part, rows=1)).plan(MODEL, SHARDERS)
    with pytest.raises(ValueError, match="costs for 1 kinds of rank"):
        planner(lambda option, part: replace(part, costs=part.costs * 2)).plan(MODEL, SHARDERS)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_costs_must_be_possible(wrong: float) -> None:
    def change(option: TableOption, part: Shards) -> Shards:
        return replace(part, costs=(Cost(forward=wrong, backward=2.0),))

    with pytest.raises(ValueError, match=r"table 'a', .*finite and not negative"):
        planner(change).plan(MODEL, SHARDERS)
