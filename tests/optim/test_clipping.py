"""Clipping of parameters that one process holds; sharded ones: distributed/test_fused_optimizer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupStage,
)
from recsys.optim.clipping import power_sum
from tests.ranks import RankPool

GRADIENTS = (torch.tensor([3.0, -4.0]), torch.tensor([0.05, 12.0]))


def two(**settings: object) -> tuple[GradientClippingOptimizer, list[nn.Parameter]]:
    """An optimizer of two parameters that it leaves at minus their clipped gradients."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in GRADIENTS]
    joined = CombinedOptimizer(
        [
            (str(i), KeyedOptimizerWrapper({"p": p}, lambda ps: torch.optim.SGD(ps, lr=1.0)))
            for i, p in enumerate(parameters)
        ]
    )
    for parameter, gradient in zip(parameters, GRADIENTS, strict=True):
        parameter.grad = gradient.clone()
    return GradientClippingOptimizer(joined, **settings), parameters  # type: ignore[arg-type]


@pytest.mark.parametrize("max_gradient", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, "inf"])
@pytest.mark.parametrize("is_global", [False, True])
def test_the_norm_is_that_of_torch(
    max_gradient: float, norm_type: float | str, is_global: bool
) -> None:
    optimizer, parameters = two(
        clipping=GradientClipping.NORM,
        max_gradient=max_gradient,
        norm_type=norm_type,
        enable_global_grad_clip=is_global,
    )
    expected = [nn.Parameter(torch.zeros(2)) for _ in GRADIENTS]
    for parameter, gradient in zip(expected, GRADIENTS, strict=True):
        parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(expected, max_gradient, float(norm_type))
    optimizer.step()
    assert optimizer.last_total_grad_norm is not None
    torch.testing.assert_close(optimizer.last_total_grad_norm, norm)
    for own, other in zip(parameters, expected, strict=True):
        assert other.grad is not None
        torch.testing.assert_close(own.detach(), -other.grad)


def test_values_are_limited_each() -> None:
    optimizer, (a, b) = two(clipping=GradientClipping.VALUE, max_gradient=1.0)
    optimizer.step()
    torch.testing.assert_close(a.detach(), torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(b.detach(), torch.tensor([-0.05, -1.0]))
    assert optimizer.last_total_grad_norm is None


@pytest.mark.parametrize("clipping", [GradientClipping.NORM, GradientClipping.VALUE])
def test_a_limit_of_0_stops_training(clipping: GradientClipping) -> None:
    optimizer, weights = two(clipping=clipping, max_gradient=0)
    before = [weight.detach().clone() for weight in weights]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))


def test_nothing_is_clipped_unless_asked_for() -> None:
    optimizer, (a, _) = two(max_gradient=0.001, track_grad_norm=True)
    optimizer.step()
    assert torch.equal(a.detach(), -GRADIENTS[0])
    assert optimizer.last_total_grad_norm is not None
    assert optimizer.last_total_grad_norm.item() == pytest.approx(13.0001, abs=1e-4)


def test_the_gradients_of_a_closure_are_clipped() -> None:
    optimizer, (a, _) = two(clipping=GradientClipping.VALUE, max_gradient=1.0)

    def closure() -> float:
        a.grad = torch.tensor([7.0, 0.5])
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert a.tolist() == [-1.0, -0.5]


def test_parameters_without_gradient_and_sparse_gradients() -> None:
    table, idle = nn.Embedding(3, 2, sparse=True), nn.Parameter(torch.ones(1))
    nn.init.zeros_(table.weight)
    sgd = KeyedOptimizerWrapper(
        {"t": table.weight, "idle": idle}, lambda ps: torch.optim.SGD(ps, lr=1.0)
    )
    optimizer = GradientClippingOptimizer(sgd, GradientClipping.NORM, max_gradient=1.0)
    table(torch.tensor([1, 1])).sum().backward()
    optimizer.step()
    expected = torch.zeros(3, 2)
    expected[1] = -1 / math.sqrt(2)
    torch.testing.assert_close(table.weight.detach(), expected)


def test_wrappers_can_be_stacked() -> None:
    optimizer, (a, _) = two(clipping=GradientClipping.VALUE, max_gradient=1.0)
    WarmupOptimizer(optimizer, [WarmupStage(value=0.5)], lr=0.5).step()
    torch.testing.assert_close(a.detach(), torch.tensor([-0.25, 0.25]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gradient": -1.0}, "max_gradient must .*received -1.0"),
        ({"max_gradient": math.nan}, "max_gradient must .*received nan"),
        ({"norm_type": -1.0}, "norm_type must .*received -1.0"),
        ({"norm_type": "two"}, "norm_type must .*received 'two'"),
        ({"clipping": "all"}, "clipping must .*received 'all'"),
    ],
)
def test_bad_settings_raise(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        two(**{"clipping": GradientClipping.NORM, **settings})


@pytest.mark.parametrize("setting", ["clipping", "max_gradient", "norm_type"])
def test_settings_of_a_wrong_type_raise(setting: str) -> None:
    for value in (None, [1.0], True):
        with pytest.raises(TypeError, match=rf"GradientClippingOptimizer\.{setting} must be"):
            two(**{setting: value})


def test_clipping_is_taken_by_name() -> None:
    optimizer, (a, _) = two(clipping="value", max_gradient=np.float32(1.0))
    optimizer.step()
    torch.testing.assert_close(a.detach(), torch.tensor([-1.0, 1.0]))
    optimizer, parameters = two(clipping="norm", max_gradient=1.0)
    optimizer.step()
    assert torch.cat([p.detach() for p in parameters]).norm().item() == pytest.approx(1.0)


def _clip_otherwise(setting: str, values: list[object]) -> str:
    settings = {"clipping": "norm", "enable_global_grad_clip": True}
    optimizer, _ = two(**{**settings, setting: values[dist.get_rank()]})
    for _ in range(2):  # also when the first error was caught
        with pytest.raises(ValueError, match="enable_global_grad_clip all ranks must") as caught:
            optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "values"),
    [("clipping", ["norm", "value"]), ("max_gradient", [1.0, 2.0]), ("norm_type", [2.0, "inf"])],
)
def test_ranks_that_clip_in_different_ways_raise_alike(
    ranks: RankPool, setting: str, values: list[object]
) -> None:
    first, second = ranks(2, _clip_otherwise, setting, values)
    assert first == second
    assert setting in first
    assert f"received {values[0]!r} on rank 0 and" in first


def test_power_sums() -> None:
    values: list[Tensor] = [torch.tensor([-2.0, 1.0]), torch.empty(0, 4), torch.tensor([[3.0]])]
    for norm_type, expected in ((1.0, 6.0), (2.0, 14.0), (math.inf, 3.0)):
        assert power_sum(values, norm_type, torch.device("cpu")).item() == pytest.approx(expected)
        assert power_sum([], norm_type, torch.device("cpu")).item() == 0.0
