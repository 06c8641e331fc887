"""How long a part of a table keeps its rank busy in one training step.

A part's time is the sum of what its rank must move for it, each over a bandwidth that was measured
or is known of the hardware (:class:`~recsys.distributed.planner.topology.Topology`). Fixed costs,
such as the latency of the step's exchanges, are the same under every plan and left out.

With ``N`` ids and ``G`` bags that reach a part of ``r x c`` values (``e`` bytes each):

- *forward*: ``N c e`` bytes of rows are read;
- *backward*: the rows that were touched are read and written, with their optimizer state. Of ``r``
  equally likely rows ``N`` draws touch ``r (1 - (1 - 1/r)^N)``;
- *input*: ``N`` ids (and weights) and ``G`` lengths arrive;
- *output*: ``G c`` values leave (``N c`` where they are not pooled), and as many gradients arrive,
  in the precision of the wire. Of what leaves a rank, ``(W - L) / W`` crosses between nodes of
  ``L`` ranks among ``W``. If the rows of a table lie within one node, the node's sums cross only
  once: ``1 / L`` of it;
- *update*: replicas of a table add up whole gradients: ``2 (W - 1) / W`` of its size is sent.

Costs of lookups follow the roofline model: Williams et al., "Roofline: an insightful visual
performance model for multicore architectures", 2009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import final

from recsys.distributed.planner.hardware import Hardware
from recsys.distributed.planner.measured import transfer_ms
from recsys.distributed.planner.tables import UVM_KERNELS, Bytes, PlannedTable, Storage
from recsys.distributed.planner.topology import Topology
from recsys.distributed.types import EmbeddingComputeKernel

_LENGTH_BYTES, _VALUE_BYTES = 4, 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Milliseconds of one step.

    Attributes:
        forward: looking rows up.
        backward: updating them.
        input: receiving ids.
        output: sending embeddings and receiving their gradients.
        update: adding up the gradients of replicas, and applying them.
    """

    forward: float = 0.0
    backward: float = 0.0
    input: float = 0.0
    output: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.input + self.output + self.update

    def plus(self, other: Cost) -> Cost:
        """Returns the sum of both."""
        names = [part.name for part in fields(self)]
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in names})


@final
class CostModel:
    """The time and the memory of parts of tables, on ranks of one kind.

    Args:
        topology: the machine.
        batch_size: samples per rank and step.
        hardware: of the ranks; the slowest of all by default.
    """

    def __init__(
        self, topology: Topology, batch_size: int, hardware: Hardware | None = None
    ) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._hardware = hardware or topology.slowest

    def of_part(
        self,
        table: PlannedTable,
        num_rows: int,
        num_cols: int,
        kernel: EmbeddingComputeKernel,
        *,
        in_node: bool = False,
    ) -> Cost:
        """Returns what a part costs the rank that owns it.

        Args:
            table: what it is a part of.
            num_rows: of the part.
            num_cols: of the part.
            kernel: where it lives.
            in_node: whether all row parts of its columns lie on the ranks of one node.
        """
        topology = self._topology
        world_size, local_size = topology.world_size, topology.local_size
        num_nodes = topology.num_nodes
        ids, bags = self._load(table, world_size)
        ids *= num_rows / max(table.rows, 1)
        values = (bags if table.is_pooled else ids) * num_cols
        forward, backward = self._lookup(table, ids, num_rows, num_cols, kernel)
        if world_size == 1:
            return Cost(forward=forward, backward=backward)
        ids_in = ids * (table.id_bytes + 4 * table.is_weighted) + bags * _LENGTH_BYTES
        there_and_back = values * sum(table.wire_bytes)
        if in_node and num_rows < table.rows:
            # each rank of the node sums up and sends on an equal share of the samples
            moved = self._transfer("all_to_all", there_and_back, local_size, 1)
            sums = there_and_back / local_size
            moved += self._transfer("all_to_all", sums, num_nodes, num_nodes)
        else:
            moved = self._transfer("all_to_all", there_and_back, world_size, num_nodes)
        return Cost(
            forward=forward,
            backward=backward,
            input=self._transfer("all_to_all", ids_in, world_size, num_nodes),
            output=moved,
        )

    def of_replica(self, table: PlannedTable, kernel: EmbeddingComputeKernel) -> Cost:
        """Returns what a copy of a whole table costs each rank."""
        topology = self._topology
        world_size = topology.world_size
        ids, _ = self._load(table, 1)
        forward, backward = self._lookup(table, ids, table.rows, table.dim, kernel)
        if world_size == 1 or not table.trains:
            return Cost(forward=forward, backward=backward)
        size = table.gradient_bytes
        summed = self._transfer("all_reduce", size, world_size, topology.num_nodes)
        # the gradient is cleared, written, read; weights are read and written
        passes = 5 * size / self._hardware.memory_bw
        return Cost(forward=forward, backward=backward, update=summed + passes)

    def storage_of_part(
        self, table: PlannedTable, num_rows: int, num_cols: int, kernel: EmbeddingComputeKernel
    ) -> Storage:
        """Returns the memory of a part: weights, state, and the buffers of one batch."""
        ids, bags = self._load(table, self._topology.world_size)
        values = (bags if table.is_pooled else ids) * num_cols
        buffers = int(2 * values * _VALUE_BYTES + ids * table.id_bytes)
        return replace(table.storage_of(num_rows, num_cols, kernel), buffers=Bytes(buffers))

    def storage_of_replica(self, table: PlannedTable, kernel: EmbeddingComputeKernel) -> Storage:
        """Returns the memory of a copy of the whole table, and of the sum of its gradients."""
        kept = table.storage_of(table.rows, table.dim, kernel)
        summed = Bytes(table.gradient_bytes if table.trains else 0)
        return replace(kept, gradients=kept.gradients.plus(summed))

    def _load(self, table: PlannedTable, num_ranks: int) -> tuple[float, float]:
        """Returns the ids and bags of a table in a step of so many ranks."""
        samples = num_ranks * self._batch_size
        return samples * table.ids_per_sample, float(samples * table.num_features)

    def _lookup(
        self,
        table: PlannedTable,
        ids: float,
        num_rows: int,
        num_cols: int,
        kernel: EmbeddingComputeKernel,
    ) -> tuple[float, float]:
        hardware = self._hardware
        bandwidth = hardware.ddr_mem_bw if kernel in UVM_KERNELS else hardware.memory_bw
        row_bytes = num_cols * table.element_bytes
        forward = ids * row_bytes / bandwidth
        if not table.trains:
            return forward, 0.0
        touched = _touched(num_rows, ids) * (row_bytes + table.state_bytes_per_row(num_cols))
        return forward, (ids * num_cols * _VALUE_BYTES + 2 * touched) / bandwidth

    def _transfer(self, kind: str, num_bytes: float, num_ranks: int, num_nodes: int) -> float:
        return transfer_ms(kind, num_bytes, num_ranks, num_nodes, self._hardware)


def _touched(num_rows: int, ids: float) -> float:
    """Returns how many of equally likely rows are expected among the ids."""
    if num_rows <= 1:
        return float(num_rows)
    return -num_rows * math.expm1(ids * math.log1p(-1 / num_rows))
