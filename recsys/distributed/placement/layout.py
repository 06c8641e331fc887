"""Compiles a placement of tables into the routes that the three stages of a batch follow.

Every sharding strategy is a set of rectangles (row range x column range) with an owner. This file
turns the rectangles of one module into a frozen `Layout`: what each rank is sent and in
which order, which lookups it makes, and where each column of their output goes. It knows nothing
of tensors' contents; the stages know nothing of strategies.

Words used here and in the stages:

- *slot*: one (table, feature) pair, in the order of the unsharded module's output.
- *segment*: the ids of one feature, or of one row block of it, within one rank's batch.
- *stream*: a segment as one destination rank receives it; one stream feeds one slot of one
  rectangle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
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
    def num_rows(self) -> int:
        """Rows in the rectangle."""
        return self.row_end - self.row_start

    @property
    def num_cols(self) -> int:
        """Columns in the rectangle."""
        return self.col_end - self.col_start


@final
@dataclass(frozen=True, slots=True)
class IdRange:
    """The ids `0..end`, each the row of its number: the one id space so far.

    An id is no row. What is asked about ids (which ones there are, which row block holds one) is
    asked of the id space of their table, never of its rows, so that another space can stand here. A
    step from ids to rows would come after the check in the input stage, `InputDist._checked`.
    """

    end: int

    def edges(self, row_starts: Sequence[int]) -> tuple[int, ...]:
        """Return the first id of each row block, and the end of the last."""
        return (*row_starts, self.end)


@final
@dataclass(frozen=True, slots=True)
class RowParts:
    """How the rows of a bag that are in several row blocks are combined.

    Each block's rows are pooled as `pooling` says, the results added up, and the sum divided by
    the number of ids in the bag if it `is_averaged`.
    """

    pooling: PoolingType
    is_averaged: bool = False


ROW_PARTS: Mapping[PoolingType, RowParts] = {
    PoolingType.SUM: RowParts(PoolingType.SUM),
    PoolingType.MEAN: RowParts(PoolingType.SUM, is_averaged=True),
    PoolingType.NONE: RowParts(PoolingType.NONE),
}
"""Per combine rule, what row blocks and the sum of them do. A rule that adds nothing up (a maximum)
also needs its own reduction in the output stage."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTable:
    """A table with its place.

    `features` are indices into the module's features. `group` is equal for tables that one
    lookup can serve together. `rects` is empty for a replicated (data-parallel) table.
    `combine` says what becomes of the rows of a bag. A lookup of tables with `one_width`
    serves rectangles of one width only. `id_space` None: the range of the rows.
    """

    name: str
    num_rows: int
    dim: int
    features: tuple[int, ...]
    group: Hashable
    rects: tuple[Rect, ...]
    combine: PoolingType = PoolingType.SUM
    one_width: bool = False
    id_space: IdRange | None = None

    def __post_init__(self) -> None:
        if self.rects:
            check_tiling(self)

    @property
    def ids(self) -> IdRange:
        """The ids that there are."""
        return self.id_space or IdRange(self.num_rows)

    @property
    def row_starts(self) -> tuple[int, ...]:
        """First row of each row block."""
        return tuple(sorted({rect.row_start for rect in self.rects}))

    @property
    def whole(self) -> Rect:
        """The rectangle of all rows and columns, as a replica has it on each rank."""
        return Rect(row_start=0, row_end=self.num_rows, col_start=0, col_end=self.dim, rank=0)


