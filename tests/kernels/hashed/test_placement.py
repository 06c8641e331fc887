"""Rows that ids get at once, compared with sets of Python."""

from __future__ import annotations

import random

import pytest
import torch

from recsys.kernels.hashed.index import LINE, IdIndex, IndexSettings, geometry
from recsys.kernels.hashed.placement import choose_rows
from recsys.kernels.hashed.twin import locate, scores_of


def _index(
    rows: int, eviction: str, first: int = 0, last: int | None = None, seed: int = 3
) -> IdIndex:
    settings = IndexSettings(
        eviction=eviction,  # type: ignore[arg-type]
        half_life=4 * (eviction == "lfu"),
        exponent=2 if eviction == "distance_lfu" else 1,
        ttl=0,
        admission="always",
        admission_value=0,
        is_shared=True,
    )
    of_table, regions = geometry(rows, 4)
    last = regions if last is None else last
    return IdIndex.empty(settings, of_table, regions, first, last, seed)


def _python_score(eviction: str, step: int, last_used: int, seen: int) -> float:
    if eviction == "lfu":
        return (seen >> min((step - last_used) // 4, 31)) * 2**31 + last_used
    if eviction == "distance_lfu":
        return seen / (step - last_used) ** 2
    return last_used


@pytest.mark.parametrize("eviction", ["none", "lru", "lfu", "distance_lfu"])
@pytest.mark.parametrize("seed", range(4))
def test_each_line_keeps_its_best_ids(eviction: str, seed: int) -> None:
    rng = random.Random(seed)
    index = _index(512, eviction)
    step = 50
    ids = torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(700)])
    last_used = torch.tensor([rng.randrange(1, step) for _ in ids], dtype=torch.int32)
    seen = torch.tensor([rng.randrange(256, 5000) for _ in ids], dtype=torch.int32)
    given = scores_of(index.settings, step, last_used, seen)
    scores = [
        _python_score(eviction, step, *pair)
        for pair in zip(last_used.tolist(), seen.tolist(), strict=True)
    ]
    assert given.tolist() == pytest.approx(scores, rel=1e-12)
    rows, was_there = choose_rows(index, ids, given, step)
    assert not was_there.any()
    _check(index, ids, rows, scores)
    order = torch.tensor(rng.sample(range(700), 700))
    assert torch.equal(choose_rows(index, ids[order], given[order], step)[0], rows[order])
    # another split of the regions
    for first in range(4):
        part = _index(512, eviction, first, first + 1)
        own = (locate(index, ids).regions == first).nonzero().flatten()
        found, _ = choose_rows(part, ids[own], given[own], step)
        assert torch.equal(torch.where(found < 0, -1, found + first * 128), rows[own])


def _check(index: IdIndex, ids: torch.Tensor, rows: torch.Tensor, scores: list[float]) -> None:
    spots = locate(index, ids)
    placed = rows[rows >= 0].tolist()
    assert len(set(placed)) == len(placed)
    members: dict[int, list[tuple[float, int]]] = {}
    for number, (id_, line) in enumerate(zip(ids.tolist(), spots.lines.tolist(), strict=True)):
        members.setdefault(line, []).append((-scores[number], id_))
    row_of = dict(zip(ids.tolist(), rows.tolist(), strict=True))
    homes = dict(zip(ids.tolist(), spots.homes.tolist(), strict=True))
    for line, own in members.items():
        room = LINE - (line % index.lines == 0)
        kept = [id_ for _, id_ in sorted(own)[:room]]
        assert all(row_of[id_] == -1 for _, id_ in sorted(own)[room:])
        assert all(row_of[id_] // LINE == line for id_ in kept)
        assert all(row_of[id_] % (index.lines * LINE) for id_ in kept)  # not the shared row
        for home in range(4):  # ids that fit are at home, the best first
            at_home = [id_ for id_ in kept if homes[id_] == home]
            fit = at_home[: 16 - (home == 0 and room < LINE)]
            assert all(row_of[id_] // 16 == line * 4 + home for id_ in fit)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_given_ids_come_before_those_that_are_there(eviction: str) -> None:
    rng = random.Random(1)
    index, step = _index(256, eviction), 9
    old = torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(300)])
    last_used = torch.tensor([rng.randrange(1, step) for _ in old], dtype=torch.int32)
    seen = torch.full_like(last_used, 256)
    scores = scores_of(index.settings, step, last_used, seen)
    rows, _ = choose_rows(index, old, scores, step)
    has_row = rows >= 0
    index.ids[rows[has_row]] = old[has_row]
    index.last_used[rows[has_row]] = last_used[has_row]
    if eviction == "lfu":
        index.seen[rows[has_row]] = seen[has_row]
    before = {int(index.ids[row]): row for row in index.last_used.nonzero().flatten().tolist()}
    given = torch.cat([old[:40], torch.arange(100)])
    found, was_there = choose_rows(index, given, torch.zeros_like(given), step)
    taken = set(found.tolist())
    assert (found >= 0).all()
    assert len(taken) == len(given)
    for id_, row, was in zip(given.tolist(), found.tolist(), was_there.tolist(), strict=True):
        assert was == (id_ in before)
        if was:
            assert row == before[id_]
    # of each line, the ids with the lowest scores lost their rows
    lines = locate(index, old).lines
    for line in range(4):
        mine = [
            (score, id_)
            for score, id_, at, row in zip(
                scores.tolist(), old.tolist(), lines.tolist(), rows.tolist(), strict=True
            )
            if at == line and row >= 0 and id_ not in set(given.tolist())
        ]
        lost = {id_ for _, id_ in mine if before[id_] in taken}
        kept = [score for score, id_ in mine if id_ not in lost]
        assert all(score <= min(kept, default=score) for score, id_ in mine if id_ in lost)


def test_no_ids() -> None:
    rows, was_there = choose_rows(
        _index(64, "lru"), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 1
    )
    assert rows.numel() == was_there.numel() == 0
