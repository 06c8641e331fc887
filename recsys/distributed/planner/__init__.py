"""Planner: finds a sharding plan for a model, and reports its costs.

Modules, in reading order:

- machine: `hardware` (one rank), `measured` (measured speeds), `presets` (machines by name),
  `topology_json` (files), `topology` (all ranks);
- tables: `types` (constraints), `pooling_stats` (ids), `tables`, `model_tables` (tables of a
  model), `tables_file` (tables in a file);
- costs of a placement: `shard_traffic` (traffic), `costs` (time), `storage` (memory), `options`,
  `option_lister` (options for a table), `enumerators` (options of a model, for inspection);
- search: `placement` (input and output), `shard_arrays`, `bounds`, `assignment`, `local_search`,
  `exact`, `search`;
- planner: `agreement` (ranks compare inputs), `plan_cost` (costs of a plan), `planners`;
- reports: `advice` (remedies and alternatives), `report_rows` (content), `rating` (text),
  `report_html` (page), `formatting`.
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
