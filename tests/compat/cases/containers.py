"""Jagged containers: text, leaves, equality, empty ones, buffers longer than their bags."""

from __future__ import annotations

from typing import Any

import torch

from tests.compat.answers import raises

LENGTHS = [2, 0, 1, 1, 0, 3]


def _batch(is_weighted: bool = False, by_offsets: bool = False, spare: int = 0) -> Any:
    from torchrec import KeyedJaggedTensor

    lengths = torch.tensor(LENGTHS)
    values = torch.randint(0, 10, (7 + spare,))
    weights = torch.rand(7 + spare) if is_weighted else None
    if by_offsets:
        offsets = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
        return KeyedJaggedTensor(["a", "b"], values, weights, offsets=offsets)
    return KeyedJaggedTensor(["a", "b"], values, weights, lengths)


def _jagged(is_weighted: bool = False, by_offsets: bool = False, spare: int = 0) -> Any:
    from torchrec import JaggedTensor

    weights = torch.rand(3 + spare) if is_weighted else None
    bags = {"offsets": [0, 2, 2, 3]} if by_offsets else {"lengths": [2, 0, 1]}
    parts = {name: torch.tensor(numbers) for name, numbers in bags.items()}
    return JaggedTensor(torch.rand(3 + spare), weights, **parts)


