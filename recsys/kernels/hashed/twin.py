"""Lookup of ids in hash indexes, in operations of PyTorch, on any device.

`hash_index.c` computes the same bit for bit, and faster. Both follow these rules. First, ids that
have a row are found and their rows' use is recorded. Then each other id, once, is admitted or not
and gets a row, in the order of lines and, in a line, of ids. As no two lines affect each other,
the twin places the first id of every line at once, then the second of every line, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from recsys.kernels.hashed.index import IdIndex, IndexSettings

LINE, WAYS = 64, 16
MAX_SEEN = (1 << 31) - 1
FRACTION = 256
"""A count of 1 in `seen` of eviction "lfu", which has 8 fractional bits."""
CHUNK = 1 << 16
"""Ids that are compared with their lines at once, to bound memory."""

Found: TypeAlias = tuple[Tensor, Tensor, Tensor, list[int], Tensor, Tensor]
"""Fields of `index.Mapped`."""


def signed(number: int) -> int:
    """Return an int64 with the bits of a whole number modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift int64 values right as unsigned numbers, by 1 bit or more."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def mix64(values: Tensor) -> Tensor:
    """Return the finalizer of splitmix64 of int64 values, a permutation of all 64-bit values.

    Example:
        >>> mix64(torch.tensor([0, 1])).tolist()
        [0, 6238072747940578789]
    """
    values = (values ^ shift_right(values, 30)) * signed(0xBF58476D1CE4E5B9)
    values = (values ^ shift_right(values, 27)) * signed(0x94D049BB133111EB)
    return values ^ shift_right(values, 31)


@final
class Spots(NamedTuple):
    """Places of ids, each [ids]."""

    hashes: Tensor
    regions: Tensor
    """Regions, counted from the table's first."""
    lines: Tensor
    """Lines, counted from the shard's first."""
    homes: Tensor
    """Home buckets, from 0 to 3."""
    digests: Tensor
    """uint8 digests, from 1 to 255."""


def locate(index: IdIndex, ids: Tensor) -> Spots:
    """Return the places of ids: the only definition of the hash's bits besides the C file.

    The highest bits are the region, 32 bits below choose the line, 2 bits below the home bucket,
    and the lowest 16 bits the digest.
    """
    hashes = mix64(ids ^ signed(index.seed))
    bits = index.num_regions.bit_length() - 1
    regions = shift_right(hashes, 64 - bits) if bits else torch.zeros_like(hashes)
    lines = shift_right(shift_right(hashes << bits, 32) * index.lines, 32)
    homes = (hashes >> (30 - bits)) & 3
    digests = (((hashes & 0xFFFF) * 255 >> 16) + 1).to(torch.uint8)
    local = (regions - index.first_region) * index.lines + lines
    return Spots(hashes, regions, local, homes, digests)


def map_tables(
    indexes: Sequence[IdIndex],
    ids: Tensor,
    sizes: Sequence[int],
    step: int,
    pin: int,
    is_training: bool,
    returns_old: bool = False,
) -> Found:
    """Map ids to rows; see `index.map_ids`."""
    parts = ids.split(list(sizes))
    for index, part in zip(indexes, parts, strict=True):
        check_regions(index, part)
    results = [
        _Table(index, step, pin).map(part, locate(index, part), is_training)
        for index, part in zip(indexes, parts, strict=True)
    ]
    if not results:
        none = torch.zeros(0, 5, dtype=torch.int64)
        return ids.clone(), ids.clone(), ids.clone(), [], none, ids.new_empty(0, 2)
    rows, new_rows, new_ids, counts, old = zip(*results, strict=True)
    new_sizes = [new.numel() for new in new_rows]
    joined = torch.cat(rows), torch.cat(new_rows), torch.cat(new_ids)
    all_old = torch.cat(old) if returns_old else ids.new_empty(0, 2)
    return *joined, new_sizes, torch.tensor(counts), all_old


def check_regions(index: IdIndex, ids: Tensor) -> None:
    """Raise an error if an id belongs to another shard."""
    regions = locate(index, ids).regions
    is_foreign = (regions < index.first_region) | (regions >= index.last_region)
    if is_foreign.any():
        raise ValueError(
            f"ids must belong to regions {index.first_region} to {index.last_region - 1} of the "
            f"shard; received id {int(ids[is_foreign][0])} of region "
            f"{int(regions[is_foreign][0])}. Send each id to the owner of its region."
        )


