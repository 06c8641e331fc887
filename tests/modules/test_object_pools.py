"""Pools have the same rows as a dict."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import pytest
import torch

from recsys.modules.object_pools import KeyedJaggedTensorPool, TensorPool
from recsys.sparse import KeyedJaggedTensor

CPU = torch.device("cpu")
MAXIMA = {"a": 3, "b": 0, "c": 2}
Row = dict[str, list[int]]


def jagged_of(
    rows: list[Row], keys: list[str], dtype: torch.dtype = torch.int64, is_weighted: bool = False
) -> KeyedJaggedTensor:
    """Features with these rows; the weight of an id is half the id."""
    values = torch.tensor([value for key in keys for row in rows for value in row[key]]).to(dtype)
    lengths = torch.tensor([len(row[key]) for key in keys for row in rows], dtype=torch.int64)
    weights = values.float() / 2 if is_weighted else None
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths)


def rows_of(features: KeyedJaggedTensor, keys: list[str]) -> list[Row]:
    """The inverse; checks the weights."""
    if features.weights_or_none() is not None:
        assert torch.equal(features.weights(), features.values().float() / 2)
    columns = {key: [v.tolist() for v in features[key].to_dense()] for key in keys}
    return [{key: columns[key][i] for key in keys} for i in range(features.stride())]


def random_row(rng: random.Random) -> Row:
    return {
        key: [rng.randrange(100) for _ in range(rng.randint(0, most))]
        for key, most in MAXIMA.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("enable_uvm", [False, True])
def test_vectors_are_those_of_a_dict(dtype: torch.dtype, enable_uvm: bool) -> None:
    rng = random.Random(0)
    pool = TensorPool(7, 2, dtype, device=CPU, enable_uvm=enable_uvm)
    expected = {i: torch.zeros(2, dtype=dtype) for i in range(7)}
    for num_ids in (0, 1, 5, 30):
        ids = torch.tensor([rng.randrange(7) for _ in range(num_ids)], dtype=torch.int32)
        values = torch.randint(0, 2, (num_ids, 2)).to(dtype)
        pool.update(ids, values)
        expected |= dict(zip(ids.tolist(), values, strict=True))
        asked = torch.tensor([rng.randrange(7) for _ in range(9)])
        assert torch.equal(pool(asked), torch.stack([expected[int(i)] for i in asked]))
    assert torch.equal(pool.pool, torch.stack(list(expected.values())))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_features_are_those_of_a_dict(dtype: torch.dtype, is_weighted: bool) -> None:
    rng = random.Random(1)
    pool = KeyedJaggedTensorPool(6, MAXIMA, dtype, is_weighted, CPU)
    keys = list(MAXIMA)
    expected: dict[int, Row] = {i: {key: [] for key in keys} for i in range(6)}
    for num_ids in (0, 1, 4, 20):
        ids = [rng.randrange(6) for _ in range(num_ids)]
        rows = [random_row(rng) | {"other": [1, 2]} for _ in ids]
        order = rng.sample([*keys, "other"], 4)
        pool.update(
            torch.tensor(ids, dtype=torch.int64), jagged_of(rows, order, dtype, is_weighted)
        )
        expected |= dict(zip(ids, rows, strict=True))
        asked = [rng.randrange(6) for _ in range(9)]
        found = pool.lookup(torch.tensor(asked))
        assert found.keys() == keys
        assert (found.values().dtype, found.lengths().dtype) == (dtype, torch.int32)
        assert rows_of(found, keys) == [{key: expected[i][key] for key in keys} for i in asked]
    assert pool.lookup(torch.empty(0, dtype=torch.int64)).stride() == 0


def test_a_state_dict_is_loaded_into_another_pool() -> None:
    pool = KeyedJaggedTensorPool(6, MAXIMA, is_weighted=True, device=CPU)
    rows = [random_row(random.Random(i)) for i in range(4)]
    pool.update(torch.arange(4), jagged_of(rows, list(MAXIMA), is_weighted=True))
    other = KeyedJaggedTensorPool(6, MAXIMA, is_weighted=True, device=CPU)
    state = pool.state_dict()
    assert {name: list(value.shape) for name, value in state.items()} == {
        "values": [6, 5],
        "key_lengths": [6, 3],
        "weights": [6, 5],
    }
    other.load_state_dict(state)
    assert rows_of(other.lookup(torch.arange(4)), list(MAXIMA)) == rows
    vectors = TensorPool(3, 2, torch.float32, device=CPU, loaded_values=torch.rand(3, 2))
    assert list(vectors.state_dict()) == ["_pool"]
    copied = copy.deepcopy(vectors)
    copied.update(torch.tensor([1]), torch.ones(1, 2))
    assert not torch.equal(copied.pool, vectors.pool)


def test_gradients_do_not_flow_through_a_pool() -> None:
    pool = TensorPool(3, 2, torch.float32, device=CPU)
    pool.update(torch.tensor([1]), torch.ones(1, 2, requires_grad=True))
    assert not pool(torch.tensor([1])).requires_grad


def test_pools_move_with_their_model() -> None:
    for enable_uvm in (False, True):
        pool = TensorPool(3, 2, torch.float32, enable_uvm=enable_uvm)
        assert pool.device.type == "meta"
        with pytest.raises(ValueError, match="meta device"):
            pool(torch.tensor([1]))
        moved = pool.to_empty(device=CPU)
        assert moved.device == CPU
    plain = TensorPool(3, 2, torch.float32, device=CPU)
    assert plain.double().dtype == torch.float64
    assert plain.to("meta").device.type == "meta"


class _Reader(torch.nn.Module):
    def __init__(self, pool: torch.nn.Module) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, ids: torch.Tensor) -> Any:
        return self.pool.lookup(ids)


def test_lookups_are_traced_scripted_and_compiled() -> None:
    vectors = TensorPool(3, 2, torch.float32, device=CPU, loaded_values=torch.rand(3, 2))
    features = KeyedJaggedTensorPool(3, {"a": 2}, is_weighted=True, device=CPU)
    rows = [{"a": [4, 6]}, {"a": [8]}]
    features.update(torch.tensor([2, 0]), jagged_of(rows, ["a"], is_weighted=True))
    ids = torch.tensor([2, 1, 2, 0])
    for make in (
        torch.fx.symbolic_trace,
        torch.jit.script,
        partial(torch.compile, backend="eager"),
    ):
        made = make(_Reader(vectors))
        assert torch.equal(made(ids), vectors(ids))
        with pytest.raises(Exception, match=r"TensorPool.ids must be in \[0"):
            made(torch.tensor([1, 3]))
    graph = torch.fx.symbolic_trace(_Reader(features))
    found = graph(ids)
    assert rows_of(found, ["a"]) == [rows[0], {"a": []}, rows[0], rows[1]]
    with pytest.raises(IndexError, match="received 3"):
        graph(torch.tensor([1, 3]))


def test_bad_arguments() -> None:
    vectors = TensorPool(3, 2, torch.float32, device=CPU)
    features = KeyedJaggedTensorPool(3, {"a": 2}, is_weighted=True, device=CPU)
    one, good = torch.tensor([1]), jagged_of([{"a": [4, 6]}], ["a"], is_weighted=True)
    features.update(one, good)
    before = copy.deepcopy(features.state_dict())
    for bad in (-1, 3):
        with pytest.raises(IndexError, match=rf"TensorPool.ids must .*0, 3\); received {bad}"):
            vectors(torch.tensor([1, bad]))
        with pytest.raises(IndexError, match=rf"received {bad}"):
            features.update(torch.tensor([bad]), good)
    with pytest.raises(TypeError, match="int32 or int64"):
        vectors(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="one dimension"):
        features.lookup(torch.tensor([[1]]))
    for values in (torch.ones(1, 3), torch.ones(2), torch.ones(1, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"must have the shape \[ids, 2\]"):
            vectors.update(one, values)
    with pytest.raises(ValueError, match=r"one id .*received 1 .*and 2"):
        vectors.update(one, torch.ones(2, 2))
    with pytest.raises(KeyError, match="missing"):
        features.update(one, jagged_of([{"b": [4]}], ["b"], is_weighted=True))
    with pytest.raises(ValueError, match=r"2 ids .*feature 'a'; received 3"):
        features.update(one, jagged_of([{"a": [1, 2, 3]}], ["a"], is_weighted=True))
    with pytest.raises(ValueError, match="must have weights"):
        features.update(one, jagged_of([{"a": [1]}], ["a"]))
    with pytest.raises(ValueError, match=r"torch\.int64 on cpu; received torch\.int32"):
        features.update(one, jagged_of([{"a": [1]}], ["a"], torch.int32, is_weighted=True))
    varied = KeyedJaggedTensor(
        ["b", "a"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(ValueError, match="one row per id in every"):
        features.update(one, varied)
    assert all(torch.equal(before[name], value) for name, value in features.state_dict().items())
    with pytest.raises(ValueError, match="must not be negative"):
        KeyedJaggedTensorPool(3, {"a": -1})
    with pytest.raises(ValueError, match="loaded_values must have the shape"):
        TensorPool(3, 2, torch.float32, device=CPU, loaded_values=torch.ones(2, 2))
