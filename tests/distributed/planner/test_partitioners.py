"""A user's own search: its choices are checked, counted, and held against the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from recsys.distributed.planner import EmbeddingShardingPlanner, PlannerError, Topology
from recsys.distributed.planner.options import Reach
from recsys.distributed.planner.partitioners import partitioned
from recsys.distributed.planner.placement import (
    Choice,
    InfeasibleError,
    Problem,
    Ranks,
)
from recsys.distributed.planner.search import search
from tests.distributed.planner.search_cases import check, option, problems, shards, way
from tests.distributed.planner.test_planners import SHARDERS, collection

ROOM = (1000, 0)


@dataclass
class Fixed:
    """Always the same choices."""

    choices: Sequence[Choice]

    def partition(self, problem: Problem) -> Sequence[Choice]:
        return self.choices


class AllOnTheFirst:
    """Every table whole on rank 0."""

    def partition(self, problem: Problem) -> list[Choice]:
        return [Choice(option=0, ranks=[0]) for _ in problem.tables]


def test_the_plan_is_what_it_chooses() -> None:
    model = collection({"a": (1000, 64), "b": (2000, 64)})
    topology = Topology(2, "cpu", ddr_cap=1 << 30)
    plan = EmbeddingShardingPlanner(topology, partitioner=AllOnTheFirst()).plan(model, SHARDERS)
    assert [entry.ranks for entry in plan.plan[""].values()] == [[0], [0]]
    assert plan.rating is not None
    assert plan.rating.placement is not None
    assert plan.rating.placement.gap > 0.5
    assert plan.rating.placement.load_ms == pytest.approx(
        tuple(cost.total for cost in plan.rating.costs)
    )
    small = Topology(2, "cpu", ddr_cap=1 << 15)
    with pytest.raises(PlannerError, match="does not fit"):
        EmbeddingShardingPlanner(small, partitioner=AllOnTheFirst()).plan(model, SHARDERS)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(problems())
def test_the_planners_own_search_passes(problem: Problem) -> None:
    try:
        found = search(problem)
    except InfeasibleError:
        return
    same = partitioned(Fixed(found.choices), problem)
    check(problem, same)
    assert same.method == "partitioner"
    assert same.slowest_ms == pytest.approx(found.slowest_ms, rel=1e-9, abs=1e-12)


NODE = way(shards(count=2, cost_ms=(1.0,), memory=(300, 0)), reach=Reach.ONE_NODE)
NODES = way(shards(count=4, cost_ms=(1.0,), memory=(1, 0)), reach=Reach.NODES)
ALL = option(1.0, 1.0, reach=Reach.FIXED)
TABLE = [option(1.0, 1.0, memory=600), NODE, NODES, ALL]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(option=4, ranks=[0]), "one of the 4 options of table 0; received number 4"),
        (Choice(option=-1, ranks=[0]), "received number -1"),
        (Choice(option=0, ranks=[0]), r"2 shards of option 0 of table 0 anywhere.* ranks \[0\]"),
        (Choice(option=0, ranks=[1, 1]), "no two on one of the 4 ranks"),
        (Choice(option=0, ranks=[3, 4]), r"received ranks \[3, 4\]"),
        (Choice(option=0, ranks=[-1, 0]), r"received ranks \[-1, 0\]"),
        (Choice(option=1, ranks=[1, 2]), "one_node"),
        (Choice(option=2, ranks=[0, 2, 1, 3]), "nodes"),
        (Choice(option=3, ranks=[3, 2]), "fixed"),
    ],
)
def test_choices_must_keep_the_rules(choice: Choice, message: str) -> None:
    problem = Problem(ranks=Ranks(memory_caps=[ROOM] * 4, node_size=2), tables=[TABLE])
    with pytest.raises(ValueError, match=rf"Fixed\.partition must .*{message}"):
        partitioned(Fixed([choice]), problem)


def test_every_table_needs_a_choice_that_fits() -> None:
    ranks = Ranks(memory_caps=[ROOM] * 4, node_size=2, base_memory=[(0, 0), (200, 0)] * 2)
    problem = Problem(ranks=ranks, tables=[TABLE, TABLE])
    with pytest.raises(ValueError, match="for each of 2 tables, in order; received 1"):
        partitioned(Fixed([Choice(option=1, ranks=[0, 1])]), problem)
    both = [Choice(option=0, ranks=[0, 1]), Choice(option=1, ranks=[0, 1])]
    with pytest.raises(ValueError, match="rank 1 by 100 bytes"):
        partitioned(Fixed(both), problem)
    both[1] = Choice(option=1, ranks=[3, 2])
    check(problem, partitioned(Fixed(both), problem))


def test_no_tables() -> None:
    problem = Problem(ranks=Ranks(memory_caps=[ROOM], base_ms=(2.0,)), tables=[])
    assert partitioned(Fixed([]), problem).bound_ms == 2.0
