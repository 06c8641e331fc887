"""Storage reservations: memory to keep free of tables."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from recsys.compat.planner.constants import gb_to_bytes
from recsys.compat.planner.topology import Topology
from recsys.compat.planner.types import StorageReservation
from recsys.distributed.planner import types as ours
from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.storage import StorageModel
from recsys.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
)
from recsys.distributed.types import ModuleSharder


class _Reserving(StorageReservation):
    """Applies the planner's rule, `usable`, to every rank."""

    def usable(self, memory_cap: int, dense_bytes: int | None) -> int:
        """Return the bytes of `memory_cap` that tables may use."""
        raise NotImplementedError

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """Return a copy of the machine with the memory that tables may use beside the batch.

        Args:
            topology: Machine; not changed.
            batch_size: Samples per rank and step.
            module: Model.
            sharders: One for each module type to shard.
            constraints: Constraints by table name.

        Raises:
            PlannerError: A rank has no memory left.
        """
        device = topology.compute_device
        tables = tables_of(module, sharders, constraints or {}, device, batch_size=batch_size)
        batch = StorageModel(topology, batch_size).batch_storage(tables).total.device
        model_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
        dense_bytes = model_bytes - sum(t.rows * t.dim * t.element_bytes for t in tables)
        reserved = copy.deepcopy(Topology.of(topology))
        for rank in reserved.devices:
            free = rank.storage
            if device == "cuda":
                free.hbm = left = self.usable(free.hbm, dense_bytes) - batch
                free.ddr = self.usable(free.ddr, None)
            else:
                free.ddr = left = self.usable(free.ddr, dense_bytes) - batch
            if min(left, free.ddr) < 0:
                raise PlannerError(
                    f"{self} must leave memory for tables; received rank {rank.rank} of "
                    f"{topology.hardware[rank.rank].memory_cap} bytes, with {dense_bytes} bytes of "
                    f"dense parameters and {batch} of a batch. Reserve less, or make the batch "
                    "smaller.",
                    PlannerErrorType.INSUFFICIENT_STORAGE,
                )
        object.__setattr__(self, "_last_reserved_topology", copy.deepcopy(reserved))  # frozen
        return reserved

    @property
    def last_reserved_topology(self) -> Topology | None:
        """Copy of the last result of `reserve`; None before the first call."""
        return getattr(self, "_last_reserved_topology", None)


@dataclass(frozen=True)
class PlannersReservation(_Reserving):
    """Reservation by a rule of `recsys.distributed.planner`.

    Args:
        rule: Rule.
    """

    rule: ours.StorageReservation

    def usable(self, memory_cap: int, dense_bytes: int | None) -> int:
        """Return the bytes that tables may use."""
        return self.rule.usable(memory_cap, dense_bytes)


@dataclass(frozen=True)
class HeuristicalStorageReservation(ours.HeuristicalStorageReservation, _Reserving):
    """The planner's rule of this name, with `reserve`.

    Example:
        >>> HeuristicalStorageReservation(percentage=0.5).usable(1000, 10)
        440
    """


@dataclass(frozen=True)
class FixedPercentageStorageReservation(ours.FixedPercentageStorageReservation, _Reserving):
    """The planner's rule of this name, with `reserve`.

    Example:
        >>> FixedPercentageStorageReservation(percentage=0.5).usable(1000, 10)
        500
    """


@dataclass(frozen=True)
class FixedAbsoluteStorageReservation(_Reserving):
    """Reserves a number of bytes of device memory; on a CPU, of host memory.

    Args:
        hbm_reserved_bytes: Bytes of each rank.

    Raises:
        ValueError: The number is negative.

    Example:
        >>> FixedAbsoluteStorageReservation.from_gb(0.5)
        FixedAbsoluteStorageReservation(hbm_reserved_bytes=536870912)
    """

    hbm_reserved_bytes: int

    def __post_init__(self) -> None:
        if self.hbm_reserved_bytes < 0:
            raise ValueError(
                "FixedAbsoluteStorageReservation.hbm_reserved_bytes must be at least 0; received "
                f"{self.hbm_reserved_bytes}."
            )

    def usable(self, memory_cap: int, dense_bytes: int | None) -> int:
        """Return the bytes that tables may use."""
        return memory_cap if dense_bytes is None else memory_cap - self.hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> Self:
        """Return a reservation of a number of GiB."""
        return cls(gb_to_bytes(hbm_reserved_gb))


@dataclass(frozen=True)
class InferenceStorageReservation(_Reserving):
    """Reserves a share of the memory and the bytes of the dense tensors.

    Args:
        percentage: Share of the memory to keep free, 0 to 1.
        dense_tensor_estimate: Bytes of all dense tensors; if None, the bytes of the parameters.
    """

    percentage: float
    dense_tensor_estimate: int | None = None

    def usable(self, memory_cap: int, dense_bytes: int | None) -> int:
        """Return the bytes that tables may use."""
        rule = ours.HeuristicalStorageReservation(self.percentage, 1.0, self.dense_tensor_estimate)
        return rule.usable(memory_cap, dense_bytes)
