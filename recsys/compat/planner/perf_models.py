"""How good a placed plan is."""

from __future__ import annotations

from recsys.compat.planner.topology import Storage, Topology
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


class NoopStorageModel(PerfModel):
    """A plan is as good as its fullest rank has bytes: of the device, on a CPU of the host.

    Args:
        topology: the machine.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the bytes of the fullest rank.

        Args:
            plan: one option for each table, with the rank of every shard.

        Raises:
            ValueError: if a shard has no rank or no bytes.
        """
        kind = "hbm" if self._topology.compute_device == "cuda" else "ddr"
        return float(max(getattr(storage, kind) for storage in _storage_of(plan, self._topology)))


def _storage_of(plan: list[ShardingOption], topology: Topology) -> list[Storage]:
    """Return the bytes on each rank."""
    sizes = [Storage(0, 0) for _ in range(topology.world_size)]
    for option in plan:
        for shard in option.shards:
            if shard.rank is None or shard.storage is None:
                raise ValueError(
                    "NoopStorageModel.rate takes a plan whose shards have a rank and storage; "
                    f"received {shard} of table {option.name!r}. An estimator sets the storage, a "
                    "partitioner the rank."
                )
            sizes[shard.rank] += shard.storage
    return sizes
