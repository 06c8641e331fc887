"""Compiles a placement of tables into the routes of a batch through the three stages.

Every sharding strategy is a set of rectangles (row range x column range) with an owner. This file
converts the rectangles of one module to a frozen `Layout`: the segments that each rank receives in
order, its lookups, and the output column of each of their columns. It does not depend on the
contents of tensors, and the stages do not depend on strategies.

Terms of this file and the stages:

- *slot*: one (table, feature) pair, in the order of the unsharded module's output.
- *segment*: the ids of one feature, or of one row block of it, within one rank's batch.
- *stream*: a segment as one destination rank receives it; one stream feeds one slot of one
  rectangle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

from recsys.kernels.types import PoolingType

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    def offsets(self) -> tuple[int, int]:
        """First row and column."""
        return self.row_start, self.col_start

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns."""
        return self.num_rows, self.num_cols

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
class IdHash:
    """Assignment of 64-bit ids to the regions of a table with hashed ids.

    Row blocks are whole regions. The owner of a region converts its ids to rows at the end of
    `InputDist.receive`.
    """

    seed: int
    num_regions: int
    region_rows: int


@final
@dataclass(frozen=True, slots=True)
class RowParts:
    """Combination of a bag's rows from several row blocks.

    The rows of each block are pooled by `pooling`, and the results added up. The sum is divided by
    the number of ids in the bag if `is_averaged`.
    """

    pooling: PoolingType
    is_averaged: bool = False


ROW_PARTS: Mapping[PoolingType, RowParts] = {
    PoolingType.SUM: RowParts(PoolingType.SUM),
    PoolingType.MEAN: RowParts(PoolingType.SUM, is_averaged=True),
    PoolingType.NONE: RowParts(PoolingType.NONE),
}
"""Combination of row blocks by pooling. A pooling that is not a sum (a maximum) also needs its own
reduction in the output stage."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTable:
    """A table with its placement.

    Attributes:
        name: Name of the table.
        num_rows: Number of rows.
        dim: Number of columns.
        features: Indices into the module's features.
        group: Key of a lookup: tables with equal keys can share one.
        rects: Shards; empty for a replicated (data-parallel) table.
        combine: Pooling of the rows of a bag.
        one_width: Whether a lookup of the table requires rectangles of one width.
        hashed: Assignment of ids to regions; None if ids are row numbers.
    """

    name: str
    num_rows: int
    dim: int
    features: tuple[int, ...]
    group: Hashable
    rects: tuple[Rect, ...]
    combine: PoolingType = PoolingType.SUM
    one_width: bool = False
    hashed: IdHash | None = None

    def __post_init__(self) -> None:
        if self.rects:
            check_tiling(self)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns."""
        return self.num_rows, self.dim

    @property
    def row_starts(self) -> tuple[int, ...]:
        """First row of each row block."""
        return tuple(sorted({rect.row_start for rect in self.rects}))

    @property
    def row_edges(self) -> tuple[int, ...]:
        """First row of each row block, and the end of the last."""
        return (*self.row_starts, self.num_rows)

    @property
    def whole(self) -> Rect:
        """The rectangle of all rows and columns, which each rank has of a replica."""
        return Rect(row_start=0, row_end=self.num_rows, col_start=0, col_end=self.dim, rank=0)


def check_tiling(table: PlacedTable) -> None:
    """Check that the rectangles of a table are a grid that covers it exactly once.

    Raises:
        ValueError: They are not. The error names the table and the wrong rows or columns.
    """
    rows = sorted({(rect.row_start, rect.row_end) for rect in table.rects})
    cols = sorted({(rect.col_start, rect.col_end) for rect in table.rects})
    for what, ranges, size in (("rows", rows, table.num_rows), ("columns", cols, table.dim)):
        reached = 0
        for start, end in ranges:
            if start != reached or end <= start:
                raise ValueError(
                    f"The shards of table {table.name!r} must cover its {what} 0..{size} once, "
                    f"without gap or overlap; received the {what} ranges {ranges}."
                )
            reached = end
        if reached != size:
            raise ValueError(
                f"The shards of table {table.name!r} must cover its {what} 0..{size}; they end "
                f"at {reached}."
            )
    # the ranges alone do not show missing or repeated cells
    cells = {(rect.row_start, rect.col_start) for rect in table.rects}
    if not len(table.rects) == len(cells) == len(rows) * len(cols):
        raise ValueError(
            f"The shards of table {table.name!r} must form a grid of {len(rows)} row blocks x "
            f"{len(cols)} column blocks, each present once; received {len(table.rects)} shards."
        )


class Slot(NamedTuple):
    """One (table, feature) pair; `col` is its first column in the unsharded output."""

    table: int
    feature: int
    col: int
    dim: int
    combine: PoolingType