def check_tiling(table: PlacedTable) -> None:
    """Check that the rectangles of a table are a grid that covers it exactly once.

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
                    f"without gap or overlap; received the {what} ranges {ranges}."
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
    """The ids of one slot that one rectangle serves, and the output columns that come of them."""

    slot: int
    rect: Rect
    cols: tuple[int, int]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LookupGroup:
    """One lookup of one rank: its rectangles and, per stream, which of them serves it.

    `streams` is the stretch of the rank's streams that this lookup reads, `width` its output
    columns, which are added up within the node before they travel where `in_node`.
    """

    key: Hashable
    tables: tuple[int, ...]
    rects: tuple[Rect, ...]
    feature_table_map: tuple[int, ...]
    streams: range
    width: int
    in_node: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All that the stages need to know about the placement of one module's tables.

    Attributes:
        world_size: number of ranks.
        tables: the placed tables, in the module's order.
        slots: (table, feature) pairs in the order of the output; `width` is the sum of their
            dims.
        split_slots: slots of row-split tables; their ids are bucketized. `num_buckets` is the
            largest number of row blocks of any of them (0 if there are none).
        send_segments: per destination rank, the segments it is sent, in its stream order. Segment
            `f` is feature `f` of the module; segment `num_features + bucket *
            len(split_slots) + i` is one row block of `split_slots[i]`.
        groups: per rank, its lookups.
        streams: per rank, what it is sent, in the order of its lookups' output columns.
        replica_groups: the lookups of replicated tables, which every rank makes on its own batch.
        replica_streams: their streams.
        node_size: ranks per node where some tables' sums take two hops, else `world_size`.
        node_tables: tables whose row parts are added up within a node first.
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
    streams: tuple[tuple[Stream, ...], ...]
    replica_groups: tuple[LookupGroup, ...]
    replica_streams: tuple[Stream, ...]
    node_size: int
    node_tables: frozenset[int]

    @property
    def rank_widths(self) -> tuple[int, ...]:
        """Per rank, the total width of its lookups' output."""
        return tuple(sum(g.width for g in rank_groups) for rank_groups in self.groups)

    @property
    def is_pooled(self) -> bool:
        """Whether rows are combined bag by bag; else each returns to its id."""
        return all(table.combine is not PoolingType.NONE for table in self.tables)

    @property
    def averaged_slots(self) -> tuple[int, ...]:
        """Which of `split_slots`, by place, divide their sums by the number of ids in a bag."""
        rules = [ROW_PARTS[self.slots[slot].combine] for slot in self.split_slots]
        return tuple(place for place, rule in enumerate(rules) if rule.is_averaged)

    @property
    def is_hierarchical(self) -> bool:
        """Whether outputs travel in two hops."""
        return bool(self.node_tables)

    def plot(
        self, *, samples_per_rank: int = 1, ids_per_sample: float = 1.0, pooled: bool = True
    ) -> Figure:
        """Draw the tables over the ranks, and the bytes that a forward pass exchanges.

        Args:
            samples_per_rank: batch size of each rank.
            ids_per_sample: of each feature, on average.
            pooled: whether one embedding per sample travels back, or one per id.

        Returns:
            A matplotlib figure; `figure.savefig("plan.svg")` keeps it.

        Raises:
            ImportError: if matplotlib is missing; the extra `plot` has it.
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
        tables: the tables of one module in its order. Where any is looked up without pooling, a
            lookup serves rectangles of one width only, and nothing is added up, so that nodes do
            not matter.
        num_features: number of the module's distinct features.
        world_size: number of ranks; every rectangle's owner is below it.
        node_size: ranks per node; ranks of one node are neighbours. A table whose row parts are all
            on one node (per column block) is added up there before it travels on. None: one node.

    Returns:
        The layout; the same on every rank.
    """
    slots = _number_slots(tables)
    num_blocks = [len(table.row_starts) for table in tables]
    split_slots = tuple(i for i, slot in enumerate(slots) if num_blocks[slot.table] > 1)
    is_pooled = all(table.combine is not PoolingType.NONE for table in tables)
    node_size = node_size or world_size
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
        group = first.setdefault(table.group, index)
        is_apart = table.one_width or not is_pooled
        block_of = {start: block for block, start in enumerate(table.row_starts)}
        for rect in table.rects or [table.whole]:
            width = rect.num_cols if is_apart else 0
            block = block_of.get(rect.row_start, 0)
            # what takes two hops is looked up first
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
    """Return whether the row parts of every column block are on one node."""
    nodes: dict[int, set[int]] = {}
    for rect in table.rects:
        nodes.setdefault(rect.col_start, set()).add(rect.rank // node_size)
    return len(table.row_starts) > 1 and all(len(found) == 1 for found in nodes.values())


def _number_slots(tables: Sequence[PlacedTable]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    col = 0
    for index, table in enumerate(tables):
        for feature in table.features:
            slots.append(Slot(index, feature, col, table.dim, table.combine))
            col += table.dim
    return tuple(slots)


class _Source(NamedTuple):
    """A slot of a table: its number and first column, and where the ids of its row blocks are."""

    slot: int
    col: int
    segment: int  # of row block 0
    step: int  # from there to the next block's


_Part: TypeAlias = tuple[tuple[bool, int, int, int, int, int], Rect]
"""A rectangle, after what sorts those of a rank into lookups, and these into the module's order:
whether its sums travel in one hop, number and width of its lookup, the number of its table, its row
block, its first column."""


def _plan_lookups(
    tables: Sequence[PlacedTable], sources: Sequence[Sequence[_Source]], owned: Iterable[_Part]
) -> tuple[tuple[LookupGroup, ...], tuple[Stream, ...], tuple[int, ...]]:
    """Return the lookups, streams and segments of a rank that owns these rectangles."""
    streams: list[Stream] = []
    segments: list[int] = []
    groups: list[LookupGroup] = []
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
            LookupGroup(
                key=tables[numbers[0]].group,
                tables=numbers,
                rects=tuple(rect for _, rect in parts),
                feature_table_map=tuple(feature_table_map),
                streams=range(first, len(streams)),
                width=width,
                in_node=not is_flat,
            )
        )
    return tuple(groups), tuple(streams), tuple(segments)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join ranges that touch, in the order given.

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
