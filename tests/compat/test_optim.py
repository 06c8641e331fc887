"""An optimizer without tables, and the kinds of optimizers."""

from __future__ import annotations

import pytest
import torch

from recsys.compat.optim import EmptyFusedOptimizer, optimizer_type_to_emb_opt_type
from recsys.kernels.types import EmbOptimType
from recsys.optim import LAMB
from recsys.optim.keyed import CombinedOptimizer
from recsys.optim.specs import supported_optimizer_classes


def test_an_empty_one_takes_part_and_does_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    empty = EmptyFusedOptimizer()
    both = CombinedOptimizer([("empty", empty), ("also", EmptyFusedOptimizer())])
    weight.sum().backward()
    both.step()
    both.zero_grad()
    assert weight.grad is not None
    assert empty.step(closure=lambda: 3) == 3
    assert both.state_dict()["state"] == {}
    both.load_state_dict(both.state_dict())


def test_the_kind_of_a_class() -> None:
    kinds = {
        torch.optim.SGD: EmbOptimType.EXACT_SGD,
        torch.optim.AdamW: EmbOptimType.ADAM,
        LAMB: EmbOptimType.LAMB,
    }
    assert {cls: optimizer_type_to_emb_opt_type(cls) for cls in kinds} == kinds
    assert all(map(optimizer_type_to_emb_opt_type, supported_optimizer_classes()))
    with pytest.raises(ValueError, match=r"received .*Rprop"):
        optimizer_type_to_emb_opt_type(torch.optim.Rprop)