class Stream(NamedTuple):
    """The ids of one slot that one rectangle serves, and their output columns."""

    slot: int
    rect: Rect
    cols: tuple[int, int]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedLookup:
    """One lookup of one rank.

    Attributes:
        key: Key of the tables.
        tables: Numbers of the tables.
        rects: Rectangle of each table.
        feature_table_map: Index of the rectangle of each stream.
        streams: Range of the lookup's streams among the rank's.
        width: Number of output columns.
        in_node: Whether the output is added up within the node before it is sent on.
        is_hashed: Whether the tables have hashed ids.
    """

    key: Hashable
    tables: tuple[int, ...]
    rects: tuple[Rect, ...]
    feature_table_map: tuple[int, ...]
    streams: range
    width: int
    in_node: bool = False
    is_hashed: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Placement of one module's tables, compiled for the stages.

    Attributes:
        world_size: Number of ranks.
        num_features: Number of the module's unique features.
        tables: Placed tables, in the module's order.
        slots: (table, feature) pairs in the order of the output.
        width: Number of output columns.
        split_slots: Slots of row-split tables, whose ids are bucketized.
        num_buckets: Largest number of row blocks of a split slot; 0 without split slots.
        send_segments: Segments sent to each rank, in its stream order. Segment `f` is feature `f`
            of the module. Segment `num_features + bucket * len(split_slots) + i` is one row block
            of `split_slots[i]`.
        groups: Lookups of each rank.
        streams: Received streams of each rank, in the order of its lookups' output columns.
        replica_groups: Lookups of replicated tables, which every rank runs on its own batch.
        replica_streams: Streams of these lookups.
        node_size: Ranks per node if sums of some tables take two hops, otherwise `world_size`.
        node_tables: Tables whose row shards are added up within a node first.
    """

    world_size: int
    num_features: int
    tables: tuple[PlacedTable, ...]
    slots: tuple[Slot, ...]
    width: int
    split_slots: tuple[int, ...]
    num_buckets: int
    send_segments: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[PlacedLookup, ...], ...]
    streams: tuple[tuple[Stream, ...], ...]
    replica_groups: tuple[PlacedLookup, ...]
    replica_streams: tuple[Stream, ...]
    node_size: int
    node_tables: frozenset[int]

    @property
    def rank_widths(self) -> tuple[int, ...]:
        """Total width of the lookups' output of each rank."""
        return tuple(sum(g.width for g in rank_groups) for rank_groups in self.groups)

    @property
    def is_pooled(self) -> bool:
        """True if rows are combined bag by bag; False if each returns to its id."""
        return all(table.combine is not PoolingType.NONE for table in self.tables)

    @property
    def averaged_slots(self) -> tuple[int, ...]:
        """Positions in `split_slots` of slots whose sums are divided by the ids in a bag."""
        rules = [ROW_PARTS[self.slots[slot].combine] for slot in self.split_slots]
        return tuple(place for place, rule in enumerate(rules) if rule.is_averaged)

    @property
    def is_hierarchical(self) -> bool:
        """True if outputs take two hops."""
        return bool(self.node_tables)

    def plot(
        self, *, samples_per_rank: int = 1, ids_per_sample: float = 1.0, pooled: bool = True
    ) -> Figure:
        """Draw the tables over the ranks, and the bytes that a forward pass exchanges.

        Args:
            samples_per_rank: Batch size of each rank.
            ids_per_sample: Average number of ids per sample and feature.
            pooled: Whether one embedding per sample is returned, or one per id.

        Returns:
            A matplotlib figure; `figure.savefig("plan.svg")` saves it.

        Raises:
            ImportError: Matplotlib is missing; install the extra `plot`.
        """
        from recsys.distributed.placement.layout_plot import plot_layout

        return plot_layout(
            self, samples_per_rank=samples_per_rank, ids_per_sample=ids_per_sample, pooled=pooled
        )


