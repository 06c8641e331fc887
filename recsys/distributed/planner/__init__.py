"""Finds where tables go, says what that costs, and why.

To be read in this order:

- the machine: `hardware` (one rank), `measured` (speeds that were measured), `presets`
  (machines by name), `topology_json` (files), `topology` (all ranks);
- what is placed: `types` (constraints), `pooling_stats` (ids), `tables`, `model_tables` (of
  a model), `tables_file` (of a file);
- what a placement costs: `costs` (time), `storage` (memory), `options` and `option_lister`
  (all ways to place a table); `enumerators` is for options of a user's own, as `ShardEstimator`
  is for costs;
- the search, which of an option reads where its shards may go, their milliseconds and bytes:
  `placement` (what it is asked and answers), `shard_arrays`, `bounds`, `assignment`,
- the planner: `agreement` (of ranks), `plan_cost` (what it knows of a plan), `planners`;
- reports: `advice` (why tables do not fit, and what would help), `explanation` (the facts),
  `rating` and `report_html` (as text, as a page), `words`.
"""

from recsys.distributed.planner.enumerators import EmbeddingEnumerator
from recsys.distributed.planner.hardware import Hardware
from recsys.distributed.planner.planners import EmbeddingShardingPlanner
from recsys.distributed.planner.pooling_stats import PoolingStats
from recsys.distributed.planner.topology import CustomTopologyData, Topology
from recsys.distributed.planner.types import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
)

__all__ = [
    "CustomTopologyData",
    "EmbeddingEnumerator",
    "EmbeddingShardingPlanner",
    "FixedPercentageStorageReservation",
    "Hardware",
    "HeuristicalStorageReservation",
    "ParameterConstraints",
    "PlannerError",
    "PlannerErrorType",
    "PoolingStats",
    "Topology",
]
