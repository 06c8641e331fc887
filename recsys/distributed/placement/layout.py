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

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias, final

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
@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTable:
    """A table with its place.

    ``features`` are indices into the module's features. ``group`` is equal for tables that one
    lookup can serve together. ``rects`` is empty for a replicated (data-parallel) table. A lookup
    of tables with ``one_width`` serves rectangles of one width only.
    """

    name: str
    num_rows: int
    dim: int
    features: tuple[int, ...]
    group: Hashable
    rects: tuple[Rect, ...]
    one_width: bool = False

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

    @property
    def whole(self) -> Rect:
        """The rectangle of all rows and columns, as a replica has it on each rank."""
        return Rect(row_start=0, row_end=self.num_rows, col_start=0, col_end=self.dim, rank=0)


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
class Stream:
    """The ids of one slot that one rectangle serves, and the output columns that come of them."""

    slot: int
    rect: Rect
    cols: tuple[int, int]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LookupGroup:
    """One lookup of one rank: its rectangles and, per stream, which of them serves it.

    ``streams`` is the stretch of the rank's streams that this lookup reads, ``width`` its output
    columns, of which the last ``node_width`` are added up within the node before they travel.
    """

    key: Hashable
    tables: tuple[int, ...]
    rects: tuple[Rect, ...]
    feature_table_map: tuple[int, ...]
    streams: range
    width: int
    node_width: int


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
        streams: per rank, what it is sent, in the order of its lookups' output columns.
        replica_groups: the lookups of replicated tables, which every rank makes on its own batch.
        replica_streams: their streams.
        node_size: ranks per node where some tables' sums take two hops, else ``world_size``.
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
    def is_hierarchical(self) -> bool:
        """Whether outputs travel in two hops."""
        return bool(self.node_tables)

    def plot(
        self, *, samples_per_rank: int = 1, ids_per_sample: float = 1.0, pooled: bool = True
    ) -> Figure:
        """Draws the tables over the ranks, and the bytes that a forward pass exchanges.

        Args:
            samples_per_rank: batch size of each rank.
            ids_per_sample: of each feature, on average.
            pooled: whether one embedding per sample travels back, or one per id.

        Returns:
            A matplotlib figure; ``figure.savefig("plan.svg")`` keeps it.

        Raises:
            ImportError: if matplotlib is missing; the extra ``plot`` has it.
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
    equal_widths: bool = False,
) -> Layout:
    """Compiles placed tables into a layout.

    Args:
        tables: the tables of one module in its order.
        num_features: number of the module's distinct features.
        world_size: number of ranks; every rectangle's owner lies below it.
        node_size: ranks per node; ranks of one node are neighbours. A table whose row parts all lie
            on one node (per column block) is added up there before it travels on. None: one node.
        equal_widths: whether a lookup serves rectangles of one width only, as lookups without
            pooling do; their outputs are not added up, so nodes do not matter to them.

    Returns:
        The layout; the same on every rank.

    Raises:
        ValueError: if a rectangle is owned by a rank that does not exist.
    """
    slots, slots_of = _number_slots(tables)
    num_blocks = [len(table.row_starts) for table in tables]
    split_slots = tuple(i for i, slot in enumerate(slots) if num_blocks[slot.table] > 1)
    node_size = node_size or world_size
    in_node = frozenset(
        index
        for index, table in enumerate(tables)
        if node_size < world_size and not equal_widths and adds_up_in_node(table, node_size)
    )
    compiler = _Compiler(tables, slots, slots_of, split_slots, num_features, in_node, equal_widths)
    owned: list[list[_Owned]] = [[] for _ in range(world_size)]
    for index, table in enumerate(tables):
        block_of = {start: block for block, start in enumerate(table.row_starts)}
        for rect in table.rects:
            if rect.rank >= world_size:
                raise ValueError(
                    f"The plan places a shard of table {table.name!r} on rank {rect.rank}, but "
                    f"there are "
                    f"{world_size} ranks (0..{world_size - 1}). Make the plan for this world size."
                )
            block = block_of[rect.row_start]
            owned[rect.rank].append((index in in_node, index, block, rect.col_start, rect))
    per_rank = [compiler.plan_lookups(of_rank) for of_rank in owned]
    replica_groups, replica_streams, _ = compiler.plan_lookups(
        [(False, index, 0, 0, table.whole) for index, table in enumerate(tables) if not table.rects]
    )
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
    """Whether the row parts of every column block lie on one node."""
    nodes: dict[int, set[int]] = {}
    for rect in table.rects:
        nodes.setdefault(rect.col_start, set()).add(rect.rank // node_size)
    return table.is_row_split and all(len(found) == 1 for found in nodes.values())


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


_Owned: TypeAlias = tuple[bool, int, int, int, Rect]
"""A rectangle of one rank: whether its sums are added up in the node, the number of its table, its
row block, its first column. Sorted, these are in the order of lookups."""


class _Compiler:
    """Groups the rectangles of ranks into lookups, each in the module's order of tables."""

    def __init__(
        self,
        tables: Sequence[PlacedTable],
        slots: Sequence[Slot],
        slots_of: Sequence[Sequence[int]],
        split_slots: Sequence[int],
        num_features: int,
        in_node: frozenset[int],
        equal_widths: bool,
    ) -> None:
        first: dict[Hashable, int] = {}
        self._group_of = [first.setdefault(t.group, index) for index, t in enumerate(tables)]
        self._apart = [equal_widths or table.one_width for table in tables]
        self._tables, self._slots_of, self._in_node = tables, slots_of, in_node
        self._cols = [slot.col for slot in slots]
        # of each slot the segment of its row block 0, and how far the next block's lies from it
        self._segment = [slot.feature for slot in slots]
        self._step = [0] * len(slots)
        for place, slot in enumerate(split_slots):
            self._segment[slot], self._step[slot] = num_features + place, len(split_slots)

    def plan_lookups(
        self, owned: Sequence[_Owned]
    ) -> tuple[tuple[LookupGroup, ...], tuple[Stream, ...], tuple[int, ...]]:
        """Returns the lookups, streams and segments of a rank that owns these rectangles."""
        members: dict[tuple[int, int], list[_Owned]] = {}
        for mine in sorted(owned, key=itemgetter(0, 1, 2, 3)):
            width = mine[4].num_cols if self._apart[mine[1]] else 0
            members.setdefault((self._group_of[mine[1]], width), []).append(mine)
        streams: list[Stream] = []
        segments: list[int] = []
        groups: list[LookupGroup] = []
        for _, group in sorted(members.items()):
            first = len(streams)
            feature_table_map: list[int] = []
            width = node_width = 0
            for local, (in_node, index, block, _, rect) in enumerate(group):
                for slot in self._slots_of[index]:
                    col = self._cols[slot]
                    cols = (col + rect.col_start, col + rect.col_end)
                    streams.append(Stream(slot=slot, rect=rect, cols=cols))
                    segments.append(self._segment[slot] + block * self._step[slot])
                    feature_table_map.append(local)
                columns = rect.num_cols * len(self._slots_of[index])
                width += columns
                node_width += columns if in_node else 0
            groups.append(
                LookupGroup(
                    key=self._tables[group[0][1]].group,
                    tables=tuple(mine[1] for mine in group),
                    rects=tuple(mine[4] for mine in group),
                    feature_table_map=tuple(feature_table_map),
                    streams=range(first, len(streams)),
                    width=width,
                    node_width=node_width,
                )
            )
        return tuple(groups), tuple(streams), tuple(segments)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Joins ranges that touch, in the order given.

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
