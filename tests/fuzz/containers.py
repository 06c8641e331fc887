"""Random containers through random operations: each field equals a plain-Python model's."""

from __future__ import annotations

import copy
import pickle
import random
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from recsys.datasets.utils import Batch
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recsys.sparse.kjt_list import KJTList
from tests.fuzz import sharded_tables
from tests.fuzz.container_model import INTS, Model, built, caches, model_of, running
from tests.ranks import RankPool
from tests.saved import through_torch_save

# -- comparison --------------------------------------------------------------------------------


def _check(given: KeyedJaggedTensor, model: Model) -> None:
    """Compare every field; a shallow copy keeps derived values out of the batch itself."""
    kjt = copy.copy(given)
    assert kjt.keys() == model.keys
    assert kjt.stride() == model.stride, ("stride", kjt.stride(), model.stride)
    sizes = [len(bags) for bags in model.bags]
    assert kjt.stride_per_key() == sizes, ("stride_per_key", kjt.stride_per_key(), sizes)
    if model.keys:
        assert kjt.variable_stride_per_key() == (model.strides is not None)
    assert kjt.stride_per_key_per_rank() == (model.strides or [])
    assert (kjt.values().dtype, kjt.lengths().dtype) == model.dtypes
    assert kjt.values().tolist() == model.flat()
    assert kjt.lengths().tolist() == model.lengths()
    assert kjt.offsets().tolist() == running(model.lengths())
    weights = kjt.weights_or_none()
    assert (None if weights is None else weights.dtype) is model.weights
    if weights is not None:
        assert weights.tolist() == [value + 0.5 for value in model.flat()]
    inverse = kjt.inverse_indices_or_none()
    assert (inverse is None) == (model.inverse is None)
    if inverse is not None and model.inverse is not None:
        rows = dict(zip(inverse[0], inverse[1].tolist(), strict=True))  # the last row is read
        wanted = {key: model.inverse[key] for key in model.keys}
        assert {key: rows[key] for key in model.keys} == wanted, ("inverse_indices", rows, wanted)
    assert kjt.length_per_key() == model.counts()
    assert kjt.offset_per_key() == running(model.counts())
    kjt.validate()
    views = kjt.to_dict()
    for place, (key, bags) in enumerate(zip(model.keys, model.bags, strict=True)):
        assert model.keys[kjt.index_per_key()[key]] == key
        if key not in model.keys[place + 1 :]:
            for jt in (views[key], kjt[key]):
                assert [bag.tolist() for bag in jt.to_dense()] == bags


def _check_meta(rng: random.Random, kjt: KeyedJaggedTensor, model: Model) -> None:
    """On the meta device every field but the numbers stays, and errors name the class."""
    meta = kjt.to("meta")
    num_keys = len(model.keys)
    order = list(range(num_keys))[::-1]
    for found, expected in (
        (meta, model),
        (meta.permute(order), model.pick(order)),
        (KeyedJaggedTensor.concat([meta]), model),
        (*meta.split([num_keys, 0])[:1], model),
    ):
        assert found.keys() == expected.keys
        assert found.stride() == model.stride
        assert found.stride_per_key_per_rank() == (expected.strides or [])
        assert found.values().numel() == len(model.flat())
        assert found.lengths().numel() == len(model.lengths())
        assert (found.inverse_indices_or_none() is None) == (model.inverse is None)
    calls: list[Callable[[], object]] = [meta.to_dict, lambda: meta.split([1] * num_keys)]
    for call in [*calls, lambda: meta.to("cpu"), meta.validate]:
        error = _error_of(call)
        if error is not None:
            assert isinstance(error, ValueError), repr(error)
            assert "KeyedJaggedTensor" in str(error)
            assert "meta device" in str(error)


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _check_fake(rng: random.Random, kjt: KeyedJaggedTensor, model: Model) -> None:
    fake = pytree.tree_map_only(Tensor, FakeTensorMode().from_tensor, kjt)
    assert fake.keys() == model.keys
    assert fake.stride() == model.stride
    assert fake.stride_per_key_per_rank() == (model.strides or [])
    assert fake.values().numel() == len(model.flat())


