import pytest

from recsys.compat.planner.values import (
    KeyValueParams,
    PipelineType,
    column_shards,
    uneven_row_shards,
)
from recsys.distributed.planner import ParameterConstraints
from recsys.distributed.types import ParameterSharding


def test_key_value_settings_are_named_where_they_mean_nothing():
    params = KeyValueParams(ssd_storage_directory="/mnt/ssd", ps_client_thread_num=4)
    told = r"KeyValueParams\(ssd_storage_directory='/mnt/ssd', ps_client_thread_num=4\)"
    with pytest.raises(ValueError, match=told):
        ParameterConstraints(key_value_params=params)
    with pytest.warns(UserWarning, match=told):
        ParameterSharding("table_wise", "fused", key_value_params=params)


def test_how_many_batches_a_pipeline_keeps():
    assert [kind.batches_in_flight for kind in PipelineType] == [1, 1, 2, 3]


def test_shards_cover_a_table_once():
    for columns, least, widths in ((64, 24, [32, 32]), (60, 16, [20] * 3), (65, 16, [65])):
        sizes, offsets = column_shards(columns, 10, least)
        assert [width for _, width in sizes] == widths
        assert [left for _, left in offsets] == [sum(widths[:i]) for i in range(len(widths))]


@pytest.mark.parametrize(
    ("rows", "memory", "buckets", "expected"),
    [
        (100, [10, 20, 70], None, [10, 20, 70]),
        (100, [1, 1, 1], None, [33, 33, 34]),
        (60, [3, 4, 5, 1], 12, [10, 15, 20, 15]),
        (100, [19, 26, 55], 5, [0, 20, 80]),
    ],
)
def test_rows_in_proportion_to_memory(rows, memory, buckets, expected):
    sizes, offsets = uneven_row_shards(rows, len(memory), 8, memory, buckets)
    assert sizes == [[size, 8] for size in expected]
    assert offsets == [[sum(expected[:i]), 0] for i in range(len(expected))]


def test_rows_that_cannot_be_split_so():
    with pytest.raises(ValueError, match="must not all be 0"):
        uneven_row_shards(100, 2, 8, [0, 0])
    with pytest.raises(ValueError, match="one per rank; received 3 for 2"):
        uneven_row_shards(100, 2, 8, [1, 2, 3])
    with pytest.raises(ValueError, match="num_buckets must divide the 100 rows"):
        uneven_row_shards(100, 2, 8, [1, 2], 7)
