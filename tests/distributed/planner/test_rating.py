"""A plan's costs are those the search weighed, and the same when the plan is rated afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recsys.distributed.default_sharders import get_default_sharders
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from recsys.distributed.planner.rating import RatedPlan
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
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
    assert made.made_for is not None
    elsewhere = replace(made.made_for, world_size=2 * made.made_for.world_size)
    made.made_for = elsewhere  # as of a file that another machine wrote
    assert planner.rate(model, SHARDERS, made).made_for == elsewhere


def test_a_plan_that_lacks_a_table_is_not_rated() -> None:
    planner, model = planner_of({"t": (1003, 96), "u": (50, 64)})
    made = planner.plan(model, SHARDERS)
    del made.plan[""]["u"]
    with pytest.raises(ValueError, match="missing: \\['u'\\]"):
        planner.rate(model, SHARDERS, made)


def two_nodes(pooled: bool, kind: str, ranks: list[int], local_size: int = 4) -> float:
    """Return the cost in ms of a table under a strategy, on two nodes of four ranks."""
    topology = Topology.preset("H100", 8, local_world_size=4)
    constraints = {"t": ParameterConstraints(pooling_factors=[8.0])}  # longer than the parts
    planner = EmbeddingShardingPlanner(topology, 64, constraints=constraints)
    names = {"name": "t", "feature_names": ["f"]}
    model: torch.nn.Module
    if pooled:
        bag = EmbeddingBagConfig(num_embeddings=100_000, embedding_dim=64, **names)
        model = EmbeddingBagCollection(tables=[bag], device=torch.device("meta"))
    else:
        config = EmbeddingConfig(num_embeddings=100_000, embedding_dim=64, **names)
        model = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    sharders = get_default_sharders()
    entry = parameter_sharding(
        ShardingType(kind), 100_000, 64, ranks, device_type="cuda", local_size=local_size
    )
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan({"t": entry})})
    rating = planner.rate(model, sharders, plan).rating
    assert rating is not None
    return rating.slowest_ms


def test_sums_cross_once_where_rows_lie_in_a_node() -> None:
    node = two_nodes(True, "table_row_wise", [4, 5, 6, 7])
    assert two_nodes(True, "row_wise", [0, 1, 4, 5]) > 1.5 * node
    # made for nodes of other sizes
    both = two_nodes(True, "table_row_wise", list(range(8)), local_size=8)
    assert both == two_nodes(True, "row_wise", list(range(8)))


def test_sequences_are_not_added_up() -> None:
    in_node, across = [4, 5, 6, 7], [0, 1, 4, 5]
    node = two_nodes(False, "table_row_wise", in_node)
    assert node == two_nodes(False, "row_wise", in_node) == two_nodes(False, "row_wise", across)


@pytest.mark.parametrize("kernel", ["quant", "fused_uvm"])
def test_a_kernel_that_does_not_train_here_is_refused(kernel: str) -> None:
    planner = EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=1 << 30), 64)
    model = collection({"t": (1003, 96)})
    plan = planner.plan(model, SHARDERS)
    plan.plan[""]["t"].compute_kernel = kernel
    with pytest.raises(ValueError, match=f"on cpu: fused.*; received '{kernel}'"):
        planner.rate(model, SHARDERS, plan)
    with pytest.raises(TypeError, match=r"plan must be a ShardingPlan.* str\."):
        planner.rate(model, SHARDERS, "plan.json")  # type: ignore[arg-type]
