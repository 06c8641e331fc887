"""Conversions between batch types equal the methods that they call."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from recsys.compat.sparse import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    KTRegroupAsDict,
    pad_vbe_kjt_lengths,
    permute_multi_embedding,
    regroup_kts,
)
from recsys.distributed.types import LazyAwaitable
from recsys.modules.embedding_configs import DataType
from recsys.sparse import KeyedJaggedTensor, KeyedTensor, kjt_is_equal


@pytest.mark.parametrize("weighted", [False, True])
def test_there_and_back(weighted):
    weights = torch.rand(5) if weighted else None
    kjt = KeyedJaggedTensor(
        ["a", "b"], torch.arange(5), weights, lengths=torch.tensor([1, 0, 3, 1])
    )
    by_key = ComputeKJTToJTDict()(kjt)
    assert {key: jt.values().tolist() for key, jt in by_key.items()} == {
        "a": [0],
        "b": [1, 2, 3, 4],
    }
    assert by_key["b"].lengths().tolist() == [3, 1]
    assert (by_key["b"].weights_or_none() is not None) == weighted
    assert kjt_is_equal(ComputeJTDictToKJT()(by_key), kjt)


@pytest.mark.parametrize("regroup", [regroup_kts, permute_multi_embedding])
def test_regroups_with_gradients(regroup):
    first = torch.arange(6.0).reshape(2, 3).requires_grad_()
    second = (torch.arange(4.0).reshape(2, 2) + 10).requires_grad_()
    sources = [KeyedTensor(["a", "b"], [1, 2], first), KeyedTensor(["c"], [2], second)]
    found = regroup(sources, [["c", "b"], ["b"]])
    x, y = first.detach().numpy(), second.detach().numpy()
    np.testing.assert_array_equal(found[0].detach(), np.concatenate([y, x[:, 1:]], axis=1))
    np.testing.assert_array_equal(found[1].detach(), x[:, 1:])
    sum((part.sum() for part in found), torch.zeros(())).backward()
    assert first.grad.tolist() == [[0, 2, 2], [0, 2, 2]]  # b serves two groups
    assert second.grad.tolist() == [[1, 1], [1, 1]]
    with pytest.raises(KeyError, match="nothing"):
        regroup(sources, [["nothing"]])


def test_pads_batches_of_several_sizes():
    sizes = {"a": [[1, 2], [3]], "b": [[4]], "c": [[], [5, 6, 7], []]}
    flat = [id for bags in sizes.values() for bag in bags for id in bag]
    kjt = KeyedJaggedTensor(
        list(sizes),
        torch.tensor(flat),
        torch.tensor(flat) / 10,
        lengths=torch.tensor([len(bag) for bags in sizes.values() for bag in bags]),
        stride_per_key_per_rank=[[2], [1], [3]],
    )
    padded = pad_vbe_kjt_lengths(kjt)
    padded.validate()
    assert padded.stride_per_key() == [3, 3, 3]
    for key, jt in padded.to_dict().items():
        expected = sizes[key] + [[]] * (3 - len(sizes[key]))
        assert [bag.tolist() for bag in jt.to_dense()] == expected
        assert torch.equal(jt.weights() * 10, jt.values().float())
    assert pad_vbe_kjt_lengths(padded) is padded


def _sources(seed: int) -> list[KeyedTensor]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    keys = [f"k{i}" for i in range(8)]
    rng.shuffle(keys)
    sources = []
    for own in (keys[:3], keys[3:]):
        widths = [rng.randint(1, 4) for _ in own]
        values = torch.randn(2, sum(widths), generator=generator, requires_grad=True)
        sources.append(KeyedTensor(own, widths, values))
    return sources


@pytest.mark.parametrize("seed", range(6))
def test_equals_regroup(seed: int) -> None:
    rng = random.Random(seed)
    groups = [rng.sample([f"k{i}" for i in range(8)], rng.randint(1, 5)) for _ in range(3)]
    module = KTRegroupAsDict(groups, ["x", "y", "z"])
    for sources in (_sources(seed), _sources(seed), _sources(seed + 1), _sources(seed)[::-1]):
        received = module(sources)
        assert list(received) == ["x", "y", "z"]
        expected = KeyedTensor.regroup(sources, groups)
        for group, one, another in zip(groups, received.values(), expected, strict=True):
            assert torch.equal(one, another)
            by_key = {key: kt[key] for kt in sources for key in kt.keys()}  # noqa: SIM118
            assert torch.equal(one, torch.cat([by_key[key] for key in group], dim=1))


def test_pending_outputs_are_awaited() -> None:
    sources = _sources(0)
    module = KTRegroupAsDict([["k0", "k7"]], ["x"])
    (received,) = module([LazyAwaitable(lambda kt=kt: kt) for kt in sources]).values()
    assert torch.equal(received, KeyedTensor.regroup(sources, [["k0", "k7"]])[0])


def test_gradients_flow() -> None:
    sources = _sources(0)
    KTRegroupAsDict([["k0"], ["k0"]], ["x", "y"])(sources)["y"].sum().backward()
    (owner,) = [kt for kt in sources if "k0" in kt.keys()]  # noqa: SIM118
    assert owner.values().grad is not None
    assert owner.values().grad.sum() == owner["k0"].numel()


def test_converts() -> None:
    module = KTRegroupAsDict([["k0"]], ["x"], emb_dtype=DataType.FP16)
    assert module(_sources(0))["x"].dtype == torch.float16


def test_bad_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="must name each group"):
        KTRegroupAsDict([["a"]], ["x", "y"])
    with pytest.raises(ValueError, match="must name each group"):
        KTRegroupAsDict([["a"], ["b"]], ["x", "x"])
    with pytest.raises(ValueError, match=r"received none for \['y'\]"):
        KTRegroupAsDict([["a"], []], ["x", "y"])
    with pytest.raises(TypeError, match=r"groups\[0\] must be a list of text; received 'ab'"):
        KTRegroupAsDict(["ab"], ["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="keyed_tensors must hold at least one KeyedTensor"):
        KTRegroupAsDict([["a"]], ["x"])([])
    with pytest.raises(KeyError, match="no source has the keys"):
        KTRegroupAsDict([["nope"]], ["x"])(_sources(0))
    assert repr(KTRegroupAsDict([["a", "b"]], ["x"])) == "KTRegroupAsDict(x=['a', 'b'])"
