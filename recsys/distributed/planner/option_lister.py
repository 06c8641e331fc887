"""Lists the options for placing a table, each with its costs and its memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Protocol, final

from recsys.distributed.placement.layout import PlacedTable, adds_up_in_node
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingType,
)
from recsys.distributed.placement.strategies import (
    MIN_COLUMNS,
    even_block,
    has_region_for_each,
    rects_of,
    region_edges,
)
from recsys.distributed.planner.costs import CostModel
from recsys.distributed.planner.options import Reach, Shards, TableOption
from recsys.distributed.planner.storage import StorageModel
from recsys.distributed.planner.tables import Block, PlannedTable, ShardSpec
from recsys.distributed.planner.topology import Topology

_MIN_PARTITION = 32
_BY_NODE = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
_TYPES = (
    *(ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.ROW_WISE),
    *(ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD),
    ShardingType.DATA_PARALLEL,
)
"""Sharding types in the order of options, simplest first."""


class ShardEstimator(Protocol):
    """Estimator of the costs and memory of shards."""

    def estimate(self, table: PlannedTable, option: TableOption, shards: Shards, /) -> Shards:
        """Return shards with other costs or storage.

        Args:
            table: Table of the shards.
            option: Option that the shards belong to.
            shards: Rows, columns and the planner's estimates of one shard: `costs` on each kind of
                rank, and `storage`. Change them with `dataclasses.replace`.
        """


@final
class OptionLister:
    """Lists the options for placing a table.

    Args:
        topology: Machine.
        batch_size: Samples per rank and step.
        batches_in_flight: Batches whose ids a rank holds at a time.
        estimator: Replaces the costs and storage of shards.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        batches_in_flight: int = 1,
        estimator: ShardEstimator | None = None,
    ) -> None:
        self.topology, self.batch_size = topology, batch_size
        self.batches_in_flight, self._estimator = batches_in_flight, estimator
        self.storage = StorageModel(topology, batch_size, batches_in_flight)
        of_kind = dict(zip(topology.kinds, topology.hardware, strict=True))
        self._known: dict[Hashable, tuple[PlannedTable, list[TableOption]]] = {}
        self._costs = [CostModel(topology, batch_size, of_kind[kind]) for kind in sorted(of_kind)]

    def on(self, topology: Topology) -> OptionLister:
        """Return a lister for another machine."""
        return OptionLister(topology, self.batch_size, self.batches_in_flight, self._estimator)

    def options_of(self, table: PlannedTable) -> list[TableOption]:
        """Return the options that the user, the sharder and the optimizer allow, simplest first.

        Tables that differ only in their names share one list.
        """
        if self._estimator is not None:  # it may depend on names
            return self.estimated(table, self._options_of(table))
        key = table.same_options()
        if key not in self._known:
            # the stored table keeps the key valid
            self._known[key] = table, self._options_of(table)
        return self._known[key][1]

    def _options_of(self, table: PlannedTable) -> list[TableOption]:
        return [
            self._option(table, kind, kernel, reach, blocks, kind in _BY_NODE)
            for kind in _TYPES
            for kernel in table.kernels.get(kind, ())
            if table.allows(kind, kernel)
            for reach, blocks in self._splits(table, kind)
            if _fits_regions(table, blocks)
        ]

    def estimated(self, table: PlannedTable, options: Iterable[TableOption]) -> list[TableOption]:
        """Return options with the estimates of the estimator, if there is one.

        Raises:
            ValueError: The estimator changed more than costs and storage, or a cost is not a finite
                number of milliseconds for each kind of rank.
        """
        if self._estimator is None:
            return list(options)
        return [
            replace(option, shards=tuple(self._estimated(table, option, s) for s in option.shards))
            for option in options
        ]

    def _estimated(self, table: PlannedTable, option: TableOption, given: Shards) -> Shards:
        assert self._estimator is not None
        name = f"{type(self._estimator).__name__}.estimate"
        try:
            estimate = self._estimator.estimate(table, option, given)
        except ValueError as error:
            raise ValueError(
                f"{name} of table {table.name!r}, {option.sharding_type.value}: {error}"
            ) from error
        kinds = len(given.costs)
        same = replace(estimate, costs=given.costs, storage=given.storage) == given
        if not same or len(estimate.costs) != kinds:
            raise ValueError(
                f"{name} must return the given shards with storage and costs for {kinds} kinds of "
                f"rank; received {estimate} for {given} of table {table.name!r}. Use "
                "dataclasses.replace(shards, costs=..., storage=...)."
            )
        return estimate

    def option_of(
        self, table: PlannedTable, sharding: ParameterSharding
    ) -> tuple[TableOption, tuple[int, ...]]:
        """Return the option of a plan's entry, and the rank of each of its shards.

        Raises:
            ValueError: A rank does not exist, the entry has neither shards nor ranks, or the shards
                do not cover the table exactly once.
        """
        kind = ShardingType(sharding.sharding_type)
        kernel = EmbeddingComputeKernel(sharding.compute_kernel)
        world_size, node_size = self.topology.world_size, self.topology.local_world_size
        reach, in_node, name, rows, dim = Reach.FIXED, False, table.name, table.rows, table.dim
        blocks, ranks = [(world_size, rows, dim)], tuple(range(world_size))
        if kind is not ShardingType.DATA_PARALLEL:
            rects = rects_of(name, rows, dim, sharding, world_size, node_size)
            # raises if they overlap or leave a gap
            placed = PlacedTable(
                name=name, num_rows=rows, dim=dim, features=(), group=None, rects=rects
            )
            sizes = groupby((rect.num_rows, rect.num_cols) for rect in rects)
            blocks = [(len(list(run)), *size) for size, run in sizes]
            reach, ranks = Reach.ANYWHERE, tuple(rect.rank for rect in rects)
            # row_wise within one node costs the same as on any ranks, as in the search
            in_node = kind in _BY_NODE and adds_up_in_node(placed, node_size)
        [option] = self.estimated(
            table, [self._option(table, kind, kernel, reach, blocks, in_node)]
        )
        return option, ranks

    def _option(
        self,
        table: PlannedTable,
        kind: ShardingType,
        kernel: EmbeddingComputeKernel,
        reach: Reach,
        blocks: Sequence[Block],
        in_node: bool,
    ) -> TableOption:
        """Return the option with the shards of these blocks.

        Args:
            table: Table to place.
            kind: Sharding type.
            kernel: Compute kernel of the shards.
            reach: Ranks that the shards may use.
            blocks: Number, rows and columns of identical shards.
            in_node: Whether all row shards of some columns are in one node.
        """
        replicated = kind is ShardingType.DATA_PARALLEL
        # the traffic of a shard depends on the number of its siblings, not only on its size:
        # docs/decisions/row_split.md, "Short bags: rows return by id"
        row_parts = table.row_parts(blocks)
        shards = []
        for count, rows, cols in blocks:
            if replicated:
                costs = tuple(model.replica_cost(table, kernel) for model in self._costs)
                storage = self.storage.replica_storage(table, kernel)
            else:
                shard = ShardSpec(rows, cols, kernel, in_node, row_parts)
                costs = tuple(model.shard_cost(table, shard) for model in self._costs)
                storage = self.storage.shard_storage(table, shard)
            shards.append(Shards(count=count, rows=rows, cols=cols, costs=costs, storage=storage))
        return TableOption(
            sharding_type=kind, compute_kernel=kernel, reach=reach, shards=tuple(shards)
        )

    def _splits(
        self, table: PlannedTable, kind: ShardingType
    ) -> Iterator[tuple[Reach, Sequence[Block]]]:
        """Yield the splits of a table by a sharding type: allowed ranks and sizes of shards."""
        world_size, node_size = self.topology.world_size, self.topology.local_world_size
        # even if it splits nothing, or costs the same as a type with more possible ranks
        is_requested = table.constraints.sharding_types is not None
        rows, dim = table.rows, table.dim
        if kind is ShardingType.TABLE_WISE:
            yield Reach.ANYWHERE, [(1, rows, dim)]
        elif kind is ShardingType.COLUMN_WISE:
            for columns in self._column_splits(table, world_size):
                yield Reach.ANYWHERE, [(count, rows, cols) for count, cols in columns]
        elif kind is ShardingType.TABLE_COLUMN_WISE and is_requested:
            for columns in self._column_splits(table, node_size):
                yield Reach.ONE_NODE, [(count, rows, cols) for count, cols in columns]
        elif kind is ShardingType.TABLE_ROW_WISE and (node_size < world_size or is_requested):
            yield Reach.ONE_NODE, [(n, size, dim) for n, size in _split(rows, node_size)]
        elif kind is ShardingType.GRID_SHARD:
            yield from self._grids(table)
        elif kind is ShardingType.ROW_WISE and (world_size > 1 or is_requested):
            # powers of two, so that the number of options grows with the logarithm of the ranks
            sizes = [2**i for i in range(1, world_size.bit_length()) if 2**i < world_size]
            for num_ranks in [world_size, *reversed(sizes)]:
                reach = Reach.FIXED if num_ranks == world_size else Reach.ANYWHERE
                yield reach, [(n, size, dim) for n, size in _split(rows, num_ranks)]
        elif kind is ShardingType.DATA_PARALLEL and (world_size > 1 or is_requested):
            yield Reach.FIXED, [(world_size, rows, dim)]

    def _grids(self, table: PlannedTable) -> Iterator[tuple[Reach, Sequence[Block]]]:
        node_size = self.topology.local_world_size
        of_node = _split(table.rows, node_size)
        if sum(count for count, _ in of_node) < node_size:
            return  # some ranks of a node would have no shard
        for columns in self._column_splits(table, self.topology.num_nodes):
            widths = [cols for num_nodes, cols in columns for _ in range(num_nodes)]
            yield Reach.NODES, [(count, rows, cols) for cols in widths for count, rows in of_node]

    def _column_splits(self, table: PlannedTable, most: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the splits into 2, 3, ... shards with distinct widths; into 1 if there is none."""
        least = table.constraints.min_partition or _MIN_PARTITION
        most = min(most, table.dim // least)
        seen: set[int] = set()
        for parts in range(2, most + 1):
            columns = _split(table.dim, parts, MIN_COLUMNS)
            count = sum(n for n, _ in columns)
            if count not in seen:
                seen.add(count)
                yield columns
        if most < 2 and table.constraints.sharding_types is not None:
            yield [(1, table.dim)]


def _fits_regions(table: PlannedTable, blocks: Sequence[Block]) -> bool:
    """Return whether a table with hashed ids has a region for each of its row blocks."""
    if not table.num_regions:
        return True
    sizes = (rows for count, rows, _ in blocks for _ in range(count))
    # each block of columns repeats the row blocks; the modulo removes the last edge
    edges = {edge % table.rows for edge in accumulate(sizes, initial=0)} | {table.rows}
    return has_region_for_each(region_edges(edges, table.rows // table.num_regions))


def _split(size: int, parts: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Return the blocks of an even split as pairs of number and size."""
    block = even_block(size, parts, multiple)
    full, rest = divmod(size, block)
    return [(n, length) for n, length in ((full, block), (1, rest)) if n and length]
