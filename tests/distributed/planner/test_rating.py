"""A plan's costs are those the search weighed, and the same when the plan is rated afterwards."""

from __future__ import annotations

import pytest
import torch

from recsys.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from recsys.distributed.planner.rating import RatedPlan
from recsys.distributed.types import ShardingPlan
from tests.distributed.planner.test_planners import SHARDERS, collection

KINDS = ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel"]


def planner_of(
    sizes: dict[str, tuple[int, int]], kinds: dict[str, str] | None = None
) -> tuple[EmbeddingShardingPlanner, torch.nn.Module]:
    constraints = {name: ParameterConstraints([kind]) for name, kind in (kinds or {}).items()}
    topology = Topology.preset(["A100-80"] * 4 + ["H100"] * 4, 8, local_world_size=4)
    return EmbeddingShardingPlanner(topology, 64, constraints=constraints), collection(sizes)


def test_the_searched_plan_costs_what_the_search_says() -> None:
    sizes = {f"t{i}": (1000 * i + 7, 32 * (i % 3 + 1)) for i in range(12)}
    planner, model = planner_of(sizes)
    rating = planner.plan(model, SHARDERS).rating
    assert rating is not None
    assert rating.placement is not None
    assert [cost.total for cost in rating.costs] == pytest.approx(rating.placement.load_ms)
    assert rating.slowest_ms == pytest.approx(rating.placement.slowest_ms)
    assert rating.costs[rating.slowest_rank].total == rating.slowest_ms


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_is_rated_again_costs_the_same(kind: str) -> None:
    planner, model = planner_of({"t": (1003, 96), "u": (50, 64)}, {"t": kind})
    made = planner.plan(model, SHARDERS)
    again = planner.rate(model, SHARDERS, ShardingPlan(made.plan))
    assert isinstance(again, RatedPlan)
    assert made.rating is not None
    assert again.rating is not None
    assert again.plan == made.plan
    for one, other in zip(again.rating.costs, made.rating.costs, strict=True):
        assert one.total == pytest.approx(other.total)
    assert again.rating.storage == made.rating.storage


def test_a_plan_that_lacks_a_table_is_not_rated() -> None:
    planner, model = planner_of({"t": (1003, 96), "u": (50, 64)})
    made = planner.plan(model, SHARDERS)
    del made.plan[""]["u"]
    with pytest.raises(ValueError, match="missing: \\['u'\\]"):
        planner.rate(model, SHARDERS, made)
