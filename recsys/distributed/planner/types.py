"""What a user demands of a plan, and the error when it cannot be met."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, final

from recsys.distributed.types import EmbeddingComputeKernel, ShardingType


class PlannerError(ValueError):
    """No placement meets the demands; says which tables, how many bytes, and what would help."""


@final
@dataclass(slots=True)
class ParameterConstraints:
    """Demands on the placement of one table.

    Args:
        sharding_types: allowed :class:`~recsys.distributed.types.ShardingType` values; any if None.
        compute_kernels: allowed :class:`~recsys.distributed.types.EmbeddingComputeKernel` values,
            of which the first that the sharding type executes is used; "fused" if None.
        min_partition: the least columns of a column shard (default 32).
        pooling_factors: mean ids per sample, for each feature of the table (default 1).

    Raises:
        ValueError: if a value is not one of the choices.
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, chosen, choices in (
            ("sharding_types", self.sharding_types, [t.value for t in ShardingType]),
            ("compute_kernels", self.compute_kernels, [k.value for k in EmbeddingComputeKernel]),
        ):
            unknown = [value for value in chosen or [] if value not in choices]
            if unknown or chosen == []:
                raise ValueError(
                    f"ParameterConstraints.{name} must name some of {', '.join(choices)}; "
                    f"received {chosen}."
                )


class StorageReservation(Protocol):
    """How much of a rank's memory is kept free of tables."""

    def usable(self, memory_cap: int, dense_bytes: int) -> int:
        """Returns the bytes of ``memory_cap`` that are left for tables."""


@final
@dataclass(frozen=True, slots=True)
class HeuristicalStorageReservation:
    """Keeps a share of the memory free, and room to train the dense parameters with Adam.

    Args:
        percentage: share of the memory to keep free, 0 to 1.
    """

    percentage: float = 0.15

    def __post_init__(self) -> None:
        _check_share(type(self).__name__, self.percentage)

    def usable(self, memory_cap: int, dense_bytes: int) -> int:
        """Returns the bytes left for tables."""
        return int(memory_cap * (1 - self.percentage)) - 4 * dense_bytes


@final
@dataclass(frozen=True, slots=True)
class FixedPercentageStorageReservation:
    """Keeps a share of the memory free, dense parameters included.

    Args:
        percentage: share of the memory to keep free, 0 to 1.
    """

    percentage: float

    def __post_init__(self) -> None:
        _check_share(type(self).__name__, self.percentage)

    def usable(self, memory_cap: int, dense_bytes: int) -> int:
        """Returns the bytes left for tables."""
        return int(memory_cap * (1 - self.percentage))


def _check_share(owner: str, share: float) -> None:
    if not 0 <= share < 1:
        raise ValueError(f"{owner}.percentage must lie in [0, 1); received {share}.")
