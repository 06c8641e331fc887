from __future__ import annotations

import pytest
import torch

from recsys.compat.planner.perf_models import NoopPerfModel
from recsys.compat.planner.topology import Perf, Topology
from recsys.compat.planner.types import Shard, ShardingOption


def test_a_plan_is_as_good_as_its_slowest_rank() -> None:
    model = NoopPerfModel(Topology(3, "cpu", local_world_size=3))
    shards = [
        Shard([1, 1], [0, 0], perf=Perf(ms, 0.0, 1.0, 0.0), rank=rank)
        for ms, rank in ((1.0, 0), (5.0, 2), (4.0, 0))
    ]
    weight, module = torch.empty(3, 1), ("", torch.nn.Identity())
    option = ShardingOption("t", weight, module, [1.0], 8, "row_wise", "uniform", "fused", shards)
    assert model.rate([option]) == 7.0
    assert model.rate([option, option]) == 14.0
    assert model.rate([]) == 0.0
    shards[1].rank = None
    with pytest.raises(ValueError, match=r"have a rank.*rank: None of table 't'"):
        model.rate([option])
