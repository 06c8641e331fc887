"""How good a placed plan is."""

from __future__ import annotations

from recsys.compat.planner.topology import Topology
from recsys.compat.planner.types import PerfModel, ShardingOption


class NoopPerfModel(PerfModel):
    """A plan is as good as its slowest rank: adds up the milliseconds of each.

    Args:
        topology: the machine.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the milliseconds of the slowest rank.

        Args:
            plan: one option for each table, with the rank of every shard.

        Raises:
            ValueError: if a shard has no rank or no milliseconds.
        """
        load_ms = [0.0] * self._topology.world_size
        for option in plan:
            for shard in option.shards:
                if shard.rank is None or shard.perf is None:
                    raise ValueError(
                        "NoopPerfModel.rate takes a plan whose shards have a rank and a perf; "
                        f"received {shard} of table {option.name!r}. An estimator sets the perf, a "
                        "partitioner the rank."
                    )
                load_ms[shard.rank] += shard.perf.total
        return max(load_ms)
