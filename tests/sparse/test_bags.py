"""What JaggedTensor and KeyedJaggedTensor share: every tensor at hand is moved, pinned and kept."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from recsys.sparse import JaggedTensor, KeyedJaggedTensor
from tests.pretended_cuda import CUDA, PretendedCuda


def _batches() -> list[KeyedJaggedTensor]:
    values, inverse = torch.arange(3), (["a"], torch.tensor([[0, 1, 1]]))
    weights, bags = values + 0.5, torch.tensor([1, 2])
    return [
        KeyedJaggedTensor(["a"], values, weights, bags, inverse_indices=inverse),
        KeyedJaggedTensor(["a"], values, weights, offsets=torch.tensor([0, 1, 3])),
    ]


def test_every_tensor_is_kept_on_a_stream() -> None:
    batches = [*_batches(), JaggedTensor(torch.arange(2), torch.ones(2), torch.tensor([2]))]
    for batch, num_tensors in zip(batches, (4, 3, 3), strict=True):
        seen: list[Tensor] = []
        note = mock.patch.object(Tensor, "record_stream", lambda part, _: seen.append(part))  # noqa: B023
        with note:
            batch.record_stream(None)  # type: ignore[arg-type]
        assert len(seen) == num_tensors


def test_everything_is_pinned_and_moved() -> None:
    with PretendedCuda() as device:
        for batch in _batches():
            pinned = batch.pin_memory()
            assert all(part.is_pinned() for part in pinned._tensors())
            moved = pinned.to(CUDA, non_blocking=True)
            assert all(device.is_on_device(part) for part in moved._tensors())
            assert len(moved._tensors()) == len(batch._tensors())


def test_a_copy_in_place_refuses_other_shapes_and_parts() -> None:
    one, other = _batches()
    with pytest.raises(ValueError, match=r"KeyedJaggedTensor.copy_: parts and their shapes"):
        other.copy_(KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 2])))
    with pytest.raises(ValueError, match="inverse_indices"):
        one.copy_(KeyedJaggedTensor(["a"], torch.arange(3), torch.ones(3), torch.tensor([1, 2])))
    jt = JaggedTensor(torch.arange(2), lengths=torch.tensor([2]))
    with pytest.raises(ValueError, match=r"JaggedTensor.copy_: parts and their shapes"):
        jt.copy_(JaggedTensor(torch.arange(1), lengths=torch.tensor([1])))  # no broadcast
    assert jt.values().tolist() == [0, 1]
