"""Calls of `recsys.optim`."""

from __future__ import annotations

import torch
from torch import nn

from recsys import optim
from recsys.optim.specs import optimizer_spec
from tests.fuzz.argument_kinds import (
    Kind,
    either,
    flag,
    function,
    made,
    many,
    mapping,
    maybe,
    member,
    number,
    subclass,
    tensor,
    text,
    whole,
)
from tests.fuzz.calls.call import Call, method
from tests.fuzz.calls.modules import bags


def _parameter() -> nn.Parameter:
    weight = nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones(3, 2)
    return weight


def keyed() -> optim.KeyedOptimizerWrapper:
    """An optimizer with names."""
    return optim.KeyedOptimizerWrapper(
        {"w": _parameter()}, lambda params: torch.optim.SGD(params, lr=0.1)
    )


def _is_params(value: object) -> bool | None:
    if isinstance(value, torch.Tensor) or not hasattr(value, "__iter__"):
        return False
    if isinstance(value, list | tuple | set | dict | str | bytes):
        wanted = tensor(_parameter).is_legal
        is_right = bool(value) and all(wanted(one) is None or type(one) is dict for one in value)
        return None if is_right and not isinstance(value, dict) else False
    return None


PARAMS = Kind(lambda: [_parameter()], _is_params)
RATE, DECAY = number(0.1, 0), number(0.0, 0)
BETAS = {
    "betas": many(lambda: [0.9, 0.99], number(0.9, 0, 1), 2),
    "eps": number(1e-8, 0),
}
KEYED = made(keyed, optim.KeyedOptimizer)
STAGE = {
    "policy": member(optim.WarmupPolicy.LINEAR), "max_iters": whole(3), "value": number(0.5),
    "lr_scale": number(1.0), "decay_iters": whole(2, -1), "sgdr_period": whole(2),
    "start_interpolating_iters": maybe(whole(1, 0)), "end_value": maybe(number(0.5)),
}  # fmt: skip
STEP = {"closure": maybe(function(lambda: 1.0))}
TYPE = subclass(torch.optim.SGD, torch.optim.Optimizer)