class _Table:
    """One shard at one step."""

    def __init__(self, index: IdIndex, step: int, pin: int) -> None:
        self.index, self.settings, self.step, self.pin = index, index.settings, step, pin
        # rows last used before this step are expired
        # `pin` is the limit, since a pinned row does not expire
        self.oldest = min(step - self.settings.ttl, pin) if self.settings.ttl else 0
        self.ids, self.digests = index.ids.view(-1, LINE), index.digests.view(-1, LINE)
        self.last_used = index.last_used.view(-1, LINE)

    def map(
        self, ids: Tensor, spots: Spots, is_training: bool
    ) -> tuple[Tensor, Tensor, Tensor, list[int], Tensor]:
        rows = self.find(ids, spots)
        is_unknown = rows < 0
        hits = ids.numel() - int(is_unknown.sum())
        new_rows = new_ids = ids.new_empty(0)
        old, evicted, refused = ids.new_empty(0, 2), 0, 0
        if is_training:
            self.touch(rows[~is_unknown].unique())
            unknown, inverse = ids[is_unknown].unique(return_inverse=True)
            placed, is_admitted, old = self.place_all(unknown)
            evicted = int(old[:, 1].sum())
            rows[is_unknown] = placed[inverse]
            refused = int((is_admitted & (placed < 0)).sum())
            # by line, then by id: `unique` has sorted the ids
            order = (placed // LINE).argsort(stable=True)
            order = order[placed[order] >= 0]
            new_rows, new_ids, old = placed[order], unknown[order], old[order]
        is_unknown = rows < 0
        counts = [hits, new_rows.numel(), evicted, refused, int(is_unknown.sum())]
        if self.settings.is_shared:
            shared = (spots.regions - self.index.first_region) * self.index.lines * LINE
            rows = torch.where(is_unknown, shared, rows)
        return rows, new_rows, new_ids, counts, old

    # -- known ids ---------------------------------------------------------------------------------

    def find(self, ids: Tensor, spots: Spots) -> Tensor:
        """Return the row of each id, or -1 if the id has no row or its row has expired."""
        rows = torch.full_like(ids, -1)
        for start in range(0, ids.numel(), CHUNK):
            lines, digests = spots.lines[start:][:CHUNK], spots.digests[start:][:CHUNK]
            at, way = (self.digests[lines] == digests[:, None]).nonzero(as_tuple=True)
            candidates = lines[at] * LINE + way
            at = at + start
            is_found = self.index.ids[candidates] == ids[at]
            is_found &= self.index.last_used[candidates] >= self.oldest
            rows[at[is_found]] = candidates[is_found]
        return rows

    def touch(self, rows: Tensor) -> None:
        """Record the use of rows, each given once."""
        last_used = self.index.last_used[rows]
        if self.index.seen.numel():
            seen = self.index.seen[rows].long()
            if self.settings.eviction == "lfu":
                more = (decayed(self.settings, self.step, seen, last_used) + FRACTION).clamp(
                    max=MAX_SEEN
                )
            else:
                more = (seen + 1).clamp(max=MAX_SEEN)
            # an id counts once per step, also if several calls of the step contain it
            self.index.seen[rows] = torch.where(last_used == self.step, seen, more).int()
        self.index.last_used[rows] = self.step

    # -- unknown ids -------------------------------------------------------------------------------

    def place_all(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give rows to unknown ids.

        Args:
            ids: Unique ids in ascending order.

        Returns:
            The row of each id or -1, whether it is admitted, and `[ids, 2]` the id that lost the
            row and 1, or two zeros.
        """
        spots = locate(self.index, ids)
        is_admitted = self.admit(ids, spots)
        rows, old = torch.full_like(ids, -1), ids.new_zeros(len(ids), 2)
        left = spots.lines.argsort(stable=True)
        left = left[is_admitted[left]]
        while left.numel():
            lines, slots = spots.lines[left].unique_consecutive(return_inverse=True)
            left_open = self.open_homes(lines)[slots, spots.homes[left]]
            left, slots = left[left_open], slots[left_open]
            is_first = torch.ones_like(left, dtype=torch.bool)
            is_first[1:] = slots[1:] != slots[:-1]
            first = left[is_first]
            left = left[~is_first]
            rows[first], old[first] = self.place(
                ids[first], spots.lines[first], spots.homes[first], spots.digests[first]
            )
        return rows, is_admitted, old

    def admit(self, ids: Tensor, spots: Spots) -> Tensor:
        settings = self.settings
        if settings.admission == "at_least":
            return self.admit_by_count(spots)
        if settings.admission == "probability":
            # the increment of splitmix64 (2^64 / golden ratio); an id is drawn again in each step
            mixed = mix64(spots.hashes + signed(self.step * 0x9E3779B97F4A7C15))
            return shift_right(mixed, 32) < settings.admission_value
        return torch.ones_like(ids, dtype=torch.bool)

    def admit_by_count(self, spots: Spots) -> Tensor:
        """Count ids in the sketches of their home buckets, in order inside each bucket.

        A sketch has 4 groups of 16 cells; an id has one cell of each group, and its count is the
        lowest of them. All cells are halved when their mean exceeds half of the required count:
        otherwise they would fill up, and admit every id.
        """
        sketch, least = self.index.sketch.view(-1, LINE), self.settings.admission_value
        buckets = spots.lines * 4 + spots.homes
        mixed = mix64(spots.hashes)
        cells = torch.stack([16 * j + ((mixed >> (4 * j)) & 15) for j in range(4)], 1)
        is_admitted = torch.zeros_like(buckets, dtype=torch.bool)
        for chosen in _rounds(buckets):
            bucket, cell = buckets[chosen][:, None], cells[chosen]
            counted = (sketch[bucket, cell].int() + 1).clamp(max=255)
            sketch[bucket, cell] = counted.to(torch.uint8)
            is_admitted[chosen] = counted.amin(1) >= least
            full = bucket[sketch[bucket[:, 0]].sum(1) > 32 * least, 0]
            sketch[full] = sketch[full] >> 1
        return is_admitted

    def availability(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether rows of lines may be given to a new id, and whether to evict them.

        Returns:
            Two bool [lines, 64]: free or expired rows; and rows that can be evicted.
        """
        last_used = self.last_used[lines]
        is_free = (self.digests[lines] == 0) | (last_used < self.oldest)
        is_evictable = ~is_free & (last_used < self.pin) & (self.settings.eviction != "none")
        is_free[:, 0] &= lines % self.index.lines != 0  # the shared row
        return is_free, is_evictable

    def open_homes(self, lines: Tensor) -> Tensor:
        """Return whether a new id of each line and home gets a row, bool [lines, 4].

        A line that refuses an id refuses all later ids of the batch with the same home.
        """
        is_free, is_evictable = self.availability(lines)
        return is_free.any(1, keepdim=True) | is_evictable.view(-1, 4, WAYS).any(2)

    def place(
        self, ids: Tensor, lines: Tensor, homes: Tensor, digests: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Give a row to one id of each line; return the rows, and `old` of `place_all`."""
        is_free, is_evictable = self.availability(lines)
        way = torch.arange(LINE, device=ids.device)
        from_home = ((way // WAYS - homes[:, None]) & 3) * WAYS + way % WAYS
        is_own = (self.ids[lines] == ids[:, None]) & (self.digests[lines] == digests[:, None])
        # the id's own row, then free rows from the home bucket on, then evictable rows by score
        rank = torch.where(is_free, from_home + 1, LINE + 1).masked_fill(is_own, 0)
        is_home = way // WAYS == homes[:, None]
        lowest = self.lowest(lines, is_evictable & is_home)
        ways = torch.where(rank.amin(1) <= LINE, _first(rank == rank.amin(1, keepdim=True)), lowest)
        rows = lines * LINE + ways
        # an expired row is free, but still has the id that loses it here
        is_taken = (self.index.digests[rows] != 0) & ~is_own.any(1)
        old = torch.stack([self.index.ids[rows] * is_taken, is_taken.long()], 1)
        self.index.ids[rows] = ids
        self.index.digests[rows] = digests
        self.index.last_used[rows] = self.step
        if self.index.seen.numel():
            self.index.seen[rows] = FRACTION if self.settings.eviction == "lfu" else 1
        return rows, old

    def lowest(self, lines: Tensor, is_evictable: Tensor) -> Tensor:
        """Return the evictable way of the lowest score in each line; 64 if there is none."""
        seen = self.index.seen.view(-1, LINE)[lines] if self.index.seen.numel() else None
        scores = scores_of(self.settings, self.step, self.last_used[lines], seen)
        most = float("inf") if scores.is_floating_point() else (1 << 63) - 1
        scores = scores.masked_fill(~is_evictable, most)
        return _first(is_evictable & (scores == scores.amin(1, keepdim=True)))


def scores_of(settings: IndexSettings, step: int, last_used: Tensor, seen: Tensor | None) -> Tensor:
    """Return the scores of rows: the lowest loses its row first; for "none" the last use.

    Args:
        settings: Rules of the table.
        step: Current step, after the last use of the rows.
        last_used: int32, any shape.
        seen: int32 of the same shape; None if the rules count nothing.

    Returns:
        int64, or float64 of eviction "distance_lfu".
    """
    last_used = last_used.long()
    if settings.eviction == "distance_lfu":
        assert seen is not None
        # at least 1 for rows that may be evicted: rows of the current step are pinned
        distance = (step - last_used).double()
        power = distance
        # products as in the C file: `pow` may round differently
        for _ in range(settings.exponent - 1):
            power = power * distance
        return seen.double() / power
    if settings.eviction == "lfu":
        assert seen is not None
        # the last use decides between equal counts; both have 31 bits
        return (decayed(settings, step, seen.long(), last_used) << 31) + last_used
    return last_used


def decayed(settings: IndexSettings, step: int, seen: Tensor, last_used: Tensor) -> Tensor:
    """Halve counts of eviction "lfu" for each half-life since the last use."""
    if not settings.half_life:
        return seen
    age = (step - last_used.long()).clamp(min=0)
    return seen >> (age // settings.half_life).clamp(max=31)


def _first(flags: Tensor) -> Tensor:
    """Return the first column of each row [n, 64] that is True; 64 if there is none."""
    columns = torch.arange(flags.size(1), device=flags.device)
    return torch.where(flags, columns, flags.size(1)).amin(1)


def _rounds(groups: Tensor) -> list[Tensor]:
    """Split positions so that each split has one of each group: the first, the second, ..."""
    order = groups.argsort(stable=True)
    _, sizes = groups.unique(return_counts=True)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    rank = torch.arange(groups.numel(), device=groups.device) - starts
    order = order[rank.argsort(stable=True)]
    return list(order.split(rank.bincount().tolist()))
