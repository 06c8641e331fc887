"""`whole_optimizer` joins a torch optimizer with the one of the tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recsys.optim import GradientClippingOptimizer
from recsys.training.optimizer import whole_optimizer
from tests.training.job import adam_of, model_of


def test_a_torch_optimizer_is_joined_with_the_fused_one() -> None:
    model = model_of(dropout=False)
    adam = adam_of(model)
    found = whole_optimizer(model, adam)
    assert set(found.params) == {name for name, _ in model.named_parameters()}
    assert whole_optimizer(model, found) is found
    assert adam.param_groups[0] in list(found.param_groups)  # a scheduler changes its rate


def test_an_unsharded_model_needs_no_other() -> None:
    model = nn.Linear(2, 1)
    optimizer = whole_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
    assert isinstance(optimizer, GradientClippingOptimizer)
    assert sorted(optimizer.params) == ["bias", "weight"]


def test_optimizers_that_do_not_fit_are_errors() -> None:
    model = model_of(dropout=False)
    with pytest.raises(ValueError, match="must leave out tables that are updated in backward"):
        whole_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="received 2 others"):
        whole_optimizer(model, torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"Trainer\.optimizer must be a KeyedOptimizer or another"):
        whole_optimizer(model, "adam")  # type: ignore[arg-type]
    linear = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="clip_norm"):
        whole_optimizer(linear, torch.optim.SGD(linear.parameters(), lr=0.1), clip_norm=-1.0)
