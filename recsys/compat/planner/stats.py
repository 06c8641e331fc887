"""Logs of the costs of a plan."""

from __future__ import annotations

import logging
from typing import Any

from recsys.compat.planner.constants import bytes_to_mb
from recsys.compat.planner.topology import Storage, Topology
from recsys.compat.planner.types import Enumerator, ShardingOption, Stats, StorageReservation
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.types import ModuleSharder, ShardingPlan

logger = logging.getLogger(__name__)


class EmbeddingStats(Stats):
    """Logs the costs of each rank and each table as one message at level INFO."""

    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: dict[str, ParameterConstraints] | None = None,
        sharders: list[ModuleSharder[Any]] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = True,
        debug_stats: object | None = None,
    ) -> None:
        """Log a plan.

        Args:
            sharding_plan: Unused.
            topology: Machine.
            batch_size: Samples per rank and step.
            storage_reservation: Storage reservation.
            num_proposals: Number of distinct proposals.
            num_plans: Number of proposals that fit.
            run_time: Seconds that planning took.
            best_plan: Options of the plan, with ranks.
            constraints: Unused.
            sharders: Unused.
            enumerator: Unused.
            debug: Whether to log tables as well.
            debug_stats: Unused.
        """
        sizes = [Storage(0, 0) for _ in topology.hardware]
        load_ms = [0.0] * topology.world_size
        shards = [0] * topology.world_size
        for option in best_plan:
            for shard in option.shards:
                assert shard.rank is not None
                sizes[shard.rank] += shard.storage or Storage(0, 0)
                load_ms[shard.rank] += 0.0 if shard.perf is None else shard.perf.total
                shards[shard.rank] += 1
        lines = [
            f"plan of {len(best_plan)} tables for {topology.world_size} {topology.compute_device} "
            f"ranks, batch size {batch_size}, {type(storage_reservation).__name__}: {num_plans} of "
            f"{num_proposals} proposals fit, {run_time:.2f} s",
            "rank: shards, device MiB, host MiB, ms",
        ]
        for rank, (size, ms) in enumerate(zip(sizes, load_ms, strict=True)):
            lines.append(f"{rank}: {shards[rank]}, {_memory(size)}, {ms:.3f}")
        if debug:
            lines.append("table: type, kernel, ranks, device MiB, host MiB, ms")
            lines += [
                f"{option.fqn}: {option.sharding_type}, {option.compute_kernel}, "
                f"{option.get_shards_assignment()}, {_memory(option.total_storage)}, "
                f"{option.total_perf:.3f}"
                for option in best_plan
            ]
        logger.info("\n".join(lines))


class NoopEmbeddingStats(EmbeddingStats):
    """Logs nothing; same arguments as `EmbeddingStats`."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def _memory(size: Storage) -> str:
    return f"{bytes_to_mb(size.hbm):.1f}, {bytes_to_mb(size.ddr):.1f}"
