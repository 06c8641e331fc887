"""Layouts computed by hand, and the tilings that are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from recsys.distributed.placement.layout import (
    PlacedTable,
    Rect,
    Stream,
    build_layout,
    merge_ranges,
)
from recsys.kernels.types import PoolingType

# Tables are named by a letter; "g" is the one lookup group unless a test names another.


def rect(rows: tuple[int, int], cols: tuple[int, int], rank: int) -> Rect:
    return Rect(row_start=rows[0], row_end=rows[1], col_start=cols[0], col_end=cols[1], rank=rank)


def table(
    name: str,
    rects: list[Rect],
    features: tuple[int, ...] = (0,),
    size: tuple[int, int] = (10, 4),
    group: str = "g",
) -> PlacedTable:
    return PlacedTable(
        name=name,
        num_rows=size[0],
        dim=size[1],
        features=features,
        group=group,
        rects=tuple(rects),
    )


WHOLE = ((0, 10), (0, 4))


def columns_of(streams: Sequence[Sequence[Stream]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per rank the output columns of its lookups, from left to right."""
    return tuple(merge_ranges(stream.cols for stream in of_rank) for of_rank in streams)


def test_whole_tables_on_two_ranks() -> None:
    # a reads features 1 and 0, b reads feature 0; a on rank 1, b on rank 0
    tables = [table("a", [rect(*WHOLE, 1)], (1, 0)), table("b", [rect(*WHOLE, 0)], (0,))]
    layout = build_layout(tables, num_features=2, world_size=2)
    assert [(s.table, s.feature, s.col, s.dim) for s in layout.slots] == [
        (0, 1, 0, 4),
        (0, 0, 4, 4),
        (1, 0, 8, 4),
    ]
    assert layout.width == 12
    assert layout.send_segments == ((0,), (1, 0))
    assert layout.split_slots == ()
    assert layout.num_buckets == 0
    assert layout.rank_widths == (4, 8)
    ((first,), (second,)) = layout.groups
    assert (first.tables, first.feature_table_map, first.streams) == ((1,), (0,), range(0, 1))
    assert (second.tables, second.feature_table_map, second.width) == ((0,), (0, 0), 8)
    # a's two slots lie side by side on rank 1; the output begins with them
    assert columns_of(layout.streams) == (((8, 12),), ((0, 8),))


def test_both_owners_of_rows_contribute_to_the_same_columns() -> None:
    halves = [rect((0, 6), (0, 4), 0), rect((6, 10), (0, 4), 1)]
    tables = [table("a", halves, (0,)), table("b", halves, (1,))]
    layout = build_layout(tables, num_features=2, world_size=2)
    assert layout.split_slots == (0, 1)
    assert layout.num_buckets == 2
    # segment = 2 features + bucket * 2 split slots + place among the split slots
    assert layout.send_segments == ((2, 3), (4, 5))
    assert layout.rank_widths == (8, 8)
    assert columns_of(layout.streams) == (((0, 8),), ((0, 8),))


def test_columns_are_placed_and_not_summed() -> None:
    parts = [rect((0, 10), (0, 4), 1), rect((0, 10), (4, 8), 0)]
    layout = build_layout([table("a", parts, size=(10, 8))], num_features=1, world_size=2)
    assert layout.send_segments == ((0,), (0,))
    assert layout.split_slots == ()
    assert columns_of(layout.streams) == (((4, 8),), ((0, 4),))


def test_a_grid_is_summed_by_rows_and_placed_by_columns() -> None:
    # 2 x 2: columns 0..4 on ranks 0 and 1, columns 4..8 on ranks 2 and 3
    parts = [
        rect((0, 5), (0, 4), 0),
        rect((5, 10), (0, 4), 1),
        rect((0, 5), (4, 8), 2),
        rect((5, 10), (4, 8), 3),
    ]
    layout = build_layout([table("a", parts, size=(10, 8))], num_features=1, world_size=4)
    assert layout.send_segments == ((1,), (2,), (1,), (2,))
    assert columns_of(layout.streams) == (((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),))


def test_replicated_tables_come_from_the_rank_itself() -> None:
    tables = [table("a", []), table("b", [rect(*WHOLE, 1)]), table("c", [])]
    layout = build_layout(tables, num_features=1, world_size=2)
    assert layout.send_segments == ((), (0,))
    (replicas,) = layout.replica_groups
    assert (replicas.tables, replicas.width) == ((0, 2), 8)
    assert columns_of(layout.streams) == ((), ((4, 8),))
    assert columns_of([layout.replica_streams]) == (((0, 4), (8, 12)),)


