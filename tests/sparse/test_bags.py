"""Common parts of JaggedTensor and KeyedJaggedTensor: every tensor is moved, pinned and kept."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from recsys.sparse import JaggedTensor, KeyedJaggedTensor, kjt_is_equal
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


LENGTHS = torch.tensor([2, 0, 1, 3])


def _long(spare: int, **told: object) -> KeyedJaggedTensor:
    """A batch in a buffer with as many values to spare; the rest of the buffer is poisoned."""
    values = torch.cat([torch.arange(6), torch.full((spare,), -99)])
    weights = torch.cat([torch.rand(6), torch.full((spare,), torch.nan)])
    parts: dict[str, object] = {"lengths": LENGTHS} | told
    return KeyedJaggedTensor(["a", "b"], values, weights, **parts)  # type: ignore[arg-type]


TOLD: dict[str, dict[str, object]] = {
    "lengths": {},
    "offsets": {"lengths": None, "offsets": torch.tensor([0, 2, 2, 3, 6])},
    "length_per_key": {"length_per_key": [2, 4]},
    "stride_per_key": {"stride_per_key": [1, 3]},
}


@pytest.mark.parametrize("told", TOLD)
def test_what_follows_the_last_bag_is_never_read(told: str) -> None:
    torch.manual_seed(0)
    long = _long(3, **TOLD[told])
    torch.manual_seed(0)
    short = _long(0, **TOLD[told])
    long.validate()
    long.check_bags()
    assert long.values().numel() == 9
    assert kjt_is_equal(long.trim(), short)
    assert short.trim() is short
    for read in (
        lambda kjt: list(kjt.to_dict().values()),
        lambda kjt: [kjt["a"], kjt["b"]],
        lambda kjt: kjt.split([1, 1]),
        lambda kjt: [kjt.permute([1, 0, 1])],
        lambda kjt: [KeyedJaggedTensor.concat([kjt, kjt.permute([]), kjt.split([0, 2])[0]])],
        lambda kjt: [KeyedJaggedTensor.from_jt_dict(kjt.to_dict())],
    ):
        for one, other in zip(read(long), read(short), strict=True):
            assert one.values().tolist() == other.values().tolist()
            assert one.weights().tolist() == other.weights().tolist()
            assert one.lengths().tolist() == other.lengths().tolist()
    sent = zip(long.dist_tensors(), short.dist_tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in sent)
    assert long.dist_splits([1, 1]) == short.dist_splits([1, 1])
    assert long.length_per_key() == short.length_per_key()
    assert str(long) == str(short)


def test_bags_of_one_feature_in_a_long_buffer() -> None:
    long = JaggedTensor(torch.arange(9), torch.rand(9), torch.tensor([2, 0, 1]))
    assert [bag.tolist() for bag in long.to_dense()] == [[0, 1], [], [2]]
    assert long.to_padded_dense(2).tolist() == [[0, 1], [0, 0], [2, 0]]
    assert long.trim().weights().numel() == 3
    merged = KeyedJaggedTensor.from_jt_dict({"a": long, "b": long})
    assert merged.values().tolist() == [0, 1, 2, 0, 1, 2]


def test_a_gpu_reads_a_long_buffer_where_the_host_knows_the_lengths() -> None:
    with PretendedCuda():
        moved = _long(3).to(CUDA)
        assert moved.trim().values().numel() == 6
        assert [bags.values().numel() for bags in moved.to_dict().values()] == [2, 4]
        unknown = moved.unsync()
        assert unknown.trim() is unknown
        with pytest.raises(ValueError, match="longer than its bags needs length_per_key"):
            unknown.length_per_key()
