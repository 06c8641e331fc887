"""Costs of shards: each term against its formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from recsys.distributed.planner.costs import Cost, CostModel
from recsys.distributed.planner.measured import CollectivePoint, LookupPoint
from recsys.distributed.planner.tables import PlannedTable, ShardSpec
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.types import EmbeddingComputeKernel
from recsys.kernels.types import EmbOptimType, OptimizerSpec, RowState
from recsys.optim.specs import TableOptimizer

FUSED = EmbeddingComputeKernel.FUSED
UVM = EmbeddingComputeKernel.FUSED_UVM
TABLE = PlannedTable(
    path="",
    name="t",
    rows=1000,
    dim=64,
    element_bytes=4,
    optimizer=TableOptimizer(spec=OptimizerSpec(algorithm=EmbOptimType.SGD)),
    trains=True,
    ids_per_sample=3.0,
    num_features=2,
    constraints=ParameterConstraints(),
    kernels={},
)
LONG = dataclasses.replace(TABLE, ids_per_sample=100.0)
"""Its bags are longer than there are ranks."""
BATCH = 16


def topology(world_size: int, local_size: int | None = None) -> Topology:
    return Topology(
        world_size,
        "cuda",
        hbm_cap=1 << 30,
        local_world_size=local_size,
        hbm_mem_bw=1e6,
        ddr_mem_bw=1e5,
        intra_host_bw=1e4,
        inter_host_bw=1e3,
    )


def on_host(of: Topology) -> Topology:
    """Returns the same machine without GPUs."""
    return Topology(
        of.world_size,
        "cpu",
        ddr_cap=1 << 30,
        local_world_size=of.local_world_size,
        ddr_mem_bw=1e5,
        intra_host_bw=1e4,
        inter_host_bw=1e3,
    )


def part(
    of: Topology,
    rows: int = 1000,
    cols: int = 64,
    table: PlannedTable = TABLE,
    *,
    in_node: bool = False,
) -> Cost:
    shape = ShardSpec(rows, cols, FUSED, in_node, table.rows // rows)
    return CostModel(of, BATCH).shard_cost(table, shape)


def test_forward_reads_the_rows_of_all_ids() -> None:
    ids = 4 * BATCH * 3
    assert part(topology(4)).forward == pytest.approx(ids * 64 * 4 / 1e6)
    assert part(topology(4), cols=16).forward == pytest.approx(ids * 16 * 4 / 1e6)
    assert part(topology(4), rows=250).forward == pytest.approx(ids / 4 * 64 * 4 / 1e6)


def test_a_part_of_the_rows_is_looked_up_at_its_own_pooling() -> None:
    points = [
        LookupPoint(dim=64, pooling=pooling, forward_bw=bw, backward_bw=bw, split_bw=bw)
        for pooling, bw in ((1.0, 1e5), (4.0, 8e5))
    ]
    four = dataclasses.replace(TABLE, ids_per_sample=8.0)  # per bag, of two features
    measured = topology(4).with_measurements(lookup=points)
    ids = 4 * BATCH * 8
    assert part(measured, table=four).forward == pytest.approx(ids * 64 * 4 / 8e5)
    assert part(measured, rows=250, table=four).forward == pytest.approx(ids / 4 * 64 * 4 / 1e5)


def test_host_memory_is_read_at_its_own_speed() -> None:
    cost = CostModel(topology(1), BATCH).shard_cost(TABLE, ShardSpec(1000, 64, UVM))
    assert cost.forward == pytest.approx(BATCH * 3 * 64 * 4 / 1e5)


def test_what_a_cache_lacks_is_fetched_and_others_go_back() -> None:
    caching = EmbeddingComputeKernel.FUSED_UVM_CACHING
    rare = dataclasses.replace(TABLE, rows=10**9)  # every id is another row
    cost = CostModel(topology(1), BATCH).shard_cost(rare, ShardSpec(10**9, 64, caching))
    missed = 0.8 * BATCH * 3  # a fifth of the rows is cached
    assert cost.prefetch == pytest.approx(2 * missed * 64 * 4 / 1e5)
    in_memory = CostModel(topology(1), BATCH).shard_cost(rare, ShardSpec(10**9, 64, FUSED))
    assert cost.forward == in_memory.forward
    assert in_memory.prefetch == 0
    one_row = dataclasses.replace(TABLE, rows=1)  # fetched once at most
    cost = CostModel(topology(1), BATCH).shard_cost(one_row, ShardSpec(1, 64, caching))
    assert cost.prefetch == pytest.approx(2 * 64 * 4 / 1e5)


def test_the_total_is_all_of_it() -> None:
    parts = {part.name: 2.0**i for i, part in enumerate(dataclasses.fields(Cost))}
    assert Cost(**parts).total == sum(parts.values())


def test_backward_touches_as_many_rows_as_draws_do() -> None:
    draws = torch.randint(1000, (500, BATCH * 3), generator=torch.Generator().manual_seed(0))
    touched = sum(len(draw.unique()) for draw in draws) / len(draws)
    gradients = BATCH * 3 * 64 * 4
    expected = (gradients + 2 * touched * 64 * 4) / 1e6
    assert part(topology(1)).backward == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "state"),
    [
        (EmbOptimType.SGD, 0),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 4),
        (EmbOptimType.EXACT_ADAGRAD, 256),
        (EmbOptimType.ADAM, 512),
    ],
)
def test_state_is_read_and_written(algorithm: EmbOptimType, state: int) -> None:
    optimizer = TableOptimizer(spec=OptimizerSpec(algorithm=algorithm))
    table = dataclasses.replace(TABLE, optimizer=optimizer, rows=1, ids_per_sample=100.0)
    rows = part(topology(1), rows=1, table=table).backward * 1e6 - BATCH * 100 * 64 * 4
    assert rows == pytest.approx(2 * (256 + state))


def test_a_frozen_table_has_no_backward() -> None:
    frozen = dataclasses.replace(TABLE, trains=False, optimizer=None)
    assert part(topology(2), table=frozen).backward == 0
    assert CostModel(topology(2), BATCH).replica_cost(frozen, FUSED).update == 0


def test_one_rank_exchanges_nothing() -> None:
    cost = part(topology(1))
    assert cost.input == cost.output == cost.update == 0
    assert cost.total == pytest.approx(cost.forward + cost.backward)


def placed(of: Topology, values: float) -> float:
    """Values are read and written once more on either way."""
    return 2 * 2 * values * 4 / of.hardware[0].hbm_mem_bw


def test_embeddings_leave_and_gradients_arrive() -> None:
    values = 4 * BATCH * 2 * 64
    once = placed(topology(4), values)
    pooled = part(topology(4)).output
    assert pooled - once == pytest.approx(2 * values * 4 * 3 / 4 / 1e4)
    sequence = dataclasses.replace(TABLE, is_pooled=False)
    assert part(topology(4), table=sequence).output == pytest.approx(pooled * 3 / 2)
    halves = dataclasses.replace(TABLE, wire_bytes=(2.0, 2.0))
    assert part(topology(4), table=halves).output - once == pytest.approx((pooled - once) / 2)
    # a part of the rows sends its share of every sum
    assert part(topology(4), rows=250, table=LONG).output == pytest.approx(pooled)


def test_ids_arrive_with_their_weights() -> None:
    ids, bags = 4 * BATCH * 3, 4 * BATCH * 2
    sent, sorted_ids = (ids + bags) * 4 * 3 / 4 / 1e4, 2 * ids * 8 / 1e6
    assert part(topology(4)).input == pytest.approx(sent + sorted_ids)
    weighted = dataclasses.replace(TABLE, is_weighted=True)
    sent, sorted_ids = (2 * ids + bags) * 4 * 3 / 4 / 1e4, 2 * ids * 12 / 1e6
    assert part(topology(4), table=weighted).input == pytest.approx(sent + sorted_ids)


def test_what_crosses_between_nodes_takes_the_slow_link() -> None:
    values = 8 * BATCH * 2 * 64
    once = placed(topology(8), values)
    two_ways = 2 * values * 4
    assert part(topology(8, 2)).output - once == pytest.approx(two_ways * 6 / 8 / 1e3)
    assert part(topology(8, 8)).output - once == pytest.approx(two_ways * 7 / 8 / 1e4)


def test_sums_of_a_node_cross_once() -> None:
    values = 8 * BATCH * 2 * 64
    two_ways = 2 * values * 4
    inside, across = two_ways * 3 / 4 / 1e4, two_ways * 4 / 8 / 4 / 1e3
    on_gpu = part(topology(8, 4), rows=250, in_node=True, table=LONG).output
    # summed on the way: no more than the sums arrives, in the node and behind it
    assert on_gpu - placed(topology(8), 2 * values / 4) == pytest.approx(inside + across)
    on_cpu = part(on_host(topology(8, 4)), rows=250, in_node=True, table=LONG).output
    both = placed(topology(8), values * 5 / 4) * 1e6 / 1e5  # in host memory
    assert on_cpu - both == pytest.approx(inside + across)
    assert on_gpu < part(topology(8, 4), rows=250, table=LONG).output / 2
    # short bags are added up as well
    assert part(topology(8, 4), rows=250, in_node=True).output == pytest.approx(on_gpu)


def test_rows_of_short_bags_return_by_id() -> None:
    ids = 4 * BATCH * 3 / 4  # that reach a quarter of the rows: 3 where 4 parts have 8 bags
    cost = part(topology(4), rows=250)
    moved = 2 * ids * 64 * 4 * 3 / 4 / 1e4
    # as looked up, in the order of the ranks, and in the output
    assert cost.output == pytest.approx(moved + 2 * placed(topology(4), ids * 64))
    assert cost.input == pytest.approx(ids * 4 * 3 / 4 / 1e4 + 2 * ids * 8 / 1e6)
    # on one id more for two samples they do not
    threshold = dataclasses.replace(TABLE, ids_per_sample=4.0)
    more = dataclasses.replace(TABLE, ids_per_sample=4.5)
    ids, bags = 4 * BATCH * 4 / 4, 4 * BATCH * 2
    moved = 2 * 64 * 4 * 3 / 4 / 1e4
    assert part(topology(4), rows=250, table=threshold).output == pytest.approx(
        ids * moved + 2 * placed(topology(4), ids * 64)
    )
    assert part(topology(4), rows=250, table=more).output == pytest.approx(
        bags * moved + placed(topology(4), bags * 64)
    )
    halves = dataclasses.replace(TABLE, wire_bytes=(2.0, 2.0))  # also in a narrow format
    saved = cost.output - part(topology(4), rows=250, table=halves).output
    assert saved == pytest.approx(ids * 3 / 4 * moved / 2)
    # each id is a bag of its own in the lookup
    points = [
        LookupPoint(dim=64, pooling=pooling, forward_bw=bw, backward_bw=bw, split_bw=bw)
        for pooling, bw in ((0.25, 8e5), (1.0, 1e5))
    ]
    many = dataclasses.replace(TABLE, rows=64_000, ids_per_sample=32.0)  # 16 for each of 64 parts
    measured = topology(64).with_measurements(lookup=points)
    found = part(measured, rows=1000, table=many).forward
    assert found == pytest.approx(64 * BATCH * 32 / 64 * 64 * 4 / 1e5)


@pytest.mark.parametrize("local_size", [2, 4])
def test_sums_of_all_ranks_are_added_up_on_the_way(local_size: int) -> None:
    alone = dataclasses.replace(LONG, is_alone=True)
    of = topology(4, local_size)
    values = 4 * BATCH * 2 * 64
    ring = 2 * values * 4 * 3 / 4
    # it crosses each node's links with what its ranks have added up
    moved = ring / 1e4 if local_size == 4 else ring / local_size / 1e3
    cost = part(of, rows=250, table=alone)
    assert cost.output == pytest.approx(moved + placed(of, values / 4))
    for other, table in (
        (of, dataclasses.replace(alone, is_alone=False)),
        (of, dataclasses.replace(alone, wire_bytes=(4.0, 2.0))),
        (on_host(of), alone),
    ):
        there_and_back = values * sum(table.wire_bytes)
        crossing = there_and_back * (4 - local_size) / 4 / 1e3
        moved = crossing or there_and_back * 3 / 4 / 1e4
        memory = placed(of, values) * 1e6 / other.hardware[0].memory_bw
        assert part(other, rows=250, table=table).output == pytest.approx(moved + memory)
    # on two of the ranks, which the others only receive from
    assert part(of, rows=500, table=alone) == part(of, rows=500, table=LONG)


def test_what_an_all_reduce_was_measured_to_take_holds_for_its_halves() -> None:
    alone = dataclasses.replace(LONG, is_alone=True)
    wires = [
        CollectivePoint(kind="all_reduce", world_size=4, bytes=n, ms=n / 1e3) for n in (1, 4096)
    ]
    measured = topology(4).with_measurements(collectives=wires)
    values = 4 * BATCH * 2 * 64
    found = part(measured, rows=250, table=alone).output
    assert found == pytest.approx(values * 4 / 1e3 + placed(measured, values / 4))


def test_replicas_add_up_their_gradients() -> None:
    size = 1000 * 64 * 4
    replica = CostModel(topology(4), BATCH).replica_cost(TABLE, FUSED)
    assert replica.update == pytest.approx(2 * size * 3 / 4 / 1e4 + 9 * size / 1e6)
    assert replica.forward == pytest.approx(BATCH * 3 * 64 * 4 / 1e6)
    assert replica.input == 0
    assert replica.output == pytest.approx(placed(topology(4), BATCH * 2 * 64))


def test_columns_of_row_wise_adagrad_are_sorted_and_added_up() -> None:
    spec = OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    table = dataclasses.replace(TABLE, rows=1, optimizer=TableOptimizer(spec=spec))
    whole, half = (part(topology(4), rows=1, cols=cols, table=table) for cols in (64, 32))
    ids = 4 * BATCH * 3
    gradients = ids * 32 * 4
    pairs = ids * 2 * 4 * 8  # read and written in four passes
    row = 2 * (32 * 4 + 4)
    assert half.backward == pytest.approx((2 * gradients + pairs + row) / 1e6)
    assert half.update == pytest.approx(2 * 4 * 3 / 4 / 1e4)  # one float there and back
    assert whole.update == 0
    own = dataclasses.replace(
        table, optimizer=TableOptimizer(spec=spec, row_state=RowState.PER_SHARD)
    )
    assert part(topology(4), rows=1, cols=32, table=own).update == 0


def test_measured_speeds_take_the_place_of_bandwidths() -> None:
    lookup = LookupPoint(dim=64, pooling=1.5, forward_bw=3e5, backward_bw=2e5, split_bw=1e5)
    wires = [
        CollectivePoint(kind="all_to_all", world_size=4, bytes=n, ms=n / 1e3) for n in (1, 4096)
    ]
    plain = topology(4)
    measured = plain.with_measurements(lookup=[lookup], collectives=wires)
    before, after = part(plain), part(measured)
    assert after.forward == pytest.approx(before.forward * 1e6 / 3e5)
    assert after.backward == pytest.approx(before.backward * 1e6 / 2e5)
    values = 4 * BATCH * 2 * 64
    assert after.output - placed(plain, values) == pytest.approx(2 * values * 4 / 1e3)


def test_hashed_ids_are_mapped_to_rows_where_they_are_looked_up() -> None:
    hashed = dataclasses.replace(TABLE, num_regions=8)
    for of in (topology(1), topology(4), on_host(topology(4))):
        bandwidth = 1e6 if of.compute_device == "cuda" else 1e5
        for cols, rows in ((64, 1000), (16, 1000), (64, 250)):
            ids = of.world_size * BATCH * 3 * rows / 1000
            more = part(of, rows, cols, hashed).forward - part(of, rows, cols).forward
            assert more == pytest.approx(ids * 3 * 64 / bandwidth)


def test_wide_ids_arrive_as_8_bytes_with_their_lengths_and_weights() -> None:
    wide = dataclasses.replace(TABLE, sends_wide_ids=True, is_weighted=True)
    ids, bags = 4 * BATCH * 3, 4 * BATCH * 2
    sent, sorted_ids = (2 * ids + bags) * 8 * 3 / 4 / 1e4, 2 * ids * 12 / 1e6
    assert part(topology(4), table=wide).input == pytest.approx(sent + sorted_ids)
