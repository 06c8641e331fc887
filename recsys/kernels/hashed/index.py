"""Index of a table's rows by any 64-bit id, and the lookup of ids in a group of indexes.

A table has regions of equal size. A region has lines of 64 rows: 4 buckets of 16 rows. The hash of
an id gives its region, its line and its home bucket there (`twin.locate`). An id only ever has a
row of its line, so results are equal for any split of regions over shards, and for any order of
ids in a batch. The first row of a region belongs to no id: unknown ids may share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from recsys.base.arguments import whole
from recsys.kernels.hashed import build, native, twin

LINE = 64
"""Rows of a line: 4 buckets of 16."""
MAX_REGIONS = 1 << 14
"""Limit of the hash: the bits of region, line, home bucket and digest do not overlap."""

Eviction: TypeAlias = Literal["none", "lru", "lfu", "distance_lfu"]
Admission: TypeAlias = Literal["always", "at_least", "probability"]

COUNTS = ("hits", "admitted", "evicted", "refused", "unknown")
"""Columns of `Mapped.counts`."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSettings:
    """Rules by which ids get rows and lose them.

    A step is one training batch. A batch counts an id once, however often the batch contains it.

    Raises:
        ValueError: A value is out of its range.

    Example:
        >>> settings = IndexSettings(
        ...     eviction="lru", half_life=0, exponent=1, ttl=0,
        ...     admission="always", admission_value=0, is_shared=True,
        ... )
        >>> settings.eviction
        'lru'
    """

    eviction: Eviction
    """Row of the home bucket that a new id gets if its line is full: none; the least recently
    used; the least frequently used; or the row of the lowest count / distance^exponent. The
    distance is the number of steps since the last use."""
    half_life: int
    """Eviction "lfu": steps in which the count of an unused row halves; 0: never."""
    exponent: int
    """Eviction "distance_lfu": exponent from 1 to 4."""
    ttl: int
    """Steps without use after which a row expires; 0: never. A pinned row does not expire."""
    admission: Admission
    """Unknown ids that get a row: all; ids that occurred in about so many batches, recently; or a
    random share."""
    admission_value: int
    """Number of batches, from 2 to 255, of admission "at_least"; probability times 2^32 of
    admission "probability"; else 0."""
    is_shared: bool
    """True: ids without a row read the first row of their region. False: their row is -1."""

    def __post_init__(self) -> None:
        for name, choices in (("eviction", native.EVICTIONS), ("admission", native.ADMISSIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}; received {getattr(self, name)!r}."
                )
        whole("half_life", self.half_life, 0, 2**31 - 1)
        whole("exponent", self.exponent, 1, 4)
        whole("ttl", self.ttl, 0, 2**31 - 1)
        least, most = {"always": (0, 0), "at_least": (2, 255), "probability": (0, 1 << 32)}[
            self.admission
        ]
        whole(f"admission_value of {self.admission!r}", self.admission_value, least, most)


