"""Loads of parts, counted bag by bag and id by id of a batch that is there."""

from __future__ import annotations

import dataclasses

import pytest

from recsys.distributed.planner import shard_traffic
from recsys.distributed.planner.shard_traffic import ShardTraffic, traffic_of_shard
from recsys.distributed.planner.tables import PlannedTable, ShardSpec
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.stages import input_dist
from recsys.distributed.types import EmbeddingComputeKernel

FUSED = EmbeddingComputeKernel.FUSED
ROWS, RANKS, SAMPLES = 24, 8, 6
TABLE = PlannedTable(
    path="",
    name="t",
    rows=ROWS,
    dim=8,
    element_bytes=4,
    optimizer=None,
    trains=True,
    ids_per_sample=1.0,
    num_features=1,
    constraints=ParameterConstraints(),
    kernels={},
)


def topology(device: str = "cpu", local_size: int = RANKS) -> Topology:
    return Topology(RANKS, device, hbm_cap=1 << 30, ddr_cap=1 << 30, local_world_size=local_size)


def table(length: int, **changes: object) -> PlannedTable:
    return dataclasses.replace(TABLE, ids_per_sample=float(length), **changes)  # type: ignore[arg-type]


def batches(length: int) -> list[list[list[int]]]:
    """Returns, of each rank, the bags of so many ids each; every row comes equally often."""
    ids = iter(range(RANKS * SAMPLES * length))
    return [
        [[next(ids) % ROWS for _ in range(length)] for _ in range(SAMPLES)] for _ in range(RANKS)
    ]


def counted(length: int, parts: int) -> ShardTraffic:
    """Returns the load of the first part, by what every rank sends and gets."""
    bags = [bag for of_rank in batches(length) for bag in of_rank]
    size = ROWS // parts
    own = [[row for row in bag if row < size] for bag in bags]
    num_ids, num_own = sum(map(len, bags)), sum(map(len, own))
    if parts == 1 or 2 * num_ids > parts * len(bags):
        rows = sum(1 for _ in own)  # also of bags without any
        return ShardTraffic(num_own, rows, rows, rows, rows)
    rows = sum(1 for bag in own for _ in bag)
    return ShardTraffic(num_own, 0, rows, rows, rows, by_id=True)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5])
def test_rows_that_return_are_those_that_are_sent(length: int, parts: int) -> None:
    part = ShardSpec(ROWS // parts, 8, FUSED, row_parts=parts)
    assert traffic_of_shard(table(length), part, topology(), SAMPLES) == counted(length, parts)
    # that a GPU adds up, it does for longer bags alone, and if nothing else is sent
    on_gpu = traffic_of_shard(table(length), part, topology("cuda"), SAMPLES)
    assert on_gpu == counted(length, parts)


def test_a_bag_of_several_features_is_one_of_each() -> None:
    two = table(3, num_features=2)  # two bags of each sample, with three ids together
    part = ShardSpec(ROWS // 2, 8, FUSED, row_parts=2)
    assert not traffic_of_shard(two, part, topology(), SAMPLES).by_id
    part = ShardSpec(ROWS // 4, 8, FUSED, row_parts=4)
    load = traffic_of_shard(two, part, topology(), SAMPLES)
    assert (load.by_id, load.rows) == (True, RANKS * SAMPLES * 3 / 4)


def test_ranks_get_the_sums_alone_where_they_are_added_up_on_the_way() -> None:
    alone, part = table(5, is_alone=True), ShardSpec(3, 8, FUSED, row_parts=8)
    load = traffic_of_shard(alone, part, topology("cuda"), SAMPLES)
    assert load == counted(5, 8)._replace(adds_up=True, arriving=SAMPLES)  # its own
    short = traffic_of_shard(table(4, is_alone=True), part, topology("cuda"), SAMPLES)
    assert short == counted(4, 8)
    for other, of in (
        (part, topology("cpu")),
        (ShardSpec(6, 8, FUSED, row_parts=4), topology("cuda")),
    ):
        assert not traffic_of_shard(alone, other, of, SAMPLES).adds_up
    narrow = dataclasses.replace(alone, wire_bytes=(2.0, 4.0))
    assert not traffic_of_shard(narrow, part, topology("cuda"), SAMPLES).adds_up


def test_the_engine_calls_the_same_bags_short() -> None:
    assert shard_traffic._MOST_IDS == input_dist._MAX_IDS


def test_few_ids_return_by_id_where_sums_cross_between_nodes() -> None:
    part, two_nodes = ShardSpec(3, 8, FUSED, row_parts=8), topology("cuda", 4)
    for length, by_id in ((1, True), (2, True), (3, False), (4, False)):
        load = traffic_of_shard(table(length, is_alone=True), part, two_nodes, SAMPLES)
        assert (load.by_id, load.adds_up) == (by_id, not by_id)
        assert traffic_of_shard(
            table(length), part, two_nodes, SAMPLES
        ).by_id  # nothing is added up


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_in_a_node_return_in_two_hops_by_bag(device: str) -> None:
    part = ShardSpec(ROWS // 4, 8, FUSED, in_node=True, row_parts=4)
    load = traffic_of_shard(table(1), part, topology(device, 4), SAMPLES)
    # first its own samples and the samples of its peer in the other node, from four ranks; then its
    # share of its own samples, like each of the four
    first, then = 2 * SAMPLES * 4, RANKS * SAMPLES / 4
    if device == "cuda":
        first = 2 * SAMPLES
    bags = RANKS * SAMPLES
    assert load == ShardTraffic(
        bags / 4, bags, bags, bags, first + then, adds_up=device == "cuda", in_two_hops=True
    )
    # on a single node there is no second one, and they return by id
    assert traffic_of_shard(table(1), part, topology(device, 8), SAMPLES).by_id
    three = ShardSpec(8, 8, FUSED, in_node=True, row_parts=3)  # fewer than the node has ranks
    assert not traffic_of_shard(table(1), three, topology(device, 4), SAMPLES).adds_up


def test_sequences_return_a_row_for_each_id() -> None:
    part = ShardSpec(3, 8, FUSED, row_parts=8)
    load = traffic_of_shard(table(5, is_pooled=False), part, topology("cuda"), SAMPLES)
    ids, bags = RANKS * SAMPLES * 5 / 8, RANKS * SAMPLES
    assert load == ShardTraffic(ids, bags, bags, ids, ids)
