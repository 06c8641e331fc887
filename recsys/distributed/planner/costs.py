"""Time of a shard on its rank in one training step.

It is the sum of the bytes that the rank must move for the shard, each divided by a bandwidth that
was measured or is known from the hardware (`Topology`). Fixed costs, such as the latencies of
exchanges, are the same under every plan and are left out.

Notation: a shard of `r x c` values of `e` bytes each receives `N` ids in `G` bags.

- *prefetch*: a cache in device memory (`fused_uvm_caching`) fetches missing rows from the host and
  evicts as many: the misses among `N`, at most the distinct rows;
- *forward*: reads `N c e` bytes of rows; maps hashed ids to rows, which reads a cache line of
  digests, one of ids and one of last uses for each;
- *backward*: reads the gradients, and reads and writes the touched rows with their optimizer state.
  `N` draws from `r` equally likely rows touch `r (1 - (1 - 1/r)^N)`. If ranks that own columns must
  sum one value per row, ids are sorted and gradients read once more;
- *input*: sorts `N` ids (and weights) by owner; receives them and `G` lengths, no lengths if rows
  of a pooled table return by id (see `shard_traffic`);
- *output*: sends `G c` values (`N c` if they return by id or are not pooled) and receives as many
  gradients, in the precision of the exchange. The share `(W - L) / W` crosses between nodes of `L`
  ranks among `W`. If the rows of a pooled table are within one node, the sums of the node cross
  only once: `1 / L` of that. Values summed on the way cost the two halves of an all-reduce.
  Received values are copied to the output, and gradients from it; values by id are first sorted by
  rank;
- *update*: replicas all-reduce their gradient: each sends `2 (W - 1) / W` of the table's size and
  reads or writes it nine times. Ranks that own columns send one number per touched row, if needed.

Lookups follow the roofline model: Williams et al., "Roofline: an insightful visual performance
model for multicore architectures", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from recsys.distributed.placement.plan import EmbeddingComputeKernel
from recsys.distributed.planner.hardware import Hardware
from recsys.distributed.planner.measured import LookupSpeed
from recsys.distributed.planner.shard_traffic import traffic_of_shard
from recsys.distributed.planner.tables import PlannedTable, ShardSpec, Summable
from recsys.distributed.planner.topology import Topology

_VALUE_BYTES = 4
_INDEX_BYTES = 3 * 64  # that the mapping of a hashed id reads
_SORT_PASSES, _PAIR_BYTES = 4, 8
_FOUND_ID_BYTES = 8  # as in the user's batch
REPLICA_PASSES = 1 + 2 + 2 + 1 + 3
"""Passes over a replica's gradient: clear, divide by the ranks, square, average, apply."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cost(Summable):
    """Milliseconds of one step.

    Attributes:
        prefetch: Fetching rows into a cache in device memory, and evicting others.
        forward: Looking up rows.
        backward: Updating rows.
        input: Receiving ids.
        output: Sending embeddings and receiving their gradients.
        update: Summing and applying gradients of replicas, or statistics of column shards.
    """

    prefetch: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    input: float = 0.0
    output: float = 0.0
    update: float = 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """Milliseconds of each phase, in order."""
        return self.prefetch, self.forward, self.backward, self.input, self.output, self.update

    @property
    def total(self) -> float:
        """Milliseconds of all phases."""
        looked_up = self.prefetch + self.forward + self.backward
        return looked_up + self.input + self.output + self.update


