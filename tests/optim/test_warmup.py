"""Learning rates follow the stages; progress is saved."""

from __future__ import annotations

import copy

import pytest
import torch

from recsys.optim import (
    CombinedOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)

P = WarmupPolicy
CONSTANT = WarmupStage(P.CONSTANT, max_iters=2, value=0.7)


def wrapped(name: str = "p", lr: float = 5.0) -> KeyedOptimizerWrapper:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    return KeyedOptimizerWrapper({name: parameter}, lambda ps: torch.optim.SGD(ps, lr=lr))


def rates(optimizer: WarmupOptimizer, steps: int) -> list[float]:
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


# As TorchRec 1.8.0 sets them, at lr=0.1 (run beside it; `1/sqrt(0)` fails there).
AS_PEER = {
    "linear": ([WarmupStage(P.LINEAR, 4, 0.1)], [0.01, 0.0325, 0.055, 0.0775, 0.1, 0.1, 0.1]),
    "none": ([WarmupStage(P.NONE, 2, 0.3)], [0.1, 0.1, 0.1, 0.1]),
    "default": ([WarmupStage()], [0.1, 0.1, 0.1]),
    "nothing": ([], [0.1, 0.1]),
    "poly": (
        [WarmupStage(P.POLY, 5, 2.0, decay_iters=4)],
        [0.1, 0.05625, 0.025, 0.00625, 0.0, 0.00625, 0.1],
    ),
    "poly, decay of the whole stage": (
        [WarmupStage(P.POLY, 5, 2.0)],
        [0.1, 0.064, 0.036, 0.016, 0.004, 0.0, 0.1],
    ),
    "step": (
        [WarmupStage(P.STEP, 7, 0.5, decay_iters=2)],
        [0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125, 0.1],
    ),
    "cosine": (
        [WarmupStage(P.COSINE_ANNEALING_WARM_RESTARTS, 9, 0.1, sgdr_period=4)],
        [0.1, 0.0868198, 0.055, 0.0231802, 0.1, 0.0868198, 0.055, 0.0231802, 0.1, 0.0868198, 0.1],
    ),
    "cosine, scaled": (
        [WarmupStage(P.COSINE_ANNEALING_WARM_RESTARTS, 3, 0.3, lr_scale=3.0)],
        [0.3, 0.3, 0.3, 0.3, 0.1],
    ),
    "interpolate": (
        [WarmupStage(P.INTERPOLATE, 6, 0.2, start_interpolating_iters=2, end_value=0.8)],
        [-0.01, 0.005, 0.02, 0.035, 0.05, 0.065, 0.08, 0.1],
    ),
    "linear, second": (
        [CONSTANT, WarmupStage(P.LINEAR, 8, 0.1)],
        [0.07, 0.07, 0.07, 0.04375, 0.055, 0.06625, 0.0775, 0.08875, 0.1, 0.1],
    ),
    "inverse root, second": (
        [CONSTANT, WarmupStage(P.INVSQRT, 8, 0.4)],
        [0.07, 0.07, 0.07, 0.0577350, 0.05, 0.0447214, 0.0408248, 0.0377964, 0.0353553, 0.1],
    ),
    "step, second, decay of one": (
        [CONSTANT, WarmupStage(P.STEP, 5, 0.5)],
        [0.07, 0.07, 0.07, 0.0125, 0.00625, 0.003125, 0.1],
    ),
    "four stages": (
        [
            WarmupStage(P.LINEAR, 3, 0.1),
            WarmupStage(P.CONSTANT, 6, 1.0),
            WarmupStage(P.STEP, 10, 0.5, decay_iters=2),
            WarmupStage(P.POLY, 12, 1.0, decay_iters=16),
        ],
        [
            *[0.01, 0.04, 0.07, 0.1, 0.1, 0.1, 0.1, 0.0125, 0.00625, 0.00625, 0.003125],
            *[0.03125, 0.025, 0.1],
        ],
    ),
}


@pytest.mark.parametrize("case", AS_PEER)
def test_rates_are_those_of_torchrec(case: str) -> None:
    stages, expected = AS_PEER[case]
    assert rates(WarmupOptimizer(wrapped(), stages), len(expected) - 1) == pytest.approx(
        expected, abs=1e-7
    )


def test_the_inverse_root_starts_at_one() -> None:
    optimizer = WarmupOptimizer(wrapped(), [WarmupStage(P.INVSQRT, 2)], lr=0.2)
    assert rates(optimizer, 1) == pytest.approx([0.2, 0.2])


