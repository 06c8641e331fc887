"""Jagged containers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch

from tests.compat.answers import raises


def _bags(weighted: bool = False) -> Any:
    from torchrec import JaggedTensor

    weights = torch.tensor([0.5, 1.0, 2.0]) if weighted else None
    return JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), weights, torch.tensor([1, 0, 2]))


def _batch(weighted: bool = False, keys: tuple[str, ...] = ("a", "b", "c")) -> Any:
    from torchrec import KeyedJaggedTensor

    lengths = torch.randint(0, 3, (len(keys) * 3,))
    total = int(lengths.sum())
    weights = torch.rand(total) if weighted else None
    return KeyedJaggedTensor(list(keys), torch.randint(0, 9, (total,)), weights, lengths)


def _parts(batch: Any) -> Any:
    return [
        list(batch.keys()),
        batch.values(),
        batch.weights_or_none(),
        batch.lengths(),
        batch.offsets(),
        batch.length_per_key(),
        batch.offset_per_key(),
        batch.stride(),
    ]


def _of_bags(bags: Any) -> Any:
    return [bags.values(), bags.weights_or_none(), bags.lengths(), bags.offsets()]


def keyed_jagged_tensor_to_dict() -> Any:
    return {
        key: [_of_bags(bags), bags.to_dense(), bags.to_padded_dense(2)]
        for key, bags in _batch(weighted=True).to_dict().items()
    }


def text_of_containers() -> Any:
    from torchrec import KeyedJaggedTensor, KeyedTensor

    lengths = torch.tensor([1, 0, 2, 1])
    ids, weights = torch.tensor([1, 2, 3, 4]), torch.tensor([0.5, 1.0, 2.0, 4.0])
    found = [
        _bags(),
        _bags(weighted=True),
        KeyedJaggedTensor(["a", "b"], ids, lengths=lengths),
        KeyedJaggedTensor(["a", "b"], ids, weights, lengths),
        KeyedJaggedTensor(
            ["a", "b"],
            torch.tensor([1, 2, 3]),
            lengths=torch.tensor([1, 0, 2]),
            stride_per_key_per_rank=[[2], [1]],
        ),
        KeyedTensor(["a", "b"], [2, 1], torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])),
        KeyedJaggedTensor.empty(),
    ]
    return [str(one) for one in found]


def empty_containers() -> Any:
    from torchrec import JaggedTensor, KeyedJaggedTensor

    found = []
    for kind in (JaggedTensor, KeyedJaggedTensor):
        for options in (
            {},
            {"is_weighted": True},
            {"values_dtype": torch.int32, "lengths_dtype": torch.int64},
        ):
            made = kind.empty(**options)
            found.append([made.values(), made.weights_or_none(), made.lengths()])
    like = KeyedJaggedTensor.empty_like(_batch(weighted=True))
    has_offsets = JaggedTensor.empty().offsets_or_none() is not None
    return [found, like.values(), like.weights_or_none(), like.keys(), has_offsets]


def equality_with_other_types() -> Any:
    from torchrec import KeyedJaggedTensor
    from torchrec.sparse.jagged_tensor import jt_is_equal, kjt_is_equal

    bags, batch = _bags(), _batch()
    others = (None, 3, "x", torch.ones(1), [1], bags, batch, copy.deepcopy(bags))
    swapped = KeyedJaggedTensor(["b", "a", "c"], batch.values(), lengths=batch.lengths())
    return [
        [jt_is_equal(bags, other) for other in others],
        [kjt_is_equal(batch, other) for other in (*others, copy.deepcopy(batch), swapped)],
        jt_is_equal(bags, _bags(weighted=True)),
        kjt_is_equal(batch, batch.permute([1, 0, 2])),
        [bags == 3, batch == "x", bags != bags],
    ]


def permuted_and_split() -> Any:
    batch = _batch(weighted=True)
    return [
        _parts(batch.permute([2, 0])),
        _parts(batch.permute([1, 1, 0])),
        [_parts(part) for part in batch.split([1, 2])],
        [part.values() for part in batch.split([0, 3])],
        raises(lambda: batch.permute([7])),
    ]


def concatenated() -> Any:
    from torchrec import KeyedJaggedTensor

    whole = KeyedJaggedTensor.concat([_batch(), _batch(keys=("x", "y"))])
    return [_parts(whole), raises(lambda: KeyedJaggedTensor.concat([]))]


def from_jagged_tensors() -> Any:
    from torchrec import JaggedTensor, KeyedJaggedTensor

    dense = [torch.rand(length) for length in (2, 0, 1)]
    bags = JaggedTensor.from_dense(dense, [2 * row for row in dense])
    padded = JaggedTensor.from_dense_lengths(torch.arange(12).view(3, 4), torch.tensor([4, 0, 2]))
    batch = KeyedJaggedTensor.from_jt_dict({"a": _bags(), "b": _bags()})
    return [_of_bags(bags), _of_bags(padded), _parts(batch), bags.to_dense_weights()]


def from_lengths_and_offsets() -> Any:
    from torchrec import KeyedJaggedTensor

    values, offsets = torch.tensor([4, 5, 6]), torch.tensor([0, 1, 1, 3, 3])
    return [
        _parts(KeyedJaggedTensor.from_offsets_sync(["a", "b"], values, offsets)),
        _parts(KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, offsets.diff())),
    ]


def features_of_different_batch_sizes() -> Any:
    from torchrec import KeyedJaggedTensor

    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 0, 2]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1, 1], [0, 0, 0]])),
    )
    keys, inverse = batch.inverse_indices()
    return [
        batch.stride(),
        batch.stride_per_key(),
        batch.stride_per_key_per_rank(),
        batch.variable_stride_per_key(),
        list(keys),
        inverse,
        {key: _of_bags(bags) for key, bags in batch.to_dict().items()},
    ]


def what_is_sent_to_other_ranks() -> Any:
    batch = _batch(weighted=True)
    return [batch.dist_labels(), batch.dist_splits([1, 2]), batch.dist_tensors()]


def copies_and_moves() -> Any:
    batch = _batch(weighted=True)
    again = pickle.loads(pickle.dumps(batch))
    moved = batch.to(torch.device("meta"))
    return [_parts(again), _parts(copy.deepcopy(batch)), moved.values().device, batch.device()]


def regrouped() -> Any:
    from torchrec import KeyedTensor

    one = KeyedTensor(["a", "b"], [2, 1], torch.rand(3, 3))
    two = KeyedTensor.from_tensor_list(["c", "d"], [torch.rand(3, 2), torch.rand(3, 4)])
    return [
        KeyedTensor.regroup([one, two], [["d", "a"], ["b", "c"], ["a"]]),
        KeyedTensor.regroup_as_dict([one, two], [["c"], ["a", "d"]], ["x", "y"]),
        two.to_dict(),
        two.length_per_key(),
        two.offset_per_key(),
        raises(lambda: KeyedTensor.regroup([one, two], [["z"]])),
    ]


def wrong_parts() -> Any:
    from torchrec import JaggedTensor

    values = torch.tensor([1, 2, 3])
    return [
        raises(lambda: JaggedTensor(values)),
        raises(lambda: _batch()["z"]),
        raises(lambda: _bags().weights()),
        raises(lambda: _batch().weights()),
        raises(lambda: _batch().inverse_indices()),
    ]
