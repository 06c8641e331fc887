"""How long a part of a table keeps its rank busy in one training step.

A part's time is the sum of what its rank must move for it, each over a bandwidth that was measured
or is known of the hardware (`Topology`). Fixed costs,
such as the latency of the step's exchanges, are the same under every plan and left out.

With `N` ids and `G` bags that reach a part of `r x c` values (`e` bytes each):

- *prefetch*: rows that a cache in device memory lacks (`fused_uvm_caching`) come from the host,
  and as many go back: what the cache's hit rate leaves of `N`, at most the distinct ones;
- *forward*: `N c e` bytes of rows are read;
- *backward*: gradients are read, and the rows that were touched are read and written with their
  optimizer state. Of `r` equally likely rows `N` draws touch `r (1 - (1 - 1/r)^N)`. Where
  owners of columns must add up one value per row, ids are sorted and gradients read once more;
- *input*: `N` ids (and weights) are sorted by owner; they and `G` lengths arrive, none where rows
  of a pooled table return by id (see `part_load`);
- *output*: `G c` values leave (`N c` where they return by id or are not pooled), and as many
  gradients arrive, in the precision of the wire. Of what leaves a rank, `(W - L) / W` crosses
  between nodes of `L` ranks among `W`. If the rows of a pooled table are within one node, the
  node's sums cross only once: `1 / L` of it. What is added up on the way, and its gradients, take
  what the two halves of an all-reduce take. Values that arrive are placed in the output, and
  gradients taken from it; what returns by id is put in the order of the ranks first;
- *update*: replicas of a table add up whole gradients: `2 (W - 1) / W` of its size is sent, and
  it is read or written nine times. Owners of columns send one number per touched row, if need be.

Costs of lookups follow the roofline model: Williams et al., "Roofline: an insightful visual
performance model for multicore architectures", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from recsys.distributed.placement.plan import EmbeddingComputeKernel
from recsys.distributed.planner.hardware import Hardware
from recsys.distributed.planner.measured import LookupSpeed
from recsys.distributed.planner.part_load import load_of
from recsys.distributed.planner.tables import Part, PlannedTable, Summable
from recsys.distributed.planner.topology import Topology

_LENGTH_BYTES, _VALUE_BYTES = 4, 4
_SORT_PASSES, _PAIR_BYTES = 4, 8
_FOUND_ID_BYTES = 8  # as users give them
REPLICA_PASSES = 1 + 2 + 2 + 1 + 3
"""Over a replica's gradient: cleared, divided by the ranks, squared, averaged, applied."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cost(Summable):
    """Milliseconds of one step.

    Attributes:
        prefetch: bringing rows into a cache in device memory, and those they displace back.
        forward: looking rows up.
        backward: updating them.
        input: receiving ids.
        output: sending embeddings and receiving their gradients.
        update: adding up gradients of replicas and applying them, or statistics of split rows.
    """

    prefetch: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    input: float = 0.0
    output: float = 0.0
    update: float = 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """All of them, in order."""
        return self.prefetch, self.forward, self.backward, self.input, self.output, self.update

    @property
    def total(self) -> float:
        """All of it."""
        looked_up = self.prefetch + self.forward + self.backward
        return looked_up + self.input + self.output + self.update