CALLS = [
    *(
        Call(kind.__name__, kind, {"params": PARAMS, "lr": RATE, "weight_decay": DECAY, **BETAS})
        for kind in (
            optim.Adam, optim.AdamW, optim.AdamL2, optim.LAMB, optim.PartialRowWiseAdam,
            optim.PartialRowWiseLAMB,
        )
    ),
    Call("SGD", optim.SGD, {"params": PARAMS, "lr": RATE, "weight_decay": DECAY}),
    Call("Adagrad", optim.Adagrad, {
        "params": PARAMS, "lr": RATE, "weight_decay": DECAY, "eps": number(1e-8, 0),
    }),
    Call("RowWiseAdagrad", optim.RowWiseAdagrad, {
        "params": PARAMS, "lr": RATE, "weight_decay": DECAY, "eps": number(1e-8, 0),
        "lr_decay": number(0.0, 0), "initial_accumulator_value": number(0.0, 0),
        "maximize": flag(False),
    }),
    Call("LarsSGD", optim.LarsSGD, {
        "params": PARAMS, "lr": RATE, "weight_decay": DECAY, "momentum": number(0.9, 0),
        "eta": number(0.001, 0),
    }),
    Call("apply_optimizer_in_backward", optim.apply_optimizer_in_backward, {
        "optimizer_class": TYPE, "params": Kind(
            lambda: [_parameter()],
            lambda value: None if isinstance(value, list | tuple | set) and not value
            else _is_params(value),
        ),
        "optimizer_kwargs": mapping(lambda: {"lr": 0.1}),
        "update_mode": text("fused"), "row_state": text("exact"),
        "stochastic_rounding": flag(False),
    }),
    Call("in_backward_optimizer_filter", lambda **given: list(
        optim.in_backward_optimizer_filter(**given)), {
        "named_parameters": many(
            lambda: list(bags().named_parameters()),
            Kind(lambda: None, lambda value: None if isinstance(value, tuple) else False)),
        "include": flag(False),
    }),
    Call("set_learning_rate", optim.set_learning_rate, {
        "optimizer": made(keyed, torch.optim.Optimizer), "lr": RATE,
    }),
    Call("optimizer_spec", optimizer_spec, {
        "optimizer_class": TYPE, "optimizer_kwargs": mapping(lambda: {"lr": 0.1}),
    }),
    Call("KeyedOptimizer", optim.KeyedOptimizer, {
        "params": mapping(lambda: {"w": _parameter()}, tensor(_parameter)),
        "state": Kind(dict, lambda value: None if isinstance(value, dict) else False),
        "param_groups": many(lambda: [], Kind(dict, lambda value: None if isinstance(
            value, dict) else False)),
    }),
    Call("KeyedOptimizer.load_state_dict", method(keyed, "load_state_dict"), {
        "state_dict": Kind(lambda: keyed().state_dict(), lambda value: None if isinstance(
            value, dict) and "state" in value else False),
    }),
    Call("KeyedOptimizer.save_param_groups", method(keyed, "save_param_groups"), {
        "save": flag(True),
    }),
    Call("KeyedOptimizer.init_state", method(keyed, "init_state"), {
        "sparse_grad_parameter_names": maybe(Kind(
            lambda: {"w"},
            lambda value: None if isinstance(value, set | list | tuple | dict) and all(
                isinstance(one, str) for one in value) else False)),
    }),
    Call("KeyedOptimizerWrapper", optim.KeyedOptimizerWrapper, {
        "params": mapping(lambda: {"w": _parameter()}, tensor(_parameter)),
        "optim_factory": Kind(
            lambda: lambda params: torch.optim.SGD(params, lr=0.1),
            lambda value: None if value is torch.optim.SGD else False),
    }),
    Call("KeyedOptimizerWrapper.step", method(keyed, "step"), STEP),
    Call("KeyedOptimizerWrapper.zero_grad", method(keyed, "zero_grad"), {
        "set_to_none": flag(True),
    }),
    Call("CombinedOptimizer", optim.CombinedOptimizer, {
        "optims": many(lambda: [("a", keyed())], either(KEYED, Kind(
            lambda: None, lambda value: None if isinstance(value, tuple) and len(
                value) == 2 and KEYED.is_legal(value[1]) is None else False))),
    }),
    Call("CombinedOptimizer.step", method(
        lambda: optim.CombinedOptimizer([("a", keyed())]), "step"), STEP),
    Call("CombinedOptimizer.prepend_opt_key", optim.CombinedOptimizer.prepend_opt_key, {
        "name": text("w"), "opt_key": text("a"),
    }),
    Call("OptimizerWrapper", optim.OptimizerWrapper, {"optimizer": KEYED}),
    Call("GradientClippingOptimizer", optim.GradientClippingOptimizer, {
        "optimizer": KEYED, "clipping": member(optim.GradientClipping.NORM),
        "max_gradient": number(0.1, 0, is_finite=False), "norm_type": either(
            number(2.0, is_finite=False), text("inf")),
        "enable_global_grad_clip": flag(False),
        "param_to_pgs": maybe(Kind(lambda: None, lambda value: None if isinstance(
            value, dict) else False)),
        "track_grad_norm": flag(False),
    }),
    Call("GradScaler", optim.GradScaler, {
        "device": text("cpu"), "init_scale": number(4.0, 0), "growth_factor": number(2.0, 1),
        "backoff_factor": number(0.5, 0, 1), "growth_interval": whole(3), "enabled": flag(True),
        "process_group": maybe(Kind(lambda: None, lambda value: False)),
    }),
    Call("WarmupStage", optim.WarmupStage, STAGE),
    Call("WarmupStage.factor", method(optim.WarmupStage, "factor"), {"step": whole(1, 0)}),
    Call("WarmupOptimizer", optim.WarmupOptimizer, {
        "optimizer": KEYED, "stages": many(lambda: [optim.WarmupStage()], made(optim.WarmupStage)),
        "lr": RATE, "lr_param": text("lr"), "param_name": text("__warmup"),
    }),
]  # fmt: skip
