"""Tables with hashed ids as plain dicts, in Python's whole numbers: who has which row, and why.

Written from docs and the rules of `HashedIds`, without tensors, for comparison with the real ones.
A row's weights follow from one number, how often a gradient was added to it: see `PlainTable`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from recsys.modules.hashed_ids import LFU, AtLeast, DistanceLFU, HashedIds, Probability

WORD = 2**64
LINE, WAYS, PINNED = 64, 16, 4
START, RATE = 0.5, 2.0**-6
"""Initial weights, and the learning rate of SGD: all sums are exact in float32."""


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 % WORD
    x ^= x >> 27
    x = x * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


class PlainTable:
    """One table.

    A row has the weights `START - RATE * (c + 1) * updates` in column c, if each id that is looked
    up gets the gradient c + 1 there.
    """

    def __init__(self, rules: HashedIds, rows: int, regions: int) -> None:
        self.rules, self.rows = rules, rows
        self.bits = regions.bit_length() - 1
        self.lines = rows // LINE // regions  # of a region
        self.step = 0
        self.ids: dict[int, int] = {}
        self.last_used: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.updates = dict.fromkeys(range(rows), 0)
        self.sketch: dict[int, list[int]] = {}
        """64 counters by bucket."""
        self.waiting: list[int] = []
        """First steps that batches with updates to come may read."""
        self.evicted = 0

    # -- places --------------------------------------------------------------------------------

    def place(self, key: int) -> tuple[int, int, int]:
        """The line, the home bucket there, and the hash of an id."""
        hashed = mix((key ^ self.rules.seed) % WORD)
        region = hashed >> (64 - self.bits)
        line = ((hashed << self.bits) % WORD >> 32) * self.lines >> 32
        return region * self.lines + line, hashed >> (30 - self.bits) & 3, hashed

    def shared_row(self, key: int) -> int:
        return self.place(key)[0] // self.lines * self.lines * LINE

    def is_reserved(self, row: int) -> bool:
        return row % (self.lines * LINE) == 0

    @property
    def pin(self) -> int:
        return min([self.step - PINNED + 1, *self.waiting])

    @property
    def oldest(self) -> int:
        """Rows last used before this step have expired."""
        return min(self.step - self.rules.ttl, max(self.pin, 0)) if self.rules.ttl else 0

    def row_of(self, key: int) -> int | None:
        """The row of an id that has one, which has not expired."""
        line, _, _ = self.place(key)
        for row in range(line * LINE, line * LINE + LINE):
            if self.ids.get(row) == key and self.last_used[row] >= self.oldest:
                return row
        return None

    # -- batches -------------------------------------------------------------------------------

    def read(self, key: int) -> int:
        """The row that a lookup reads."""
        row = self.row_of(key)
        return self.shared_row(key) if row is None else row

    def weight(self, row: int, column: int) -> float:
        if self.is_reserved(row) and self.rules.unknown == "zero":
            return 0.0
        return START - RATE * (column + 1) * self.updates[row]

    def train(self, keys: Iterable[int]) -> dict[int, int]:
        """Map a batch of all ranks; return the row of each id."""
        distinct = sorted(set(keys))
        self.step += 1
        known = {key: row for key in distinct if (row := self.row_of(key)) is not None}
        for row in known.values():
            self.touch(row)
        for key in sorted(set(distinct) - known.keys(), key=lambda key: (self.place(key)[0], key)):
            row = self.choose(key) if self.is_admitted(key) else None
            if row is not None:
                known[key] = row
        return {key: known.get(key, self.shared_row(key)) for key in distinct}

    def touch(self, row: int) -> None:
        if isinstance(self.rules.eviction, LFU):
            self.seen[row] = min(self.decayed(row) + 256, 2**31 - 1)
        elif isinstance(self.rules.eviction, DistanceLFU):
            self.seen[row] += 1
        self.last_used[row] = self.step

    def decayed(self, row: int) -> int:
        half_life = self.rules.eviction.half_life  # type: ignore[union-attr]
        halvings = (self.step - self.last_used[row]) // half_life if half_life else 0
        return self.seen[row] >> min(halvings, 31)

    def is_admitted(self, key: int) -> bool:
        line, home, hashed = self.place(key)
        admission = self.rules.admission
        if isinstance(admission, Probability):
            mixed = mix((hashed + self.step * 0x9E3779B97F4A7C15) % WORD)
            return mixed >> 32 < round(admission.probability * 2**32)
        if not isinstance(admission, AtLeast):
            return True
        cells = self.sketch.setdefault(line * 4 + home, [0] * 64)
        chosen = [16 * i + (mix(hashed) >> 4 * i & 15) for i in range(4)]
        for cell in chosen:
            cells[cell] = min(cells[cell] + 1, 255)
        is_often = min(cells[cell] for cell in chosen) >= admission.batches
        if sum(cells) > 32 * admission.batches:
            cells[:] = [count // 2 for count in cells]
        return is_often

    def choose(self, key: int) -> int | None:
        """Give a row to an id: its expired one, a free one, or that of the lowest score."""
        line, home, _ = self.place(key)
        rows = range(line * LINE, line * LINE + LINE)
        order = [line * LINE + (home + i) % 4 * WAYS + way for i in range(4) for way in range(WAYS)]
        own = [row for row in rows if self.ids.get(row) == key]
        free = [
            row for row in order
            if not self.is_reserved(row)
            and (row not in self.ids or self.last_used[row] < self.oldest)
        ]  # fmt: skip
        of_home = [row for row in order[:WAYS] if not self.is_reserved(row)]
        unpinned = [row for row in of_home if self.last_used.get(row, 0) < self.pin]
        if own or free:
            row = (own or free)[0]
        elif self.rules.eviction is None or not unpinned:
            return None
        else:
            row = min(unpinned, key=self.score)
        self.evicted += row in self.ids and self.ids[row] != key
        self.ids[row], self.last_used[row], self.updates[row] = key, self.step, 0
        if isinstance(self.rules.eviction, LFU | DistanceLFU):
            self.seen[row] = 256 if isinstance(self.rules.eviction, LFU) else 1
        return row

    def score(self, row: int) -> tuple[float, int]:
        eviction = self.rules.eviction
        if isinstance(eviction, LFU):
            return self.decayed(row), self.last_used[row]
        if isinstance(eviction, DistanceLFU):
            distance = float(self.step - self.last_used[row])
            power = distance
            for _ in range(eviction.exponent - 1):
                power *= distance
            return self.seen[row] / power, 0
        return self.last_used[row], 0

    def update(self, rows: Iterable[int]) -> None:
        """Add a gradient to rows, once for each time they are given."""
        for row in rows:
            self.updates[row] += 1


def signed(number: int) -> int:
    """A 64-bit word as a signed number."""
    return struct.unpack("q", struct.pack("Q", number % WORD))[0]  # type: ignore[no-any-return]
