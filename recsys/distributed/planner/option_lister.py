"""Lists all the ways a table may be placed, each with its costs and its memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import final

from recsys.distributed.placement.layout import PlacedTable, adds_up_in_node
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingType,
)
from recsys.distributed.placement.strategies import MIN_COLUMNS, even_block, rects_of
from recsys.distributed.planner.costs import CostModel
from recsys.distributed.planner.options import Reach, Shards, TableOption
from recsys.distributed.planner.shard_estimators import ShardEstimator, estimated
from recsys.distributed.planner.storage import StorageModel
from recsys.distributed.planner.tables import PlannedTable
from recsys.distributed.planner.topology import Topology

_MIN_PARTITION = 32


@final
class OptionLister:
    """Lists the ways to place a table.

    Args:
        topology: the machine.
        batch_size: samples per rank and step.
        batches_in_flight: batches whose ids are held at a time.
        estimator: what changes costs and storage of shards.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        batches_in_flight: int = 1,
        estimator: ShardEstimator | None = None,
    ) -> None:
        self._topology = topology
        self._estimator = estimator
        self.storage = StorageModel(topology, batch_size, batches_in_flight)
        of_kind = dict(zip(topology.kinds, topology.hardware, strict=True))
        self._known: dict[Hashable, tuple[PlannedTable, list[TableOption]]] = {}
        self._costs = [CostModel(topology, batch_size, of_kind[kind]) for kind in sorted(of_kind)]

    def options_of(self, table: PlannedTable) -> list[TableOption]:
        """Returns the ways that the user, the sharder and the optimizer allow, simplest first.

        Tables that differ in nothing but their names share one list.
        """
        if self._estimator is not None:  # it may look at names
            return self.estimated(table, self._options_of(table))
        key = table.same_options()
        if key not in self._known:
            self._known[key] = table, self._options_of(table)  # the table keeps the key true
        return self._known[key][1]

    def _options_of(self, table: PlannedTable) -> list[TableOption]:
        return [
            option
            for sharding_type, of_type in (
                (ShardingType.TABLE_WISE, self._table_wise),
                (ShardingType.COLUMN_WISE, self._column_wise),
                (ShardingType.ROW_WISE, self._row_wise),
                (ShardingType.TABLE_ROW_WISE, self._table_row_wise),
                (ShardingType.TABLE_COLUMN_WISE, self._table_column_wise),
                (ShardingType.GRID_SHARD, self._grid),
                (ShardingType.DATA_PARALLEL, self._data_parallel),
            )
            for kernel in table.kernels.get(sharding_type, ())
            if table.allows(sharding_type, kernel)
            for option in of_type(table, kernel)
        ]

    def estimated(self, table: PlannedTable, options: Iterable[TableOption]) -> list[TableOption]:
        """Returns options with the estimator's figures, if there is one."""
        if self._estimator is None:
            return list(options)
        return estimated(self._estimator, table, options)

    def option_of(
        self, table: PlannedTable, sharding: ParameterSharding
    ) -> tuple[TableOption, tuple[int, ...]]:
        """Returns a plan's entry as an option, and the rank of each of its shards.

        Raises:
            ValueError: if a rank does not exist, the plan has neither shards nor ranks, or the
                shards do not cover the table once.
        """
        kind = ShardingType(sharding.sharding_type)
        kernel = EmbeddingComputeKernel(sharding.compute_kernel)
        world_size = self._topology.world_size
        if kind is ShardingType.DATA_PARALLEL:
            [option] = self.estimated(table, [self._replicas(table, kernel)])
            return option, tuple(range(world_size))
        rects = rects_of(
            table.name, table.rows, table.dim, sharding, world_size, self._topology.local_world_size
        )
        placed = PlacedTable(  # raises if they leave a gap or overlap
            name=table.name,
            num_rows=table.rows,
            dim=table.dim,
            features=(),
            group=None,
            rects=rects,
        )
        sizes = groupby((rect.num_rows, rect.num_cols) for rect in rects)
        blocks = [(len(list(alike)), rows, cols) for (rows, cols), alike in sizes]
        # row_wise that happens to lie in one node is rated as the search counts it: anywhere
        by_node = kind in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
        in_node = by_node and adds_up_in_node(placed, self._topology.local_size)
        option = self._option(table, kind, kernel, Reach.ANYWHERE, blocks, in_node=in_node)
        [option] = self.estimated(table, [option])
        return option, tuple(rect.rank for rect in rects)

    def _asked(self, table: PlannedTable) -> bool:
        """Whether the user wants certain types, also where they do nothing."""
        return table.constraints.sharding_types is not None

    def _option(
        self,
        table: PlannedTable,
        sharding_type: ShardingType,
        kernel: EmbeddingComputeKernel,
        reach: Reach,
        blocks: Sequence[tuple[int, int, int]],
        *,
        in_node: bool = False,
    ) -> TableOption:
        """Returns the option whose shards are, each so many of rows x cols."""
        shards = tuple(
            Shards(
                count=count,
                rows=rows,
                cols=cols,
                costs=tuple(
                    of_kind.of_shard(table, rows, cols, kernel, in_node=in_node)
                    for of_kind in self._costs
                ),
                storage=self.storage.of_shard(table, rows, cols, kernel, in_node=in_node),
            )
            for count, rows, cols in blocks
        )
        return TableOption(
            sharding_type=sharding_type, compute_kernel=kernel, reach=reach, shards=shards
        )

    def _table_wise(
        self, table: PlannedTable, kernel: EmbeddingComputeKernel
    ) -> Iterator[TableOption]:
        whole = [(1, table.rows, table.dim)]
        yield self._option(table, ShardingType.TABLE_WISE, kernel, Reach.ANYWHERE, whole)

    def _column_wise(
        self, table: PlannedTable, kernel: EmbeddingComputeKernel
    ) -> Iterator[TableOption]:
        for cuts in self._column_cuts(table, self._topology.world_size):
            blocks = [(count, table.rows, cols) for count, cols in cuts]
            yield self._option(table, ShardingType.COLUMN_WISE, kernel, Reach.ANYWHERE, blocks)

    def _table_column_wise(
        self, table: PlannedTable, kernel: EmbeddingComputeKernel
    ) -> Iterator[TableOption]:
        if not self._asked(table):
            return  # costs what column_wise costs, and goes to fewer places
        for cuts in self._column_cuts(table, self._topology.local_size):
            blocks = [(count, table.rows, cols) for count, cols in cuts]
            kind = ShardingType.TABLE_COLUMN_WISE
            yield self._option(table, kind, kernel, Reach.ONE_NODE, blocks)

    def _row_wise(
        self, table: PlannedTable, kernel: EmbeddingComputeKernel
    ) -> Iterator[TableOption]:
        world_size = self._topology.world_size
        if world_size == 1 and not self._asked(table):
            return
        sizes = [2**i for i in range(1, world_size.bit_length()) if 2**i < world_size]
        for num_ranks in [world_size, *reversed(sizes)]:
            blocks = [(n, rows, table.dim) for n, rows in _cut(table.rows, num_ranks)]
            reach = Reach.FIXED if num_ranks == world_size else Reach.ANYWHERE
            yield self._option(table, ShardingType.ROW_WISE, kernel, reach, blocks)

    def _table_row_wise(
        self, table: PlannedTable, kernel: EmbeddingComputeKernel
    ) -> Iterator[TableOption]:
        topology = self._topology
        if topology.local_size == topology.world_size and not self._asked(table):
            return
        blocks = [(n, rows, table.dim) for n, rows in _cut(table.rows, topology.local_size)]
        kind = ShardingType.TABLE_ROW_WISE
        yield self._option(table, kind, kernel, Reach.ONE_NODE, blocks, in_node=True)

    def _grid(self, table: PlannedTable, kernel: EmbeddingComputeKernel) -> Iterator[TableOption]:
        topology = self._topology
        rows = _cut(table.rows, topology.local_size)
        if sum(count for count, _ in rows) < topology.local_size:
            return  # a node would have ranks without a shard
        for cuts in self._column_cuts(table, topology.world_size // topology.local_size):
            blocks = [
                (count, num_rows, cols)
                for num_nodes, cols in cuts
                for _ in range(num_nodes)
                for count, num_rows in rows
            ]
            kind = ShardingType.GRID_SHARD
            yield self._option(table, kind, kernel, Reach.NODES, blocks, in_node=True)

    def _data_parallel(
        self, table: PlannedTable, kernel: EmbeddingComputeKernel
    ) -> Iterator[TableOption]:
        world_size = self._topology.world_size
        if world_size == 1 and not self._asked(table):
            return
        yield self._replicas(table, kernel)

    def _replicas(self, table: PlannedTable, kernel: EmbeddingComputeKernel) -> TableOption:
        replicas = Shards(
            count=self._topology.world_size,
            rows=table.rows,
            cols=table.dim,
            costs=tuple(of_kind.of_replica(table, kernel) for of_kind in self._costs),
            storage=self.storage.of_replica(table, kernel),
        )
        return TableOption(
            sharding_type=ShardingType.DATA_PARALLEL,
            compute_kernel=kernel,
            reach=Reach.FIXED,
            shards=(replicas,),
        )

    def _column_cuts(self, table: PlannedTable, most: int) -> Iterator[list[tuple[int, int]]]:
        """Yields the cuts into 2, 3 ... parts of different widths; into 1 if asked for no other."""
        least = table.constraints.min_partition or _MIN_PARTITION
        most = min(most, table.dim // least)
        seen: set[int] = set()
        for parts in range(2, most + 1):
            cuts = _cut(table.dim, parts, MIN_COLUMNS)
            count = sum(n for n, _ in cuts)
            if count not in seen:
                seen.add(count)
                yield cuts
        if most < 2 and self._asked(table):
            yield [(1, table.dim)]


def _cut(size: int, parts: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Returns the blocks of :func:`split_evenly` as (how many, how large)."""
    block = even_block(size, parts, multiple)
    full, rest = divmod(size, block)
    return [(n, length) for n, length in ((full, block), (1, rest)) if n and length]
