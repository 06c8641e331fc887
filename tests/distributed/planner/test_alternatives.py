"""Moving one table: what the slowest rank would take is what rating the moved plan says."""

from __future__ import annotations

import copy
import itertools

import pytest

from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from recsys.distributed.planner.alternatives import alternatives
from recsys.distributed.planner.options import Reach, TableOption
from tests.distributed.planner.search_cases import ways
from tests.distributed.planner.test_planners import SHARDERS, collection

WORLD, LOCAL = 4, 2
SIZES = {"a": (3000, 64), "b": (1000, 128), "c": (500, 32), "d": (9000, 64)}


def planner_of(cap: float = 1e9) -> EmbeddingShardingPlanner:
    kinds = ["A100-80", "A100-80", "H100", "H100"]
    topology = Topology.preset(kinds, WORLD, LOCAL)
    topology = Topology(
        WORLD,
        "cuda",
        hbm_cap=int(cap),
        local_world_size=LOCAL,
        hbm_mem_bw=[rank.hbm_mem_bw for rank in topology.hardware],
    )
    demands = {name: ParameterConstraints(pooling_factors=[9.0]) for name in SIZES}
    return EmbeddingShardingPlanner(topology, 64, constraints=demands)


def rated_best(planner: EmbeddingShardingPlanner, name: str, option: TableOption) -> float:
    """The least time of the slowest rank over all places of an option, each rated."""
    model = collection(SIZES)
    base = planner.plan(model, SHARDERS)
    best = float("inf")
    for ranks in set(itertools.islice(ways(option, WORLD, LOCAL), 200)):
        plan = copy.deepcopy(base)
        plan.plan[""][name] = parameter_sharding(
            option.sharding_type,
            *SIZES[name],
            ranks,
            compute_kernel=option.compute_kernel,
            local_size=LOCAL,
            device_type="cuda",
        )
        rating = planner.rate(model, SHARDERS, plan).rating
        assert rating is not None
        best = min(best, rating.slowest_ms)
    return best


@pytest.mark.parametrize("name", ["b", "d"])
def test_the_best_place_of_each_type_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(LOCAL))
    planner = planner_of()
    rating = planner.plan(collection(SIZES), SHARDERS).rating
    assert rating is not None
    (table,) = [rated for rated in rating.tables if rated.table.name == name]
    others = alternatives(rating, table, table.options)
    assert {o.option.sharding_type.value for o in others} >= {
        "row_wise",
        "data_parallel",
        "table_row_wise",
    }
    assert [o.slowest_ms for o in others] == sorted(o.slowest_ms for o in others)
    reaches = {o.option.reach for o in others}
    assert Reach.FIXED in reaches
    for other in others:
        assert other.bytes_over == 0
        assert other.slowest_ms == pytest.approx(rated_best(planner, name, other.option))


def test_what_has_no_room_comes_last_and_says_by_how_much() -> None:
    planner = planner_of(cap=2.2e6)
    rating = planner.plan(collection(SIZES), SHARDERS).rating
    assert rating is not None
    (table,) = [rated for rated in rating.tables if rated.table.name == "d"]  # 2.3 MB whole
    assert table.option.num_ranks > 1
    others = alternatives(rating, table, table.options)
    assert others[-1].bytes_over > 0
    whole = next(o for o in others if o.option.sharding_type.value == "table_wise")
    free = [budget.device - used.device for used, budget in rating.memory]
    for rank, shard in table.shards():
        free[rank] += shard.memory.device
    assert whole.bytes_over == whole.option.shards[0].memory.device - max(free)
    fits = [o.bytes_over == 0 for o in others]
    assert fits == sorted(fits, reverse=True)
