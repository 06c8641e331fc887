"""Planners choose among what an enumerator lists, the user's own too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from recsys.distributed.planner import EmbeddingShardingPlanner, PlannerError, Topology
from recsys.distributed.planner.enumerators import EmbeddingEnumerator
from recsys.distributed.planner.options import TableOption
from recsys.distributed.planner.pooling_stats import FeatureStats, PoolingStats
from recsys.distributed.planner.tables import PlannedTable
from recsys.distributed.planner.types import ParameterConstraints, PlannerErrorType
from recsys.distributed.types import ModuleSharder, ShardingType
from tests.distributed.planner.test_planners import SHARDERS, collection, only

TOPOLOGY = Topology(4, "cpu", ddr_cap=1 << 30, local_world_size=2)
MODEL = collection({"a": (1000, 64), "b": (2000, 64)})


class Few:
    """Lists what keeps to a number of ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._all = EmbeddingEnumerator(TOPOLOGY)
        self._num_ranks = num_ranks

    def enumerate(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
    ) -> list[tuple[PlannedTable, list[TableOption]]]:
        return [
            (table, [o for o in options if o.num_ranks == self._num_ranks])
            for table, options in self._all.enumerate(module, sharders)
        ]


class Backwards(EmbeddingEnumerator):
    """Lists all there is, in an order of its own."""

    def enumerate(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
    ) -> list[tuple[PlannedTable, list[TableOption]]]:
        return [(table, options[::-1]) for table, options in super().enumerate(module, sharders)]


def test_lists_every_table_with_its_options() -> None:
    listed = EmbeddingEnumerator(TOPOLOGY, constraints={"b": only("row_wise")}).enumerate(
        MODEL, SHARDERS
    )
    assert [table.name for table, _ in listed] == ["a", "b"]
    (_, of_a), (_, of_b) = listed
    assert {o.sharding_type for o in of_a} > {o.sharding_type for o in of_b}
    assert {o.sharding_type for o in of_b} == {ShardingType.ROW_WISE}


def test_costs_are_those_of_the_batch_size() -> None:
    def cost(batch_size: int | None) -> float:
        ((_, options), _) = EmbeddingEnumerator(TOPOLOGY, batch_size).enumerate(MODEL, SHARDERS)
        return options[0].shards[0].costs[0].total

    assert cost(None) == cost(512) > cost(256)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_only_what_is_listed_is_chosen(num_ranks: int) -> None:
    planner = EmbeddingShardingPlanner(TOPOLOGY, enumerator=Few(num_ranks))
    plan = planner.plan(MODEL, SHARDERS).plan[""]
    assert [len(entry.ranks or ()) for entry in plan.values()] == [num_ranks] * 2


def test_changes_are_tried_only_where_all_that_is_listed_is_ours() -> None:
    slow = Topology(4, "cpu", ddr_cap=1 << 30, local_world_size=2, intra_host_bw=1e4)
    full = Topology(4, "cpu", ddr_cap=10_000_000, local_world_size=2)
    large = collection({f"t{i}": (20_000, 64) for i in range(6)})  # 31 MB
    for kind, tried in ((EmbeddingEnumerator, True), (Backwards, False)):
        planner = EmbeddingShardingPlanner(enumerator=kind(slow))
        report = planner.plan(MODEL, SHARDERS).report(seconds=30)
        assert ("What would gain most" in report) is tried
        with pytest.raises(PlannerError) as refused:
            EmbeddingShardingPlanner(enumerator=kind(full)).plan(large, SHARDERS)
        assert ("What would fit" in str(refused.value)) is tried


def test_a_table_that_is_left_without_options_is_named() -> None:
    planner = EmbeddingShardingPlanner(TOPOLOGY, enumerator=Few(3))
    with pytest.raises(PlannerError, match=r"Few\.enumerate must list .* none of table 'a'"):
        planner.plan(MODEL, SHARDERS)


def test_what_plans_are_made_for_is_the_enumerators() -> None:
    stats = PoolingStats(
        features={"f_a": FeatureStats(ids_per_sample=9.0, batch_size=8.0, histogram=((1, 72),))}
    )
    enumerator = EmbeddingEnumerator(TOPOLOGY, 8, pooling_stats=stats)
    planner = EmbeddingShardingPlanner(enumerator=enumerator)
    plan = planner.plan(MODEL, SHARDERS)
    rating, again = plan.rating, planner.rate(MODEL, SHARDERS, plan).rating
    assert rating is not None
    assert again is not None
    assert (rating.topology, rating.batch_size) == (TOPOLOGY, 8)
    assert rating.tables[0].table.ids_per_sample == 9.0
    assert rating.slowest_ms == again.slowest_ms
    others = {
        "topology": Topology(2, "cpu"),
        "batch_size": 16,
        "pooling_stats": PoolingStats(features={}),
    }
    for name, other in others.items():
        with pytest.raises(ValueError, match=rf"\.{name} must be that of its enumerator; rec"):
            EmbeddingShardingPlanner(enumerator=enumerator, **{name: other})


class Wrapped:
    """Lists some tables of an enumerator of ours that it holds."""

    def __init__(self, *names: str) -> None:
        self._all, self._names = EmbeddingEnumerator(TOPOLOGY), names

    def enumerate(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
    ) -> list[tuple[PlannedTable, list[TableOption]]]:
        listed = self._all.enumerate(module, sharders)
        return [(table, options) for table, options in listed if table.name in self._names]


def test_all_tables_must_be_listed_under_the_planners_constraints() -> None:
    with pytest.raises(PlannerError, match=r"Wrapped\.enumerate must list every .* table 'b'") as e:
        EmbeddingShardingPlanner(TOPOLOGY, enumerator=Wrapped("a")).plan(MODEL, SHARDERS)
    planner = EmbeddingShardingPlanner(
        TOPOLOGY, enumerator=Wrapped("a", "b"), constraints={"a": only("row_wise")}
    )
    assert e.value.error_type is PlannerErrorType.INPUT_VALIDATION
    with pytest.raises(PlannerError, match="table 'a' under the planner's constraints") as e:
        planner.plan(MODEL, SHARDERS)
    assert e.value.error_type is PlannerErrorType.INPUT_VALIDATION


def test_constraints_are_those_of_the_enumerator() -> None:
    constraints = {"a": only("row_wise")}
    enumerator = EmbeddingEnumerator(TOPOLOGY, 8, constraints)
    for said_twice in (None, dict(constraints)):
        planner = EmbeddingShardingPlanner(
            TOPOLOGY, 8, enumerator=enumerator, constraints=said_twice
        )
        assert planner.plan(MODEL, SHARDERS).plan[""]["a"].sharding_type == "row_wise"
    with pytest.raises(ValueError, match="must be that of its enumerator"):
        EmbeddingShardingPlanner(
            TOPOLOGY, 8, enumerator=enumerator, constraints={"a": ParameterConstraints()}
        )
