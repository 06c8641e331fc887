"""Parts written for TorchRec make the plans that they make there; all else is the planner's own."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from recsys.compat.planner.enumerators import EmbeddingEnumerator
from recsys.compat.planner.partitioners import GreedyPerfPartitioner
from recsys.compat.planner.planners import EmbeddingShardingPlanner, to_sharding_plan
from recsys.compat.planner.proposers import GridSearchProposer, UniformProposer
from recsys.compat.planner.shard_estimators import EmbeddingStorageEstimator
from recsys.compat.planner.topology import Topology
from recsys.compat.planner.types import (
    PerfModel,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
)
from recsys.distributed import planner as ours
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.planner import ParameterConstraints, PlannerError, PlannerErrorType
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from tests.compat.planner.scripts import needs_peer, printed
from tests.ranks import RankPool

# what extensions.py has; its TorchRec names cannot be imported here
ROWS = {"users": 4000, "goods": 1000, "shops": 2000, "tags": 3000}
VALUES = [place * 37 for place in range(12)]
LENGTHS = [[1, 2], [0, 3], [1, 1], [4, 0]]

SHARDERS = [EmbeddingBagCollectionSharder()]
NAMES = ("a", "b", "c")


def model() -> torch.nn.Module:
    tables = [
        EmbeddingBagConfig(1000 * (place + 1), 64, name, feature_names=[f"f_{name}"])
        for place, name in enumerate(NAMES)
    ]
    meta = torch.device("meta")
    return torch.nn.Sequential(EmbeddingBagCollection(tables=tables, device=meta))


def machine(device: str = "cuda", cap: int = 1 << 30, world_size: int = 4) -> Topology:
    return Topology(world_size, device, hbm_cap=cap, ddr_cap=cap, local_world_size=2)


def kinds(plan: ours.planners.RatedPlan) -> list[str]:
    return [entry.sharding_type for entry in plan.plan["0"].values()]


class TestParts:
    def test_they_make_these_plans(self) -> None:
        found = printed("extensions.py")
        everywhere = ["row_wise", [0, 1, 2, 3]]
        assert set(map(str, found["enumerator"].values())) == {str(everywhere)}
        assert [kind for kind, _ in found["partitioner"].values()] == ["table_wise"] * 4
        assert [ranks for _, ranks in found["partitioner"].values()] == [[0], [1], [2], [3]]
        assert [kind for kind, *_ in found["heard"]] == ["row_wise", "table_row_wise", "table_wise"]
        best = min(found["heard"], key=lambda heard: float(heard[2]))
        assert {kind for kind, _ in found["proposer"].values()} == {best[0]}
        assert found["performance model"]["users"] == everywhere
        assert [0] not in [ranks for _, ranks in found["storage reservation"].values()]
        assert found["stats"]["proposals"] == [1, 1]
        assert found["stats"]["plan"] == found["storage reservation"]
        assert found["error"] == "INSUFFICIENT_STORAGE"

    def test_a_model_runs_under_the_plan(self) -> None:
        plan, out = printed("extensions.py")["forward"]
        assert set(map(str, plan.values())) == {str(["table_wise", [0]])}
        values, expected, start = np.array(VALUES), [], 0
        for feature, per_sample in zip(ROWS, LENGTHS, strict=True):
            place = sorted(ROWS).index(feature)
            weight = (np.arange(ROWS[feature] * 16) % (7 + place)).reshape(-1, 16)
            bags = []
            for length in per_sample:
                bags.append(weight[values[start : start + length]].sum(axis=0))
                start += length
            expected.append(np.stack(bags))
        np.testing.assert_array_equal(np.array(out), np.concatenate(expected, axis=1))

    @needs_peer
    def test_torchrec_makes_the_same(self) -> None:
        assert printed("extensions.py") == printed("extensions.py", by_peer=True)


class Repeats(Proposer):
    """The same two proposals, over and over."""

    def __init__(self, times: int) -> None:
        self._times = times
        self.heard: list[tuple[bool, float | None, list[int | None]]] = []

    def load(self, search_space: list[ShardingOption], enumerator: object = None) -> None:
        self._of = {
            kind: [option for option in search_space if option.sharding_type == kind]
            for kind in ("table_wise", "row_wise")
        }

    def propose(self) -> list[ShardingOption] | None:
        place = len(self.heard)
        return None if place == self._times else list(self._of.values())[place % 2]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: object = None,
    ) -> None:
        assert plan is not None
        assert isinstance(storage_constraint, Topology)
        self.heard.append((partitionable, perf_rating, plan[0].get_shards_assignment()))


class Counts(PerfModel):
    def __init__(self) -> None:
        self.calls = 0

    def rate(self, plan: list[ShardingOption]) -> float:
        self.calls += 1
        return float(sum(option.num_shards for option in plan))


class Hears(Stats):
    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def log(self, **facts: Any) -> None:  # type: ignore[override]
        self.heard.append(facts)


class Halves(StorageReservation):
    def reserve(self, topology: Topology, *args: object, **kwargs: object) -> Topology:
        reserved = copy.deepcopy(topology)
        for device in reserved.devices:
            device.storage.hbm //= 2
            device.storage.ddr //= 2
        return reserved


class TestLoop:
    def test_a_proposal_that_comes_again_is_not_tried_again(self) -> None:
        proposer, rates, stats = Repeats(5), Counts(), Hears()
        planner = EmbeddingShardingPlanner(
            machine(), proposer=proposer, performance_model=rates, stats=stats
        )
        plan = planner.plan(model(), SHARDERS)
        assert kinds(plan) == ["table_wise"] * 3
        assert rates.calls == 2
        assert [rating for _, rating, _ in proposer.heard] == [3.0, 12.0, 3.0, 12.0, 3.0]
        assert [ranks[0] is None for _, _, ranks in proposer.heard] == [
            False,
            False,
            True,
            True,
            True,
        ]
        assert [(f["num_proposals"], f["num_plans"]) for f in stats.heard] == [(2, 2)]

    def test_the_plan_is_rated_and_reported(self) -> None:
        planner = EmbeddingShardingPlanner(machine(), proposer=UniformProposer())
        plan = planner.plan(model(), SHARDERS)
        assert len(set(kinds(plan))) == 1
        assert plan.rating is not None
        assert plan.rating.is_custom
        assert plan.rating.topology.devices  # type: ignore[attr-defined]
        assert "per step" in plan.report(seconds=0)
        own = ours.EmbeddingShardingPlanner(machine()).rate(model(), SHARDERS, plan)
        assert own.rating is not None
        assert plan.rating.budgets == own.rating.budgets
        assert plan.rating.costs == own.rating.costs

    def test_estimates_are_what_the_rating_says(self) -> None:
        stats = Hears()
        planner = EmbeddingShardingPlanner(machine(), proposer=GridSearchProposer(), stats=[stats])
        plan = planner.plan(model(), SHARDERS)
        assert plan.rating is not None
        load = [0.0] * 4
        for option in stats.heard[0]["best_plan"]:
            for shard in option.shards:
                load[shard.rank] += shard.perf.total
        assert load == pytest.approx([cost.total for cost in plan.rating.costs])

    def test_time_is_limited(self) -> None:
        proposer = Repeats(10**9)
        planner = EmbeddingShardingPlanner(machine(), proposer=proposer, timeout_seconds=0.2)
        assert len(planner.plan(model(), SHARDERS).plan["0"]) == 3

    def test_what_does_not_fit_says_why(self) -> None:
        planner = EmbeddingShardingPlanner(
            machine(cap=10_000), proposer=UniformProposer(), storage_reservation=Halves()
        )
        with pytest.raises(PlannerError, match=r"more ranks.*error: .*up to Storage") as raised:
            planner.plan(model(), SHARDERS)
        assert raised.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
        nothing = EmbeddingShardingPlanner(machine(), proposer=Repeats(0))
        with pytest.raises(PlannerError, match=r"received 0 of 3 tables.*Propose others") as raised:
            nothing.plan(model(), SHARDERS)
        assert raised.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS

    def test_a_rank_that_is_none(self) -> None:
        class Lazy(GreedyPerfPartitioner):
            def partition(self, proposal: Any, storage_constraint: Any) -> Any:
                return proposal

        planner = EmbeddingShardingPlanner(
            machine(), partitioner=Lazy(), performance_model=Counts()
        )
        with pytest.raises(PlannerError, match=r"on a rank of 0 to 3; received ranks \[None"):
            planner.plan(model(), SHARDERS)

    def test_a_model_without_tables(self) -> None:
        planner = EmbeddingShardingPlanner(machine(), proposer=UniformProposer())
        assert planner.plan(torch.nn.Linear(1, 1), SHARDERS).plan == {}
        assert to_sharding_plan([], machine()).plan == {}

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("estimator", EmbeddingStorageEstimator(machine())),
            ("batches_in_flight", 2),
            ("pooling_stats", object()),
        ],
    )
    def test_what_is_not_for_proposals_is_refused(self, name: str, value: object) -> None:
        with pytest.raises(ValueError, match=f"{name} is only for the planner's own search"):
            EmbeddingShardingPlanner(machine(), proposer=UniformProposer(), **{name: value})  # type: ignore[arg-type]


class TestOwnSearch:
    @pytest.mark.parametrize(
        "parts",
        [
            {},
            {"enumerator": EmbeddingEnumerator(machine(), 512)},
            {"stats": Hears()},
            {"storage_reservation": ours.HeuristicalStorageReservation()},
        ],
        ids=lambda parts: "".join(parts),
    )
    def test_it_plans_as_ever(self, parts: dict[str, Any]) -> None:
        plan = EmbeddingShardingPlanner(machine(), **parts).plan(model(), SHARDERS)
        expected = ours.EmbeddingShardingPlanner(machine()).plan(model(), SHARDERS)
        assert plan.plan == expected.plan
        assert plan.rating is not None
        assert plan.rating.placement is not None

    def test_a_plain_enumerator_brings_what_it_has(self) -> None:
        demands = {"b": ParameterConstraints(sharding_types=["row_wise"])}
        lister = EmbeddingEnumerator(machine(), 64, demands)
        plan = EmbeddingShardingPlanner(enumerator=lister).plan(model(), SHARDERS)
        assert kinds(plan)[1] == "row_wise"
        assert plan.rating is not None
        assert plan.rating.batch_size == 64
        assert plan.rating.placement is not None

    def test_stats_hear_of_its_plan(self) -> None:
        stats = Hears()
        plan = EmbeddingShardingPlanner(machine(), stats=stats).plan(model(), SHARDERS)
        [facts] = stats.heard
        assert facts["sharding_plan"] is plan
        assert plan.rating is not None
        for option in facts["best_plan"]:
            entry = plan.plan["0"][option.name]
            assert option.sharding_type == entry.sharding_type
            assert option.get_shards_assignment() == entry.ranks
        times = sum(option.total_perf for option in facts["best_plan"])
        assert times == pytest.approx(sum(cost.total for cost in plan.rating.costs))

    def test_it_counts_with_what_a_reservation_leaves(self) -> None:
        plan = EmbeddingShardingPlanner(machine(), storage_reservation=Halves()).plan(
            model(), SHARDERS
        )
        assert plan.rating is not None
        assert plan.rating.placement is not None
        assert {room.device for room in plan.rating.budgets} == {1 << 29}


def plan_together(fails: bool) -> tuple[list[tuple[str, str, list[int] | None]], set[int]] | str:
    import torch.distributed as dist

    stats = Hears()
    topology = machine("cpu", cap=1000 if fails else 1 << 30, world_size=2)
    planner = EmbeddingShardingPlanner(
        topology, proposer=UniformProposer(), storage_reservation=Halves(), stats=stats
    )
    try:
        plan = planner.collective_plan(model(), SHARDERS, dist.group.WORLD)
    except PlannerError as error:
        return f"{error.error_type.name}: {error}"
    assert len(stats.heard) == (dist.get_rank() == 0)
    assert plan.rating is not None
    searched = EmbeddingShardingPlanner(topology, stats=stats).collective_plan(model(), SHARDERS)
    assert len(stats.heard) == 2 * (dist.get_rank() == 0)
    return [
        (name, entry.sharding_type, entry.ranks)
        for found in (plan, searched)
        for name, entry in found.plan["0"].items()
    ], {room.host for room in plan.rating.budgets}


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_plan_together(ranks: RankPool, fails: bool) -> None:
    first, second = ranks(2, plan_together, fails)
    assert first == second
    assert str(first).startswith("INSUFFICIENT_STORAGE") == fails
    if not fails:
        assert first[1] == {1 << 29}