def _check_wrong_cache(rng: random.Random, kjt: KeyedJaggedTensor, model: Model) -> None:
    """Check that a wrong number per key is named, even if all others are right."""
    if not model.keys:
        return
    name, right = rng.choice(list(caches(model).items()))
    wrong: Any = dict(right) if isinstance(right, dict) else list(right)
    place = rng.choice(list(wrong) if isinstance(wrong, dict) else range(len(wrong)))
    wrong[place] += rng.choice([1, 2])
    values, lengths = torch.tensor(model.flat()), torch.tensor(model.lengths(), dtype=torch.int64)
    strides = [len(bags) for bags in model.bags]
    parts = model.keys, values.long(), None, lengths
    error = _error_of(lambda: KeyedJaggedTensor(*parts, stride_per_key=strides, **{name: wrong}))
    assert isinstance(error, ValueError), f"{name}={wrong} was taken for {right}"
    assert str(error).startswith(f"KeyedJaggedTensor.{name}"), (name, str(error))


# -- operations --------------------------------------------------------------------------------


def _tensors_of(value: Any) -> list[Tensor]:
    """The tensors that a container has at hand."""
    if isinstance(value, KJTList):
        return [tensor for batch in value for tensor in _tensors_of(batch)]
    if isinstance(value, Batch):
        dense = [value.dense_features, value.labels]
        return dense + _tensors_of(value.sparse_features)
    if isinstance(value, KeyedTensor):
        return [value.values()]
    parts = [value.values(), value.weights_or_none()]
    parts += [value.lengths_or_none(), value.offsets_or_none()]
    if isinstance(value, KeyedJaggedTensor):
        parts += [(value.inverse_indices_or_none() or (None, None))[1]]
    return [part for part in parts if part is not None]


Step = Callable[[random.Random, KeyedJaggedTensor, Model], tuple[KeyedJaggedTensor, Model]]
STEPS: dict[str, Step] = {}


def _step(function: Step) -> Step:
    STEPS[function.__name__.strip("_")] = function
    return function


def _through(rng: random.Random, given: Any) -> Any:
    """A copy that keeps all: of a batch, or of what holds one."""

    def from_spec(value: Any) -> Any:
        leaves, spec = pytree.tree_flatten(value)
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))

    def pinned(value: Any) -> Any:
        with mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor.clone()):
            return value.pin_memory()

    def recorded(value: Any) -> Any:
        seen: list[Tensor] = []
        note = mock.patch.object(
            Tensor, "record_stream", lambda tensor, stream: seen.append(tensor)
        )
        with note:
            value.record_stream(None)
        assert {id(tensor) for tensor in _tensors_of(value)} <= {id(tensor) for tensor in seen}
        return value

    ways: list[Callable[[Any], Any]] = [
        copy.copy,
        copy.deepcopy,
        lambda value: pickle.loads(pickle.dumps(value)),
        through_torch_save,
        lambda value: value.to(torch.device("cpu")),
        pinned,
        recorded,
        lambda value: pytree.tree_map_only(Tensor, torch.clone, value),
        lambda value: pytree.tree_map(lambda leaf: leaf, value),
        from_spec,
    ]
    return rng.choice(ways)(given)


@_step
def _kept(
    rng: random.Random, kjt: KeyedJaggedTensor, model: Model
) -> tuple[KeyedJaggedTensor, Model]:
    return _through(rng, kjt), model


@_step
def _held(
    rng: random.Random, kjt: KeyedJaggedTensor, model: Model
) -> tuple[KeyedJaggedTensor, Model]:
    if rng.random() < 0.5:
        return _through(rng, KJTList([kjt, kjt]))[rng.randrange(2)], model
    names = ["age"] if rng.random() < 0.5 else []
    batch = _through(rng, Batch(torch.ones(2, 1), kjt, torch.zeros(2), names, "liked"))
    assert (batch.dense_names, batch.label_name) == (tuple(names), "liked")
    assert batch.dense_features.tolist() == [[1], [1]]
    assert batch.labels.tolist() == [0, 0]
    return batch.sparse_features, model


