"""Batches checked in full, on request."""

from __future__ import annotations

import pytest
import torch

from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

FILMS = EmbeddingBagConfig(5, 4, "films", feature_names=["film", "liked"])


def batch(values: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["film", "user"], torch.tensor(values), lengths=torch.tensor([1, 1, 0, 1])
    )


def test_a_good_batch() -> None:
    assert validate_keyed_jagged_tensor(batch([0, 4, 900]))
    assert validate_keyed_jagged_tensor(batch([0, 4, 900]), [FILMS])
    assert validate_keyed_jagged_tensor(KeyedJaggedTensor.empty(), [FILMS])


@pytest.mark.parametrize("bad", [5, -1])
def test_an_id_outside_its_table(bad: int) -> None:
    with pytest.warns(UserWarning, match=rf"^Id {bad} .*1 of .*'film'.*4\. .*'films'"):
        assert not validate_keyed_jagged_tensor(batch([0, bad, 900]), [FILMS])


def test_parts_that_came_apart() -> None:
    good = batch([1, 2, 3])
    good.lengths().copy_(torch.tensor([1, -1, 2, 1]))
    with pytest.raises(ValueError, match=r'length -1 at .*1.*feature "film"'):
        validate_keyed_jagged_tensor(good)
