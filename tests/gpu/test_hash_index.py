"""Ids mapped on a GPU, by the twin, get the rows that they get on a CPU."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch

from recsys.kernels.hashed.index import map_ids
from tests.kernels.hashed.cases import (
    SETTINGS,
    assert_same,
    assert_same_state,
    batch_of,
    index_of,
    state_of,
)


@pytest.mark.parametrize("name", SETTINGS)
def test_maps_as_on_the_cpu(name: str) -> None:
    draw, index = random.Random(0), index_of(SETTINGS[name], lines=2)
    moved = dataclasses.replace(index, **{k: v.cuda() for k, v in state_of(index).items()})
    for step in range(1, 20):
        ids = torch.tensor(batch_of(draw, 400, 900), dtype=torch.int64)
        now = [ids.numel()], step, step - draw.randrange(3), step % 5 != 0
        expected, found = map_ids([index], ids, *now), map_ids([moved], ids.cuda(), *now)
        on_cpu = [v.cpu() if isinstance(v, torch.Tensor) else v for v in found]
        assert_same(tuple(on_cpu), expected)
        back = {name: value.cpu() for name, value in state_of(moved).items()}
        assert_same_state(dataclasses.replace(copy.copy(index), **back), index)
