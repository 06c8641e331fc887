"""Finds a placement: the machine (``topology``), demands (``types``), the search (``planners``).

The machine is read from top to bottom in ``hardware`` (one rank), ``measured`` (speeds that were
measured), ``presets`` (machines by name), ``topology_json`` (files) and ``topology`` (all ranks).
"""

from recsys.distributed.planner.custom_topology import CustomTopologyData
from recsys.distributed.planner.hardware import Hardware
from recsys.distributed.planner.planners import EmbeddingShardingPlanner
from recsys.distributed.planner.pooling_stats import PoolingStats
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    ParameterConstraints,
    PlannerError,
)

__all__ = [
    "CustomTopologyData",
    "EmbeddingShardingPlanner",
    "FixedPercentageStorageReservation",
    "Hardware",
    "HeuristicalStorageReservation",
    "ParameterConstraints",
    "PlannerError",
    "PoolingStats",
    "Topology",
]
