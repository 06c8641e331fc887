from __future__ import annotations

import logging

import pytest
import torch

from recsys.compat.planner.stats import EmbeddingStats, NoopEmbeddingStats
from recsys.compat.planner.storage_reservations import FixedPercentageStorageReservation
from recsys.compat.planner.topology import Perf, Storage, Topology
from recsys.compat.planner.types import Shard, ShardingOption, Stats
from recsys.distributed.types import ShardingPlan


@pytest.mark.parametrize("debug", [True, False])
def test_ranks_and_tables_are_logged(caplog: pytest.LogCaptureFixture, debug: bool) -> None:
    shards = [
        Shard([1, 1], [0, 0], Storage(3 << 20, 1 << 20), Perf(1.0, 0.5, 0.0, 0.0), rank)
        for rank in (1, 1)
    ]
    option = ShardingOption(
        "t", torch.empty(2, 1), ("m", torch.nn.Identity()), [1.0], 8, "row_wise", "uniform",
        "fused", shards,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        EmbeddingStats().log(
            sharding_plan=ShardingPlan({}),
            topology=Topology(2, "cuda", local_world_size=2, hbm_cap=1, ddr_cap=1),
            batch_size=512,
            storage_reservation=FixedPercentageStorageReservation(0.1),
            num_proposals=9,
            num_plans=4,
            run_time=1.25,
            best_plan=[option],
            debug=debug,
        )
    [text] = [record.getMessage() for record in caplog.records]
    assert "4 of 9 proposals fit, 1.25 s" in text
    assert "FixedPercentageStorageReservation" in text
    assert "\n0: 0, 0.0, 0.0, 0.000\n1: 2, 6.0, 2.0, 3.000" in text
    assert ("m.t: row_wise, fused, [1, 1], 6.0, 2.0, 3.000" in text) == debug


def test_a_stats_class_that_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        NoopEmbeddingStats().log(ShardingPlan({}), best_plan=[])
    assert isinstance(NoopEmbeddingStats(), Stats)
    assert not caplog.records
