"""TorchScript compiles the containers, with the methods that models call."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.sparse import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    jt_is_equal,
    kjt_is_equal,
)

KEYS = ["film", "user", "other"]


class Jagged(nn.Module):
    def forward(self, bags: JaggedTensor) -> JaggedTensor:
        return JaggedTensor(bags.values() * 2, lengths=bags.lengths())


class OfBatch(nn.Module):
    """Each method that scripted containers have."""

    def forward(self, kjt: KeyedJaggedTensor) -> KeyedTensor:
        bags = kjt.to_dict()
        first = bags["film"].values().sum() + kjt["user"].offsets().sum()
        second = kjt.offsets().sum() + kjt.stride() + kjt.length_per_key()[1]
        parts = KeyedTensor(["a", "b"], [1, 1], torch.stack([first, second]).view(1, 2))
        third = parts["b"] + parts.to_dict()["a"] + kjt.weights().sum()
        return KeyedTensor(["a"], [1], third.float())


def test_scripted_containers_have_the_methods_of_the_real_ones() -> None:
    lengths = torch.tensor([2, 0, 1, 1, 3, 0])
    batch = KeyedJaggedTensor(KEYS, torch.arange(7), torch.rand(7), lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        of_batch, jagged = torch.jit.script(OfBatch()), torch.jit.script(Jagged())
    expected = OfBatch()(batch)
    assert torch.equal(of_batch(batch)["a"], expected["a"])
    by_offsets = KeyedJaggedTensor(
        KEYS, batch.values(), batch.weights(), offsets=batch.offsets().clone()
    )
    assert torch.equal(of_batch(by_offsets)["a"], expected["a"])
    bags = JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2]))
    found = jagged(bags)
    assert type(found) is JaggedTensor
    assert [bag.tolist() for bag in found.to_dense()] == [[2.0], [2.0, 2.0]]


class Rearranged(nn.Module):
    """Operations of models on a batch before its lookup."""

    def forward(self, kjt: KeyedJaggedTensor, order: list[int]) -> list[KeyedJaggedTensor]:
        parts = kjt.permute(order).split([1, 0, 2])
        return [
            kjt.permute(order + order[:1]),
            KeyedJaggedTensor.concat([parts[2], parts[0]]),
            parts[1],
            parts[0].with_values(parts[0].values() * 2),
            KeyedJaggedTensor.from_lengths_sync(
                kjt.keys(), kjt.values(), kjt.lengths(), kjt.weights_or_none()
            ),
            KeyedJaggedTensor.from_offsets_sync(
                kjt.keys(), kjt.values(), kjt.offsets(), kjt.weights_or_none()
            ),
            kjt.to(kjt.device()),
        ]


class Asked(nn.Module):
    """Host-side questions."""

    def forward(self, kjt: KeyedJaggedTensor) -> list[list[int]]:
        places = kjt.index_per_key()
        return [
            kjt.length_per_key(),
            kjt.offset_per_key(),
            kjt.stride_per_key(),
            [places[key] for key in kjt.keys()],  # noqa: SIM118
            [kjt.stride(), int(kjt.variable_stride_per_key())],
        ]


class Columns(nn.Module):
    """Operations of models on pooled and on jagged embeddings."""

    def forward(self, kt: KeyedTensor, jagged: JaggedTensor) -> list[Tensor]:
        found = KeyedTensor.regroup([kt], [["b", "a"], ["b"]])
        named = KeyedTensor.regroup_as_dict([kt.to(kt.device())], [["a"]], ["x"])
        found += [named["x"], torch.tensor(kt.offset_per_key())]
        found += jagged.to_dense()
        moved = jagged.to(jagged.device())
        found += [moved.values(), moved.lengths()]
        return found


def _script(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def _batch(rng: random.Random, is_weighted: bool) -> KeyedJaggedTensor:
    size = rng.choice((0, 1, 4))
    lengths = torch.tensor([rng.randint(0, 3) for _ in range(3 * size)], dtype=torch.int64)
    count = int(lengths.sum())
    values = torch.tensor([rng.randrange(99) for _ in range(count)], dtype=torch.int64)
    return KeyedJaggedTensor(KEYS, values, torch.rand(count) if is_weighted else None, lengths)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_batches_are_rearranged_as_in_python(is_weighted: bool) -> None:
    rng = random.Random(0)
    scripted, asked = _script(Rearranged()), _script(Asked())
    for _ in range(20):
        order = rng.sample(range(3), 3)
        batch = _batch(rng, is_weighted)
        assert asked(batch) == Asked()(batch)
        found, wanted = scripted(batch, order), Rearranged()(batch, order)
        for mine, other in zip(found, wanted, strict=True):
            assert mine.keys() == other.keys()
            assert mine.stride() == other.stride()
            assert torch.equal(mine.values(), other.values())
            assert torch.equal(mine.lengths(), other.lengths())
            assert (mine.weights_or_none() is None) == (not is_weighted)
            if is_weighted:
                assert torch.equal(mine.weights(), other.weights())


def test_columns_are_regrouped_as_in_python() -> None:
    inputs = (
        KeyedTensor(["a", "b"], [1, 2], torch.rand(4, 3)),
        JaggedTensor(torch.rand(5), lengths=torch.tensor([2, 0, 3])),
    )
    for found, wanted in zip(_script(Columns())(*inputs), Columns()(*inputs), strict=True):
        assert torch.equal(found, wanted)


class Wrong(nn.Module):
    def forward(self, kjt: KeyedJaggedTensor, kind: str) -> Tensor:
        if kind == "permute":
            return kjt.permute([3]).values()
        if kind == "split":
            return kjt.split([1, 1])[0].values()
        if kind == "key":
            return kjt["unknown"].values()
        if kind == "concat":
            return KeyedJaggedTensor.concat([kjt, kjt.with_values(kjt.values())]).values()
        kt = KeyedTensor(["a"], [1], torch.ones(1, 1))
        if kind == "column":
            return kt["unknown"]
        if kind == "source":
            return KeyedTensor.regroup([kt], [["unknown"]])[0]
        return KeyedTensor.regroup([kt, kt], [["a"]])[0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("permute", "indices must .*received 3"),
        ("split", r"add up .*received \[1, 1\]"),
        ("key", "has no key unknown; received keys"),
        ("column", "has no key unknown; received keys"),
        ("source", "no source has the key unknown"),
        ("twice", "two sources have the key a"),
        ("concat", "parts must .*received film twice"),
    ],
)
def test_errors_name_what_is_wrong(kind: str, message: str) -> None:
    batch = _batch(random.Random(1), False)
    with pytest.raises(torch.jit.Error, match=message):
        _script(Wrong())(batch, kind)


class Changed(nn.Module):
    def forward(self, kjt: KeyedJaggedTensor, how: str) -> KeyedJaggedTensor:
        if how == "to":
            return kjt.to(torch.device("cpu"))
        if how == "concat":
            other = KeyedJaggedTensor(["c"], torch.ones(4).long(), lengths=torch.tensor([0, 4]))
            return KeyedJaggedTensor.concat([kjt, other])
        return kjt.with_values(kjt.values() + 1)


@pytest.mark.parametrize("how", ["to", "concat", "with_values"])
def test_batch_sizes_of_features_are_not_lost(how: str) -> None:
    ids, lengths = torch.arange(5), torch.tensor([1, 1, 3])
    batch = KeyedJaggedTensor(["a", "b"], ids, lengths=lengths, stride_per_key_per_rank=[[2], [1]])
    found, wanted = _script(Changed())(batch, how), Changed()(batch, how)
    assert found.keys() == wanted.keys()
    assert found.stride_per_key_per_rank() == wanted.stride_per_key_per_rank()
    assert found.stride() == wanted.stride() == 2
    for key, bags in found.to_dict().items():
        assert jt_is_equal(bags, wanted[key])


class Split(nn.Module):
    def forward(self, kjt: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        parts = kjt.split([1, 1])
        return [parts[0], parts[1], kjt.permute([1, 0]), KeyedJaggedTensor.concat([kjt])]


class Padded(nn.Module):
    def forward(self, jt: JaggedTensor) -> list[Tensor]:
        found = [jt.to_padded_dense(2, -1.0), jt.to_padded_dense()]
        weights = jt.to_padded_dense_weights()
        if weights is not None:
            found.append(weights)
        return found


@pytest.mark.parametrize("width", [(), (2,)])
def test_bags_are_padded_as_in_python(width: tuple[int, ...]) -> None:
    for lengths in ([2, 0, 3], [0, 0], []):
        total = sum(lengths) + 2
        values, weights = torch.rand(total, *width), torch.rand(total)
        bags = JaggedTensor(values, weights, torch.tensor(lengths, dtype=torch.int64))
        for found, wanted in zip(_script(Padded())(bags), Padded()(bags), strict=True):
            assert torch.equal(found, wanted)


def test_buffers_may_be_longer_than_their_bags() -> None:
    long = KeyedJaggedTensor(["a", "b"], torch.arange(9), torch.rand(9), torch.tensor([2, 0, 1, 1]))
    for found, wanted in zip(_script(Split())(long), Split()(long), strict=True):
        assert kjt_is_equal(found, wanted)


ALONE = """
import sys, torch
from recsys import KeyedJaggedTensor
class Twice(torch.nn.Module):
    def forward(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return kjt.permute([1, 0]).permute([1, 0])
torch.jit.script(Twice()).save("m.pt")
batch = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 2, 0]))
found = torch.jit.load("m.pt")(batch)
assert type(found) is KeyedJaggedTensor and found.values().tolist() == [1, 2, 3]
assert not {"recsys.fx", "recsys.inference", "recsys.modules"} & set(sys.modules)
"""


def test_containers_alone_are_enough(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)  # TorchScript reads source
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "ignore", "alone.py"]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
