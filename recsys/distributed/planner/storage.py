"""The memory that a part of a table takes on its rank, buffers of batches included.

Weights and optimizer state are what the engine allocates, to the byte. Buffers are those of the
moment when a step holds most, at the start of its backward pass: the ids that were looked up, the
gradients of the lookups' outputs, and of the rank's own samples the embeddings, their gradients,
and these in the order in which they are sent back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from recsys.distributed.placement.plan import EmbeddingComputeKernel
from recsys.distributed.planner.part_load import PartLoad, load_of
from recsys.distributed.planner.tables import Bytes, Part, PlannedTable, Storage
from recsys.distributed.planner.topology import Topology

_VALUE_BYTES, _LENGTH_BYTES, _ROW_ID_BYTES = 4, 4, 8
_SORTED_ID_BYTES = 12  # and where it stood
_GIVEN_ID_BYTES, _GIVEN_LENGTH_BYTES = 8, 8  # as batches mostly have them
_BATCH_COPIES = 3  # of the own samples' embeddings: they, their gradients, and these to be sent


@final
class StorageModel:
    """The memory of parts of tables.

    Args:
        topology: the machine.
        batch_size: samples per rank and step.
        batches_in_flight: batches whose ids a rank holds at a time.
    """

    def __init__(self, topology: Topology, batch_size: int, batches_in_flight: int = 1) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._batches_in_flight = batches_in_flight

    def of_shard(self, table: PlannedTable, part: Part) -> Storage:
        """Return the memory of a part of a table."""
        num_rows, num_cols = part[:2]
        load = load_of(table, part, self._topology, self._batch_size)
        received = load.ids * (table.id_bytes + _VALUE_BYTES * table.is_weighted)
        received += 2 * load.bags * _LENGTH_BYTES  # and offsets
        values = load.rows * num_cols
        moved = self._moved_values(table, part, load)
        gradients, working = self._row_gradients(table, num_rows, num_cols, load.ids)
        # the update begins when what was moved to be sent is no longer needed
        buffers = values * _VALUE_BYTES + max(moved * _VALUE_BYTES, working)
        return table.storage_of(part, gradients, int(self._batches_in_flight * received + buffers))

    def _moved_values(self, table: PlannedTable, part: Part, load: PartLoad) -> float:
        """Return what a split adds to the buffers of the own samples; see `of_batch`.

        Below 0 it adds nothing. It is on every rank; those without a part are taken to have enough
        memory left for it.
        """
        ids, bags = table.load(self._batch_size)
        if load.in_two_hops:  # in the order of the ranks, and received
            received = load.rows / part.row_parts if load.adds_up else load.rows
            return (load.rows + received) * part.cols
        if not table.is_pooled:  # rows are not in the order of the ids, so they are moved
            is_whole = (part.rows, part.cols) == (table.rows, table.dim)
            return 0.0 if is_whole else ids * table.dim
        if part.row_parts == 1:
            return 0.0
        # each sends its share of every sum; means are divided in a copy of the gradients
        sent = ids if load.by_id else bags if load.adds_up else bags * part.row_parts
        return (sent - bags + bags * table.is_mean) * table.dim

    def of_replica(self, table: PlannedTable, kernel: EmbeddingComputeKernel) -> Storage:
        """Return the memory of a copy of the whole table, and of the sum of its gradients."""
        whole = Part(table.rows, table.dim, kernel)
        if not table.trains:
            return table.storage_of(whole)
        summed, working = table.gradient_bytes, 0.0
        if table.optimizer is not None and table.optimizer.spec.moves_without_gradient:
            # what is sent is put together first, and the rows that moved are taken out of it
            ids, _ = table.load(self._topology.world_size * self._batch_size)
            values = table.touched(table.rows, ids) * table.dim
            working = values * _VALUE_BYTES * table.optimizer.spec.rule.update_copies
            working += summed
        return table.storage_of(whole, summed, int(working))

    def of_batch(self, tables: Sequence[PlannedTable]) -> Storage:
        """Return the memory of a rank's own batch and of its embeddings, whatever the plan."""
        return Storage(buffers=Bytes(sum(int(self._own_bytes(table)) for table in tables)))

    def _own_bytes(self, table: PlannedTable) -> float:
        ids, bags = table.load(self._batch_size)
        values = (bags if table.is_pooled else ids) * table.dim
        given = ids * (_GIVEN_ID_BYTES + _VALUE_BYTES * table.is_weighted)
        given += 2 * bags * _GIVEN_LENGTH_BYTES  # and offsets
        return self._batches_in_flight * given + _BATCH_COPIES * values * _VALUE_BYTES

    def _row_gradients(
        self, table: PlannedTable, num_rows: int, num_cols: int, ids: float
    ) -> tuple[int, float]:
        """Return the bytes of a part's row gradients that are kept, and those of its update."""
        optimizer = table.optimizer
        if optimizer is None:
            return 0, 0.0
        if optimizer.is_deferred:
            touched = table.touched(num_rows, ids)
            return int(touched * (num_cols * _VALUE_BYTES + _ROW_ID_BYTES)), 0.0
        copies, sorted_ids = 0, 0.0
        if table.writes_row_gradients:
            copies = optimizer.spec.rule.update_copies
        if num_cols < table.dim and optimizer.exchanges_row_state:
            # rows are added up first, in a lookup of their own, which takes a copy
            copies += 1
            sorted_ids = ids * _SORTED_ID_BYTES
        if not copies:
            return 0, 0.0
        return 0, copies * table.touched(num_rows, ids) * num_cols * _VALUE_BYTES + sorted_ids
