"""The unsharded collection on a GPU equals the one on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from recsys.optim import RowWiseAdagrad
from tests.distributed.cases import Case, train


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad])
@pytest.mark.parametrize("seed", range(4))
def test_trains_as_on_the_cpu(seed: int, optimizer: type[torch.optim.Optimizer]) -> None:
    case = Case(seed, 1, optimizer=optimizer)
    reference = case.model()
    moved = copy.deepcopy(reference).to("cuda")
    expected = train(case, reference, range(3), rank=None)
    received = train(case, moved, range(3), rank=None)
    for one, other in zip(received, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(moved.state_dict()[name].cpu(), value, rtol=1e-4, atol=1e-5)


def test_bad_ids_are_raised_by_check() -> None:
    case = Case(0, 1)
    model = case.model().to("cuda").ebc
    batch = case.batches(1)[0].to(torch.device("cuda"))
    batch.values().fill_(10**6)
    model(batch)
    with pytest.raises(IndexError, match="Id 1000000 at position"):
        model.check_ids()
