"""Ids without limit: how a table gives its rows to 64-bit ids, and takes them back.

A table with `ids=HashedIds(...)` is read by any int64, such as the hash of a user's name. An id
gets a row when it is trained on, and loses it when another id needs the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, final

from torch import nn

from recsys.base.arguments import finite, path_of, whole
from recsys.base.checked import check_fields
from recsys.kernels.hashed.index import MAX_REGIONS, IndexSettings

__all__ = [
    "LFU",
    "LRU",
    "AtLeast",
    "DistanceLFU",
    "HashedIds",
    "Probability",
    "check_rows_in_memory",
]


@final
@dataclass(frozen=True)
class LRU:
    """Eviction of the least recently used id."""


@final
@dataclass(frozen=True)
class LFU:
    """Evict the least frequently used id. Counts are per batch and can decay.

    Raises:
        ValueError: The half-life is negative.
    """

    half_life: int = 0
    """Batches without an id in which its count halves; 0: counts do not decay."""

    def __post_init__(self) -> None:
        whole("LFU.half_life", self.half_life, 0, 2**31 - 1)


@final
@dataclass(frozen=True)
class DistanceLFU:
    """Eviction of the id with the lowest count / distance^exponent.

    The count is the number of batches that had the id, the distance the number of batches since
    its last use.

    Raises:
        ValueError: The exponent is not from 1 to 4.
    """

    exponent: int = 1
    """Whole number from 1 to 4."""

    def __post_init__(self) -> None:
        whole("DistanceLFU.exponent", self.exponent, 1, 4)


@final
@dataclass(frozen=True)
class AtLeast:
    """Admission of an id at the n-th batch that has it, by approximate counts (never later).

    Raises:
        ValueError: The number of batches is not from 2 to 255.
    """

    batches: int
    """Number of batches from 2 to 255."""

    def __post_init__(self) -> None:
        whole("AtLeast.batches", self.batches, 2, 255)


@final
@dataclass(frozen=True)
class Probability:
    """Admission of an unknown id with a probability, in each batch that has it.

    Raises:
        ValueError: The probability is not above 0 and below 1.
    """

    probability: float
    """Above 0 and below 1."""

    def __post_init__(self) -> None:
        if not 0 < finite("Probability.probability", self.probability) < 1:
            raise ValueError(
                f"Probability.probability must be above 0 and below 1; received {self.probability}."
            )


@final
@dataclass(frozen=True, kw_only=True)
class HashedIds:
    """Rules by which a table gives its rows to ids of 64 bits.

    The rows are `num_embeddings` of the config, rounded up to whole lines of 64 rows per region.
    Which ids have rows depends on the batches alone, not on their order of ids or on the number of
    ranks. Up to 80% of the rows are filled almost without a loss.

    The table needs an optimizer in backward (`apply_optimizer_in_backward`): the weights and the
    optimizer state of a row are reset for each new id.

    Raises:
        ValueError: A value is out of its range.
        TypeError: A value has another type.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> config = EmbeddingBagConfig(1_000, 8, "users", feature_names=["user"], ids=HashedIds())
        >>> config.num_embeddings
        1024
    """

    eviction: LRU | LFU | DistanceLFU | None = field(default_factory=LRU)
    """Rule of the id that loses its row; None: ids keep their rows."""
    ttl: int | None = None
    """Batches without an id after which it loses its row; None: no limit."""
    admission: AtLeast | Probability | None = None
    """Condition for a row; None: an id gets a row in the first batch that trains on it."""
    unknown: Literal["shared", "zero"] = "shared"
    """Ids without a row read one trained row per region, or zeros."""
    num_regions: int = 64
    """Parts into which rows can be split among ranks; a power of two. Small tables have fewer."""
    seed: int = 0
    """Seed of the hash; a secret one if ids come from an adversary."""
    overflow: str | None = None
    """Folder on a local disk for the rows that ids lose, so that a table has more ids than memory
    for rows: an id that comes back has its weights and optimizer state again. None: they are lost.

    Its count for `LFU` and `DistanceLFU` starts again at 1. In evaluation such an id reads its
    weights from the disk, and no id gets or loses a row; in a batch of more different ids than the
    table has rows, some read the row of unknown ids. Each shard of a table has a folder of its own
    there, deleted when the process ends; the next job on the machine deletes the folders of killed
    jobs. Each row on the disk takes about 60 bytes of memory.

    For tables on the CPU, table-wise, row-wise or table-row-wise, with an eviction, and without
    `ttl` and `admission`. `save_checkpoint` saves the rows on the disk as well; other ways to
    save, move, resize, publish or quantize the table raise an error."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ttl is not None:
            whole("HashedIds.ttl", self.ttl, 1, 2**31 - 1)
        whole("HashedIds.num_regions", self.num_regions, 1, MAX_REGIONS)
        if self.num_regions & (self.num_regions - 1):
            raise ValueError(
                f"HashedIds.num_regions must be a power of two; received {self.num_regions}."
            )
        if self.unknown not in ("shared", "zero"):
            raise ValueError(
                f"HashedIds.unknown must be 'shared' or 'zero'; received {self.unknown!r}."
            )
        if self.overflow is not None:
            self._check_overflow()

    def _check_overflow(self) -> None:
        path_of("HashedIds.overflow", self.overflow)
        for name, is_good, rule in (
            ("eviction", self.eviction is not None, "an eviction, whose rows go to the folder"),
            ("ttl", self.ttl is None, "no ttl: rows in the folder do not expire"),
            ("admission", self.admission is None, "no admission: ids return to rows at once"),
        ):
            if not is_good:
                raise ValueError(
                    f"HashedIds with overflow must have {rule}; received "
                    f"{name}={getattr(self, name)!r}. Leave out overflow or {name}."
                )

    @property
    def has_rows_on_disk(self) -> bool:
        """True if ids may have rows on the disk, so that memory has only a part of the table."""
        return self.overflow is not None

    def check_rows_in_memory(
        self, table: str, action: str, remedy: str = "Leave out overflow."
    ) -> None:
        """Raise an error if a table may have rows on the disk.

        Args:
            table: Name of the table.
            action: The subject of the message, which such tables do not support.
            remedy: Last sentence of the message.

        Raises:
            ValueError: It has.
        """
        if self.has_rows_on_disk:
            raise ValueError(
                f"{action} needs all rows of a table in memory; received table {table!r} with "
                f"HashedIds.overflow={self.overflow!r}. {remedy}"
            )

    def settings(self) -> IndexSettings:
        """Return the rules as the index takes them."""
        eviction, admission = self.eviction, self.admission
        value = 0
        if isinstance(admission, AtLeast):
            value = admission.batches
        elif isinstance(admission, Probability):
            value = round(admission.probability * 2**32)
        return IndexSettings(
            eviction=_EVICTIONS[type(eviction)],  # type: ignore[arg-type]
            half_life=eviction.half_life if isinstance(eviction, LFU) else 0,
            exponent=eviction.exponent if isinstance(eviction, DistanceLFU) else 1,
            ttl=self.ttl or 0,
            admission=_ADMISSIONS[type(admission)],  # type: ignore[arg-type]
            admission_value=value,
            is_shared=True,
        )


def check_rows_in_memory(model: nn.Module, action: str) -> None:
    """Raise an error if a table of a model may have rows on the disk.

    Args:
        model: The model.
        action: The subject of the message, which such tables do not support.

    Raises:
        ValueError: A table has `HashedIds.overflow`.
    """
    for path, module in model.named_modules():
        rules = getattr(module, "rules", None)
        if isinstance(rules, HashedIds):
            rules.check_rows_in_memory(path.removesuffix(".index").rpartition(".")[2], action)


_EVICTIONS = {LRU: "lru", LFU: "lfu", DistanceLFU: "distance_lfu", type(None): "none"}
_ADMISSIONS = {AtLeast: "at_least", Probability: "probability", type(None): "always"}
