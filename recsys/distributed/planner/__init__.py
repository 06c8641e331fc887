"""Finds a placement: the machine (``topology``), demands (``types``), the search (``planners``)."""

from recsys.distributed.planner.planners import EmbeddingShardingPlanner
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    ParameterConstraints,
    PlannerError,
)

__all__ = [
    "EmbeddingShardingPlanner",
    "FixedPercentageStorageReservation",
    "HeuristicalStorageReservation",
    "ParameterConstraints",
    "PlannerError",
    "Topology",
]