@final
class CostModel:
    """Time of shards on ranks of one kind.

    Args:
        topology: Machine.
        batch_size: Samples per rank and step.
        hardware: Hardware of the ranks; the slowest rank's hardware if None.
    """

    def __init__(
        self, topology: Topology, batch_size: int, hardware: Hardware | None = None
    ) -> None:
        self._topology = topology
        self._hardware = hardware or topology.slowest
        self._world_size = topology.world_size
        self._local_size = topology.local_world_size
        self._batch_size = batch_size

        # measured speeds if the topology has them, else bandwidths:
        # docs/decisions/planner.md, "Costs are bytes over measured speeds"
        def ms_per_byte(kind: str, num_ranks: int, num_nodes: int) -> float:
            return topology.transfer_ms(kind, 1.0, num_ranks, num_nodes, self._hardware)

        nodes = topology.num_nodes
        self._exchange = ms_per_byte("all_to_all", self._world_size, nodes)
        self._exchange_in_node = ms_per_byte("all_to_all", self._local_size, 1)
        self._exchange_of_nodes = ms_per_byte("all_to_all", nodes, nodes)
        self._all_reduce = ms_per_byte("all_reduce", self._world_size, nodes)
        self._all_reduce_in_node = ms_per_byte("all_reduce", self._local_size, 1)
        self._copy = 2 / self._hardware.memory_bw  # bytes are read and written

    def shard_cost(self, table: PlannedTable, shard: ShardSpec) -> Cost:
        """Return the cost of a shard on the rank that owns it."""
        num_rows, num_cols = shard[:2]
        load = traffic_of_shard(table, shard, self._topology, self._batch_size)
        ids, values = load.ids, load.rows * num_cols
        looked_up = self._lookup(table, shard, ids, load.bags)
        if self._world_size == 1:
            return Cost(**looked_up)
        ids_in = (ids * (1 + table.is_weighted) + load.lengths) * table.id_bytes
        there_and_back = values * sum(table.wire_bytes)
        # ids are sorted by owner; embeddings are copied to the output, gradients from it
        ids_ms = ids * (_FOUND_ID_BYTES + 4 * table.is_weighted) * self._copy
        laid_out = load.arriving + load.by_id * load.rows  # by id: sorted by rank first
        placed = 2 * laid_out * num_cols * _VALUE_BYTES * self._copy
        if load.in_two_hops:
            # each rank of the node sums and forwards an equal share of the samples:
            # docs/decisions/row_split.md, "Sums inside a node; sequences return by id"
            summed = values * _VALUE_BYTES * self._all_reduce_in_node
            moved = summed if load.adds_up else there_and_back * self._exchange_in_node
            moved += there_and_back / self._local_size * self._exchange_of_nodes
        elif load.adds_up:
            # reduce-scatter, and all-gather in backward: the two halves of an all-reduce:
            # docs/decisions/row_split.md, "Reduce-scatter over NCCL"
            moved = values * _VALUE_BYTES * self._all_reduce
        else:
            moved = there_and_back * self._exchange
        sums = 0.0
        # the statistic of a row needs the columns of all owners:
        # docs/decisions/optimizers.md, "Column shards keep the fused row-wise Adagrad"
        if table.trains and table.adds_up_rows(num_cols):
            sums = 2 * table.touched(num_rows, ids) * _VALUE_BYTES
        return Cost(
            **looked_up,
            input=ids_in * self._exchange + ids_ms,
            output=moved + placed,
            update=sums * self._exchange,
        )

    def replica_cost(self, table: PlannedTable, kernel: EmbeddingComputeKernel) -> Cost:
        """Return the cost of a replica of a table on each rank."""
        ids, bags = table.load(self._batch_size)
        whole = ShardSpec(table.rows, table.dim, kernel)
        looked_up = self._lookup(table, whole, ids, bags)
        if self._world_size == 1:
            return Cost(**looked_up)
        values = (bags if table.is_pooled else ids) * table.dim
        placed = 2 * values * _VALUE_BYTES * self._copy
        passes = REPLICA_PASSES / self._hardware.memory_bw
        update = table.gradient_bytes * (self._all_reduce + passes) if table.trains else 0.0
        return Cost(**looked_up, output=placed, update=update)

    def _lookup(
        self, table: PlannedTable, shard: ShardSpec, ids: float, bags: float
    ) -> dict[str, float]:
        """Return the milliseconds of prefetch, forward and backward."""
        num_rows, num_cols, kernel = shard[:3]
        hardware = self._hardware
        pooling = ids / bags if bags else 0.0  # of the shard: with rows on n ranks, 1/n of the ids
        speed = self._topology.lookup_speed(num_cols, pooling, hardware)
        # rows in host memory pass its memory bus and the link to the device
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
            fetched = (2 if table.trains else 1) * missed * row_bytes  # includes the evicted row
        learning = backward / backward_bw if table.trains else 0.0
        mapped = ids * _INDEX_BYTES if table.num_regions else 0.0
        return {
            "prefetch": fetched / host_bw,
            "forward": forward / speed.forward_bw + mapped / hardware.memory_bw,
            "backward": learning,
        }


def lookup_bytes(
    ids: float, touched: float, row_bytes: float, gradient_bytes: float, state_bytes: float
) -> tuple[float, float]:
    """Return the bytes that a lookup moves in forward, and in backward with the update.

    Args:
        ids: Ids that are looked up.
        touched: Distinct rows among them.
        row_bytes: Bytes of a row.
        gradient_bytes: Bytes of a row's gradient.
        state_bytes: Bytes of the optimizer state of a row.
    """
    return ids * row_bytes, ids * gradient_bytes + 2 * touched * (row_bytes + state_bytes)


def statistic_bytes(ids: float, gradient_bytes: float) -> float:
    """Return the additional bytes that backward moves to sum the gradients of each row.

    The ids are sorted with their positions, 32 bits each, 8 bits per pass, and the gradients are
    read in that order: Merrill and Grimshaw, "High performance and scalable radix sorting", 2011.

    Args:
        ids: Ids that are looked up.
        gradient_bytes: Bytes of a row's gradient.
    """
    return ids * (_SORT_PASSES * 2 * _PAIR_BYTES + gradient_bytes)
