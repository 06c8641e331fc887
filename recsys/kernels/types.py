"""The vocabulary of the kernels room: enums and frozen descriptions of tables and optimizers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import final

from recsys.kernels.arguments import finite

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
class EmbOptimType(enum.Enum):
    """Optimizers that a table can own. Names as in FBGEMM, whose users know them."""

    SGD = "sgd"
    EXACT_SGD = "sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    ADAM = "adam"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    LAMB = "lamb"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    LARS_SGD = "lars_sgd"

    def __str__(self) -> str:
        return self.value


@final
class EmbeddingLocation(enum.Enum):
    """Where a table's weights live. On a CPU always HOST; the managed ones need CUDA and FBGEMM."""

    DEVICE = "device"
    MANAGED = "managed"
    MANAGED_CACHING = "managed_caching"
    HOST = "host"


@final
class WeightDecayMode(enum.Enum):
    """How `weight_decay` acts. Only rows that were looked up decay, never the rest of the table."""

    L2 = "l2"
    """Added to the gradient (`g + weight_decay * w`), so that the optimizer's statistics see it."""
    DECOUPLE = "decouple"
    """`w` shrinks by `learning_rate * weight_decay`, beside the update (as in AdamW)."""


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


_LAMBS = (EmbOptimType.LAMB, EmbOptimType.PARTIAL_ROWWISE_LAMB)
_DECAYS_DECOUPLED = (EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM, *_LAMBS)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """The optimizer a table owns. Hashable: tables are grouped by it.

    Fields an algorithm does not read must keep their default, so that a setting is never dropped
    without a word.

    Example:
        >>> OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1).eps
        1e-08
    """

    algorithm: EmbOptimType
    learning_rate: float = 0.01
    """The value at construction; `TableBatchedEmbedding.learning_rates` changes it later."""
    eps: float = 1e-8
    """Added to the square root, outside of it. Adagrad, Adam, LAMB."""
    beta1: float = 0.9
    """Adam, LAMB."""
    beta2: float = 0.999
    """Adam, LAMB."""
    weight_decay: float = 0.0
    """Acts on looked-up rows only."""
    weight_decay_mode: WeightDecayMode | None = None
    """None: decoupled for Adam, partial row-wise Adam and LAMB, L2 for the others."""
    momentum: float = 0.9
    """LARS-SGD."""
    eta: float = 0.001
    """LARS-SGD: the trust coefficient."""
    stochastic_rounding: bool = False
    """Tables of fp16 or bf16: round an updated weight up or down at random, right on average.
    Updates smaller than half a step of the dtype are then not lost."""

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, EmbOptimType):
            raise TypeError(
                "OptimizerSpec.algorithm must be an EmbOptimType; received "
                f"{self.algorithm!r}. Choose one of {[e.name for e in EmbOptimType]}."
            )
        for name in ("learning_rate", "eps", "weight_decay", "eta", "beta1", "beta2", "momentum"):
            below = 1 if name in ("beta1", "beta2", "momentum") else None
            number = finite(f"OptimizerSpec.{name}", getattr(self, name), least=0, below=below)
            object.__setattr__(self, name, number)
        default = (
            WeightDecayMode.DECOUPLE if self.algorithm in _DECAYS_DECOUPLED else WeightDecayMode.L2
        )
        if self.weight_decay_mode is None:
            object.__setattr__(self, "weight_decay_mode", default)
        elif self.weight_decay_mode is not default and self.algorithm in (
            *_LAMBS,
            EmbOptimType.LARS_SGD,
        ):
            raise ValueError(
                f"{self.algorithm.name} knows only weight_decay_mode={default.name}; received "
                f"{self.weight_decay_mode.name}."
            )
        unread = [
            f.name
            for f in fields(self)
            if f.name in _READ_BY
            and self.algorithm not in _READ_BY[f.name]
            and getattr(self, f.name) != f.default
        ]
        if unread:
            raise ValueError(
                f"{self.algorithm.name} does not read {unread}; received "
                f"{[getattr(self, name) for name in unread]}. Leave them at their defaults."
            )

    def settings(self) -> dict[str, float | str | tuple[float, float]]:
        """What the algorithm reads besides its rate, under the names of torch.optim."""
        read = {
            name: getattr(self, name)
            for name, algorithms in _READ_BY.items()
            if self.algorithm in algorithms
        }
        if "beta1" in read:
            read["betas"] = (read.pop("beta1"), read.pop("beta2"))
        if self.weight_decay and self.weight_decay_mode is not None:
            read["weight_decay_mode"] = self.weight_decay_mode.value
        return {"weight_decay": self.weight_decay, **read}


_ADAGRADS = (EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
_READ_BY: dict[str, tuple[EmbOptimType, ...]] = {
    "eps": (*_ADAGRADS, *_DECAYS_DECOUPLED),
    "beta1": _DECAYS_DECOUPLED,
    "beta2": _DECAYS_DECOUPLED,
    "momentum": (EmbOptimType.LARS_SGD,),
    "eta": (EmbOptimType.LARS_SGD,),
}
