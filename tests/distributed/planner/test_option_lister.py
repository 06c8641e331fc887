"""Options: the allowed ones, their ranks, and their parts, which equal the plan's parts."""

from __future__ import annotations

import dataclasses
import itertools
import random

import torch

from recsys.distributed.placement.layout import IdHash
from recsys.distributed.placement.strategies import STRATEGIES, rects_of_regions
from recsys.distributed.planner.option_lister import OptionLister
from recsys.distributed.planner.options import Reach, TableOption
from recsys.distributed.planner.storage import StorageModel
from recsys.distributed.planner.tables import PlannedTable, ShardSpec
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.types import EmbeddingComputeKernel, ShardingType
from recsys.kernels.hashed.index import geometry
from recsys.optim.specs import TableOptimizer, optimizer_spec
from tests.offenders import check_each

FUSED = EmbeddingComputeKernel.FUSED


def table(rows: int = 1000, dim: int = 128, **constraints: object) -> PlannedTable:
    return PlannedTable(
        path="",
        name="t",
        rows=rows,
        dim=dim,
        element_bytes=4,
        optimizer=None,
        trains=True,
        ids_per_sample=1.0,
        num_features=1,
        constraints=ParameterConstraints(**constraints),  # type: ignore[arg-type]
        kernels=dict.fromkeys(ShardingType, (FUSED,)),
    )


def options(of: PlannedTable, world_size: int = 8, local_size: int = 4) -> list[TableOption]:
    topology = Topology(world_size, "cpu", ddr_cap=1 << 30, local_world_size=local_size)
    return OptionLister(topology, 16).options_of(of)


def test_each_type_has_its_counts_of_ranks() -> None:
    found: dict[str, list[int]] = {}
    for option in options(table()):
        found.setdefault(option.sharding_type.value, []).append(option.num_ranks)
    assert found == {
        "table_wise": [1],
        "column_wise": [2, 3, 4],
        "row_wise": [8, 4, 2],
        "table_row_wise": [4],
        "grid_shard": [8],
        "data_parallel": [8],
    }


def test_tables_that_differ_in_names_alone_share_their_options() -> None:
    lister = OptionLister(Topology(8, "cpu", ddr_cap=1 << 30, local_world_size=4), 16)
    first = table()
    of_first = lister.options_of(first)
    assert lister.options_of(dataclasses.replace(first, name="other", path="else")) is of_first
    adam = TableOptimizer(spec=optimizer_spec(torch.optim.Adam, {"lr": 0.1}))
    for change in (
        {"rows": 2000},
        {"dim": 64},
        {"element_bytes": 2},
        {"optimizer": adam},
        {"trains": False},
        {"ids_per_sample": 3.0},
        {"num_features": 2},
        {"is_pooled": False},
        {"is_weighted": True},
        {"wire_bytes": (2.0, 2.0)},
        {"constraints": ParameterConstraints(min_partition=64)},
        {"kernels": {ShardingType.TABLE_WISE: (FUSED,)}},
    ):
        changed = dataclasses.replace(first, **change)  # type: ignore[arg-type]
        assert lister.options_of(changed) == options(changed) != of_first, change


def test_on_one_rank_a_table_is_whole_unless_asked_otherwise() -> None:
    assert [o.sharding_type.value for o in options(table(), 1, 1)] == ["table_wise"]
    asked = table(sharding_types=["row_wise", "data_parallel"])
    asked = dataclasses.replace(
        asked, kernels={ShardingType.ROW_WISE: (FUSED,), ShardingType.DATA_PARALLEL: (FUSED,)}
    )
    assert [o.num_ranks for o in options(asked, 1, 1)] == [1, 1]


def parts_are_rectangles(size: tuple[int, int]) -> None:
    rows, dim = size
    of = table(rows, dim, min_partition=4)
    storage = StorageModel(Topology(8, "cpu", ddr_cap=1 << 30, local_world_size=4), 16)
    tried = 0
    for option in options(of):
        if option.sharding_type is ShardingType.DATA_PARALLEL:
            continue
        in_node = option.sharding_type in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
        rects = STRATEGIES[option.sharding_type](rows, dim, range(option.num_ranks), 4)
        row_parts = sum(rect.col_start == 0 for rect in rects)
        parts = [ShardSpec(r.num_rows, r.num_cols, FUSED, in_node, row_parts) for r in rects]
        sizes = [storage.shard_storage(of, part).total for part in parts]
        assert sizes == [part.memory for part in option.shards for _ in range(part.count)]
        tried += 1
    assert tried


def test_parts_are_the_rectangles_of_the_plan() -> None:
    sizes = itertools.product([1, 3, 7, 1000, 1001], [4, 36, 64, 100, 128])
    check_each(parts_are_rectangles, sizes)


def test_options_say_where_their_parts_may_go() -> None:
    reach = {option.sharding_type.value: option.reach for option in options(table())}
    assert reach["table_wise"] is reach["column_wise"] is Reach.ANYWHERE
    assert reach["table_row_wise"] is Reach.ONE_NODE
    assert reach["grid_shard"] is Reach.NODES
    assert reach["data_parallel"] is Reach.FIXED
    of_all, of_some, *_ = (o for o in options(table()) if o.sharding_type.value == "row_wise")
    assert (of_all.reach, of_some.reach) == (Reach.FIXED, Reach.ANYWHERE)


def test_a_grid_has_a_part_for_each_rank_of_its_nodes() -> None:
    few = [o for o in options(table(rows=3)) if o.sharding_type is ShardingType.GRID_SHARD]
    assert few == []
    (grid,) = (o for o in options(table()) if o.sharding_type is ShardingType.GRID_SHARD)
    assert [part.count for part in grid.shards] == [4, 4]


def test_hashed_ids_have_the_options_that_the_engine_can_place() -> None:
    rng, refused = random.Random(0), 0
    for _ in range(100):
        rows, regions = geometry(rng.randint(1, 10_000), 2 ** rng.randint(0, 6))
        world_size, node_size = rng.choice([(8, 4), (6, 3), (24, 8), (2, 2), (63, 63)])
        plain = table(rows=rows)
        hashed = dataclasses.replace(plain, num_regions=regions, index_row_bytes=13)
        found = [(o.sharding_type, o.num_ranks) for o in options(hashed, world_size, node_size)]
        expected = []
        for option in options(plain, world_size, node_size):
            kind, ranks = option.sharding_type, range(option.num_ranks)
            rects = []
            if kind is not ShardingType.DATA_PARALLEL:
                rects = STRATEGIES[kind](rows, plain.dim, ranks, node_size)
            id_hash = IdHash(seed=0, num_regions=regions, region_rows=rows // regions)
            try:
                rects_of_regions("t", rects, id_hash)
            except ValueError:
                refused += kind is not ShardingType.DATA_PARALLEL
            else:
                expected.append((kind, option.num_ranks))
        assert found == expected
    assert refused > 20
