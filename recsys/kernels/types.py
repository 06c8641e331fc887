"""Enums and frozen descriptions of tables, lookups and optimizers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from recsys.kernels.update_rules import EmbOptimType, OptimizerSpec, WeightDecayMode

__all__ = [
    "BoundsCheckMode",
    "EmbOptimType",
    "EmbeddingLocation",
    "LookupSettings",
    "OptimizerSpec",
    "PoolingType",
    "RowState",
    "TableSpec",
    "UpdateMode",
    "WeightDecayMode",
]


class PoolingType(enum.Enum):
    """Reduction of the rows of a bag to one vector."""

    SUM = "SUM"
    MEAN = "MEAN"
    """Sum divided by the number of ids, weighted or not."""
    NONE = "NONE"
    """No reduction: a sequence lookup, one row per id."""


class UpdateMode(enum.Enum):
    """Method and time of a table's update."""

    FUSED = "fused"
    """Backward applies the table's own optimizer; gradients are never materialized."""
    DEFERRED = "deferred"
    """Backward leaves duplicate-free row gradients; `step()` applies the table's own optimizer."""
    GRADIENT = "gradient"
    """The tables are plain parameters: backward fills `.grad`, any torch optimizer trains them."""


class RowState(enum.Enum):
    """Behavior of an optimizer that reads whole rows on a table that is split by columns."""

    EXACT = "exact"
    """The owners of a row's columns exchange partial sums: results as for an unsplit table."""
    PER_SHARD = "per_shard"
    """Each owner treats its columns as whole rows: no exchange, other results than unsplit."""


class EmbeddingLocation(enum.Enum):
    """Memory of a table's weights. HOST on a CPU; managed memory needs CUDA and FBGEMM."""

    DEVICE = "device"
    MANAGED = "managed"
    MANAGED_CACHING = "managed_caching"
    HOST = "host"


class BoundsCheckMode(enum.Enum):
    """Response to an id that is negative or not smaller than the table's number of rows."""

    FATAL = "fatal"
    """Raise an IndexError naming feature, table, id, position and table size."""
    WARNING = "warning"
    """Warn once per call and read row 0 instead, as FBGEMM does."""
    IGNORE = "ignore"
    """Read row 0 instead, without a warning."""
    NONE = "none"
    """No check. A bad id is undefined behavior: it may crash the process."""

    @classmethod
    def _missing_(cls, value: object) -> BoundsCheckMode | None:
        """Return the mode with FBGEMM's number: `BoundsCheckMode(1)` warns."""
        members = list(cls)
        # `isinstance` would accept a bool as a number
        if type(value) is int and 0 <= value < len(members):
            return members[value]
        return None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """Name and shape of a table, or of a shard of a table."""

    name: str
    """Name for messages."""
    num_rows: int
    """Number of rows; 0 for an empty row shard."""
    dim: int
    """Columns."""

    def __post_init__(self) -> None:
        if self.num_rows < 0 or self.dim <= 0:
            raise ValueError(
                f"TableSpec needs num_rows >= 0 and dim > 0; table '{self.name}' received "
                f"num_rows={self.num_rows}, dim={self.dim}."
            )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LookupSettings:
    """Settings of a lookup, from which its backend is chosen.

    Raises:
        ValueError: Settings contradict each other.
    """

    device: torch.device
    weights_dtype: torch.dtype = torch.float32
    """fp32, fp16 or bf16. Optimizer state and its math are fp32."""
    output_dtype: torch.dtype = torch.float32
    """Dtype of the looked-up values."""
    dims: Sequence[int]
    """[T] columns of each table; all equal without pooling."""
    feature_table_map: Sequence[int]
    """[F] table number of each feature."""
    pooling: PoolingType
    optimizer: OptimizerSpec | None
    """Optimizer of the tables; required unless `update_mode` is GRADIENT."""
    update_mode: UpdateMode
    bits: Sequence[int] = ()
    """[T] bits per value of quantized tables; empty: tables of `weights_dtype`."""
    location: EmbeddingLocation | None = None
    """Memory of the weights; None: HOST on a CPU, DEVICE elsewhere."""
    cache_load_factor: float | None = None
    """Share of the rows that the cache of MANAGED_CACHING holds; None: 0.2."""

    @property
    def fused(self) -> OptimizerSpec | None:
        """Optimizer that backward applies; None without."""
        return self.optimizer if self.update_mode is UpdateMode.FUSED else None

    @property
    def owned(self) -> OptimizerSpec | None:
        """Optimizer whose state is stored with the tables; None without."""
        return self.optimizer if self.update_mode is not UpdateMode.GRADIENT else None

    def __post_init__(self) -> None:
        on_host = self.device.type in ("cpu", "meta")
        if self.location is None:
            place = EmbeddingLocation.HOST if on_host else EmbeddingLocation.DEVICE
            # the class is frozen; readers of `location` find no None
            object.__setattr__(self, "location", place)
        elif on_host is not (self.location is EmbeddingLocation.HOST):
            raise ValueError(
                f"EmbeddingLocation.{self.location.name} does not fit device "
                f"{self.device}: HOST is for the CPU, the others are for CUDA."
            )
        if self.update_mode is not UpdateMode.GRADIENT and self.optimizer is None:
            raise ValueError(
                f"UpdateMode.{self.update_mode.name} needs an optimizer; received None. Give "
                "an OptimizerSpec, or use UpdateMode.GRADIENT and a torch optimizer."
            )
        if self.pooling is PoolingType.NONE and len(set(self.dims)) > 1:
            raise ValueError(
                f"PoolingType.NONE needs equal dims; received {sorted(set(self.dims))}. Build "
                "one lookup per dim."
            )
        if not self.weights_dtype.is_floating_point:
            raise ValueError(f"weights_dtype must be floating; received {self.weights_dtype}.")
        rounds = self.optimizer is not None and self.optimizer.stochastic_rounding
        if rounds and self.weights_dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                "stochastic_rounding is for tables of torch.float16 and torch.bfloat16; received "
                f"{self.weights_dtype}. Leave it False."
            )
