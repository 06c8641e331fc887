"""The vocabulary of the kernels: enums and frozen descriptions of tables and optimizers."""

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
    """The table's own optimizer, inside backward; gradients are never materialised."""
    DEFERRED = "deferred"
    """Backward leaves duplicate-free row gradients; `step()` applies the table's own optimizer."""
    GRADIENT = "gradient"
    """The tables are plain parameters: backward fills `.grad`, any torch optimizer trains them."""


class RowState(enum.Enum):
    """Behaviour of an optimizer that reads whole rows on a table that is split by columns."""

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
    """Warn once per call and read row 0 in its place (what FBGEMM does)."""
    IGNORE = "ignore"
    """Read row 0 in its place without a warning."""
    NONE = "none"
    """Do not look. A bad id is then undefined behaviour: it may crash the process."""

    @classmethod
    def _missing_(cls, value: object) -> BoundsCheckMode | None:
        """Return the mode of a number, as FBGEMM counts them: `BoundsCheckMode(1)` warns."""
        members = list(cls)
        if type(value) is int and 0 <= value < len(members):
            return members[value]
        return None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """One table, or one shard of one, as a kernel sees it."""

    name: str
    """Used in messages only."""
    num_rows: int
    """May be 0: a rank can own an empty row shard."""
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
    """Everything about a lookup that decides which kernels can do it.

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
    """[F] the table number each feature reads."""
    pooling: PoolingType
    optimizer: OptimizerSpec | None
    """Needed unless `update_mode` is GRADIENT."""
    update_mode: UpdateMode
    bits: Sequence[int] = ()
    """[T] of the values of quantized tables; empty: tables of `weights_dtype`."""
    location: EmbeddingLocation | None = None
    """None becomes HOST on a CPU, DEVICE elsewhere."""
    cache_load_factor: float | None = None
    """Share of the rows that the cache of MANAGED_CACHING holds; None: 0.2."""

    @property
    def fused(self) -> OptimizerSpec | None:
        """The optimizer that a kernel has to apply inside backward, if any."""
        return self.optimizer if self.update_mode is UpdateMode.FUSED else None

    @property
    def owned(self) -> OptimizerSpec | None:
        """The optimizer whose state is beside the tables, if any."""
        return self.optimizer if self.update_mode is not UpdateMode.GRADIENT else None

    def __post_init__(self) -> None:
        on_host = self.device.type in ("cpu", "meta")
        if self.location is None:
            place = EmbeddingLocation.HOST if on_host else EmbeddingLocation.DEVICE
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
