"""From the name of a strategy to rectangles, and from a plan to rectangles that were checked."""

from __future__ import annotations

import itertools

import pytest

from recsys.distributed.placement.layout import ROW_PARTS, PlacedTable, Rect
from recsys.distributed.placement.strategies import (
    STRATEGIES,
    check_plan_covers,
    parameter_sharding,
    placement,
    pooling_of_parts,
    rects_of,
    split_evenly,
)
from recsys.distributed.types import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingType,
    ShardMetadata,
)
from recsys.kernels.types import PoolingType
from tests.offenders import check_each

TW, RW, CW = ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE


def corners(rects: tuple[Rect, ...] | list[Rect]) -> list[tuple[int, ...]]:
    return [(r.row_start, r.row_end, r.col_start, r.col_end, r.rank) for r in rects]


@pytest.mark.parametrize(
    ("size", "parts", "multiple", "expected"),
    [
        (10, 1, 1, [(0, 10)]),
        (10, 4, 1, [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (2, 4, 1, [(0, 1), (1, 2)]),
        (9, 4, 1, [(0, 3), (3, 6), (6, 9)]),
        (0, 4, 1, []),
        (10, 2, 4, [(0, 8), (8, 10)]),
        (3, 2, 4, [(0, 3)]),
    ],
)
def test_split_evenly(
    size: int, parts: int, multiple: int, expected: list[tuple[int, int]]
) -> None:
    assert split_evenly(size, parts, multiple) == expected


def covers_the_table_once(case: tuple[ShardingType, int, int, list[int]]) -> None:
    sharding_type, rows, dim, ranks = case
    sharding = parameter_sharding(sharding_type, rows, dim, ranks)
    rects = rects_of("t", rows, dim, sharding, world_size=5)
    # raises if the rectangles leave a gap or overlap
    placed = PlacedTable(name="t", num_rows=rows, dim=dim, features=(0,), group=0, rects=rects)
    assert {r.rank for r in placed.rects} <= set(ranks)


def test_every_strategy_covers_the_table_once() -> None:
    ranks = [[0], [2, 0, 1], [3, 3], [0, 1, 2, 3, 4]]
    cases = itertools.product(STRATEGIES, [1, 2, 7, 8], [1, 4, 6, 32], ranks)
    check_each(covers_the_table_once, cases)


def test_shards_of_each_strategy() -> None:
    def of(sharding_type: ShardingType, ranks: list[int]) -> list[tuple[int, ...]]:
        return corners(rects_of("t", 10, 16, parameter_sharding(sharding_type, 10, 16, ranks), 4))

    assert of(TW, [2]) == [(0, 10, 0, 16, 2)]
    assert of(RW, [0, 1, 2, 3]) == [
        (0, 3, 0, 16, 0),
        (3, 6, 0, 16, 1),
        (6, 9, 0, 16, 2),
        (9, 10, 0, 16, 3),
    ]
    assert of(CW, [3, 1]) == [(0, 10, 0, 8, 3), (0, 10, 8, 16, 1)]
    assert of(CW, [1, 1]) == [(0, 10, 0, 16, 1)], "neighbours on one rank are one shard"
    assert of(CW, [1, 0, 1, 1]) == [(0, 10, 0, 4, 1), (0, 10, 4, 8, 0), (0, 10, 8, 16, 1)]
    assert of(ShardingType.DATA_PARALLEL, [0, 1, 2, 3]) == []


def test_ranks_that_get_nothing_are_not_named() -> None:
    assert parameter_sharding(RW, 2, 8, [0, 1, 2, 3]).ranks == [0, 1]
    assert parameter_sharding(CW, 2, 8, [0, 1, 2, 3]).ranks == [0, 1]


def test_placements_name_the_device() -> None:
    on_cpu = parameter_sharding(TW, 4, 4, [1])
    on_gpu = parameter_sharding(
        TW, 4, 4, [1], device_type="cuda", compute_kernel=EmbeddingComputeKernel.FUSED_UVM
    )
    assert on_cpu.sharding_spec is not None
    assert on_gpu.sharding_spec is not None
    assert on_cpu.sharding_spec.shards[0].placement == "rank:1/cpu"
    assert on_gpu.sharding_spec.shards[0].placement == "rank:1/cuda:1"
    assert on_gpu.compute_kernel == "fused_uvm"


def test_gpus_are_numbered_by_node() -> None:
    assert placement("cuda", 5, 4) == "rank:5/cuda:1"
    assert placement("cpu", 5, 4) == "rank:5/cpu"
    spec = parameter_sharding(
        RW, 4, 4, [0, 1, 2, 3], device_type="cuda", local_size=2
    ).sharding_spec
    assert spec is not None
    assert [s.placement for s in spec.shards] == [f"rank:{r}/cuda:{r % 2}" for r in range(4)]
    assert [s.rank for s in spec.shards] == [0, 1, 2, 3]


@pytest.mark.parametrize(("sharding_type", "ranks"), [(TW, [1]), (CW, [1, 0]), (RW, [0, 1])])
def test_shards_follow_from_type_and_ranks(sharding_type: ShardingType, ranks: list[int]) -> None:
    short = ParameterSharding(sharding_type.value, "fused", ranks)
    full = parameter_sharding(sharding_type, 10, 8, ranks)
    assert rects_of("t", 10, 8, short, 2) == rects_of("t", 10, 8, full, 2)


def test_row_wise_is_on_all_ranks_unless_said() -> None:
    short = ParameterSharding("row_wise", "fused")
    assert corners(rects_of("t", 10, 8, short, 2)) == [(0, 5, 0, 8, 0), (5, 10, 0, 8, 1)]


def test_shards_by_hand_may_be_uneven_and_empty() -> None:
    spec = EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [7, 8], "rank:1/cpu"),
            ShardMetadata([7, 0], [0, 8], "rank:2/cpu"),
            ShardMetadata([7, 0], [3, 8], "rank:0/cpu"),
        ]
    )
    sharding = ParameterSharding("row_wise", "fused", [1, 2, 0], spec)
    assert corners(rects_of("t", 10, 8, sharding, 3)) == [(0, 7, 0, 8, 1), (7, 10, 0, 8, 0)]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'t' on rank 2, .*ranks \(0\.\.1\)"):
        rects_of("t", 10, 8, parameter_sharding(TW, 10, 8, [2]), 2)
    with pytest.raises(ValueError, match=r"table 't' \(table_wise\) must name its"):
        rects_of("t", 10, 8, ParameterSharding("table_wise", "fused"), 2)


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        (ShardingType.TABLE_ROW_WISE, [2, 3], [((0, 5), (0, 8), 2), ((5, 10), (0, 8), 3)]),
        (ShardingType.TABLE_COLUMN_WISE, [2, 3], [((0, 10), (0, 4), 2), ((0, 10), (4, 8), 3)]),
        (
            ShardingType.GRID_SHARD,
            [0, 1, 2, 3],
            [
                ((0, 5), (0, 4), 0),
                ((5, 10), (0, 4), 1),
                ((0, 5), (4, 8), 2),
                ((5, 10), (4, 8), 3),
            ],
        ),
    ],
)
def test_strategies_of_several_nodes(
    kind: ShardingType, ranks: list[int], expected: list[object]
) -> None:
    placed = parameter_sharding(kind, 10, 8, ranks, local_size=2)
    found = [
        ((r.row_start, r.row_end), (r.col_start, r.col_end), r.rank)
        for r in rects_of("t", 10, 8, placed, 4)
    ]
    assert sorted(found, key=lambda r: r[2]) == expected


def test_a_plan_names_every_table_and_no_other() -> None:
    plan = EmbeddingModuleShardingPlan({name: parameter_sharding(TW, 1, 1, [0]) for name in "ab"})
    check_plan_covers("ebc", plan, ["b", "a"])
    with pytest.raises(ValueError, match=r"missing: \['c'\], not .*module: \['b'\]"):
        check_plan_covers("ebc", plan, ["a", "c"])


def test_a_pooling_without_a_rule_for_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ROW_PARTS, PoolingType.MEAN)
    columns = [Rect(row_start=0, row_end=4, col_start=c, col_end=c + 4, rank=0) for c in (0, 4)]
    assert pooling_of_parts(PoolingType.MEAN, columns) is PoolingType.MEAN
    rows = [Rect(row_start=r, row_end=r + 2, col_start=0, col_end=8, rank=0) for r in (0, 2)]
    with pytest.raises(ValueError, match=r"one of \['SUM', 'NONE'\]; received PoolingType.MEAN"):
        pooling_of_parts(PoolingType.MEAN, rows)
