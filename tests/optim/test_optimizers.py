from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recsys.optim import optimizers
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward, mark_in_backward
from recsys.optim.optimizers import in_backward_optimizer_filter
from recsys.optim.rowwise_adagrad import RowWiseAdagrad
from recsys.optim.specs import optimizer_spec

CLASSES = [
    optimizers.SGD,
    optimizers.Adagrad,
    optimizers.RowWiseAdagrad,
    optimizers.Adam,
    optimizers.AdamW,
    optimizers.AdamL2,
    optimizers.PartialRowWiseAdam,
    optimizers.LAMB,
    optimizers.PartialRowWiseLAMB,
    optimizers.LarsSGD,
]


@pytest.mark.parametrize(
    ("ours", "theirs", "kwargs"),
    [
        (optimizers.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
        (optimizers.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-8}),
        (optimizers.AdamW, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        (optimizers.AdamL2, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
        (optimizers.Adam, torch.optim.Adam, {"lr": 0.1}),
    ],
)
def test_dense_layers_train_as_with_torch(ours, theirs, kwargs: dict[str, float]) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    second = copy.deepcopy(first)
    pairs = [(first, ours(first.parameters(), **kwargs)), (second, None)]
    pairs[1] = (second, theirs(second.parameters(), **kwargs))
    for _ in range(3):
        x = torch.randn(5, 3)
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("owned", [False, True])
def test_a_weight_decay_of_adam_warns_once(owned: bool) -> None:
    """Weight decay works as in AdamW, and not as in torch.optim.Adam."""
    optimizers._warn_of_decoupled_decay.cache_clear()

    def make(optimizer_class: Any, decay: float) -> None:
        weight = nn.Parameter(torch.ones(2, 2))
        if owned:
            apply_optimizer_in_backward(
                optimizer_class, [weight], {"lr": 0.1, "weight_decay": decay}
            )
        else:
            optimizer_class([weight], lr=0.1, weight_decay=decay)

    for other in (optimizers.AdamW, optimizers.AdamL2, torch.optim.Adam, optimizers.LAMB):
        make(other, 0.1)  # a warning is an error here
    make(optimizers.Adam, 0.0)
    with pytest.warns(UserWarning, match=r"as AdamW; .* recsys\.optim\.AdamL2"):
        make(optimizers.Adam, 0.1)
    make(optimizers.Adam, 0.1)


@pytest.mark.parametrize("optimizer_class", CLASSES)
def test_learning_falls_and_state_survives_a_round_trip(optimizer_class) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 1), torch.randn(20, 3)
    goal = x.sum(1, keepdim=True)
    lr = 10.0 if optimizer_class is optimizers.LarsSGD else 0.1
    optimizer = optimizer_class(layer.parameters(), lr=lr)

    def step() -> float:
        optimizer.zero_grad()
        loss = (layer(x) - goal).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = [step() for _ in range(10)]
    assert losses[-1] < losses[0]
    weights, state = copy.deepcopy(layer.state_dict()), copy.deepcopy(optimizer.state_dict())
    step()
    expected = copy.deepcopy(layer.state_dict())
    layer.load_state_dict(weights)
    optimizer = optimizer_class(layer.parameters(), lr=lr)
    optimizer.load_state_dict(state)
    step()
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("optimizer_class", CLASSES)
def test_sparse_gradients_move_their_rows_only(optimizer_class) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    table = nn.Embedding(6, 4, sparse=True)
    before = table.weight.detach().clone()
    optimizer = optimizer_class(table.parameters(), lr=0.1)
    table(torch.tensor([1, 4, 1])).sum().backward()
    optimizer.step()
    changed = (table.weight != before).any(1)
    assert changed.tolist() == [False, True, False, False, True, False]


def test_row_wise_adagrad_keeps_one_number_per_row() -> None:
    assert RowWiseAdagrad is optimizers.RowWiseAdagrad
    layer = nn.Linear(3, 5)
    optimizer = RowWiseAdagrad(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.state[layer.weight]["sum"].shape == (5,)
    assert optimizer.state[layer.bias]["sum"].shape == (1,)


@pytest.mark.parametrize("maximize", [False, True])
def test_row_wise_adagrad_follows_the_formula(maximize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    table = nn.Parameter(torch.randn(3, 4, generator=generator))
    weight, sums = table.detach().double().numpy().copy(), np.full(3, 0.5)
    optimizer = RowWiseAdagrad([table], 0.1, 0.3, 0.2, 0.5, 1e-3, maximize=maximize)
    for step in range(4):
        grad = torch.randn(3, 4, generator=generator)
        table.grad = grad.clone()
        optimizer.step()
        full = (-1 if maximize else 1) * grad.double().numpy() + 0.2 * weight
        sums += (full**2).mean(axis=1)
        weight -= 0.1 / (1 + step * 0.3) * full / (np.sqrt(sums) + 1e-3)[:, None]
    np.testing.assert_allclose(table.detach(), weight, rtol=1e-5, atol=1e-6)


def test_row_wise_adagrad_goes_on_from_a_saved_state() -> None:
    tables = [nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    first = RowWiseAdagrad(tables[:1], 0.1, lr_decay=1.0)
    for _ in range(2):
        tables[0].grad = torch.ones(2, 3)
        first.step()
    second = RowWiseAdagrad(tables[1:], 0.1, lr_decay=1.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        tables[1].copy_(tables[0])
    for table, optimizer in zip(tables, (first, second), strict=True):
        table.grad = torch.ones(2, 3)
        optimizer.step()
    torch.testing.assert_close(tables[0], tables[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings", [{"lr_decay": 0.1}, {"initial_accumulator_value": 1.0}, {"maximize": True}]
)
def test_what_tables_do_not_take_is_named(settings: dict[str, float]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=rf"tables does not support \['{name}'\]"):
        optimizer_spec(RowWiseAdagrad, settings)


def test_bad_settings_raise_at_once() -> None:
    with pytest.raises(ValueError, match=r"RowWiseAdagrad\.lr_decay must be .* received -1"):
        RowWiseAdagrad([nn.Parameter(torch.ones(1))], lr_decay=-1.0)
    with pytest.raises(ValueError, match=r"SGD\.lr must be finite .*received -1"):
        optimizers.SGD([nn.Parameter(torch.ones(1))], lr=-1.0)


def test_closure_is_evaluated() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = optimizers.SGD([weight], lr=0.5)

    def closure() -> float:
        weight.grad = torch.ones(1)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert weight.item() == 0.5


def test_filter_separates_who_updates_what() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    apply_optimizer_in_backward(torch.optim.SGD, model["a"].parameters(), {"lr": 0.1})
    mark_in_backward(model["b"].bias)
    named = list(model.named_parameters())
    assert [n for n, _ in in_backward_optimizer_filter(named)] == ["b.weight"]
    included = in_backward_optimizer_filter(named, include=True)
    assert [n for n, _ in included] == ["a.weight", "a.bias", "b.bias"]
