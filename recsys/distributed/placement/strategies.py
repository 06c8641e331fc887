"""Rectangles of sharding strategies, and checked rectangles of a plan's shards.

A sharding strategy is a function that returns rectangles. The stages of a batch do not know
strategies. Strategy names occur in plans written by hand (`sharding_plan`), in plan files
(`plan_json`) and in proposals of the planner (`option_lister`, `tables`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from recsys.base.arguments import whole, whole_list
from recsys.base.checked import checked
from recsys.distributed.placement.file_checks import nearest
from recsys.distributed.placement.layout import ROW_PARTS, IdHash, Rect
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingType,
    ShardMetadata,
)
from recsys.kernels.types import PoolingType

if TYPE_CHECKING:
    from recsys.distributed.placement.plan_json import ShardingPlan

MIN_COLUMNS = 4  # FBGEMM's kernels read rows in groups of four columns


def even_block(size: int, parts: int, multiple: int = 1) -> int:
    """Return the size of the blocks of `split_evenly`, except the last.

    Example:
        >>> even_block(10, 4)
        3
    """
    block = -(-size // parts)
    return max(-(-block // multiple) * multiple, 1)


def split_evenly(size: int, parts: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Split `0..size` into blocks of equal size, the last ones smaller; empty blocks are omitted.

    Args:
        size: Size to split.
        parts: Number of blocks.
        multiple: Divisor of every block's size, except the last.

    Returns:
        `(start, end)` per block, at most `parts` of them.

    Example:
        >>> split_evenly(10, 4)
        [(0, 3), (3, 6), (6, 9), (9, 10)]
        >>> split_evenly(24, 4, multiple=4)
        [(0, 8), (8, 16), (16, 24)]
    """
    block = even_block(size, parts, multiple)
    return [(start, min(start + block, size)) for start in range(0, size, block)]


