"""The gather of position weights, against a loop over bags and ids."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch

from recsys.modules.position_weights import PositionGather, PositionWeights, with_weights
from recsys.sparse import KeyedJaggedTensor

LENGTHS = {"c": 5, "a": 4, "b": 2}  # not in alphabetical order


def random_batch(seed: int, keys: list[str]) -> KeyedJaggedTensor:
    rng = random.Random(seed)
    varies = rng.random() < 0.4
    size = rng.choice([0, 1, 5])
    strides = [rng.randint(0, 4) if varies else size for _ in keys]
    lengths = [
        rng.randint(0, LENGTHS.get(key, 9))
        for key, n in zip(keys, strides, strict=True)
        for _ in range(n)
    ]
    dtype = rng.choice([torch.int32, torch.int64])
    return KeyedJaggedTensor(
        keys,
        torch.randint(0, 100, (sum(lengths),), dtype=rng.choice([torch.int32, torch.int64])),
        lengths=torch.tensor(lengths, dtype=dtype),
        stride=None if varies else size,
        stride_per_key=strides if varies else None,
    )


def weigh_one_by_one(
    weights: dict[str, torch.Tensor], batch: KeyedJaggedTensor
) -> list[torch.Tensor]:
    found = []
    lengths = iter(batch.lengths().tolist())
    for key, stride in zip(batch.keys(), batch.stride_per_key(), strict=True):
        for _ in range(stride):
            for position in range(next(lengths)):
                found.append(weights[key][position] if key in weights else torch.ones(()))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_each_id_gets_the_weight_of_its_position(seed: int) -> None:
    keys = random.Random(seed).sample(["a", "b", "c", "x"], random.Random(seed).randint(1, 4))
    batch = random_batch(seed, keys)
    torch.manual_seed(seed)
    weights = {name: torch.randn(n, requires_grad=True) for name, n in LENGTHS.items()}
    gather = PositionGather(LENGTHS, "test")
    received = gather(list(weights.values()), batch)
    expected = weigh_one_by_one(weights, batch)
    scale = torch.randn(len(expected))
    stacked = torch.stack([*expected, torch.zeros(())])[:-1]
    assert torch.equal(received, stacked)
    total = (received * scale).sum() + sum(w.sum() for w in weights.values())
    reference = (stacked * scale).sum() + sum(w.sum() for w in weights.values())
    for one, another in zip(
        torch.autograd.grad(total, list(weights.values())),
        torch.autograd.grad(reference, list(weights.values())),
        strict=True,
    ):
        torch.testing.assert_close(one, another)


def test_every_weight_has_a_gradient_even_if_no_id_uses_it() -> None:
    weights = [torch.ones(n, requires_grad=True) for n in LENGTHS.values()]
    empty = KeyedJaggedTensor(
        ["b"], torch.tensor([], dtype=torch.int64), lengths=torch.zeros(2).int()
    )
    PositionGather(LENGTHS, "test")(weights, empty).sum().backward()
    assert [w.grad.tolist() for w in weights if w.grad is not None] == [
        [0.0] * n for n in LENGTHS.values()
    ]


def test_other_keys_are_routed_anew() -> None:
    gather = PositionGather({"a": 1, "b": 1}, "test")
    weights = [torch.tensor([2.0]), torch.tensor([3.0])]
    for keys, expected in [(["a", "b"], [2, 3]), (["b", "a"], [3, 2]), (["x", "b"], [1, 3])]:
        batch = KeyedJaggedTensor(keys, torch.tensor([7, 8]), lengths=torch.tensor([1, 1]))
        assert gather(weights, batch).tolist() == expected


@pytest.mark.parametrize("varies", [False, True])
def test_a_bag_that_is_too_long_is_named(varies: bool) -> None:
    strides = {"stride_per_key": [2, 1, 2]} if varies else {}
    lengths = torch.tensor([9, 0, 4, 1, 3] if varies else [9, 0, 4, 1, 1, 3])
    batch = KeyedJaggedTensor(
        ["x", "a", "b"], torch.zeros(int(lengths.sum())).long(), lengths=lengths, **strides
    )
    weights = [torch.ones(n) for n in LENGTHS.values()]
    with pytest.raises(ValueError, match=r"2; received 3.*1 of feature 'b'"):
        PositionGather(LENGTHS, "test")(weights, batch)


def test_a_batch_on_another_device_is_refused() -> None:
    batch = KeyedJaggedTensor(["a"], torch.tensor([7]), lengths=torch.tensor([1])).to("meta")
    with pytest.raises(ValueError, match=r"on cpu; received a .*on meta"):
        PositionGather({"a": 1}, "test")([torch.ones(1)], batch)


def test_copies_and_pickles() -> None:
    gather = PositionGather({"a": 1}, "test")
    batch = KeyedJaggedTensor(["a"], torch.tensor([7]), lengths=torch.tensor([1]))
    gather([torch.ones(1)], batch)
    for other in (copy.deepcopy(gather), pickle.loads(pickle.dumps(gather))):
        assert other([torch.tensor([2.0])], batch).tolist() == [2.0]


@pytest.mark.parametrize("length", [0, -1])
def test_lengths_must_be_positive(length: int) -> None:
    with pytest.raises(ValueError, match=rf"at least 1; received \{{'b': {length}\}}"):
        PositionWeights({"a": 1, "b": length})


def test_weights_start_as_ones_and_return_to_them() -> None:
    weights = PositionWeights({"a": 2}, torch.device("meta")).to_empty(device="cpu")
    weights.reset_parameters()
    assert weights["a"].tolist() == [1.0, 1.0]


def test_other_weights_leave_everything_else() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1, 1], [0, 0, 0]])),
    )
    weighted = with_weights(batch, torch.tensor([4.0, 5.0, 6.0]))
    assert weighted["b"].weights().tolist() == [6.0]
    assert weighted.values() is batch.values()
    assert weighted.stride_per_key_per_rank() == [[2], [1]]
    assert weighted.inverse_indices() == batch.inverse_indices()
    assert weighted.stride() == batch.stride()