@_step
def _derived(
    rng: random.Random, kjt: KeyedJaggedTensor, model: Model
) -> tuple[KeyedJaggedTensor, Model]:
    kjt = copy.copy(kjt)
    rng.choice([kjt.sync, kjt.unsync, kjt.offsets, kjt.lengths, kjt.index_per_key])()
    return kjt, model


@_step
def _permuted(
    rng: random.Random, kjt: KeyedJaggedTensor, model: Model
) -> tuple[KeyedJaggedTensor, Model]:
    places = rng.sample(range(len(model.keys)), rng.randint(0, len(model.keys)))
    tensor = torch.tensor(places, dtype=torch.int64) if rng.random() < 0.3 else None
    return kjt.permute(places, tensor), model.pick(places)


@_step
def _split(
    rng: random.Random, kjt: KeyedJaggedTensor, model: Model
) -> tuple[KeyedJaggedTensor, Model]:
    first = rng.randint(0, len(model.keys))
    places = list(range(len(model.keys)))
    parts = kjt.split([first, len(places) - first])
    if rng.random() < 0.4 and 0 < first < len(places):
        return KeyedJaggedTensor.concat(parts[::-1]), model.pick(places[first:] + places[:first])
    return (
        (parts[0], model.pick(places[:first]))
        if rng.random() < 0.5
        else (
            parts[1],
            model.pick(places[first:]),
        )
    )


@_step
def _joined(
    rng: random.Random, kjt: KeyedJaggedTensor, model: Model
) -> tuple[KeyedJaggedTensor, Model]:
    if not model.keys:
        return kjt, model
    free = [key for key in ("f0", "f1", "f2") if key not in model.keys]
    other = model_of(rng, f"n{rng.randrange(10**6)}_", like=model)
    if rng.random() < 0.5 and free and other.keys:  # a name that an earlier split took away
        other.keys[0] = free[0]
        if other.inverse is not None:
            other.inverse = dict(zip(other.keys, other.inverse.values(), strict=True))
    if not other.keys:
        return KeyedJaggedTensor.concat([kjt, built(rng, other)]), model
    pairs = [(kjt, model), (built(rng, other), other)]
    rng.shuffle(pairs)
    (one, first), (two, second) = pairs
    own = None
    if first.inverse is not None and second.inverse is not None:
        own = {key: first.inverse[key] for key in first.keys}
        own |= {key: second.inverse[key] for key in second.keys}
    joined = replace(
        first,
        keys=first.keys + second.keys,
        bags=first.bags + second.bags,
        strides=None
        if first.strides is None or second.strides is None
        else first.strides + second.strides,
        inverse=own,
    )
    return KeyedJaggedTensor.concat([one, two]), joined


@_step
def _weighed(
    rng: random.Random, kjt: KeyedJaggedTensor, model: Model
) -> tuple[KeyedJaggedTensor, Model]:
    if model.weights is None:
        return kjt.to("cpu", dtype=torch.float64), model
    dtype = rng.choice([torch.float32, torch.float64])
    return kjt.to("cpu", dtype=dtype), replace(model, weights=dtype)


@_step
def _overwritten(
    rng: random.Random, kjt: KeyedJaggedTensor, model: Model
) -> tuple[KeyedJaggedTensor, Model]:
    if rng.random() < 0.5:
        return kjt.with_values(kjt.values().clone()), model
    target = copy.deepcopy(kjt)
    target.values().zero_()
    return target.copy_(kjt), model


# -- a case ------------------------------------------------------------------------------------


