"""Fingerprints know the tables (TorchRec's do not), and a request hash the job."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recsys import EmbeddingCollection, EmbeddingConfig
from recsys.compat.planner.dry_run import (
    DryRunOrchestrator,
    DryRunRequest,
    PlannerSessionContext,
    ShardingPlanRequest,
    ShardingPlanResult,
)
from recsys.compat.planner.planners import EmbeddingShardingPlanner
from recsys.compat.planner.topology import Topology
from recsys.distributed.default_sharders import get_default_sharders


def model(rows: int) -> nn.Module:
    tables = [EmbeddingConfig(name="a", embedding_dim=4, num_embeddings=rows, feature_names=["f"])]
    return nn.Sequential(EmbeddingCollection(tables=tables, device=torch.device("meta")))


def request(**arguments: Any) -> DryRunRequest:
    given = {
        "model": model(100),
        "sharders": get_default_sharders(),
        "world_size": 2,
        "local_world_size": 2,
        "batch_size": 8,
        "training_framework": "apf",
        "sku_list": ["roomy", "tiny"],
    }
    return DryRunRequest(**{**given, **arguments})


def test_plans_of_other_tables_have_other_fingerprints() -> None:
    prints = [request(model=model(rows)).fingerprint("tiny") for rows in (100, 100, 200)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(("name", "value"), [("batch_size", 16), ("pod_size", 2)])
def test_requests_for_other_jobs_have_other_hashes(name: str, value: int) -> None:
    job = {"model": nn.Identity(), "sharders": [], "world_size": 2, "local_world_size": 2}
    first = ShardingPlanRequest(**job, batch_size=8)
    again = ShardingPlanRequest(**job, batch_size=8)
    assert first.request_hash == again.request_hash
    assert (
        first.request_hash
        != ShardingPlanRequest(**{**job, "batch_size": 8, name: value}).request_hash
    )


class Planner:
    """Plans with the bytes of device memory of each machine type."""

    def __init__(self, hbm_cap: dict[str, int]) -> None:
        self.hbm_cap = hbm_cap
        self.stats: list[Any] = []

    def run(self, sku: str, ctx: PlannerSessionContext, pg: Any = None) -> ShardingPlanResult:
        self.stats.append(ctx.stats)
        assert isinstance(ctx.request.model, nn.Module)
        topology = Topology(
            ctx.request.world_size, "cuda", hbm_cap=self.hbm_cap[sku], ddr_cap=1 << 30
        )
        planner = EmbeddingShardingPlanner(topology, batch_size=ctx.request.batch_size)
        plan = planner.plan(ctx.request.model, ctx.request.sharders)
        return ShardingPlanResult(sku, True, plan, None, 0, 0)


class Reporter:
    def build_stats(self, ctx: PlannerSessionContext, sku: str) -> Any:
        return [sku, *ctx.results]


def test_a_machine_that_is_too_small_has_a_reason_and_the_other_a_plan() -> None:
    asked = request()
    executor = Planner({"roomy": 1 << 34, "tiny": 1})
    context = PlannerSessionContext(asked, {})
    results = DryRunOrchestrator(executor, reporter=Reporter()).plan(asked, context)
    plan = results["roomy"].sharding_plan
    assert plan is not None
    assert list(plan.plan["0"]) == ["a"]
    assert not results["tiny"].success
    assert results["tiny"].request_hash == asked.request_hash
    assert str(results["tiny"].planner_failure_reason).startswith("PlannerError: ")
    assert executor.stats == [["roomy"], ["tiny", "roomy"]]
    assert context.results == results