def build_layout(
    tables: Sequence[PlacedTable],
    num_features: int,
    world_size: int,
    *,
    node_size: int | None = None,
) -> Layout:
    """Compile placed tables into a layout.

    Args:
        tables: Tables of one module in its order. If any table is looked up without pooling, a
            lookup requires rectangles of one width, and nothing is added up, so that nodes do not
            matter.
        num_features: Number of the module's unique features.
        world_size: Number of ranks; every rectangle's owner is below it.
        node_size: Ranks per node; ranks of one node are consecutive. If all row shards of a table
            are on one node (per column block), they are added up there before the sum is sent on.
            None for a single node.

    Returns:
        The layout; the same on every rank.
    """
    slots = _number_slots(tables)
    num_blocks = [len(table.row_starts) for table in tables]
    split_slots = tuple(i for i, slot in enumerate(slots) if num_blocks[slot.table] > 1)
    is_pooled = all(table.combine is not PoolingType.NONE for table in tables)
    node_size = node_size or world_size
    # found in the placement, so that no strategy needs a special case:
    # docs/decisions/row_split.md, "Sums inside a node; sequences return by id"
    in_node = frozenset(
        index
        for index, table in enumerate(tables)
        if is_pooled and node_size < world_size and adds_up_in_node(table, node_size)
    )
    sources: list[list[_Source]] = [[] for _ in tables]
    place_of = {slot: place for place, slot in enumerate(split_slots)}
    for i, slot in enumerate(slots):
        place = place_of.get(i)
        segment = slot.feature if place is None else num_features + place
        step = 0 if place is None else len(split_slots)
        sources[slot.table].append(_Source(i, slot.col, segment, step))
    first: dict[Hashable, int] = {}
    owned: list[list[_Part]] = [[] for _ in range(world_size)]
    replicated: list[_Part] = []
    for index, table in enumerate(tables):
        # a number in place of the key, which need not be sortable
        group = first.setdefault((table.group, table.hashed is not None), index)
        # a lookup of several widths by PyTorch's kernels would need the number of ids of each:
        # docs/decisions/exchange.md, "The host waits for the device once per step"
        is_apart = table.one_width or not is_pooled
        block_of = {start: block for block, start in enumerate(table.row_starts)}
        for rect in table.rects or [table.whole]:
            # 0 joins rectangles of all widths in one lookup
            width = rect.num_cols if is_apart else 0
            # a replica has no row blocks
            block = block_of.get(rect.row_start, 0)
            # tables with two hops are looked up first
            order = (index not in in_node, group, width, index, block, rect.col_start)
            (owned[rect.rank] if table.rects else replicated).append((order, rect))
    per_rank = [_plan_lookups(tables, sources, parts) for parts in owned]
    replica_groups, replica_streams, _ = _plan_lookups(tables, sources, replicated)
    return Layout(
        world_size=world_size,
        num_features=num_features,
        tables=tuple(tables),
        slots=slots,
        width=sum(slot.dim for slot in slots),
        split_slots=split_slots,
        num_buckets=max((num_blocks[slots[i].table] for i in split_slots), default=0),
        send_segments=tuple(segments for _, _, segments in per_rank),
        groups=tuple(groups for groups, _, _ in per_rank),
        streams=tuple(streams for _, streams, _ in per_rank),
        replica_groups=replica_groups,
        replica_streams=replica_streams,
        node_size=node_size if in_node else world_size,
        node_tables=in_node,
    )


def adds_up_in_node(table: PlacedTable, node_size: int) -> bool:
    """Return whether the row shards of every column block are on one node."""
    nodes: dict[int, set[int]] = {}
    for rect in table.rects:
        nodes.setdefault(rect.col_start, set()).add(rect.rank // node_size)
    return len(table.row_starts) > 1 and all(len(of_block) == 1 for of_block in nodes.values())


def _number_slots(tables: Sequence[PlacedTable]) -> tuple[Slot, ...]:
    pairs = [(i, feature) for i, table in enumerate(tables) for feature in table.features]
    columns = accumulate((tables[i].dim for i, _ in pairs), initial=0)
    return tuple(
        Slot(i, feature, column, tables[i].dim, tables[i].combine)
        for (i, feature), column in zip(pairs, columns, strict=False)
    )


class _Source(NamedTuple):
    """A slot of a table: its number and first column, and the segments of its row blocks."""

    slot: int
    col: int
    segment: int  # of row block 0
    step: int  # to the segment of the next block


_Part: TypeAlias = tuple[tuple[bool, int, int, int, int, int], Rect]
"""Sort key and rectangle. The key sorts the rectangles of a rank into lookups and these into the
module's order: whether the sums take one hop, number and width of the lookup, number of the table,
row block, first column."""


def _plan_lookups(
    tables: Sequence[PlacedTable], sources: Sequence[Sequence[_Source]], owned: Iterable[_Part]
) -> tuple[tuple[PlacedLookup, ...], tuple[Stream, ...], tuple[int, ...]]:
    """Return the lookups, streams and segments of a rank that owns these rectangles."""
    streams: list[Stream] = []
    segments: list[int] = []
    groups: list[PlacedLookup] = []
    # sorted by the order alone, since rectangles have none
    for (is_flat, *_), group in groupby(
        sorted(owned, key=itemgetter(0)), key=lambda part: part[0][:3]
    ):
        parts = list(group)
        first = len(streams)
        feature_table_map: list[int] = []
        width = 0
        for local, ((*_, index, block, _), rect) in enumerate(parts):
            for slot, col, segment, step in sources[index]:
                cols = (col + rect.col_start, col + rect.col_end)
                streams.append(Stream(slot, rect, cols))
                segments.append(segment + block * step)
                feature_table_map.append(local)
            width += rect.num_cols * len(sources[index])
        numbers = tuple(order[3] for order, _ in parts)
        groups.append(
            PlacedLookup(
                key=tables[numbers[0]].group,
                tables=numbers,
                rects=tuple(rect for _, rect in parts),
                feature_table_map=tuple(feature_table_map),
                streams=range(first, len(streams)),
                width=width,
                in_node=not is_flat,
                is_hashed=tables[numbers[0]].hashed is not None,
            )
        )
    return tuple(groups), tuple(streams), tuple(segments)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join adjacent ranges, in the given order.

    Example:
        >>> merge_ranges([(0, 4), (4, 8), (12, 16)])
        ((0, 8), (12, 16))
    """
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)
