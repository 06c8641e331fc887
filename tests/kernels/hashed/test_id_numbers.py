"""Numbers of ids against a plain dict."""

from __future__ import annotations

import random

import pytest
import torch

from recsys.kernels.hashed import build
from recsys.kernels.hashed.id_numbers import IdNumbers
from tests.kernels.hashed.cases import EXTREMES, ids_of_line


@pytest.mark.parametrize("kind", ["C", "torch"])
@pytest.mark.parametrize("seed", range(3))
def test_they_equal_a_dict(monkeypatch: pytest.MonkeyPatch, kind: str, seed: int) -> None:
    if kind == "torch":
        monkeypatch.setattr(build, "library", lambda: None)
    draw, numbers, expected = random.Random(seed), IdNumbers(), dict[int, int]()
    universe = [*EXTREMES, *(draw.randrange(-(2**63), 2**63) for _ in range(6000))]
    for step in range(60):
        ids = draw.sample(universe, draw.randrange(400))
        tensor = torch.tensor(ids, dtype=torch.int64)
        if draw.random() < 0.7:
            given = [step * 1000 + i for i in range(len(ids))]
            old = numbers.put(tensor, torch.tensor(given, dtype=torch.int64))
            assert old.tolist() == [expected.get(one, -1) for one in ids]
            expected.update(zip(ids, given, strict=True))
        else:
            assert numbers.take(tensor).tolist() == [expected.pop(one, -1) for one in ids]
        assert len(numbers) == len(expected)
        found = numbers.find(torch.tensor(universe)).tolist()
        assert found == [expected.get(one, -1) for one in universe]
    assert len(expected) > 1000  # the index has grown


def test_ids_of_one_line_of_a_table_do_not_fill_one_here() -> None:
    ids = torch.tensor(sorted(set(ids_of_line(20_000, 7))))
    numbers = IdNumbers()
    numbers.put(ids, torch.arange(len(ids)))
    assert torch.equal(numbers.find(ids), torch.arange(len(ids)))
    assert numbers._index.ids.numel() <= 8 * len(ids)
