"""The report is correct: every number in it equals the rating, or the result of planning again."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from torch import nn

from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.planner import (
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    ParameterConstraints,
    Topology,
)
from recsys.distributed.planner.advice import fullness, plan_again, with_half_weights
from recsys.distributed.planner.formatting import ms, size_of
from recsys.distributed.planner.rating import RatedPlan
from recsys.distributed.planner.report_rows import Explanation
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from tests.distributed.planner.test_planners import SHARDERS, collection

TABLES = {f"t{i}": (1000 * i + 500, 32 * (1 + i % 3)) for i in range(24)}


def planned(
    sizes: dict[str, tuple[int, int]] = TABLES,
    world_size: int = 8,
    hbm_cap: float = 80e9,
    **constraints: ParameterConstraints,
) -> RatedPlan:
    topology = Topology.preset("H100", world_size)
    hardware = [replace(rank, hbm_cap=int(hbm_cap)) for rank in topology.hardware]
    planner = EmbeddingShardingPlanner(
        Topology.from_hardware(hardware, topology.local_world_size),
        256,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    return planner.plan(nn.ModuleDict({"ebc": collection(sizes)}), SHARDERS)


@pytest.mark.parametrize(("gap", "advised"), [(0.01, False), (0.05, True)])
def test_a_longer_search_is_advised_where_the_gap_is_wide(gap: float, advised: bool) -> None:
    rating = planned().rating
    assert rating is not None
    assert rating.placement is not None
    bound_ms = rating.slowest_ms / (1 + gap)
    found = replace(rating.placement, bound_ms=bound_ms, method="heuristic")
    headline = Explanation(replace(rating, placement=found), seconds=0).headline()
    assert f"the gap is {gap:.1%}" in headline
    assert ("A longer search" in headline) is advised


def test_headline_ranks_and_tables() -> None:
    plan = planned()
    rating = plan.rating
    assert rating is not None
    report = plan.report(seconds=0)
    slowest = rating.slowest_rank
    assert report.startswith(
        f"The slowest of 8 ranks, rank {slowest}, takes {ms(rating.slowest_ms)} per step for its "
        "tables. No plan "
    )
    for rank, (cost, stored) in enumerate(zip(rating.costs, rating.storage, strict=True)):
        (line,) = re.findall(rf"^{rank} +\d.*$", report, re.M)
        assert f"{cost.forward:.3f}" in line
        assert f"{cost.total:.3f}" in line
        assert size_of(stored.total.device) in line
    assert report.count("\nebc.t") == 20
    assert report.endswith("\n... and 4 more")
    assert "gain" not in report  # no time to try changes


def test_many_ranks_are_shown_by_the_outer_ones() -> None:
    plan = planned(world_size=64)
    rating = plan.rating
    assert rating is not None
    report = plan.report(seconds=0)
    assert f"\n{rating.slowest_rank} slowest" in report
    for label in ("median", "fastest", "fullest"):
        assert re.search(rf"^\d+ .*{label}", report, re.M)
    shown = len(re.findall(r"^\d+ \w+ .*GiB$", report, re.M))
    assert f"\n... and {64 - shown} more\n" in report


def test_one_rank() -> None:
    report = planned(world_size=1).report(seconds=0)
    assert report.startswith("The only rank takes ")
    assert "table_wise on rank 0" in report


class TestWhatBinds:
    def test_a_table_that_is_too_hot(self) -> None:
        hot = ParameterConstraints(["table_wise"], pooling_factors=[500.0])
        plan = planned({"hot": (100_000, 64), "cold": (10, 32)}, hot=hot)
        report = plan.report()
        assert "Table 'hot' is too hot for one rank: it takes 100.0% of the time of rank" in report
        assert "less than the slowest." in report
        assert "Lift the constraints on table 'hot': " in report
        assert "(if its constraints allowed): slowest rank" in report

    def test_memory(self) -> None:
        sizes = {f"t{i}": (10_000, 64) for i in range(4)}  # 2.44 MiB and buffers
        demand = {name: ParameterConstraints(["table_wise"]) for name in sizes}
        report = planned(sizes, 2, 6.3e6, **demand).report(seconds=0)
        assert (
            "The cuda memory that is free for tables is at least 95% full on ranks 0-1." in report
        )
        report = planned(sizes, 2, 16e6, **demand).report(seconds=0)
        assert "full on" not in report


def test_gains_are_those_of_planning_again() -> None:
    plan = planned(t20=ParameterConstraints(["table_wise"], pooling_factors=[99.0]))
    rating = plan.rating
    assert rating is not None
    gains = {gain.text: gain.slowest_ms for gain in Explanation(rating, seconds=60).gains}
    assert list(gains.values()) == sorted(gains.values())
    assert "Lift the constraints on table 't20'" in gains
    halves = with_half_weights(tuple(rated.table for rated in rating.tables))
    assert {table.element_bytes for table in halves} == {2}
    again = plan_again(rating.lister, halves, rating.budgets)
    assert again is not None
    text = "Keep weights in 16 bits (data_type=DataType.FP16)"
    assert gains.get(text, rating.slowest_ms) == pytest.approx(again.slowest_ms, rel=0.02)
    assert f"{ms(min(gains.values()))} instead of {ms(rating.slowest_ms)}" in plan.report(
        seconds=60
    )


def test_given_plans() -> None:
    planner = EmbeddingShardingPlanner(Topology.preset("H100", 4), 256)
    model = collection(TABLES)
    entries = {
        name: parameter_sharding(
            ShardingType.TABLE_WISE, *size, [0], device_type="cuda", local_size=4
        )
        for name, size in TABLES.items()
    }
    plan = planner.rate(model, SHARDERS, ShardingPlan({"": EmbeddingModuleShardingPlan(entries)}))
    report = plan.report()
    best = planner.plan(model, SHARDERS).rating
    assert best is not None
    assert "The plan was passed in, not searched for." in report
    (found,) = re.findall(r"Let the planner place all tables: ([\d.]+) ms instead", report)
    assert float(found) == pytest.approx(best.slowest_ms, rel=0.02)
    assert re.search(r"row_wise on \d ranks?: slowest rank", report)


def test_an_edited_plan_has_no_report() -> None:
    plan = planned()
    entries = plan.plan["ebc"]
    whole = next(name for name, entry in entries.items() if entry.sharding_type == "table_wise")
    kept = entries[whole]
    assert kept.ranks is not None
    entries[whole] = parameter_sharding(
        ShardingType.TABLE_WISE, *TABLES[whole], [(kept.ranks[0] + 1) % 8], device_type="cuda"
    )
    message = f"table '{whole}' of module 'ebc' was edited.*planner.rate"
    with pytest.raises(ValueError, match=message):
        plan.report()
    with pytest.raises(ValueError, match=message):
        plan.report_html()
    entries[whole] = kept
    assert plan.report(seconds=0)
    del entries[whole]
    with pytest.raises(ValueError, match=message):
        plan.report()
    with pytest.raises(ValueError, match="must be rated before"):
        RatedPlan(plan.plan).report()


def test_a_kernel_that_is_not_allowed_is_said_to_be() -> None:
    demand = ParameterConstraints(["table_wise"], compute_kernels=["fused_uvm"])
    topology = Topology(1, "cuda", hbm_cap=1 << 30, ddr_cap=1 << 30)
    planner = EmbeddingShardingPlanner(topology, constraints={"a": demand})
    report = planner.plan(collection({"a": (1000, 64)}), SHARDERS).report(seconds=0)
    assert "table_wise on 1 rank (if its constraints allowed): " in report


def test_host_memory_that_is_nearly_full_is_seen() -> None:
    demand = ParameterConstraints(compute_kernels=["fused_uvm"])
    topology = Topology(1, "cuda", hbm_cap=1 << 30, ddr_cap=3_000_000)
    planner = EmbeddingShardingPlanner(
        topology,
        1,
        constraints={"a": demand},
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    rating = planner.plan(collection({"a": (10_000, 64)}), SHARDERS).rating
    assert rating is not None
    assert fullness(rating) == pytest.approx(2_560_000 / 3_000_000, rel=0.01)