def _of_samples(**more: Any) -> Any:
    """Features of different batch sizes, as the samples' bags of one of them are known."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(4),
        lengths=torch.tensor([1, 1, 1, 0, 1]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["a"], torch.tensor([[0, 1, 1]])),
        **more,
    )


def _parts(bags: Any) -> Any:
    return [bags.values(), bags.lengths(), bags.offsets(), bags.weights_or_none()]


def text_of_jagged() -> Any:
    return [str(_jagged(is_weighted)) for is_weighted in (False, True)]


def text_of_keyed_jagged() -> Any:
    return [str(_batch(is_weighted)) for is_weighted in (False, True)]


def text_of_keyed() -> Any:
    from torchrec import KeyedTensor

    return str(KeyedTensor(["x", "y"], [1, 2], torch.rand(2, 3)))


def text_of_many() -> Any:
    from torchrec import KeyedJaggedTensor

    keys = [f"f{i}" for i in range(12)]
    return str(KeyedJaggedTensor(keys, torch.arange(240), lengths=torch.full((24,), 10)))


def text_of_empty_ones() -> Any:
    from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

    kt = KeyedTensor([], [], torch.zeros(1, 0))
    empty = JaggedTensor.empty(), JaggedTensor.empty(is_weighted=True), KeyedJaggedTensor.empty()
    return [str(one) for one in (*empty, kt)]


def leaves_of_jagged() -> Any:
    from torch.utils._pytree import tree_flatten

    return [tree_flatten(_jagged(w, o))[0] for w in (False, True) for o in (False, True)]


def leaves_of_keyed_jagged() -> Any:
    from torch.utils._pytree import tree_flatten

    return [tree_flatten(_batch(w, o))[0] for w in (False, True) for o in (False, True)]


def leaves_of_different_batch_sizes() -> Any:
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten(_of_samples())
    batch = tree_unflatten(leaves, spec)
    return [leaves, batch.keys(), batch.stride_per_key(), *_parts(batch)]


def names_of_leaves() -> Any:
    from torch.utils._pytree import keystr, tree_flatten_with_path

    return [
        [keystr(path) for path, _ in tree_flatten_with_path(given)[0]]
        for given in (_jagged(), _batch(), _batch(by_offsets=True))
    ]


def leaves_of_keyed() -> Any:
    from torch.utils._pytree import tree_flatten, tree_unflatten
    from torchrec import KeyedTensor

    leaves, spec = tree_flatten(KeyedTensor(["x", "y"], [1, 2], torch.rand(2, 3)))
    again = tree_unflatten(leaves, spec)
    return [leaves, again.keys(), again.length_per_key(), again["y"]]


def mapped_leaves() -> Any:
    from torch.utils._pytree import tree_map

    def double(leaf: Any) -> Any:
        return None if leaf is None else leaf * 2

    found = tree_map(double, _batch(True))
    return [found.keys(), found.stride(), found.values(), found.lengths(), found.weights()]


def equality_of_jagged() -> Any:
    from torchrec.sparse.jagged_tensor import jt_is_equal

    one, weighted, keyed = _jagged(), _jagged(True), _batch()
    others = [one, weighted, keyed, None, torch.ones(3), "x", {}]
    return [[jt_is_equal(one, o), jt_is_equal(o, one), jt_is_equal(o, o)] for o in others]


def equality_of_keyed_jagged() -> Any:
    from torchrec.sparse.jagged_tensor import kjt_is_equal

    one, weighted, jagged = _batch(), _batch(True), _jagged()
    others = [one, weighted, one.permute([1, 0]), jagged, None, torch.ones(3), 1]
    return [[kjt_is_equal(one, o), kjt_is_equal(o, one), kjt_is_equal(o, o)] for o in others]


def equality_of_lengths_and_offsets() -> Any:
    from torchrec import KeyedJaggedTensor
    from torchrec.sparse.jagged_tensor import kjt_is_equal

    one = _batch()
    other = KeyedJaggedTensor(one.keys(), one.values(), offsets=one.offsets())
    return [kjt_is_equal(one, other), one == other, one == one, one != other, one == None]  # noqa: E711


def empty_keyed_jagged() -> Any:
    from torchrec import JaggedTensor, KeyedJaggedTensor

    found = [[JaggedTensor.empty().lengths(), JaggedTensor.empty().offsets_or_none() is None]]
    for given in ({}, {"is_weighted": True, "lengths_dtype": torch.int64}):
        empty = KeyedJaggedTensor.empty(**given)
        found.append([*_parts(empty), empty.offsets_or_none(), empty.length_per_key_or_none()])
        found.append([empty.keys(), empty.stride(), empty.offset_per_key(), empty.to_dict()])
    return found


def empty_like_others() -> Any:
    from torchrec import JaggedTensor, KeyedJaggedTensor

    found = []
    for is_weighted in (False, True):
        keyed = KeyedJaggedTensor.empty_like(_batch(is_weighted))
        jagged = JaggedTensor.empty_like(_jagged(is_weighted))
        found += [[*_parts(one), one.offsets_or_none()] for one in (keyed, jagged)]
        found.append([keyed.stride(), keyed.keys(), keyed.length_per_key_or_none()])
    return found


def inverse_indices_of_some_keys() -> Any:
    batch = _of_samples()
    return [batch.inverse_indices(), batch.stride(), batch.stride_per_key(), _parts(batch)]


def lookup_with_inverse_indices_of_the_keys_it_reads() -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    def of(features: list[str]) -> Any:
        config = EmbeddingBagConfig(
            name="t", embedding_dim=4, num_embeddings=10, feature_names=features
        )
        tables = EmbeddingBagCollection(tables=[config])
        with torch.no_grad():
            tables.embedding_bags["t"].weight.copy_(torch.arange(40.0).view(10, 4))
        return tables

    found = of(["a"])(_of_samples())
    return [found.keys(), found.values(), raises(lambda: of(["a", "b"])(_of_samples()))]


def concat_with_inverse_indices_of_some_keys() -> Any:
    from torchrec import KeyedJaggedTensor

    other = KeyedJaggedTensor(
        ["c"],
        torch.arange(1),
        lengths=torch.tensor([1]),
        stride_per_key_per_rank=[[1]],
        inverse_indices=(["c"], torch.zeros(1, 3).long()),
    )
    return KeyedJaggedTensor.concat([_of_samples(), other]).inverse_indices()


def long_jagged() -> Any:
    found = []
    for is_weighted in (False, True):
        bags = _jagged(is_weighted, spare=4)
        found += [_parts(bags), bags.to_dense(), bags.to_dense_weights(), str(bags)]
        found += [bags.to_padded_dense(3), bags.to_padded_dense()]
    return found


def long_keyed_jagged() -> Any:
    found = []
    for by_offsets in (False, True):
        batch = _batch(True, by_offsets, spare=4)
        found += [_parts(batch), batch.length_per_key(), batch.offset_per_key(), str(batch)]
        found += [_parts(batch["b"]), batch.size_in_bytes(), _parts(batch.sync().to("cpu"))]
    return found


def long_keyed_jagged_with_numbers_told() -> Any:
    from torchrec import KeyedJaggedTensor

    batch = KeyedJaggedTensor(
        ["a", "b"], torch.arange(9), lengths=torch.tensor(LENGTHS), length_per_key=[3, 4]
    )
    return [_parts(batch), batch.length_per_key(), batch.offset_per_key(), _parts(batch["a"])]


def long_keyed_jagged_split_and_permuted() -> Any:
    batch = _batch(True, spare=4)
    parts = [*batch.split([1, 1]), batch.permute([1, 0]), batch.permute([1, 0, 1])]
    return [[part.keys(), part.stride(), *_parts(part)] for part in parts]