def test_progress_is_saved_and_resumed() -> None:
    stages = [WarmupStage(P.LINEAR, 3, 0.1), WarmupStage(P.STEP, 10, 0.5, decay_iters=2)]
    whole = rates(WarmupOptimizer(wrapped(), stages), 8)
    first, second = (WarmupOptimizer(wrapped(), stages) for _ in range(2))
    rates(first, 5)
    state = copy.deepcopy(first.state_dict())
    assert state["state"]["__warmup"]["warmup"].tolist() == [5, 1]
    second.load_state_dict(state)
    assert rates(second, 3) == whole[5:]


def test_a_state_without_progress_raises() -> None:
    optimizer = WarmupOptimizer(wrapped(), [WarmupStage()], param_name="progress")
    with pytest.raises(KeyError, match="progress as 'progress'"):
        optimizer.load_state_dict(wrapped().state_dict())


def test_every_group_of_joined_optimizers_follows() -> None:
    joined = CombinedOptimizer([("a", wrapped(lr=1.0)), ("b", wrapped(lr=2.0))])
    optimizer = WarmupOptimizer(joined, [WarmupStage(P.LINEAR, 2, 0.5)], lr=0.2)
    assert [group["lr"] for group in joined.param_groups] == [0.1, 0.1]
    optimizer.step()
    assert [group["lr"] for group in joined.param_groups] == pytest.approx([0.15, 0.15])
    assert sorted(optimizer.params) == ["a.p", "b.p"]


def test_one_of_joined_optimizers_saves_its_progress() -> None:
    def build(lr: float = 0.2) -> CombinedOptimizer:
        warm = WarmupOptimizer(wrapped("t"), [WarmupStage(P.LINEAR, 4, 0.0)], lr=lr)
        return CombinedOptimizer([("tables", warm), wrapped("dense")])

    first, second = build(), build(lr=0.4)
    for joined in (first, second):
        joined.save_param_groups(True)
    for _ in range(2):
        first.step()
    state = copy.deepcopy(first.state_dict())
    assert state["state"]["tables.__warmup"]["warmup"].tolist() == [2, 0]
    second.load_state_dict(state)
    assert [group["lr"] for group in second.param_groups] == pytest.approx([0.2, 5.0])
    second.step()
    assert second.param_groups[0]["lr"] == pytest.approx(0.3)
    del state["state"]["tables.__warmup"]
    with pytest.raises(KeyError, match=r"missing: \['tables.__warmup'\]"):
        second.load_state_dict(state)


def test_another_setting_can_be_warmed_up() -> None:
    optimizer = WarmupOptimizer(wrapped(), [CONSTANT], lr=0.2, lr_param="momentum")
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (5.0, pytest.approx(0.14))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": P.INTERPOLATE, "max_iters": 3}, "needs start_interpolating_iters and end_val"),
        (
            {
                "policy": P.INTERPOLATE,
                "max_iters": 3,
                "start_interpolating_iters": 3,
                "end_value": 1.0,
            },
            "smaller than max_iters; .*3 and 3",
        ),
        ({"sgdr_period": 0}, r"WarmupStage\.sgdr_period must be positive; received 0"),
        ({"max_iters": 0}, r"WarmupStage\.max_iters must be positive; received 0"),
        ({"decay_iters": 0}, "decay_iters must be positive, .*received 0"),
        ({"decay_iters": -2}, "decay_iters must be .*-1; received -2"),
        ({"policy": "lineal"}, "policy must be .*none, linear.*'lineal'"),
        ({"value": float("nan")}, r"WarmupStage\.value must be finite; received nan"),
    ],
)
def test_bad_stages_raise(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarmupStage(**settings)  # type: ignore[arg-type]


def test_a_policy_may_be_named() -> None:
    assert WarmupStage("linear", 4, 0.5) == WarmupStage(P.LINEAR, 4, 0.5)  # type: ignore[arg-type]
    assert WarmupStage("INVSQRT").policy is P.INVSQRT  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [float("nan"), -1.0])
def test_the_rate_is_a_rate(rate: float) -> None:
    with pytest.raises(ValueError, match=r"WarmupOptimizer\.lr must be finite and"):
        WarmupOptimizer(wrapped(), [], lr=rate)


@pytest.mark.parametrize("iters", [[3, 3], [4, 2]])
def test_stages_must_ascend(iters: list[int]) -> None:
    stages = [WarmupStage(P.CONSTANT, max_iters=i) for i in iters]
    with pytest.raises(ValueError, match="must ascend from 1 on"):
        WarmupOptimizer(wrapped(), stages)


def test_the_name_of_the_progress_must_be_free() -> None:
    with pytest.raises(ValueError, match="received 'p'"):
        WarmupOptimizer(wrapped(), [], param_name="p")
