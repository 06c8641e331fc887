"""Position weights on a GPU equal those on the CPU; bags that are too long are found later."""

from __future__ import annotations

import copy

import pytest
import torch

from recsys.modules.feature_processor import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessorDictWrapper
from recsys.sparse import KeyedJaggedTensor

LENGTHS = {"a": 4, "b": 2}


def _batch(longest: int) -> KeyedJaggedTensor:
    lengths = torch.tensor([longest, 1, 0, 2, 1, 2, 3, 0, 1])
    ids = torch.arange(int(lengths.sum()))
    return KeyedJaggedTensor(["b", "x", "a"], ids, lengths=lengths)


def test_weighs_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    reference = PositionWeightedModuleCollection(LENGTHS)
    for weight in reference.parameters():
        torch.nn.init.normal_(weight)
    moved = copy.deepcopy(reference).to("cuda")
    expected, received = reference(_batch(2)), moved(_batch(2).to("cuda"))
    torch.testing.assert_close(received.weights().cpu(), expected.weights())
    expected.weights().sin().sum().backward()
    received.weights().sin().sum().backward()
    for one, other in zip(moved.parameters(), reference.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad)
    moved.check_lengths()


@pytest.mark.parametrize(
    "processors",
    [
        PositionWeightedModuleCollection(LENGTHS),
        FeatureProcessorDictWrapper({k: PositionWeightedModule(n) for k, n in LENGTHS.items()}),
    ],
)
def test_long_bags_are_raised_by_check_lengths(
    processors: PositionWeightedModuleCollection | FeatureProcessorDictWrapper,
) -> None:
    processors.to("cuda")
    assert processors(_batch(3).to("cuda")).weights().isfinite().all()
    with pytest.raises(ValueError, match=r"received 3 ids.*bag 0.*'b'"):
        processors.check_lengths()
    processors.check_lengths()  # raises once