def split_by_sizes(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return `(start, end)` of consecutive blocks of the given sizes.

    Example:
        >>> split_by_sizes([4, 0, 2])
        [(0, 4), (4, 4), (4, 6)]
    """
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def grid_of(
    rows: Sequence[tuple[int, int]], columns: Sequence[tuple[int, int]], ranks: Sequence[int]
) -> list[Rect]:
    """Return a rectangle per block of columns and block of rows in it, each on the next rank.

    Example:
        >>> [(rect.row_start, rect.rank) for rect in grid_of([(0, 5), (5, 10)], [(0, 8)], [3, 1])]
        [(0, 3), (5, 1)]
    """
    cells = ((row, column) for column in columns for row in rows)
    return [
        Rect(row_start=top, row_end=bottom, col_start=left, col_end=right, rank=rank)
        # not strict: small tables have fewer blocks than ranks
        for ((top, bottom), (left, right)), rank in zip(cells, ranks, strict=False)
    ]


def _table_wise(rows: int, dim: int, ranks: Sequence[int], node_size: int) -> list[Rect]:
    return grid_of([(0, rows)], [(0, dim)], ranks)


def _row_wise(rows: int, dim: int, ranks: Sequence[int], node_size: int) -> list[Rect]:
    return grid_of(split_evenly(rows, len(ranks)), [(0, dim)], ranks)


def _column_wise(rows: int, dim: int, ranks: Sequence[int], node_size: int) -> list[Rect]:
    return grid_of([(0, rows)], split_evenly(dim, len(ranks), MIN_COLUMNS), ranks)


def _grid(rows: int, dim: int, ranks: Sequence[int], node_size: int) -> list[Rect]:
    nodes = [ranks[i : i + node_size] for i in range(0, len(ranks), node_size)]
    columns = split_evenly(dim, len(nodes), MIN_COLUMNS)
    return [
        rect
        for block, node in zip(columns, nodes, strict=False)
        for rect in grid_of(split_evenly(rows, len(node)), [block], node)
    ]


STRATEGIES: Mapping[ShardingType, Callable[[int, int, Sequence[int], int], list[Rect]]] = {
    ShardingType.TABLE_WISE: _table_wise,
    ShardingType.ROW_WISE: _row_wise,
    ShardingType.COLUMN_WISE: _column_wise,
    ShardingType.TABLE_ROW_WISE: _row_wise,
    ShardingType.TABLE_COLUMN_WISE: _column_wise,
    ShardingType.GRID_SHARD: _grid,
}
"""Function from (rows, columns, owning ranks, ranks per node) to rectangles, by strategy."""


def parameter_sharding(
    sharding_type: ShardingType,
    num_rows: int,
    dim: int,
    ranks: Sequence[int],
    *,
    device_type: str = "cpu",
    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
    local_size: int | None = None,
) -> ParameterSharding:
    """Return the placement of one table.

    Args:
        sharding_type: The strategy.
        num_rows: Rows of the table.
        dim: Columns of the table.
        ranks: Owners in the order of their shards: all ranks for a data-parallel table, the ranks
            of one node for `table_row_wise` and `table_column_wise`, of some nodes, node by node,
            for `grid_shard`.
        device_type: Device type of the placements, "cpu" or "cuda".
        compute_kernel: Compute kernel of the table.
        local_size: Ranks per node, which number their GPUs from 0; None for a single node.

    Example:
        >>> placed = parameter_sharding(ShardingType.ROW_WISE, 10, 8, [0, 1])
        >>> [shard.shard_sizes for shard in placed.sharding_spec.shards]
        [[5, 8], [5, 8]]
    """
    if sharding_type is ShardingType.DATA_PARALLEL:
        return ParameterSharding(sharding_type.value, compute_kernel.value, list(ranks), None)
    local_size = local_size or max(ranks) + 1
    rects = STRATEGIES[sharding_type](num_rows, dim, ranks, local_size)
    placements = [_placement(device_type, rect.rank, local_size) for rect in rects]
    return sharding_of_rects(sharding_type, rects, placements, compute_kernel)


def sharding_of_rects(
    sharding_type: ShardingType,
    rects: Sequence[Rect],
    placements: Sequence[str],
    compute_kernel: EmbeddingComputeKernel,
) -> ParameterSharding:
    """Return a plan's entry for rectangles, each with its `placement`.

    Example:
        >>> rects = grid_of(split_by_sizes([7, 3]), [(0, 8)], [0, 1])
        >>> kernel = EmbeddingComputeKernel.FUSED
        >>> cpus = ["rank:0/cpu", "rank:1/cpu"]
        >>> sharding_of_rects(ShardingType.ROW_WISE, rects, cpus, kernel).ranks
        [0, 1]
    """
    shards = [
        ShardMetadata([*rect.offsets], [*rect.shape], place)
        for rect, place in zip(rects, placements, strict=True)
    ]
    ranks = [rect.rank for rect in rects]
    spec = EnumerableShardingSpec(shards)
    return ParameterSharding(sharding_type.value, compute_kernel.value, ranks, spec)


@checked
def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Return rank and device of a rank's shards, in the format of plans.

    Args:
        compute_device: "cpu" or "cuda".
        rank: Rank among all ranks.
        local_size: Ranks per node; every node numbers its GPUs from 0.

    Example:
        >>> placement("cuda", rank=5, local_size=4)
        'rank:5/cuda:1'
    """
    whole("placement: local_size", local_size)
    return placement_helper(compute_device, rank % local_size, rank)


_placement = functools.lru_cache(1 << 14)(placement)  # a plan repeats it for each table


@checked
def placement_helper(device_type: str, index: int = 0, rank: int = 0) -> str:
    """Return rank and device of a rank's shards, in the format of plans; see `placement`.

    Args:
        device_type: "cpu" or "cuda".
        index: Number of the GPU on its node.
        rank: Rank among all ranks.

    Example:
        >>> placement_helper("cuda", index=1, rank=5), placement_helper("cpu", rank=5)
        ('rank:5/cuda:1', 'rank:5/cpu')
    """
    whole("placement_helper: index", index, least=0)
    whole("placement_helper: rank", rank, least=0)
    device = f"cuda:{index}" if device_type == "cuda" else device_type
    return f"rank:{rank}/{device}"


def rects_of(
    name: str,
    num_rows: int,
    dim: int,
    sharding: ParameterSharding,
    world_size: int,
    node_size: int | None = None,
) -> tuple[Rect, ...]:
    """Return the rectangles of a table in a plan, with neighbors merged; empty if replicated.

    Args:
        name: Name of the table.
        num_rows: Rows of the table.
        dim: Columns of the table.
        sharding: The plan's entry. Without shards they follow from its type and ranks.
        world_size: Number of ranks.
        node_size: Ranks per node; None for a single node.

    Raises:
        ValueError: A rank does not exist, a shard does not have two offsets and two sizes, or the
            plan has neither shards nor ranks. (`build_layout` finds gaps and overlaps.)
        TypeError: An offset, a size or a rank is not a whole number.
    """
    sharding_type = ShardingType(sharding.sharding_type)
    if sharding_type is ShardingType.DATA_PARALLEL:
        return ()
    if sharding.sharding_spec is not None:
        rects = [_rect_of(name, shard) for shard in sharding.sharding_spec.shards]
    else:
        where = f"The ranks of table {name!r}"
        ranks = None if sharding.ranks is None else whole_list(where, sharding.ranks)
        if not ranks:
            if sharding_type is not ShardingType.ROW_WISE:
                raise ValueError(
                    f"The plan for table {name!r} ({sharding_type.value}) must name its ranks or "
                    "its shards; received neither. Set ParameterSharding.ranks."
                )
            ranks = list(range(world_size))
        rects = STRATEGIES[sharding_type](num_rows, dim, ranks, node_size or world_size)
    for rect in rects:
        if not 0 <= rect.rank < world_size:
            raise ValueError(
                f"The plan places a shard of table {name!r} on rank {rect.rank}, but there are "
                f"{world_size} ranks (0..{world_size - 1}). Make the plan for this world size."
            )
    # a plan may list an empty shard for each rank without rows
    kept = [rect for rect in rects if rect.num_rows > 0 and rect.num_cols > 0]
    return tuple(_merge_neighbors(kept))


def rects_of_regions(name: str, rects: Sequence[Rect], hashed: IdHash) -> tuple[Rect, ...]:
    """Return the rectangles of a table with hashed ids: rows move to the nearest region's edge.

    Args:
        name: Name of the table.
        rects: Rectangles of its plan.
        hashed: Regions of the table.

    Raises:
        ValueError: The table is replicated, or has fewer regions than row blocks.
    """
    if not rects:
        raise ValueError(
            f"Table {name!r} with HashedIds must not be data_parallel: its replicas would give "
            "their rows to different ids. Use another sharding type."
        )
    rows = {row for rect in rects for row in (rect.row_start, rect.row_end)}
    edge = region_edges(rows, hashed.region_rows)
    if not has_region_for_each(edge):
        raise ValueError(
            f"Table {name!r} with HashedIds must have a region for each of its {len(edge) - 1} row "
            f"blocks; received {hashed.num_regions} regions. Use fewer ranks, or more rows and "
            "HashedIds.num_regions."
        )
    return tuple(
        replace(rect, row_start=edge[rect.row_start], row_end=edge[rect.row_end]) for rect in rects
    )


def region_edges(edges: Iterable[int], region_rows: int) -> dict[int, int]:
    """Return the nearest edge of a region for each edge of a row block."""
    return {edge: (edge + region_rows // 2) // region_rows * region_rows for edge in edges}


def has_region_for_each(moved: Mapping[int, int]) -> bool:
    """Return whether every row block still has rows after `region_edges` moved its edges."""
    return len(set(moved.values())) == len(moved)


def _rect_of(table: str, shard: ShardMetadata) -> Rect:
    row, col = whole_list(f"shard_offsets of table {table!r}", shard.shard_offsets, length=2)
    rows, cols = whole_list(f"shard_sizes of table {table!r}", shard.shard_sizes, length=2)
    return Rect(
        row_start=row, row_end=row + rows, col_start=col, col_end=col + cols, rank=shard.rank
    )


def pooling_of_parts(pooling: PoolingType, rects: Sequence[Rect]) -> PoolingType:
    """Return the pooling of a table's shards: shards of a mean are sums, divided at the end.

    Raises:
        ValueError: The pooling cannot be split by rows.
    """
    if len({rect.row_start for rect in rects}) <= 1:
        return pooling
    if pooling not in ROW_PARTS:
        raise ValueError(
            f"Tables split by rows are pooled as one of {[p.name for p in ROW_PARTS]}; received "
            f"PoolingType.{pooling.name}. Place such tables whole, or split them by columns."
        )
    return ROW_PARTS[pooling].pooling


def _merge_neighbors(rects: Sequence[Rect]) -> list[Rect]:
    """Merge column neighbors of the same rows and rank, if all rows are split the same way."""
    # with several row blocks, the result might be no grid
    if len({(rect.row_start, rect.row_end) for rect in rects}) > 1:
        return list(rects)
    merged: list[Rect] = []
    for rect in sorted(rects, key=lambda r: r.col_start):
        last = merged[-1] if merged else None
        if last and last.rank == rect.rank and last.col_end == rect.col_start:
            rect = replace(rect, col_start=last.col_start)
            merged.pop()
        merged.append(rect)
    return merged


def check_plan_paths(plan: ShardingPlan, module_paths: Collection[str]) -> None:
    """Check that a plan names exactly the modules of a model that can be sharded.

    Raises:
        ValueError: It does not. The error lists modules that are missing from the plan or the
            model.
    """
    missing = sorted(module_paths - plan.plan.keys())
    unknown = sorted(plan.plan.keys() - module_paths)
    if missing or unknown:
        raise ValueError(
            f"The plan must name each shardable module of the model once; missing: {missing}, "
            f"not shardable modules of the model: {unknown}.{_nearest(unknown, module_paths)} To "
            "leave a module on every rank, place its tables data_parallel."
        )


def check_plan_covers(
    module_path: str, plan: EmbeddingModuleShardingPlan, table_names: Collection[str]
) -> None:
    """Check that a plan names exactly the tables of a module.

    Raises:
        ValueError: It does not. The error lists tables that are missing from the plan or the
            module.
    """
    known = set(table_names)
    missing = [name for name in table_names if name not in plan]
    unknown = [name for name in plan if name not in known]
    if missing or unknown:
        raise ValueError(
            f"The plan of module {module_path!r} must name each of its tables once; missing: "
            f"{missing}, not in the module: {unknown}.{_nearest(unknown, table_names)} Give it one "
            f"ParameterSharding for each of {list(table_names)}."
        )


def _nearest(unknown: Sequence[str], known: Collection[str]) -> str:
    return f" {nearest(unknown[0], known)}" if unknown and known else ""
