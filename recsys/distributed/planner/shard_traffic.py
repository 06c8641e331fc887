"""Traffic of a shard in one step: the ids that it receives, and how its output returns.

Costs and memory are computed from it. The rows of a pooled table that is split by rows return in
one of these ways, as in the engine's output stage:

- *by bag*: each shard sends a sum for every bag, even if none of its ids are in the bag;
- *by id*: each id is looked up as a bag of its own, without lengths, and its row is pooled on the
  rank of the sample. The limit is half as many ids in a step as bags of all shards. With several
  nodes and sums on the way, the limit is as many ids as each bag has nodes, which is the traffic
  between nodes. The engine decides for all tables of a module together and for each batch; this
  model decides for each table separately;
- *summed on the way*, on a GPU and in fp32, if all ranks have shards of the same columns: a
  reduce-scatter, and an all-gather in backward. Before a plan exists this is known only if no other
  table of the module is sent.

Rows on the ranks of one node among several are summed by bag there, and the sums forwarded.
"""

from __future__ import annotations

from typing import NamedTuple, final

from recsys.distributed.planner.tables import PlannedTable, ShardSpec
from recsys.distributed.planner.topology import Topology

_MOST_IDS = 0.5  # ids per bag and shard up to which rows return by id, as in the input stage
_EXACT = (4.0, 4.0)  # bytes of an fp32 value in both directions


@final
class ShardTraffic(NamedTuple):
    """Traffic of a shard for the samples of all ranks.

    Attributes:
        ids: Ids that it receives.
        lengths: Lengths of bags that it receives.
        bags: Bags that it looks up.
        rows: Output rows of its columns that it sends.
        arriving: Rows that ranks receive from it, over all hops.
        by_id: Whether rows of a pooled table return by id.
        adds_up: Whether rows are summed on the way, or on the first of two hops.
        in_two_hops: Whether rows return in two hops.
    """

    ids: float
    lengths: float
    bags: float
    rows: float
    arriving: float
    by_id: bool = False
    adds_up: bool = False
    in_two_hops: bool = False


def traffic_of_shard(
    table: PlannedTable, shard: ShardSpec, topology: Topology, batch_size: int
) -> ShardTraffic:
    """Return the traffic of a shard.

    Args:
        table: Table of the shard.
        shard: Shard.
        topology: Machine.
        batch_size: Samples per rank and step.
    """
    parts = shard.row_parts
    all_ids, bags = table.load(topology.world_size * batch_size)
    ids = all_ids * shard.rows / max(table.rows, 1)
    if parts == 1 or not table.is_pooled:
        rows = bags if table.is_pooled else ids
        return ShardTraffic(ids, bags, bags, rows, rows)
    two_hops = shard.in_node and topology.num_nodes > 1
    # the engine reduce-scatters over NCCL and in fp32 only:
    # docs/decisions/row_split.md, "Reduce-scatter over NCCL"
    adds_up = topology.compute_device == "cuda" and table.wire_bytes == _EXACT
    if two_hops:
        adds_up &= parts == topology.local_world_size
    else:
        adds_up &= parts == topology.world_size and table.is_alone
        most_ids = _MOST_IDS
        if adds_up and topology.num_nodes > 1:
            # `parts` is the world size here: at most as many ids per bag as nodes:
            # docs/decisions/row_split.md, "Short bags: rows return by id"
            most_ids = min(most_ids, 1 / topology.local_world_size)
        if all_ids <= most_ids * parts * bags:
            return ShardTraffic(ids, 0.0, ids, ids, ids, by_id=True)
    arriving = bags / parts if adds_up else bags
    if two_hops:
        arriving += bags / topology.local_world_size
    return ShardTraffic(ids, bags, bags, bags, arriving, adds_up=adds_up, in_two_hops=two_hops)
