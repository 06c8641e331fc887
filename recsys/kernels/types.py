"""The vocabulary of the kernels room: enums and frozen descriptions of tables and optimizers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import final

from recsys.kernels.update_rules import EmbOptimType, OptimizerSpec, WeightDecayMode

__all__ = [
    "BoundsCheckMode",
    "EmbOptimType",
    "EmbeddingLocation",
    "OptimizerSpec",
    "PoolingMode",
    "RowState",
    "TableSpec",
    "UpdateMode",
    "WeightDecayMode",
]


@final
class PoolingMode(enum.Enum):
    """What happens to the rows of one bag."""

    SUM = "sum"
    MEAN = "mean"
    """Sum divided by the number of ids, weighted or not."""
    NONE = "none"
    """Sequence lookup: one row per id."""


@final
class UpdateMode(enum.Enum):
    """Who applies the gradient of a table, and when."""

    FUSED = "fused"
    """The table's own optimizer, inside backward; gradients are never materialised."""
    DEFERRED = "deferred"
    """Backward leaves duplicate-free row gradients; `step()` applies the table's own optimizer."""
    GRADIENT = "gradient"
    """The tables are plain parameters: backward fills `.grad`, any torch optimizer trains them."""


@final
class RowState(enum.Enum):
    """What an optimizer that reads whole rows does where a table is split by columns."""

    EXACT = "exact"
    """The owners of a row's columns exchange what the whole row adds up to: as if unsplit."""
    PER_SHARD = "per_shard"
    """Each owner takes its columns for whole rows: no exchange, but other values than unsplit."""


@final
class EmbeddingLocation(enum.Enum):
    """Where a table's weights live. On a CPU always HOST; the managed ones need CUDA and FBGEMM."""

    DEVICE = "device"
    MANAGED = "managed"
    MANAGED_CACHING = "managed_caching"
    HOST = "host"


@final
class BoundsCheckMode(enum.Enum):
    """What to do with an id that is negative or not smaller than the table's row count."""

    FATAL = "fatal"
    """Raise an IndexError naming feature, table, id, position and table size."""
    WARNING = "warning"
    """Warn once per call and read row 0 in its place (what FBGEMM does)."""
    IGNORE = "ignore"
    """Read row 0 in its place without a word."""
    NONE = "none"
    """Do not look. A bad id is then undefined behaviour: it may crash the process."""

    @classmethod
    def _missing_(cls, value: object) -> BoundsCheckMode | None:
        """The mode of a number, as FBGEMM counts them: `BoundsCheckMode(1)` warns."""
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