def geometry(num_embeddings: int, max_regions: int = 64) -> tuple[int, int]:
    """Return the rows and the regions of a table, its rows rounded up to whole lines.

    Args:
        num_embeddings: Rows that are required.
        max_regions: The most regions, a power of two. Smaller tables have fewer regions: a region
            has at least one line of 64 rows.

    Returns:
        The number of rows and the number of regions.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> geometry(100_000), geometry(100)
        ((102400, 64), (128, 2))
    """
    lines = -(-whole("num_embeddings", num_embeddings) // LINE)
    whole("max_regions", max_regions, 1, MAX_REGIONS)
    if max_regions & (max_regions - 1):
        raise ValueError(f"max_regions must be a power of two; received {max_regions}.")
    num_regions = min(max_regions, 1 << (lines.bit_length() - 1))
    return -(-lines // num_regions) * num_regions * LINE, num_regions


@final
# identity and weak references: `native` caches groups of tables by their first index
@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class IdIndex:
    """Index of the rows of one shard: whole consecutive regions of a table.

    Rows count from the first row of `first_region`. All arrays but `digests` are the index's
    state; after a write to them from outside, call `rebuild`.

    Example:
        >>> settings = IndexSettings(
        ...     eviction="lru", half_life=0, exponent=1, ttl=0,
        ...     admission="always", admission_value=0, is_shared=True,
        ... )
        >>> rows, regions = geometry(1000)
        >>> index = IdIndex.empty(settings, rows, regions, 0, regions, seed=1)
        >>> mapped = map_ids([index], torch.tensor([-7, 5, -7]), [3], 1, 1, is_training=True)
        >>> mapped.new_sizes, index.ids[mapped.rows].tolist()
        ([2], [-7, 5, -7])
    """

    settings: IndexSettings
    num_regions: int
    """Regions of the whole table."""
    first_region: int
    last_region: int
    """First region after the shard's last."""
    lines: int
    """Lines of a region."""
    seed: int
    """Seed of the table's hash, any 64-bit integer."""
    ids: Tensor
    """int64 [rows] id of each row; without a meaning where `last_used` is 0."""
    last_used: Tensor
    """int32 [rows] last step that used the row; 0: the row is free."""
    seen: Tensor
    """int32 [rows] number of batches that used the row, for "lfu" times 256; [0] for others."""
    digests: Tensor
    """uint8 [rows] digest of each row's id; 0: the row is free."""
    sketch: Tensor
    """uint8 [4 * rows] 64 counters of each bucket of admission "at_least"; [0] for others."""

    @staticmethod
    def empty(
        settings: IndexSettings,
        rows: int,
        num_regions: int,
        first_region: int,
        last_region: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> IdIndex:
        """Return the index of a shard without ids.

        Args:
            settings: Rules of the table.
            rows: Rows of the whole table, as `geometry` rounds them.
            num_regions: Regions of the whole table, a power of two.
            first_region: The shard's first region.
            last_region: The first region after the shard's last.
            seed: Seed of the table's hash, any 64-bit integer.
            device: Device of the arrays.

        Raises:
            ValueError: The rows are not whole lines of each region, or the regions are not in
                the table.
        """
        whole("num_regions", num_regions, 1, MAX_REGIONS)
        if num_regions & (num_regions - 1):
            raise ValueError(f"num_regions must be a power of two; received {num_regions}.")
        if rows <= 0 or rows % (LINE * num_regions):
            raise ValueError(
                f"rows must be a multiple of {LINE} rows for each of {num_regions} regions; "
                f"received {rows}. Use `geometry` to round them up."
            )
        whole("first_region", first_region, 0, num_regions)
        whole("last_region", last_region, first_region, num_regions)
        lines = rows // (LINE * num_regions)
        size = (last_region - first_region) * lines * LINE
        counts = settings.eviction in ("lfu", "distance_lfu")
        return IdIndex(
            settings=settings,
            num_regions=num_regions,
            first_region=first_region,
            last_region=last_region,
            # `locate` multiplies lines by 32 bits of the hash, within int64; in C they have 32 bits
            lines=whole("lines of a region", lines, 1, (1 << 31) // num_regions),
            seed=seed,
            ids=torch.zeros(size, dtype=torch.int64, device=device),
            last_used=torch.zeros(size, dtype=torch.int32, device=device),
            seen=torch.zeros(size if counts else 0, dtype=torch.int32, device=device),
            digests=torch.zeros(size, dtype=torch.uint8, device=device),
            sketch=torch.zeros(
                4 * size if settings.admission == "at_least" else 0,
                dtype=torch.uint8,
                device=device,
            ),
        )

    def rebuild(self) -> bool:
        """Compute the digests from `ids` and `last_used`, for example after these were loaded.

        Returns:
            Whether each id has a row of its line, which the hash gives.
        """
        is_good = torch.ones((), dtype=torch.bool, device=self.ids.device)
        for start in range(0, self.ids.numel(), 1 << 20):  # to bound memory
            rows = slice(start, start + (1 << 20))
            ids, is_used = self.ids[rows], self.last_used[rows] > 0
            places = twin.locate(self, ids)
            self.digests[rows] = torch.where(is_used, places.digests, 0)
            lines = torch.arange(start, start + ids.numel(), device=ids.device) // LINE
            is_good &= ~((places.lines != lines) & is_used).any()
        return bool(is_good)


@final
class Mapped(NamedTuple):
    """Rows of a batch, and the rows that got a new id."""

    rows: Tensor
    """int64 [ids] row of each id in its shard; -1 only without `is_shared`: the id has no row."""
    new_rows: Tensor
    """int64 [new] rows that got a new id, by table, then line, then id. Reset their weights. An
    id that returns after its row expired is new as well, possibly in the same row."""
    new_ids: Tensor
    """int64 [new] the ids of `new_rows`."""
    new_sizes: list[int]
    """Number of new rows of each table."""
    counts: Tensor
    """int64 [tables, 5] on the CPU, in the order of `COUNTS`: ids of the batch that were found;
    rows that got a new id; of these, rows taken from another id; admitted ids without a row, as
    all rows of their home bucket are pinned or nothing is evicted; and ids of the batch that have
    no row. The first and the last count an id as often as the batch contains it."""
    old: Tensor
    """int64 [new, 2] the id that lost each new row, and 1; two zeros if the row was free. [0, 2]
    unless they were asked for."""


def map_ids(
    indexes: Sequence[IdIndex],
    ids: Tensor,
    sizes: Sequence[int],
    step: int,
    pin: int,
    is_training: bool,
    returns_old: bool = False,
) -> Mapped:
    """Map a batch of ids to rows; in training, record their use and give rows to new ids.

    CPU tensors are mapped by the C file where it can be compiled, others by its twin in PyTorch.
    Both give equal results. No thread may use the same indexes meanwhile.

    Args:
        indexes: The shards of a group of tables, on one device.
        ids: int64 [sum of sizes] ids of the first table, then of the second, and so on. Each id
            belongs to a region of its shard.
        sizes: Number of ids of each table.
        step: Training step, from 1 to 2^31 - 1; in evaluation the last one.
        pin: The first step whose rows must keep their ids, at most `step`.
        is_training: Whether the batch is trained on. Otherwise the indexes are only read.
        returns_old: Whether to return the ids that lost their rows.

    Returns:
        The rows.

    Raises:
        ValueError: The sizes do not match, the step is out of its range, or an id belongs to a
            region of another shard. The indexes are unchanged.
        MemoryError: There is no memory for temporary arrays. The indexes may be changed.
    """
    if len(indexes) != len(sizes) or sum(sizes) != ids.numel() or min(sizes, default=0) < 0:
        raise ValueError(
            f"sizes must have one number for each of {len(indexes)} tables and {ids.numel()} ids "
            f"in all; received {list(sizes)}."
        )
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"ids must be int64 [ids]; received {ids.dtype} {list(ids.shape)}.")
    if not (1 <= step < 1 << 31 and pin <= step):
        raise ValueError(
            f"step must be from 1 to 2^31 - 1, and pin at most step; received {step} and {pin}."
        )
    pin = max(pin, 0)
    # the twin takes over ten times as long
    # docs/decisions/hashed_ids.md, "A C file, and a twin in PyTorch"
    library = build.library() if ids.device.type == "cpu" else None
    now = step, pin, is_training, returns_old
    if library is not None:
        return Mapped(*native.map_tables(library, indexes, ids.contiguous(), sizes, *now))
    return Mapped(*twin.map_tables(indexes, ids, sizes, *now))
