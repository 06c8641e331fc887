"""Each optimizer against torch.optim where it has one, else against its formula in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recsys.kernels.row_update import (
    init_state,
    round_stochastically,
    row_statistic,
    update_rows,
)
from recsys.kernels.types import EmbOptimType, OptimizerSpec, WeightDecayMode
from recsys.kernels.update_rules import UPDATE_RULES

ROWS, DIM, LR = 5, 4, 0.1


def gradients(steps: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(ROWS, DIM, generator=generator) for _ in range(steps)]


def initial() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(4))


def ours(spec: OptimizerSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = initial().to(dtype)
    state = init_state(spec, weight)
    for grad in gradients():
        update_rows(spec, weight, state, torch.arange(ROWS), grad, LR)
    return weight


@pytest.mark.parametrize(
    ("spec", "optimizer"),
    [
        (OptimizerSpec(algorithm=EmbOptimType.SGD), lambda p: torch.optim.SGD(p, lr=LR)),
        (
            OptimizerSpec(algorithm=EmbOptimType.SGD, weight_decay=0.3),
            lambda p: torch.optim.SGD(p, lr=LR, weight_decay=0.3),
        ),
        (
            OptimizerSpec(algorithm=EmbOptimType.EXACT_ADAGRAD, eps=1e-3, weight_decay=0.3),
            lambda p: torch.optim.Adagrad(p, lr=LR, eps=1e-3, weight_decay=0.3),
        ),
        (
            OptimizerSpec(algorithm=EmbOptimType.ADAM, eps=1e-3, beta1=0.8, beta2=0.9),
            lambda p: torch.optim.Adam(p, lr=LR, eps=1e-3, betas=(0.8, 0.9)),
        ),
        (
            OptimizerSpec(
                algorithm=EmbOptimType.ADAM, weight_decay=0.3, weight_decay_mode=WeightDecayMode.L2
            ),
            lambda p: torch.optim.Adam(p, lr=LR, weight_decay=0.3),
        ),
        (
            OptimizerSpec(algorithm=EmbOptimType.ADAM, weight_decay=0.3),
            lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.3),
        ),
    ],
    ids=["sgd", "sgd-decay", "adagrad-decay", "adam", "adam-l2", "adamw"],
)
def test_equals_torch_optim_when_every_row_is_touched(spec: OptimizerSpec, optimizer) -> None:  # type: ignore[no-untyped-def]
    parameter = torch.nn.Parameter(initial())
    theirs = optimizer([parameter])
    for grad in gradients():
        parameter.grad = grad.clone()
        theirs.step()
    torch.testing.assert_close(ours(spec), parameter.detach(), rtol=1e-5, atol=1e-6)


def formula(spec: OptimizerSpec) -> Tensor:
    """Row by row, in fp64, from the papers (norms and moments per row)."""
    weight = initial().double()
    decay, kind = spec.weight_decay, spec.algorithm
    first, second = torch.zeros(ROWS, DIM).double(), torch.zeros(ROWS, DIM).double()
    per_row = torch.zeros(ROWS).double()
    for t, grad in enumerate(gradients(), start=1):
        for r in range(ROWS):
            w, g = weight[r].clone(), grad[r].double()
            if kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
                if spec.weight_decay_mode is WeightDecayMode.L2:
                    g = g + decay * w
                per_row[r] += (g * g).mean()
                w_new = w - LR * g / (per_row[r].sqrt() + spec.eps)
                if spec.weight_decay_mode is WeightDecayMode.DECOUPLE:
                    w_new = w_new - LR * decay * w
                weight[r] = w_new
            elif kind is EmbOptimType.LARS_SGD:
                local = spec.eta * w.norm() / (g.norm() + decay * w.norm())
                first[r] = spec.momentum * first[r] + LR * local * (g + decay * w)
                weight[r] = w - first[r]
            else:
                first[r] = spec.beta1 * first[r] + (1 - spec.beta1) * g
                square = g * g
                if kind in (
                    EmbOptimType.PARTIAL_ROWWISE_ADAM,
                    EmbOptimType.PARTIAL_ROWWISE_LAMB,
                ):
                    square = square.mean().expand(DIM)
                second[r] = spec.beta2 * second[r] + (1 - spec.beta2) * square
                m_hat = first[r] / (1 - spec.beta1**t)
                v_hat = second[r] / (1 - spec.beta2**t)
                direction = m_hat / (v_hat.sqrt() + spec.eps) + decay * w
                lambs = (EmbOptimType.LAMB, EmbOptimType.PARTIAL_ROWWISE_LAMB)
                trust = w.norm() / direction.norm() if kind in lambs else 1.0
                weight[r] = w - LR * trust * direction
    return weight.float()


@pytest.mark.parametrize(
    "algorithm",
    [
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        EmbOptimType.PARTIAL_ROWWISE_ADAM,
        EmbOptimType.LAMB,
        EmbOptimType.PARTIAL_ROWWISE_LAMB,
        EmbOptimType.LARS_SGD,
        EmbOptimType.ADAM,
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_equals_the_formula(algorithm: EmbOptimType, weight_decay: float) -> None:
    spec = OptimizerSpec(algorithm=algorithm, weight_decay=weight_decay)
    torch.testing.assert_close(ours(spec), formula(spec), rtol=1e-4, atol=1e-5)


def test_decoupled_rowwise_adagrad_equals_the_formula() -> None:
    spec = OptimizerSpec(
        algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        weight_decay=0.3,
        weight_decay_mode=WeightDecayMode.DECOUPLE,
    )
    torch.testing.assert_close(ours(spec), formula(spec), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", list(EmbOptimType))
def test_untouched_rows_and_their_state_stay(algorithm: EmbOptimType) -> None:
    spec = OptimizerSpec(algorithm=algorithm, weight_decay=0.1)
    weight = initial()
    state = init_state(spec, weight)
    update_rows(spec, weight, state, torch.tensor([3, 0]), torch.ones(2, DIM), LR)
    assert (weight != initial()).any(1).tolist() == [True, False, False, True, False]
    for name, value in state.items():
        if name != "step":
            assert value[[1, 2, 4]].eq(0).all()


@pytest.mark.parametrize("algorithm", [EmbOptimType.LAMB, EmbOptimType.LARS_SGD])
def test_a_row_of_zero_gradient_is_no_nan(algorithm: EmbOptimType) -> None:
    spec = OptimizerSpec(algorithm=algorithm)
    weight = torch.zeros(2, DIM)
    update_rows(spec, weight, init_state(spec, weight), torch.tensor([0]), torch.zeros(1, DIM), LR)
    assert weight.isfinite().all()


@pytest.mark.parametrize("algorithm", list(EmbOptimType))
def test_half_weights_are_updated_in_fp32_and_rounded_once(algorithm: EmbOptimType) -> None:
    spec = OptimizerSpec(algorithm=algorithm)
    weight = initial().bfloat16()
    full = weight.float()
    state_half, state_full = init_state(spec, weight), init_state(spec, full)
    grad = gradients()[0]
    update_rows(spec, weight, state_half, torch.arange(ROWS), grad, LR)
    update_rows(spec, full, state_full, torch.arange(ROWS), grad, LR)
    assert torch.equal(weight, full.bfloat16())
    assert all(torch.equal(state_half[k], state_full[k]) for k in state_full)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize(
    "algorithm", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.PARTIAL_ROWWISE_ADAM]
)
def test_column_shards_with_row_moments_equal_the_whole(
    algorithm: EmbOptimType, decay: float
) -> None:
    spec = OptimizerSpec(algorithm=algorithm, weight_decay=decay)
    whole = ours(spec)
    halves = [initial()[:, :1].clone(), initial()[:, 1:].clone()]
    states = [init_state(spec, h) for h in halves]
    rows = torch.arange(ROWS)
    for grad in gradients():
        parts = [grad[:, :1], grad[:, 1:]]
        total = sum(row_statistic(spec, g, h, rows) for g, h in zip(parts, halves, strict=True))
        for half, state, part in zip(halves, states, parts, strict=True):
            update_rows(spec, half, state, rows, part, LR, row_moment=total / DIM)
    torch.testing.assert_close(torch.cat(halves, 1), whole, rtol=1e-5, atol=1e-6)


def test_learning_rate_may_be_a_tensor() -> None:
    spec = OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    weight = initial()
    state = init_state(spec, weight)
    for grad in gradients():
        update_rows(spec, weight, state, torch.arange(ROWS), grad, torch.tensor(LR))
    torch.testing.assert_close(weight, ours(spec))


def test_which_optimizers_reduce_rows() -> None:
    assert [a.name for a, rule in UPDATE_RULES.items() if rule.reduces_rows] == [
        "EXACT_ROWWISE_ADAGRAD",
        "PARTIAL_ROWWISE_ADAM",
        "LAMB",
        "PARTIAL_ROWWISE_LAMB",
        "LARS_SGD",
    ]


def test_misplaced_row_moment_raises() -> None:
    spec = OptimizerSpec(algorithm=EmbOptimType.LAMB)
    weight = initial()
    with pytest.raises(ValueError, match="received one for LAMB"):
        update_rows(
            spec,
            weight,
            init_state(spec, weight),
            torch.arange(ROWS),
            gradients()[0],
            LR,
            row_moment=torch.ones(ROWS),
        )
    with pytest.raises(ValueError, match=r"received LAMB\. Do not split"):
        row_statistic(spec, gradients()[0], weight, torch.arange(ROWS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_is_right_on_average(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.tensor([1.0003, -2.5007, 65000.0, 1e-3, 0.0, 3.0])
    rounded = round_stochastically(values.expand(20_000, -1), dtype)
    assert torch.equal(rounded.to(dtype).float(), rounded)
    step = torch.finfo(dtype).eps * values.abs()
    assert ((rounded - values).abs() <= step).all()
    assert ((rounded.mean(0) - values).abs() <= 0.02 * step).all()
    assert torch.equal(rounded[:, 4:], values[4:].expand(20_000, -1))


def test_stochastic_rounding_of_other_dtypes_raises() -> None:
    with pytest.raises(ValueError, match=r"received torch\.float32"):
        round_stochastically(torch.ones(1), torch.float32)


def test_steps_are_on_the_host_under_any_default_device() -> None:
    spec = OptimizerSpec(algorithm=EmbOptimType.ADAM)
    weight = torch.zeros(2, 4)
    with torch.device("meta"):
        state = init_state(spec, weight)
    assert {name: tensor.device.type for name, tensor in state.items()} == dict.fromkeys(
        state, "cpu"
    )
