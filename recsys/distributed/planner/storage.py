"""The memory that a part of a table takes on its rank, buffers of batches included."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from recsys.distributed.planner.tables import Bytes, PlannedTable, Storage
from recsys.distributed.types import EmbeddingComputeKernel

_VALUE_BYTES = 4


@final
class StorageModel:
    """The memory of parts of tables.

    Args:
        world_size: number of ranks.
        batch_size: samples per rank and step.
    """

    def __init__(self, world_size: int, batch_size: int) -> None:
        self._world_size = world_size
        self._batch_size = batch_size

    def of_part(
        self, table: PlannedTable, num_rows: int, num_cols: int, kernel: EmbeddingComputeKernel
    ) -> Storage:
        """Returns the memory of a part: weights, state, and the buffers of one batch."""
        ids, bags = table.load(self._world_size * self._batch_size)
        values = (bags if table.is_pooled else ids) * num_cols
        buffers = int(2 * values * _VALUE_BYTES + ids * table.id_bytes)
        return replace(table.storage_of(num_rows, num_cols, kernel), buffers=Bytes(buffers))

    def of_replica(self, table: PlannedTable, kernel: EmbeddingComputeKernel) -> Storage:
        """Returns the memory of a copy of the whole table, and of the sum of its gradients."""
        kept = table.storage_of(table.rows, table.dim, kernel)
        summed = Bytes(table.gradient_bytes if table.trains else 0)
        return replace(kept, gradients=kept.gradients.plus(summed))
