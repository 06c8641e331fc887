"""Compiles a placement of tables into the routes that the three stages of a batch follow.

Every sharding strategy is a set of rectangles (row range x column range) with an owner. This file
turns the rectangles of one module into a frozen :class:`Layout`: what each rank is sent and in
which order, which lookups it makes, and where each column of their output goes. It knows nothing
of tensors' contents; the stages know nothing of strategies.

Words used here and in the stages:

- *slot*: one (table, feature) pair, in the order of the unsharded module's output.
- *segment*: the ids of one feature, or of one row block of it, within one rank's batch.
- *stream*: a segment as one destination rank receives it; one stream feeds one slot of one
  rectangle.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rect:
    """A rectangle of a table and the rank that owns it. Ranges are half open."""

    row_start: int
    row_end: int
    col_start: int
    col_end: int
    rank: int

    @property
    def num_rows(self) -> int:
        """Rows in the rectangle."""
        return self.row_end - self.row_start

    @property
    def num_cols(self) -> int:
        """Columns in the rectangle."""
        return self.col_end - self.col_start


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTable:
    """A table with its place.

    ``features`` are indices into the module's features. ``group`` is equal for tables that one
    lookup can serve together. ``rects`` is empty for a replicated (data-parallel) table.
    """

    name: str
    num_rows: int
    dim: int
    features: tuple[int, ...]
    group: Hashable
    rects: tuple[Rect, ...]

    def __post_init__(self) -> None:
        if self.rects:
            check_tiling(self)

    @property
    def row_starts(self) -> tuple[int, ...]:
        """First row of each row block."""
        return tuple(sorted({rect.row_start for rect in self.rects}))

    @property
    def is_row_split(self) -> bool:
        """Whether more than one row block exists, so that partial sums must be added up."""
        return len(self.row_starts) > 1


def check_tiling(table: PlacedTable) -> None:
    """Checks that the rectangles of a table are a grid that covers it exactly once.

    Raises:
        ValueError: naming the table and the rows or columns at fault.
    """
    rows = sorted({(rect.row_start, rect.row_end) for rect in table.rects})
    cols = sorted({(rect.col_start, rect.col_end) for rect in table.rects})
    for what, ranges, size in (("rows", rows, table.num_rows), ("columns", cols, table.dim)):
        reached = 0
        for start, end in ranges:
            if start != reached or end <= start:
                raise ValueError(
                    f"The shards of table {table.name!r} must cover its {what} 0..{size} once, "
                    f"without gap or "
                    f"overlap; received the {what} ranges {ranges}."
                )
            reached = end
        if reached != size:
            raise ValueError(
                f"The shards of table {table.name!r} must cover its {what} 0..{size}; they end "
                f"at {reached}."
            )
    cells = {(rect.row_start, rect.col_start) for rect in table.rects}
    if not len(table.rects) == len(cells) == len(rows) * len(cols):
        raise ValueError(
            f"The shards of table {table.name!r} must form a grid of {len(rows)} row blocks x "
            f"{len(cols)} column "
            f"blocks, each present once; received {len(table.rects)} shards."
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One (table, feature) pair; ``col`` is its first column in the unsharded output."""

    table: int
    feature: int
    col: int
    dim: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LookupGroup:
    """One lookup of one rank: its rectangles and, per stream, which of them serves it.

    ``streams`` is the stretch of the rank's streams that this lookup reads, ``width`` its output
    columns.
    """

    key: Hashable
    tables: tuple[int, ...]
    rects: tuple[Rect, ...]
    feature_table_map: tuple[int, ...]
    streams: range
    width: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All that the stages need to know about the placement of one module's tables.

    Attributes:
        world_size: number of ranks.
        tables: the placed tables, in the module's order.
        slots: (table, feature) pairs in the order of the output; ``width`` is the sum of their
            dims.
        split_slots: slots of row-split tables; their ids are bucketized. ``num_buckets`` is the
            largest number of row blocks of any of them (0 if there are none).
        send_segments: per destination rank, the segments it is sent, in its stream order. Segment
            ``f`` is feature ``f`` of the module; segment ``num_features + bucket *
            len(split_slots) + i`` is one row block of ``split_slots[i]``.
        groups: per rank, its lookups.
        rank_widths: per rank, the total width of its lookups' output.
        replica_groups: the lookups of replicated tables, which every rank makes on its own batch.
        source_columns: per rank, for its columns from left to right, the output columns (start,
            end) they go to.
        replica_columns: the same per replica group.
    """

    world_size: int
    num_features: int
    tables: tuple[PlacedTable, ...]
    slots: tuple[Slot, ...]
    width: int
    split_slots: tuple[int, ...]
    num_buckets: int
    send_segments: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[LookupGroup, ...], ...]
    rank_widths: tuple[int, ...]
    replica_groups: tuple[LookupGroup, ...]
    source_columns: tuple[tuple[tuple[int, int], ...], ...]
    replica_columns: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One slot of one rectangle on its owner, and the output columns it is for."""

    slot: int
    table: int
    rect: Rect
    cols: tuple[int, int]


