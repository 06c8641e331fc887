"""Sizes of the shards of a table, before their owners are known."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recsys.base.arguments import choice, whole, wrong_type
from recsys.base.checked import checked
from recsys.distributed.placement.plan import ShardingType
from recsys.distributed.placement.strategies import MIN_COLUMNS, split_by_sizes, split_evenly


@checked
def calculate_shard_sizes_and_offsets(
    tensor: Tensor,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
    device_memory_sizes: Sequence[int] | None = None,
    num_buckets: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Split a table by a sharding type, before the owners of the shards are known.

    Rows are split evenly; the last shards are smaller or empty. Columns are split into shards of
    equal width, a multiple of 4, or are one shard if no such width fits.

    Args:
        tensor: The table, `[rows, columns]`; only its shape is read.
        world_size: Number of ranks: shards of `row_wise`, replicas of `data_parallel`.
        local_world_size: Ranks per node: row shards of `table_row_wise` and `grid_shard`.
        sharding_type: A `ShardingType` value.
        col_wise_shard_dim: Smallest width of a column shard; None for 128.
        device_memory_sizes: For `row_wise`, memory of each rank; rows are proportional to it.
        num_buckets: For `row_wise`, number of buckets as in `row_wise`.

    Returns:
        The sizes of the shards, `[rows, columns]` each, and their offsets.

    Raises:
        ValueError: If the type is unknown, buckets do not fit, or there is not one memory size per
            rank.

    Example:
        >>> import torch
        >>> calculate_shard_sizes_and_offsets(torch.empty(10, 4), 2, 2, "row_wise")
        ([[5, 4], [5, 4]], [[0, 0], [5, 0]])
    """
    kind = choice("sharding_type", sharding_type, ShardingType)
    if tensor.dim() != 2:
        wrong_type("tensor", "a table, [rows, columns]", tensor)
    whole("world_size", world_size)
    whole("local_world_size", local_world_size)
    if col_wise_shard_dim is not None:
        whole("col_wise_shard_dim", col_wise_shard_dim)
    if num_buckets is not None:
        whole("num_buckets", num_buckets)
    num_rows, dim = tensor.shape
    by_rows = {
        ShardingType.ROW_WISE: world_size,
        ShardingType.TABLE_ROW_WISE: local_world_size,
        ShardingType.GRID_SHARD: local_world_size,
    }
    rows, columns = _even_blocks(num_rows, by_rows.get(kind, 1)), [(0, dim)]
    if kind is ShardingType.ROW_WISE and num_buckets is not None:
        rows = split_by_sizes(bucket_rows(num_rows, num_buckets, world_size))
    elif kind is ShardingType.ROW_WISE and device_memory_sizes is not None:
        rows = _in_proportion(num_rows, device_memory_sizes, world_size)
    if kind in (
        ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD
    ):  # fmt: skip
        least = 128 if col_wise_shard_dim is None else col_wise_shard_dim
        fitting = [w for w in range(MIN_COLUMNS, dim, MIN_COLUMNS) if dim % w == 0 and w >= least]
        columns = split_evenly(dim, dim // (fitting or [dim])[0])
    shards = [(row, column) for column in columns for row in rows]
    if kind is ShardingType.DATA_PARALLEL:
        shards *= world_size
    return (
        [[bottom - top, right - left] for (top, bottom), (left, right) in shards],
        [[top, left] for (top, _), (left, _) in shards],
    )


def _even_blocks(size: int, count: int) -> list[tuple[int, int]]:
    """Split as `split_evenly`, including empty blocks."""
    blocks = split_evenly(size, count)
    return blocks + [(size, size)] * (count - len(blocks))


def _in_proportion(num_rows: int, sizes: Sequence[int], world_size: int) -> list[tuple[int, int]]:
    if len(sizes) != world_size:
        raise ValueError(
            f"device_memory_sizes must be one per rank; received {len(sizes)} for {world_size} "
            "ranks."
        )
    # the last rank has the rest, since quotients are rounded down
    rows = [num_rows * size // sum(sizes) for size in sizes[:-1]]
    return split_by_sizes([*rows, num_rows - sum(rows)])


def bucket_rows(num_rows: int, num_buckets: int, world_size: int) -> list[int]:
    """Return the rows of each rank; the first ranks have the remaining buckets."""
    if num_rows % num_buckets or num_buckets < world_size:
        raise ValueError(
            f"row_wise.num_buckets must divide the table's rows and be at least the number of "
            f"ranks; received num_buckets={num_buckets} for {num_rows} rows on {world_size} ranks."
        )
    each, more = divmod(num_buckets, world_size)
    return [(each + (rank < more)) * (num_rows // num_buckets) for rank in range(world_size)]
