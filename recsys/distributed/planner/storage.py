"""Memory of a shard on its rank, including the buffers of batches.

Weights and optimizer state equal the engine's allocations. Buffers are counted at the peak of a
step, the start of its backward pass. They hold the looked-up ids and the gradients of the lookup
outputs. For the rank's own samples they also hold the embeddings, their gradients, and a copy of
the gradients in the order in which they are sent back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from recsys.distributed.placement.plan import EmbeddingComputeKernel
from recsys.distributed.planner.shard_traffic import ShardTraffic, traffic_of_shard
from recsys.distributed.planner.tables import Bytes, PlannedTable, RankMemory, ShardSpec
from recsys.distributed.planner.topology import Topology

_VALUE_BYTES, _ROW_ID_BYTES = 4, 8
_SORTED_ID_BYTES = 12  # and its position
_GIVEN_ID_BYTES, _GIVEN_LENGTH_BYTES = 8, 8  # int64, the usual type in batches
_BATCH_COPIES = 3  # of the own samples' embeddings: values, gradients, gradients to send


@final
class StorageModel:
    """Memory of shards.

    Args:
        topology: Machine.
        batch_size: Samples per rank and step.
        batches_in_flight: Batches whose ids a rank holds at a time.
    """

    def __init__(self, topology: Topology, batch_size: int, batches_in_flight: int = 1) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._batches_in_flight = batches_in_flight

    def shard_storage(self, table: PlannedTable, shard: ShardSpec) -> RankMemory:
        """Return the memory of a shard."""
        num_rows, num_cols = shard[:2]
        load = traffic_of_shard(table, shard, self._topology, self._batch_size)
        received = load.ids * (1 + table.is_weighted) + 2 * load.bags  # lengths and offsets
        received *= table.id_bytes
        values = load.rows * num_cols
        moved = self._moved_values(table, shard, load)
        gradients, working = self._row_gradients(table, num_rows, num_cols, load.ids)
        # the update starts when the send buffers are no longer needed
        buffers = values * _VALUE_BYTES + max(moved * _VALUE_BYTES, working)
        return table.storage_of(shard, gradients, int(self._batches_in_flight * received + buffers))

    def _moved_values(self, table: PlannedTable, shard: ShardSpec, load: ShardTraffic) -> float:
        """Return the values that a split adds to the buffers of `batch_storage`.

        A negative number adds nothing. Every rank has these buffers; ranks without a shard are
        assumed to have enough memory left for them.
        """
        ids, bags = table.load(self._batch_size)
        if load.in_two_hops:  # sorted by rank, and received
            received = load.rows / shard.row_parts if load.adds_up else load.rows
            return (load.rows + received) * shard.cols
        if not table.is_pooled:  # received rows are copied into the order of the ids
            is_whole = (shard.rows, shard.cols) == (table.rows, table.dim)
            return 0.0 if is_whole else ids * table.dim
        if shard.row_parts == 1:
            return 0.0
        # each rank sends its share of every sum; means are divided in a copy of the gradients
        sent = ids if load.by_id else bags if load.adds_up else bags * shard.row_parts
        return (sent - bags + bags * table.is_mean) * table.dim

    def replica_storage(self, table: PlannedTable, kernel: EmbeddingComputeKernel) -> RankMemory:
        """Return the memory of a replica of a table and of the sum of its gradients."""
        whole = ShardSpec(table.rows, table.dim, kernel)
        if not table.trains:
            return table.storage_of(whole)
        summed, working = table.gradient_bytes, 0.0
        if table.optimizer is not None and table.optimizer.spec.moves_without_gradient:
            # the send buffer is concatenated first, and the changed rows are selected from it
            ids, _ = table.load(self._topology.world_size * self._batch_size)
            values = table.touched(table.rows, ids) * table.dim
            working = values * _VALUE_BYTES * table.optimizer.spec.rule.update_copies
            working += summed
        return table.storage_of(whole, summed, int(working))

    def batch_storage(self, tables: Sequence[PlannedTable]) -> RankMemory:
        """Return the memory of a rank's own batch and of its embeddings, under any plan."""
        return RankMemory(buffers=Bytes(sum(int(self._own_bytes(table)) for table in tables)))

    def _own_bytes(self, table: PlannedTable) -> float:
        ids, bags = table.load(self._batch_size)
        values = (bags if table.is_pooled else ids) * table.dim
        id_bytes = ids * (_GIVEN_ID_BYTES + _VALUE_BYTES * table.is_weighted)
        id_bytes += 2 * bags * _GIVEN_LENGTH_BYTES  # and offsets
        return self._batches_in_flight * id_bytes + _BATCH_COPIES * values * _VALUE_BYTES

    def _row_gradients(
        self, table: PlannedTable, num_rows: int, num_cols: int, ids: float
    ) -> tuple[int, float]:
        """Return the bytes of a shard's stored row gradients, and of its update."""
        optimizer = table.optimizer
        if optimizer is None:
            return 0, 0.0
        # row gradients stay until the step of the optimizer:
        # docs/decisions/optimizers.md, "Deferred tables hold row gradients"
        if optimizer.is_deferred:
            touched = table.touched(num_rows, ids)
            return int(touched * (num_cols * _VALUE_BYTES + _ROW_ID_BYTES)), 0.0
        copies, sorted_ids = 0, 0.0
        if table.writes_row_gradients:
            copies = optimizer.spec.rule.update_copies
        if num_cols < table.dim and optimizer.exchanges_row_state:
            # rows are summed first in a separate lookup, which needs a copy
            copies += 1
            sorted_ids = ids * _SORTED_ID_BYTES
        if not copies:
            return 0, 0.0
        return 0, copies * table.touched(num_rows, ids) * num_cols * _VALUE_BYTES + sorted_ids
