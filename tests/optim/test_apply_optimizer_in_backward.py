from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from recsys.kernels.types import RowState
from recsys.optim import optimizers
from recsys.optim.apply_optimizer_in_backward import (
    apply_optimizer_in_backward,
    attached_optimizer,
    mark_in_backward,
)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD, optimizers.LAMB])
def test_dense_layers_train_in_backward_as_with_steps(
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    stepped = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    in_backward = copy.deepcopy(stepped)
    apply_optimizer_in_backward(optimizer_class, in_backward.parameters(), {"lr": 0.1})
    optimizer = optimizer_class(stepped.parameters(), lr=0.1)  # type: ignore[call-arg]
    for _ in range(3):
        x = torch.randn(5, 3)
        in_backward(x).square().mean().backward()
        stepped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(stepped.parameters(), in_backward.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert b.grad is None


def test_the_learning_rate_can_be_scheduled() -> None:
    layer = nn.Linear(2, 2)
    apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
    attached = attached_optimizer(layer.weight)
    assert attached is attached_optimizer(layer.bias)
    assert attached is not None
    attached.param_groups[0]["lr"] = 0.0
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.equal(layer.weight, before)


def test_a_second_optimizer_raises() -> None:
    layer = nn.Linear(2, 2)
    apply_optimizer_in_backward(torch.optim.SGD, [layer.bias], {"lr": 0.1})
    with pytest.raises(ValueError, match=r"updated in backward by .*SGD.*received .*Adam"):
        apply_optimizer_in_backward(torch.optim.Adam, layer.parameters(), {"lr": 0.1})
    assert attached_optimizer(layer.weight) is None


def test_a_parameter_without_a_gradient_is_refused() -> None:
    layer = nn.Linear(2, 3)
    layer.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"params\[1\] must require .*of shape \[3\]"):
        apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
    assert attached_optimizer(layer.weight) is None  # nor is the one before it updated


def test_spec_of_a_parameter() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    assert attached_optimizer(parameter) is None
    apply_optimizer_in_backward(optimizers.RowWiseAdagrad, [parameter], {"lr": 0.5})
    attached = attached_optimizer(parameter)
    assert attached is not None
    assert attached.spec().learning_rate == 0.5
    shard = nn.Parameter(torch.ones(1, 2))
    mark_in_backward(shard, parameter)
    assert attached_optimizer(shard) is attached


def test_a_marked_parameter_can_be_pickled() -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    other = nn.Parameter(torch.ones(3, 2))
    apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
    mark_in_backward(other, parameter)
    loaded, attached = map(attached_optimizer, (pickle.loads(pickle.dumps(other)), parameter))
    assert loaded is not None
    assert attached is not None
    assert loaded.spec() == attached.spec()


def test_modes_of_tables_travel_with_the_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    apply_optimizer_in_backward(
        torch.optim.SGD,
        [parameter],
        {"lr": 0.5},
        update_mode="deferred",
        row_state="per_shard",
        stochastic_rounding=True,
    )
    attached = attached_optimizer(pickle.loads(pickle.dumps(parameter)))
    assert attached is not None
    owned = attached.table_optimizer()
    assert owned.is_deferred
    assert owned.row_state is RowState.PER_SHARD
    assert owned.spec.stochastic_rounding
    assert "update_mode='deferred'" in repr(attached)


@pytest.mark.parametrize(
    "modes",
    [{"update_mode": "deferred"}, {"row_state": "per_shard"}, {"stochastic_rounding": True}],
)
def test_modes_of_tables_mean_nothing_to_other_parameters(modes: dict[str, Any]) -> None:
    layer = nn.Linear(2, 1)
    apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.5}, **modes)
    with pytest.raises(ValueError, match=r"SGD.* is for tables .*shape \[1\]"):
        layer(torch.ones(1, 2)).sum().backward()


def test_unknown_modes_raise_at_once() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="one of fused, deferred; received 'lazy'"):
        apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 1.0}, update_mode="lazy")
    assert attached_optimizer(parameter) is None
