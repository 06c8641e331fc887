"""The options that an enumerator lists follow constraints and batch size."""

from __future__ import annotations

from recsys.distributed.planner import Topology
from recsys.distributed.planner.enumerators import EmbeddingEnumerator
from recsys.distributed.types import ShardingType
from tests.distributed.planner.test_planners import SHARDERS, collection, only

TOPOLOGY = Topology(4, "cpu", ddr_cap=1 << 30, local_world_size=2)
MODEL = collection({"a": (1000, 64), "b": (2000, 64)})


def test_lists_every_table_with_its_options() -> None:
    listed = EmbeddingEnumerator(TOPOLOGY, constraints={"b": only("row_wise")}).enumerate(
        MODEL, SHARDERS
    )
    assert [table.name for table, _ in listed] == ["a", "b"]
    (_, of_a), (_, of_b) = listed
    assert {o.sharding_type for o in of_a} > {o.sharding_type for o in of_b}
    assert {o.sharding_type for o in of_b} == {ShardingType.ROW_WISE}


def test_costs_are_those_of_the_batch_size() -> None:
    def cost(batch_size: int | None) -> float:
        ((_, options), _) = EmbeddingEnumerator(TOPOLOGY, batch_size).enumerate(MODEL, SHARDERS)
        return options[0].shards[0].costs[0].total

    assert cost(None) == cost(512) > cost(256)
