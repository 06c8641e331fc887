"""KTRegroupAsDict equals KeyedTensor.regroup, group by group."""

from __future__ import annotations

import random

import pytest
import torch

from recsys.distributed.types import LazyAwaitable
from recsys.modules.embedding_configs import DataType
from recsys.modules.regroup import KTRegroupAsDict
from recsys.sparse import KeyedTensor


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