def _keyed_jagged(rng: random.Random) -> str | None:
    model = model_of(rng, "f")
    kjt = built(rng, model)
    done = []
    try:
        _check(kjt, model)
        for _ in range(rng.randint(1, 6)):
            name = rng.choice(list(STEPS))
            done.append(name)
            kjt, model = STEPS[name](rng, kjt, model)
            if rng.random() < 0.6:
                _check(kjt, model)
        done.append("the last")
        _check(kjt, model)
        check = rng.choice([None] * 5 + [_check_meta, _check_fake, _check_wrong_cache])
        if check is not None:
            done.append(check.__name__)
            check(rng, kjt, model)
    except Exception:
        return f"after {done} of {model}: {traceback.format_exc(limit=-3)}"
    return None


def _jagged(rng: random.Random) -> str | None:
    bags = [
        [rng.randrange(9) for _ in range(rng.choice([0, 1, 2]))]
        for _ in range(rng.choice([0, 1, 3]))
    ]
    values = torch.tensor([value for bag in bags for value in bag], dtype=rng.choice(INTS))
    lengths = torch.tensor([len(bag) for bag in bags], dtype=rng.choice(INTS))
    offsets = torch.tensor(running(lengths.tolist()), dtype=lengths.dtype)
    by_lengths = rng.random() < 0.5
    weights = values + 0.5 if rng.random() < 0.5 else None
    parts = (lengths, None) if by_lengths else (None, offsets)
    jt = JaggedTensor(values, weights, *parts)
    if rng.random() < 0.3:  # a view of a buffer
        jt = KeyedJaggedTensor(["a"], values, weights, *parts).to_dict()["a"]
    try:
        for _ in range(3):
            jt = _through(rng, jt)
        assert [bag.tolist() for bag in jt.to_dense()] == bags
        assert (jt.values().dtype, jt.lengths().dtype) == (values.dtype, lengths.dtype)
        assert jt.offsets().tolist() == offsets.tolist()
        assert (jt.weights_or_none() is None) == (weights is None)
        if weights is not None:
            assert torch.equal(jt.weights(), weights)
        if rng.random() < 0.8:
            return None
        meta = jt.to("meta")
        assert meta.offsets().shape == offsets.shape
        assert meta.to_padded_dense(2).shape == (len(bags), 2)
    except Exception:
        return f"JaggedTensor of {bags}: {traceback.format_exc(limit=-3)}"
    return None


def _keyed(rng: random.Random) -> str | None:
    keys = [f"k{i}" for i in range(rng.choice([1, 2, 3]))]
    widths = [rng.randint(0, 3) for _ in keys]
    key_dim = rng.choice([0, 1, -1])
    shape = [2, 2]
    shape[key_dim] = sum(widths)
    values = torch.arange(float(2 * sum(widths))).view(shape)
    kt = KeyedTensor(keys, widths, values, key_dim)
    try:
        for _ in range(3):
            kt = _through(rng, kt)
        assert kt.keys() == keys
        assert kt.key_dim() == key_dim
        assert (kt.length_per_key(), kt.offset_per_key()) == (widths, running(widths))
        for key, part in zip(keys, values.split(widths, key_dim), strict=True):
            assert torch.equal(kt[key], part)
            assert kt.to("meta")[key].shape == part.shape
        wrong_bounds = [0, *(bound + 1 for bound in running(widths)[1:])]
        wrongs: dict[str, Any] = {
            "offset_per_key": wrong_bounds,
            "index_per_key": dict.fromkeys(keys, 1),
        }
        for name, wrong in wrongs.items() if rng.random() < 0.3 else ():
            error = _error_of(partial(KeyedTensor, keys, widths, values, key_dim, **{name: wrong}))
            assert f"KeyedTensor.{name}" in str(error), f"{name}={wrong} was taken"
    except Exception:
        return f"KeyedTensor of {widths}: {traceback.format_exc(limit=-3)}"
    return None


def complaint_about(pool: RankPool, seed: int) -> str | None:
    """Return the error in the case of a seed, or None."""
    rng = random.Random(seed)
    kind = rng.choices([_keyed_jagged, _jagged, _keyed], [8, 1, 1])[0]
    return kind(rng) or sharded_tables.complaint_about(seed)
