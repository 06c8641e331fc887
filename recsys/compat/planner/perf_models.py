"""Ratings of placed plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from recsys.compat.planner.topology import Topology
from recsys.compat.planner.types import PerfModel, ShardingOption

_T = TypeVar("_T")


class NoopPerfModel(PerfModel):
    """Rates a plan by the milliseconds of its slowest rank.

    Args:
        topology: Machine.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the milliseconds of the slowest rank.

        Args:
            plan: One option for each table, with the rank of every shard.

        Raises:
            ValueError: A shard has no rank or no milliseconds.
        """
        return max(_sums(plan, self._topology, "perf", 0.0, lambda perf: perf.total))


class NoopStorageModel(PerfModel):
    """Rates a plan by the bytes of its fullest rank: of the device, or on a CPU of the host.

    Args:
        topology: Machine.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the bytes of the fullest rank.

        Args:
            plan: One option for each table, with the rank of every shard.

        Raises:
            ValueError: A shard has no rank or no bytes.
        """
        kind = "hbm" if self._topology.compute_device == "cuda" else "ddr"
        sizes = _sums(plan, self._topology, "storage", 0, lambda storage: getattr(storage, kind))
        return float(max(sizes))


def _sums(
    plan: list[ShardingOption], topology: Topology, name: str, zero: _T, value_of: Callable[..., _T]
) -> list[_T]:
    """Return the sum of a value of the shards, by rank.

    Args:
        plan: One option for each table, with the rank of every shard.
        topology: Machine.
        name: Attribute of a shard, "perf" or "storage".
        zero: Sum of an empty rank.
        value_of: Computes the value from the attribute.
    """
    sums: list[Any] = [zero] * topology.world_size
    for option in plan:
        for shard in option.shards:
            if shard.rank is None or getattr(shard, name) is None:
                raise ValueError(
                    f"Every shard of a plan must have a rank and {name}; received {shard} of table "
                    f"{option.name!r}. Partitioners set the rank, estimators set {name}."
                )
            sums[shard.rank] += value_of(getattr(shard, name))
    return sums
