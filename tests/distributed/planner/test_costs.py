"""What parts of tables cost: each term by what is known of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from recsys.distributed.planner.costs import Cost, CostModel
from recsys.distributed.planner.tables import PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.types import EmbeddingComputeKernel
from recsys.kernels.types import EmbOptimType, OptimizerSpec
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


def part(
    of: Topology,
    rows: int = 1000,
    cols: int = 64,
    table: PlannedTable = TABLE,
    *,
    in_node: bool = False,
) -> Cost:
    return CostModel(of, BATCH).of_part(table, rows, cols, FUSED, in_node=in_node)


def test_forward_reads_the_rows_of_all_ids() -> None:
    ids = 4 * BATCH * 3
    assert part(topology(4)).forward == pytest.approx(ids * 64 * 4 / 1e6)
    assert part(topology(4), cols=16).forward == pytest.approx(ids * 16 * 4 / 1e6)
    assert part(topology(4), rows=250).forward == pytest.approx(ids / 4 * 64 * 4 / 1e6)


def test_host_memory_is_read_at_its_own_speed() -> None:
    cost = CostModel(topology(1), BATCH).of_part(TABLE, 1000, 64, UVM)
    assert cost.forward == pytest.approx(BATCH * 3 * 64 * 4 / 1e5)


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
    assert CostModel(topology(2), BATCH).of_replica(frozen, FUSED).update == 0


def test_one_rank_exchanges_nothing() -> None:
    cost = part(topology(1))
    assert cost.input == cost.output == cost.update == 0
    assert cost.total == pytest.approx(cost.forward + cost.backward)


def test_embeddings_leave_and_gradients_arrive() -> None:
    bags = 4 * BATCH * 2
    pooled = part(topology(4)).output
    assert pooled == pytest.approx(2 * bags * 64 * 4 * 3 / 4 / 1e4)
    sequence = dataclasses.replace(TABLE, is_pooled=False)
    assert part(topology(4), table=sequence).output == pytest.approx(pooled * 3 / 2)
    halves = dataclasses.replace(TABLE, wire_bytes=(2.0, 2.0))
    assert part(topology(4), table=halves).output == pytest.approx(pooled / 2)
    # a part of the rows sends its share of every sum
    assert part(topology(4), rows=250).output == pytest.approx(pooled)


def test_ids_arrive_with_their_weights() -> None:
    ids, bags = 4 * BATCH * 3, 4 * BATCH * 2
    assert part(topology(4)).input == pytest.approx((ids + bags) * 4 * 3 / 4 / 1e4)
    weighted = dataclasses.replace(TABLE, is_weighted=True)
    assert part(topology(4), table=weighted).input == pytest.approx(
        (2 * ids + bags) * 4 * 3 / 4 / 1e4
    )


def test_what_crosses_between_nodes_takes_the_slow_link() -> None:
    bytes_out = 2 * 8 * BATCH * 2 * 64 * 4
    assert part(topology(8, 2)).output == pytest.approx(bytes_out * 6 / 8 / 1e3)
    assert part(topology(8, 8)).output == pytest.approx(bytes_out * 7 / 8 / 1e4)


def test_sums_of_a_node_cross_once() -> None:
    bytes_out = 2 * 8 * BATCH * 2 * 64 * 4
    two_hops = part(topology(8, 4), rows=250, in_node=True).output
    assert two_hops == pytest.approx(bytes_out * 3 / 4 / 1e4 + bytes_out * 4 / 8 / 4 / 1e3)
    assert two_hops < part(topology(8, 4), rows=250).output / 2


def test_replicas_add_up_their_gradients() -> None:
    size = 1000 * 64 * 4
    replica = CostModel(topology(4), BATCH).of_replica(TABLE, FUSED)
    assert replica.update == pytest.approx(2 * size * 3 / 4 / 1e4 + 5 * size / 1e6)
    assert replica.forward == pytest.approx(BATCH * 3 * 64 * 4 / 1e6)
    assert replica.input == replica.output == 0
