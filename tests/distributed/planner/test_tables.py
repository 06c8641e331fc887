"""The memory that a table takes, on the device and on the host."""

from __future__ import annotations

import dataclasses

import pytest

from recsys.distributed.planner.tables import Bytes, PlannedTable
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.types import EmbeddingComputeKernel, ShardingType
from recsys.kernels.types import EmbOptimType, OptimizerSpec, RowState
from recsys.optim.specs import TableOptimizer

FUSED = EmbeddingComputeKernel.FUSED
UVM = EmbeddingComputeKernel.FUSED_UVM
CACHED = EmbeddingComputeKernel.FUSED_UVM_CACHING


def table(
    algorithm: EmbOptimType | None,
    kernel: EmbeddingComputeKernel = FUSED,
    *,
    row_state: RowState = RowState.EXACT,
    stochastic_rounding: bool = False,
    trains: bool = True,
    element_bytes: int = 4,
) -> PlannedTable:
    return PlannedTable(
        path="",
        name="t",
        rows=100,
        dim=8,
        element_bytes=element_bytes,
        optimizer=None
        if algorithm is None
        else TableOptimizer(
            spec=OptimizerSpec(algorithm=algorithm, stochastic_rounding=stochastic_rounding),
            row_state=row_state,
        ),
        trains=trains,
        ids_per_sample=1.0,
        num_features=1,
        constraints=ParameterConstraints(),
        kernels={ShardingType.COLUMN_WISE: (kernel,)},
    )


@pytest.mark.parametrize(
    ("algorithm", "state"),
    [
        (EmbOptimType.EXACT_SGD, 0),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 400),
        (EmbOptimType.EXACT_ADAGRAD, 3200),
        (EmbOptimType.ADAM, 6404),  # and a counter of steps
        (EmbOptimType.PARTIAL_ROWWISE_ADAM, 3604),
        (EmbOptimType.PARTIAL_ROWWISE_LAMB, 3604),
    ],
)
def test_weights_and_the_state_of_their_optimizer(algorithm: EmbOptimType, state: int) -> None:
    assert table(algorithm).whole == Bytes(3200 + state)
    assert table(algorithm, element_bytes=2).whole == Bytes(1600 + state)


def test_without_an_optimizer_there_is_a_gradient_if_it_trains() -> None:
    assert table(None).whole == Bytes(6400)
    assert table(None, element_bytes=2).whole == Bytes(3200)
    assert table(None, trains=False).whole == Bytes(3200)


def test_managed_memory_is_the_hosts_but_for_row_states_and_the_cache() -> None:
    assert table(EmbOptimType.EXACT_SGD, UVM).whole == Bytes(0, 3200)
    assert table(EmbOptimType.EXACT_ROWWISE_ADAGRAD, UVM).whole == Bytes(400, 3200)
    assert table(EmbOptimType.PARTIAL_ROWWISE_ADAM, UVM).whole == Bytes(404, 6400)
    cache = 20 * (8 * 4 + 16) + 100 * 4
    assert table(EmbOptimType.EXACT_SGD, CACHED).whole == Bytes(cache, 3200)


@pytest.mark.parametrize(
    "columns",
    [ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD],
    ids=str,
)
def test_columns_are_split_only_where_the_optimizer_can_do_without_whole_rows(
    columns: ShardingType,
) -> None:
    assert table(None).allows(columns, FUSED)
    assert table(EmbOptimType.ADAM, UVM).allows(columns, UVM)
    assert table(EmbOptimType.EXACT_ROWWISE_ADAGRAD).allows(columns, FUSED)
    assert not table(EmbOptimType.EXACT_ROWWISE_ADAGRAD, UVM).allows(columns, UVM)
    assert not table(EmbOptimType.LAMB).allows(columns, FUSED)
    for algorithm in (EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.LAMB):
        assert table(algorithm, UVM, row_state=RowState.PER_SHARD).allows(columns, UVM)


def test_copies_are_kept_only_of_tables_whose_rounding_is_no_matter_of_chance() -> None:
    replicas = ShardingType.DATA_PARALLEL
    assert table(EmbOptimType.EXACT_SGD).allows(replicas, FUSED)
    assert not table(EmbOptimType.EXACT_SGD, stochastic_rounding=True).allows(replicas, FUSED)


def test_an_index_of_hashed_ids_is_state_of_each_row() -> None:
    hashed = dataclasses.replace(
        table(EmbOptimType.EXACT_ROWWISE_ADAGRAD), num_regions=1, index_row_bytes=17
    )
    assert hashed.whole == Bytes(3200 + 400 + 17 * 100)
    assert hashed.state_bytes_per_row(8) == 4  # that an update moves
    assert not hashed.allows(ShardingType.DATA_PARALLEL, EmbeddingComputeKernel.DENSE)
    assert hashed.allows(ShardingType.ROW_WISE, EmbeddingComputeKernel.FUSED)


def test_wide_ids_are_sent_as_8_bytes() -> None:
    narrow = table(None)
    assert narrow.id_bytes == 4
    assert dataclasses.replace(narrow, sends_wide_ids=True).id_bytes == 8
    assert dataclasses.replace(narrow, rows=2**31).id_bytes == 8