@final
class CostModel:
    """The time of parts of tables, on ranks of one kind.

    Args:
        topology: the machine.
        batch_size: samples per rank and step.
        hardware: of the ranks; the slowest of all by default.
    """

    def __init__(
        self, topology: Topology, batch_size: int, hardware: Hardware | None = None
    ) -> None:
        self._topology = topology
        self._hardware = hardware or topology.slowest
        self._world_size = topology.world_size
        self._local_size = topology.local_world_size
        self._batch_size = batch_size

        def ms_per_byte(kind: str, num_ranks: int, num_nodes: int) -> float:
            return topology.transfer_ms(kind, 1.0, num_ranks, num_nodes, self._hardware)

        nodes = topology.num_nodes
        self._exchange = ms_per_byte("all_to_all", self._world_size, nodes)
        self._exchange_in_node = ms_per_byte("all_to_all", self._local_size, 1)
        self._exchange_of_nodes = ms_per_byte("all_to_all", nodes, nodes)
        self._all_reduce = ms_per_byte("all_reduce", self._world_size, nodes)
        self._all_reduce_in_node = ms_per_byte("all_reduce", self._local_size, 1)
        self._copy = 2 / self._hardware.memory_bw  # bytes are read and written

    def of_shard(self, table: PlannedTable, part: Part) -> Cost:
        """Return what a part of a table costs the rank that owns it."""
        num_rows, num_cols = part[:2]
        load = load_of(table, part, self._topology, self._batch_size)
        ids, values = load.ids, load.rows * num_cols
        looked_up = self._lookup(table, part, ids, load.bags)
        if self._world_size == 1:
            return Cost(**looked_up)
        ids_in = ids * (table.id_bytes + 4 * table.is_weighted) + load.lengths * _LENGTH_BYTES
        there_and_back = values * sum(table.wire_bytes)
        # ids are sorted by owner; embeddings are placed in the output, gradients taken from it
        found = ids * (_FOUND_ID_BYTES + 4 * table.is_weighted) * self._copy
        laid_out = load.arriving + load.by_id * load.rows  # the latter in the order of the ranks
        placed = 2 * laid_out * num_cols * _VALUE_BYTES * self._copy
        if load.in_two_hops:
            # each rank of the node sums up and sends on an equal share of the samples
            summed = values * _VALUE_BYTES * self._all_reduce_in_node
            moved = summed if load.adds_up else there_and_back * self._exchange_in_node
            moved += there_and_back / self._local_size * self._exchange_of_nodes
        elif load.adds_up:
            moved = values * _VALUE_BYTES * self._all_reduce
        else:
            moved = there_and_back * self._exchange
        sums = 0.0
        if table.trains and table.adds_up_rows(num_cols):
            sums = 2 * table.touched(num_rows, ids) * _VALUE_BYTES
        return Cost(
            **looked_up,
            input=ids_in * self._exchange + found,
            output=moved + placed,
            update=sums * self._exchange,
        )

    def of_replica(self, table: PlannedTable, kernel: EmbeddingComputeKernel) -> Cost:
        """Return what a copy of a whole table costs each rank."""
        ids, bags = table.load(self._batch_size)
        whole = Part(table.rows, table.dim, kernel)
        looked_up = self._lookup(table, whole, ids, bags)
        if self._world_size == 1:
            return Cost(**looked_up)
        values = (bags if table.is_pooled else ids) * table.dim
        placed = 2 * values * _VALUE_BYTES * self._copy
        passes = REPLICA_PASSES / self._hardware.memory_bw
        update = table.gradient_bytes * (self._all_reduce + passes) if table.trains else 0.0
        return Cost(**looked_up, output=placed, update=update)

    def _lookup(self, table: PlannedTable, part: Part, ids: float, bags: float) -> dict[str, float]:
        """Return the milliseconds of prefetch, forward and backward."""
        num_rows, num_cols, kernel = part[:3]
        hardware = self._hardware
        pooling = ids / bags if bags else 0.0  # of the part: rows on n ranks find an nth
        speed = self._topology.lookup_speed(num_cols, pooling, hardware)
        host_bw = min(hardware.ddr_mem_bw, hardware.hbm_to_ddr_mem_bw)
        if kernel is EmbeddingComputeKernel.FUSED_UVM:
            speed = LookupSpeed(host_bw, host_bw, host_bw)
        row_bytes, gradient_bytes = num_cols * table.element_bytes, num_cols * _VALUE_BYTES
        touched = table.touched(num_rows, ids)
        state_bytes = table.state_bytes_per_row(num_cols)
        forward, backward = lookup_bytes(ids, touched, row_bytes, gradient_bytes, state_bytes)
        backward_bw = speed.backward_bw
        if table.adds_up_rows(num_cols):
            backward, backward_bw = backward + statistic_bytes(ids, gradient_bytes), speed.split_bw
        fetched = 0.0
        if kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING:
            missed = min((1 - table.hit_rate) * ids, touched)
            fetched = (2 if table.trains else 1) * missed * row_bytes  # the row before goes back
        learning = backward / backward_bw if table.trains else 0.0
        return {
            "prefetch": fetched / host_bw,
            "forward": forward / speed.forward_bw,
            "backward": learning,
        }


def lookup_bytes(
    ids: float, touched: float, row_bytes: float, gradient_bytes: float, state_bytes: float
) -> tuple[float, float]:
    """Return the bytes that a lookup moves in forward, and in backward with the update.

    Args:
        ids: that are looked up.
        touched: distinct rows among them.
        row_bytes: of a row.
        gradient_bytes: of a row's gradient.
        state_bytes: of the optimizer's state of a row.
    """
    return ids * row_bytes, ids * gradient_bytes + 2 * touched * (row_bytes + state_bytes)


def statistic_bytes(ids: float, gradient_bytes: float) -> float:
    """Return the bytes that backward moves besides to add up the gradients of each row.

    The ids are sorted with their places, 32 bits each, 8 bits a pass, and the gradients read in
    that order: Merrill and Grimshaw, "High performance and scalable radix sorting", 2011.

    Args:
        ids: that were looked up.
        gradient_bytes: of a row's gradient.
    """
    return ids * (_SORT_PASSES * 2 * _PAIR_BYTES + gradient_bytes)
