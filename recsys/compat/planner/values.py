"""Values that scripts written for TorchRec pass to the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from recsys.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from recsys.distributed.types import ShardingType


class PipelineType(Enum):
    """Overlap of batches in a job, on which estimates of memory depend.

    Example:
        >>> PipelineType("train_sparse_dist").batches_in_flight
        2
    """

    NONE = "none"
    TRAIN_BASE = "train_base"
    TRAIN_SPARSE_DIST = "train_sparse_dist"
    TRAIN_PREFETCH_SPARSE_DIST = "train_prefetch_sparse_dist"

    @property
    def batches_in_flight(self) -> int:
        """Number of batches on a device at a time."""
        return {
            PipelineType.TRAIN_SPARSE_DIST: 2,
            PipelineType.TRAIN_PREFETCH_SPARSE_DIST: 3,
        }.get(self, 1)


@dataclass(frozen=True)
class KeyValueParams:
    """Settings of tables in a key-value store, which are not supported.

    A plan with such settings issues one warning with the given settings, and places the table by
    its compute kernel. As a constraint of the planner, they raise an error.

    Example:
        >>> KeyValueParams(ssd_storage_directory="/mnt/ssd")
        KeyValueParams(ssd_storage_directory='/mnt/ssd')
    """

    ssd_storage_directory: str | None = None
    ssd_rocksdb_write_buffer_size: int | None = None
    ssd_rocksdb_shards: int | None = None
    gather_ssd_cache_stats: bool | None = None
    stats_reporter_config: Any = None
    use_passed_in_path: bool = True
    l2_cache_size: int | None = None
    max_l1_cache_size: int | None = None
    enable_async_update: bool | None = None
    bulk_init_chunk_size: int | None = None
    lazy_bulk_init_enabled: bool | None = None
    enable_raw_embedding_streaming: bool | None = None
    res_store_shards: int | None = None
    kvzch_tbe_config: Any = None
    load_ckpt_without_opt: bool = False
    ps_hosts: tuple[tuple[str, int], ...] | None = None
    ps_client_thread_num: int | None = None
    ps_max_key_per_request: int | None = None
    ps_max_local_index_length: int | None = None

    def __repr__(self) -> str:
        usual = {name: field.default for name, field in self.__dataclass_fields__.items()}
        changed = [f"{key}={value!r}" for key, value in vars(self).items() if value != usual[key]]
        return f"KeyValueParams({', '.join(changed)})"


def column_shards(
    columns: int, rows: int, col_wise_shard_dim: int | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Split a table by columns.

    Args:
        columns: Columns of the table.
        rows: Rows of the table.
        col_wise_shard_dim: Minimum width of a shard; 128 if None.

    Returns:
        Sizes and offsets of the shards, `[rows, columns]` each.

    Example:
        >>> column_shards(64, 100, 32)
        ([[100, 32], [100, 32]], [[0, 0], [0, 32]])
    """
    return calculate_shard_sizes_and_offsets(
        torch.empty(rows, columns, device="meta"),
        1,
        1,
        ShardingType.COLUMN_WISE.value,
        col_wise_shard_dim,
    )


def uneven_row_shards(
    hash_size: int,
    num_devices: int,
    columns: int,
    device_memory_sizes: Sequence[int],
    num_buckets: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Split a table by rows in proportion to the memory of devices.

    Args:
        hash_size: Rows of the table.
        num_devices: Number of shards.
        columns: Columns of the table.
        device_memory_sizes: Bytes of each device.
        num_buckets: Number of equal buckets of rows. No shard may split a bucket.

    Returns:
        Sizes and offsets of the shards, `[rows, columns]` each; the last shard has the remaining
        rows.

    Raises:
        ValueError: There is not one size for each device, their sum is not positive, or the number
            of buckets does not divide the rows.

    Example:
        >>> uneven_row_shards(100, 3, 64, [10, 20, 70])
        ([[10, 64], [20, 64], [70, 64]], [[0, 0], [10, 0], [30, 0]])
    """
    buckets = hash_size if num_buckets is None else num_buckets
    if sum(device_memory_sizes) < 1:
        raise ValueError(
            f"device_memory_sizes must not all be 0; received {list(device_memory_sizes)}."
        )
    if buckets < 1 or hash_size % buckets:
        raise ValueError(
            f"num_buckets must divide the {hash_size} rows of the table; received {num_buckets}."
        )
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(buckets, columns, device="meta"),
        num_devices,
        num_devices,
        ShardingType.ROW_WISE.value,
        device_memory_sizes=device_memory_sizes,
    )
    rows = hash_size // buckets
    return [[size * rows, width] for size, width in sizes], [[top * rows, 0] for top, _ in offsets]
