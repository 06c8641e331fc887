"""Planners choose among what an enumerator lists, the user's own too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from recsys.distributed.planner import EmbeddingShardingPlanner, PlannerError, Topology
from recsys.distributed.planner.enumerators import EmbeddingEnumerator
from recsys.distributed.planner.options import TableOption
from recsys.distributed.planner.tables import PlannedTable
from recsys.distributed.planner.types import ParameterConstraints
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
        return options[0].parts[0].costs[0].total

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
    for enumerator, tried in ((EmbeddingEnumerator(slow), True), (Few(1), False)):
        planner = EmbeddingShardingPlanner(slow, enumerator=enumerator)
        report = planner.plan(MODEL, SHARDERS).report(seconds=30)
        assert ("What would gain most" in report) is tried
        with pytest.raises(PlannerError) as refused:
            EmbeddingShardingPlanner(full, enumerator=enumerator).plan(large, SHARDERS)
        assert ("What would fit" in str(refused.value)) is tried


def test_a_table_that_is_left_without_options_is_named() -> None:
    planner = EmbeddingShardingPlanner(TOPOLOGY, enumerator=Few(3))
    with pytest.raises(PlannerError, match=r"Few\.enumerate must list .* none of table 'a'"):
        planner.plan(MODEL, SHARDERS)


def test_constraints_are_those_of_the_enumerator() -> None:
    constraints = {"a": only("row_wise")}
    enumerator = EmbeddingEnumerator(TOPOLOGY, 8, constraints)
    for said_twice in (None, dict(constraints)):
        planner = EmbeddingShardingPlanner(
            TOPOLOGY, 8, enumerator=enumerator, constraints=said_twice
        )
        assert planner.plan(MODEL, SHARDERS).plan[""]["a"].sharding_type == "row_wise"
    with pytest.raises(ValueError, match="must be those of its enumerator"):
        EmbeddingShardingPlanner(
            TOPOLOGY, 8, enumerator=enumerator, constraints={"a": ParameterConstraints()}
        )
