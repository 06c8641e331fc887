"""What reaches a part of a table in one step, and how what it looks up returns.

Costs and memory both follow from it. Parts of the rows of a pooled table return as the engine's
output stage sends them:

- *by bag*: each part sends a sum for every bag, also where it has no ids of it;
- *by id*: where a step has at most half as many ids as bags of all parts, each id is looked up as a
  bag of its own, which needs no length, and its row returns to be pooled at home. On several nodes
  that could add up on the way it has at most as many ids as each bag has nodes, which is what would
  cross between them. The engine looks at all tables of a module together, and each batch; here each
  table is taken by itself;
- *added up on the way*, on a GPU and in fp32, where the ranks have parts of the same columns: a
  reduce-scatter there and an all-gather back. That all ranks have is only known before a plan is
  made if nothing else of the module may be sent.

Rows on the ranks of one node among several are added up by bag there, and the sums sent on.
"""

from __future__ import annotations

from typing import NamedTuple, final

from recsys.distributed.planner.tables import Part, PlannedTable
from recsys.distributed.planner.topology import Topology

_MOST_IDS = 0.5  # for each bag of each part, in what returns by id: what the input stage goes by
_EXACT = (4.0, 4.0)  # bytes of values that travel in fp32, both ways


@final
class PartLoad(NamedTuple):
    """The load of a part, of the samples of all ranks.

    Attributes:
        ids: that reach it.
        lengths: of bags, which travel with them.
        bags: that are looked up.
        rows: of its columns that return.
        arriving: rows that ranks receive for them, on all hops.
        by_id: whether rows of a pooled table return by id.
        adds_up: whether they are added up on the way, or on the first of two hops.
        in_two_hops: whether they return in two.
    """

    ids: float
    lengths: float
    bags: float
    rows: float
    arriving: float
    by_id: bool = False
    adds_up: bool = False
    in_two_hops: bool = False


def load_of(table: PlannedTable, part: Part, topology: Topology, batch_size: int) -> PartLoad:
    """Return the load of a part.

    Args:
        table: it is of.
        part: of it.
        topology: the machine.
        batch_size: samples per rank and step.
    """
    parts = part.row_parts
    all_ids, bags = table.load(topology.world_size * batch_size)
    ids = all_ids * part.rows / max(table.rows, 1)
    if parts == 1 or not table.is_pooled:
        rows = bags if table.is_pooled else ids
        return PartLoad(ids, bags, bags, rows, rows)
    two_hops = part.in_node and topology.num_nodes > 1
    adds_up = topology.compute_device == "cuda" and table.wire_bytes == _EXACT
    if two_hops:
        adds_up &= parts == topology.local_world_size
    else:
        adds_up &= parts == topology.world_size and table.is_alone
        most_ids = _MOST_IDS
        if adds_up and topology.num_nodes > 1:
            most_ids = min(most_ids, 1 / topology.local_world_size)
        if all_ids <= most_ids * parts * bags:
            return PartLoad(ids, 0.0, ids, ids, ids, by_id=True)
    arriving = bags / parts if adds_up else bags
    if two_hops:
        arriving += bags / topology.local_world_size
    return PartLoad(ids, bags, bags, bags, arriving, adds_up=adds_up, in_two_hops=two_hops)