def build_layout(tables: Sequence[PlacedTable], num_features: int, world_size: int) -> Layout:
    """Compiles placed tables into a layout.

    Args:
        tables: the tables of one module in its order.
        num_features: number of the module's distinct features.
        world_size: number of ranks; every rectangle's owner lies below it.

    Returns:
        The layout; the same on every rank.

    Raises:
        ValueError: if a rectangle is owned by a rank that does not exist.
    """
    slots, slots_of = _number_slots(tables)
    split_slots = tuple(i for i, slot in enumerate(slots) if tables[slot.table].is_row_split)
    split_index = {slot: i for i, slot in enumerate(split_slots)}

    owned: list[list[tuple[int, Rect]]] = [[] for _ in range(world_size)]
    for index, table in enumerate(tables):
        for rect in table.rects:
            if rect.rank >= world_size:
                raise ValueError(
                    f"The plan places a shard of table {table.name!r} on rank {rect.rank}, but "
                    f"there are "
                    f"{world_size} ranks (0..{world_size - 1}). Make the plan for this world size."
                )
            owned[rect.rank].append((index, rect))

    groups: list[tuple[LookupGroup, ...]] = []
    segments: list[tuple[int, ...]] = []
    pieces: list[list[_Piece]] = []
    for rank_owned in owned:
        rank_groups, rank_pieces = _plan_lookups(tables, slots, slots_of, rank_owned)
        groups.append(rank_groups)
        pieces.append(rank_pieces)
        segments.append(
            tuple(
                _segment_of(piece, tables, slots, split_index, num_features)
                for piece in rank_pieces
            )
        )

    replicas = [
        (index, Rect(row_start=0, row_end=table.num_rows, col_start=0, col_end=table.dim, rank=0))
        for index, table in enumerate(tables)
        if not table.rects
    ]
    replica_groups, replica_pieces = _plan_lookups(tables, slots, slots_of, replicas)
    replica_columns = tuple(
        _merge_ranges([replica_pieces[i].cols for i in group.streams]) for group in replica_groups
    )

    return Layout(
        world_size=world_size,
        num_features=num_features,
        tables=tuple(tables),
        slots=slots,
        width=sum(slot.dim for slot in slots),
        split_slots=split_slots,
        num_buckets=max((len(tables[slots[i].table].row_starts) for i in split_slots), default=0),
        send_segments=tuple(segments),
        groups=tuple(groups),
        rank_widths=tuple(sum(g.width for g in rank_groups) for rank_groups in groups),
        replica_groups=replica_groups,
        source_columns=tuple(_merge_ranges([p.cols for p in rank]) for rank in pieces),
        replica_columns=replica_columns,
    )


def _number_slots(tables: Sequence[PlacedTable]) -> tuple[tuple[Slot, ...], list[list[int]]]:
    slots: list[Slot] = []
    slots_of: list[list[int]] = []
    col = 0
    for index, table in enumerate(tables):
        slots_of.append(list(range(len(slots), len(slots) + len(table.features))))
        for feature in table.features:
            slots.append(Slot(table=index, feature=feature, col=col, dim=table.dim))
            col += table.dim
    return tuple(slots), slots_of


def _plan_lookups(
    tables: Sequence[PlacedTable],
    slots: Sequence[Slot],
    slots_of: Sequence[Sequence[int]],
    owned: Sequence[tuple[int, Rect]],
) -> tuple[tuple[LookupGroup, ...], list[_Piece]]:
    """Groups the rectangles of one rank into lookups, each in the module's order of tables."""
    keys = list(dict.fromkeys(table.group for table in tables))
    owned = sorted(owned, key=lambda o: (o[0], o[1].row_start, o[1].col_start))
    pieces: list[_Piece] = []
    groups: list[LookupGroup] = []
    for key in keys:
        mine = [(index, rect) for index, rect in owned if tables[index].group == key]
        if not mine:
            continue
        first = len(pieces)
        feature_table_map: list[int] = []
        for local, (index, rect) in enumerate(mine):
            for slot in slots_of[index]:
                col = slots[slot].col
                cols = (col + rect.col_start, col + rect.col_end)
                pieces.append(_Piece(slot, index, rect, cols))
                feature_table_map.append(local)
        groups.append(
            LookupGroup(
                key=key,
                tables=tuple(index for index, _ in mine),
                rects=tuple(rect for _, rect in mine),
                feature_table_map=tuple(feature_table_map),
                streams=range(first, len(pieces)),
                width=sum(piece.rect.num_cols for piece in pieces[first:]),
            )
        )
    return tuple(groups), pieces


def _segment_of(
    piece: _Piece,
    tables: Sequence[PlacedTable],
    slots: Sequence[Slot],
    split_index: dict[int, int],
    num_features: int,
) -> int:
    if piece.slot not in split_index:
        return slots[piece.slot].feature
    bucket = tables[piece.table].row_starts.index(piece.rect.row_start)
    return num_features + bucket * len(split_index) + split_index[piece.slot]


def _merge_ranges(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)
