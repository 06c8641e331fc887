"""Optimizers that evaluate a closure more than once, in the wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recsys.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)

Factory = Callable[[list[Tensor]], torch.optim.Optimizer]


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


class Quadratic:
    """A loss of two parameters, and the number of its evaluations."""

    def __init__(self) -> None:
        self.a, self.b = (nn.Parameter(torch.tensor([x, 1.0])) for x in (3.0, -2.0))
        self.evaluations = 0

    def __call__(self) -> Tensor:
        self.evaluations += 1
        self.a.grad = self.b.grad = None
        loss = ((self.a - 2 * self.b) ** 2).sum() + (self.a**2 + self.b**2).sum()
        loss.backward()
        return loss


def lbfgs(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=4)


class Ascending(torch.optim.SGD):
    """An optimizer like SAM: it takes the gradient at a point that the first gradient leads to."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            closure()
        return super().step(closure)


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        (sgd, adam, True),
        (lbfgs, adam, False),
        (adam, lbfgs, False),
        (lbfgs, lbfgs, False),
        (sgd, lambda params: Ascending(params, lr=0.1), False),
    ],
)
def test_optimizers_that_evaluate_again(first: Factory, second: Factory, is_shared: bool) -> None:
    loss, other = Quadratic(), Quadratic()
    both = CombinedOptimizer(
        [
            KeyedOptimizerWrapper({"a": loss.a}, first),
            OptimizerWrapper(KeyedOptimizerWrapper({"b": loss.b}, second)),
        ]
    )
    one, two = first([other.a]), second([other.b])
    for _ in range(3):
        expected = one.step(other)  # type: ignore[call-overload]
        two.step(*(() if is_shared else (other,)))
        assert both.step(loss) == expected
    assert torch.equal(loss.a, other.a)
    assert torch.equal(loss.b, other.b)
    assert loss.evaluations == other.evaluations


def test_the_state_of_lbfgs_exists_before_a_load() -> None:
    loss = Quadratic()
    optimizer = KeyedOptimizerWrapper({"a": loss.a, "b": loss.b}, lbfgs)
    optimizer.init_state()
    assert loss.a.tolist() == [3.0, 1.0]
    state = optimizer.state_dict()
    optimizer.step(loss)
    fresh = KeyedOptimizerWrapper({"a": loss.a, "b": loss.b}, lbfgs)
    fresh.init_state()
    fresh.load_state_dict(state)


def test_each_evaluation_of_lbfgs_is_clipped() -> None:
    def run(is_wrapped: bool) -> tuple[list[float], int, float]:
        weight = nn.Parameter(torch.tensor([4.0, -3.0]))
        lbfgs = KeyedOptimizerWrapper({"w": weight}, lambda ps: torch.optim.LBFGS(ps, lr=0.5))
        optimizer = GradientClippingOptimizer(lbfgs, GradientClipping.VALUE, max_gradient=1.0)
        losses = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (weight * weight * torch.tensor([1.0, 3.0])).sum()
            loss.backward()
            if not is_wrapped:
                nn.utils.clip_grad_value_([weight], 1.0)
            losses.append(loss.item())
            return loss

        first = (optimizer if is_wrapped else lbfgs).step(closure)
        return weight.tolist(), len(losses), first.item()

    assert run(is_wrapped=True) == run(is_wrapped=False)
    assert run(is_wrapped=True)[1] > 3
