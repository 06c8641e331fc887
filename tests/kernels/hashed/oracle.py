"""Hash index of one table in plain Python: the rules of the index, with a dict and no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from recsys.kernels.hashed.index import IdIndex, IndexSettings

MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def unmix(x: int) -> int:
    """Invert `mix`."""
    x ^= (x >> 31) ^ (x >> 62)
    x = (x * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK
    x ^= (x >> 27) ^ (x >> 54)
    x = (x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK
    return x ^ (x >> 30) ^ (x >> 60)


def id_of_hash(hash_: int, seed: int) -> int:
    """Return the signed id of a hash: ids that fall together are built with it."""
    x = unmix(hash_) ^ (seed & MASK)
    return x - (1 << 64) if x >> 63 else x


@dataclass
class Entry:
    id: int
    last_used: int
    seen: int


@dataclass
class Oracle:
    settings: IndexSettings
    num_regions: int
    lines: int
    seed: int
    entries: dict[int, Entry] = field(default_factory=dict)
    """Entries by row of the table."""
    cells: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Sketches, by first row of the line, and bucket."""

    def place_of(self, id_: int) -> tuple[int, int, int, int]:
        """Return hash, first row of the region, first row of the line, and home bucket."""
        hash_ = mix((id_ & MASK) ^ (self.seed & MASK))
        bits = f"{hash_:064b}"
        used = self.num_regions.bit_length() - 1
        region = int(bits[:used] or "0", 2)
        line = int(bits[used : used + 32], 2) * self.lines // 2**32
        home = int(bits[used + 32 : used + 34], 2)
        first = region * self.lines * 64
        return hash_, first, first + line * 64, home

    def is_alive(self, entry: Entry, step: int, pin: int) -> bool:
        ttl = self.settings.ttl
        return ttl == 0 or step - entry.last_used <= ttl or entry.last_used >= pin

    def halved(self, entry: Entry, step: int) -> int:
        life = self.settings.half_life
        return entry.seen if life == 0 else entry.seen // 2 ** ((step - entry.last_used) // life)

    def row_of(self, id_: int) -> int | None:
        line = self.place_of(id_)[2]
        rows = [r for r in range(line, line + 64) if r in self.entries]
        return next((r for r in rows if self.entries[r].id == id_), None)

    def map(
        self, ids: list[int], step: int, pin: int, is_training: bool
    ) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """Return rows, new rows with their ids, and counts."""
        alive = {}
        for id_ in ids:
            row = self.row_of(id_)
            if row is not None and self.is_alive(self.entries[row], step, pin):
                alive[id_] = row
        new: list[tuple[int, int]] = []
        counts = [sum(id_ in alive for id_ in ids), 0, 0, 0, 0]
        if is_training:
            for row in alive.values():
                self.touch(self.entries[row], step)
            for id_ in sorted(set(ids) - set(alive), key=lambda i: (self.place_of(i)[2], i)):
                if not self.admits(id_, step):
                    continue
                row = self.choose(id_, step, pin)
                if row is None:
                    counts[3] += 1
                    continue
                counts[1] += 1
                counts[2] += row in self.entries and self.entries[row].id != id_
                first = 256 if self.settings.eviction == "lfu" else 1
                self.entries[row] = Entry(id_, step, first)
                new.append((row, id_))
                alive[id_] = row
        counts[4] = sum(id_ not in alive for id_ in ids)
        shared = self.settings.is_shared
        rows = [alive.get(i, self.place_of(i)[1] if shared else -1) for i in ids]
        return rows, new, counts

    def touch(self, entry: Entry, step: int) -> None:
        if entry.last_used == step:
            return
        if self.settings.eviction == "lfu":
            entry.seen = min(self.halved(entry, step) + 256, 2**31 - 1)
        else:
            entry.seen = min(entry.seen + 1, 2**31 - 1)
        entry.last_used = step

    def admits(self, id_: int, step: int) -> bool:
        settings = self.settings
        hash_, _, line, home = self.place_of(id_)
        if settings.admission == "always":
            return True
        if settings.admission == "probability":
            mixed = mix((hash_ + step * 0x9E3779B97F4A7C15) & MASK)
            return mixed // 2**32 < settings.admission_value
        cells = self.cells.setdefault((line, home), [0] * 64)
        mixed = mix(hash_)
        chosen = [16 * group + mixed // 16**group % 16 for group in range(4)]
        for cell in chosen:
            cells[cell] = min(cells[cell] + 1, 255)
        count = min(cells[cell] for cell in chosen)
        if sum(cells) / 64 > settings.admission_value / 2:
            cells[:] = [cell // 2 for cell in cells]
        return count >= settings.admission_value

    def choose(self, id_: int, step: int, pin: int) -> int | None:
        own = self.row_of(id_)
        if own is not None:
            return own
        _, region, line, home = self.place_of(id_)
        buckets = [[line + (home + i) % 4 * 16 + way for way in range(16)] for i in range(4)]
        for row in chain(*buckets):
            entry = self.entries.get(row)
            if row != region and (entry is None or not self.is_alive(entry, step, pin)):
                return row
        rows = [r for r in buckets[0] if r != region and self.entries[r].last_used < pin]
        if self.settings.eviction == "none" or not rows:
            return None
        return min(rows, key=lambda row: self.score(self.entries[row], step))

    def score(self, entry: Entry, step: int) -> tuple[float, int]:
        if self.settings.eviction in ("lru", "none"):
            return entry.last_used, 0
        if self.settings.eviction == "lfu":
            return self.halved(entry, step), entry.last_used
        power = 1.0
        for _ in range(self.settings.exponent):
            power *= step - entry.last_used
        return entry.seen / power, 0


def oracle_of(index: IdIndex) -> Oracle:
    """Return the oracle of an empty table."""
    return Oracle(index.settings, index.num_regions, index.lines, index.seed)


def assert_equal_state(index: IdIndex, oracle: Oracle) -> None:
    """Compare the arrays of an index of a whole table."""
    rows = {row for row, used in enumerate(index.last_used.tolist()) if used}
    assert rows == set(oracle.entries)
    ids, used, seen = (a.tolist() for a in (index.ids, index.last_used, index.seen))
    for row, entry in oracle.entries.items():
        assert (ids[row], used[row]) == (entry.id, entry.last_used)
        assert not seen or seen[row] == entry.seen
        assert index.digests[row] == oracle.place_of(entry.id)[0] % 2**16 * 255 // 2**16 + 1
    assert index.digests.count_nonzero() == len(rows)
    sketch = index.sketch.view(-1, 64).tolist()
    for (line, home), cells in oracle.cells.items():
        assert sketch[line // 16 + home] == cells
