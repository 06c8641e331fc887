from __future__ import annotations

import pytest
import torch

from recsys.compat.planner.perf_models import NoopPerfModel, NoopStorageModel
from recsys.compat.planner.topology import Perf, Storage, Topology
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


@pytest.mark.parametrize(("device", "fullest"), [("cpu", 60.0), ("cuda", 9.0)])
def test_a_plan_is_as_good_as_its_fullest_rank(device: str, fullest: float) -> None:
    model = NoopStorageModel(Topology(2, device, local_world_size=2))
    shards = [
        Shard([1, 1], [0, 0], storage=Storage(hbm, ddr), rank=rank)
        for hbm, ddr, rank in ((4, 10, 0), (1, 60, 1), (5, 20, 0))
    ]
    weight, module = torch.empty(3, 1), ("", torch.nn.Identity())
    option = ShardingOption("t", weight, module, [1.0], 8, "row_wise", "uniform", "fused", shards)
    assert model.rate([option]) == fullest
    assert model.rate([option, option]) == 2 * fullest
    shards[1].storage = None
    with pytest.raises(ValueError, match=r"have a rank and storage; received .* of table 't'"):
        model.rate([option])