def test_one_lookup_per_group_of_tables_that_are_alike() -> None:
    tables = [
        table("a", [rect(*WHOLE, 0)], group="fp32"),
        table("b", [rect(*WHOLE, 0)], group="fp16"),
        table("c", [rect(*WHOLE, 0)], group="fp32"),
    ]
    layout = build_layout(tables, num_features=1, world_size=1)
    ((fp32, fp16),) = layout.groups
    assert (fp32.key, fp32.tables, fp32.streams) == ("fp32", (0, 2), range(0, 2))
    assert (fp16.key, fp16.tables, fp16.streams) == ("fp16", (1,), range(2, 3))
    assert columns_of(layout.streams) == (((0, 4), (8, 12), (4, 8)),)


def test_a_layout_is_frozen() -> None:
    layout = build_layout([table("a", [rect(*WHOLE, 0)])], num_features=1, world_size=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.world_size = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rects", "message"),
    [
        ([rect((0, 4), (0, 4), 0), rect((5, 10), (0, 4), 1)], r"rows 0\.\.10 once, without gap or"),
        (
            [rect((0, 6), (0, 4), 0), rect((5, 10), (0, 4), 1)],
            r"received the rows ranges \[\(0, 6",
        ),
        ([rect((1, 10), (0, 4), 0)], r"rows 0\.\.10 once"),
        ([rect((0, 9), (0, 4), 0)], "cover its rows .*end at 9"),
        ([rect((0, 11), (0, 4), 0)], r"they end at 11"),
        ([rect((0, 10), (0, 2), 0)], "cover its columns .*end at 2"),
        ([rect((0, 10), (0, 2), 0), rect((0, 10), (3, 4), 0)], r"columns 0\.\.4 once"),
        (
            [rect(*WHOLE, 0), rect(*WHOLE, 1)],
            "grid of 1 .* 2 shards",
        ),
        (
            [rect((0, 5), (0, 2), 0), rect((0, 5), (2, 4), 0), rect((5, 10), (0, 2), 0)],
            "grid of .*received 3 shards",
        ),
    ],
)
def test_shards_must_tile_their_table(rects: list[Rect], message: str) -> None:
    with pytest.raises(ValueError, match=f"shards of table 'a' must .*{message}"):
        table("a", rects)


def test_edges_of_row_blocks() -> None:
    halves = [rect((0, 6), (0, 4), 0), rect((6, 10), (0, 4), 1)]
    assert table("a", halves).row_edges == (0, 6, 10)


def test_only_means_over_row_blocks_are_averaged_at_the_end() -> None:
    halves = [rect((0, 5), (0, 4), 0), rect((5, 10), (0, 4), 1)]
    rules = [PoolingType.MEAN, PoolingType.SUM, PoolingType.MEAN]
    tables = [
        dataclasses.replace(table(name, rects), combine=rule)
        for name, rects, rule in zip("abc", ([rect(*WHOLE, 0)], halves, halves), rules, strict=True)
    ]
    layout = build_layout(tables, num_features=1, world_size=2)
    assert [slot.combine for slot in layout.slots] == rules
    assert layout.split_slots == (1, 2)
    assert layout.averaged_slots == (1,)


def test_without_pooling_lookups_serve_one_width_and_nodes_do_not_matter() -> None:
    narrow = [rect((0, 5), (0, 4), 0), rect((5, 10), (0, 4), 1)]
    wide = [rect((0, 5), (0, 8), 0), rect((5, 10), (0, 8), 1)]
    pair = [table("a", narrow), table("b", wide, size=(10, 8))]
    pooled = build_layout(pair, num_features=1, world_size=4, node_size=2)
    assert [len(groups) for groups in pooled.groups] == [1, 1, 0, 0]
    assert pooled.is_hierarchical
    bare = [dataclasses.replace(each, combine=PoolingType.NONE) for each in pair]
    sequence = build_layout(bare, num_features=1, world_size=4, node_size=2)
    assert [len(groups) for groups in sequence.groups] == [2, 2, 0, 0]
    assert not sequence.is_hierarchical
