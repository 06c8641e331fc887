"""When no plan fits: the advised change is enough, and a smaller one is not."""

from __future__ import annotations

import copy
import itertools
import re
import time

import pytest

from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.planner import (
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    ParameterConstraints,
    PlannerError,
    Topology,
    advice,
)
from recsys.distributed.planner.advice import alternatives
from recsys.distributed.planner.options import Reach, TableOption
from recsys.distributed.types import CacheParams
from tests.distributed.planner.search_cases import ways
from tests.distributed.planner.test_planners import MIB, SHARDERS, collection, only


def refused(
    sizes: dict[str, tuple[int, int]],
    mib: float,
    world_size: int = 2,
    device: str = "cpu",
    local_world_size: int | None = None,
    host_mib: float = 100,
    **constraints: ParameterConstraints,
) -> str:
    memory = {"hbm_cap": int(mib * MIB), "ddr_cap": int(host_mib * MIB)}
    if device == "cpu":
        memory = {"ddr_cap": int(mib * MIB)}
    planner = EmbeddingShardingPlanner(
        Topology(world_size, device, local_world_size=local_world_size, **memory),
        batch_size=1,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
    )
    try:
        planner.plan(collection(sizes), SHARDERS)
    except PlannerError as error:
        return str(error)
    return "fits"


@pytest.mark.parametrize(("rows", "nodes"), [(4000, 1), (16_000, 1), (16_000, 2)])
def test_the_number_of_ranks_is_the_least_that_does(rows: int, nodes: int) -> None:
    sizes = {f"t{i}": (rows + i, 64) for i in range(3)}
    local = 2 // nodes
    message = refused(sizes, 0.5, local_world_size=local)
    (found,) = re.findall(r"(\d+) ranks like these\.$", message)
    ranks = int(found)
    assert refused(sizes, 0.5, ranks, local_world_size=local) == "fits"
    assert refused(sizes, 0.5, ranks - local, local_world_size=local) != "fits"


def test_constraints_are_lifted() -> None:
    sizes = {"a": (1500, 64), "b": (100, 64)}  # 0.37 MiB
    message = refused(sizes, 0.3, a=only("table_wise"))
    assert "the tables without constraints on sharding_types and compute_kernels; " in message
    assert "ranks like these" not in message  # the whole table must be on one
    assert refused(sizes, 0.3) == "fits"


def test_narrow_weights_and_host_memory() -> None:
    sizes = {f"t{i}": (1500, 64) for i in range(4)}  # 0.37 MiB each, 0.18 in 16 bits
    message = refused(sizes, 0.5, device="cuda")
    assert "weights of 16 bits (data_type=DataType.FP16); tables in host memory" in message
    demand = ParameterConstraints(compute_kernels=["fused_uvm_caching"])
    assert refused(sizes, 0.5, device="cuda", **dict.fromkeys(sizes, demand)) == "fits"
    message = refused(sizes, 0.5, device="cuda", host_mib=0.1)
    assert "host memory" not in message.splitlines()[-1]


@pytest.mark.parametrize(
    "demand",
    [
        ParameterConstraints(
            compute_kernels=["fused_uvm_caching"], cache_params=CacheParams(load_factor=0.1)
        ),
        ParameterConstraints(enforce_hbm=True),
    ],
)
def test_demands_on_caches_do_not_hide_what_does_not_fit(demand: ParameterConstraints) -> None:
    sizes = {f"t{i}": (3000, 64) for i in range(4)}
    message = refused(sizes, 0.3, device="cuda", host_mib=0.1, **dict.fromkeys(sizes, demand))
    assert "Table 't0' of module '' (3000 x 64, 0." in message


def test_what_goes_to_every_rank_is_held_against_the_smallest() -> None:
    planner = EmbeddingShardingPlanner(
        Topology(2, "cpu", ddr_cap=[1 * MIB, 10 * MIB]),
        batch_size=1,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints={"a": only("data_parallel")},
    )
    with pytest.raises(PlannerError, match=r"data_parallel +2 +\d"):
        planner.plan(collection({"a": (8000, 64)}), SHARDERS)


def test_several_tables_that_are_too_big() -> None:
    sizes = {f"t{i}": (3000, 64) for i in range(6)}
    message = refused(sizes, 0.3, **dict.fromkeys(sizes, only("table_wise")))
    assert message.startswith("Table 't0' of module '' (3000 x 64, 0.7 MiB with optimizer state)")
    assert "'t1', 't2', 't3', ... and 2 more.\n" in message


def test_nothing_helps() -> None:
    message = refused({"a": (3000, 64)}, 0.01, a=only("data_parallel"))
    assert message.endswith("Make tables smaller, or reserve less memory.")


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def tick() -> float:
        now[0] += 2.0
        return now[0]

    monkeypatch.setattr(advice.time, "monotonic", tick)
    tried = []
    monkeypatch.setattr(advice, "plan_again", lambda *args, **kwargs: tried.append(args))
    refused({f"t{i}": (16_000, 64) for i in range(3)}, 0.5)
    assert len(tried) == 1
    assert time.monotonic() > 0


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
    for rank, shard, _ in table.shards:
        free[rank] += shard.memory.device
    assert whole.bytes_over == whole.option.shards[0].memory.device - max(free)
    fits = [o.bytes_over == 0 for o in others]
    assert fits == sorted(fits, reverse=True)
