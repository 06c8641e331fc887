"""Learning rates and schedules resume at their values; another optimizer's state is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from recsys.distributed.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.optim import LAMB, Adam, RowWiseAdagrad
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tests.distributed.cases import CPU, EachType, shard
from tests.ranks import RankPool


def _wrapped(model: nn.Module, kind: Any, **settings: Any) -> KeyedOptimizerWrapper:
    optimizer = KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda params: kind(params, **settings)
    )
    optimizer.init_state()
    return optimizer


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize(
    ("kind", "saved", "other"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"lr": 1, "momentum": 1}),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3}, {"weight_decay": 1}),
        (torch.optim.AdamW, {"lr": 0.1 + 0.2, "weight_decay": 1e-300}, {"lr": 1}),
        (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.5}, {"lr": 1, "eps": 1}),
    ],
)
def test_settings_of_torch_optimizers_come_back(
    tmp_path: Path, kind: Any, saved: dict[str, Any], other: dict[str, Any]
) -> None:
    model = nn.Linear(2, 1)
    before, after = _wrapped(model, kind, **saved), _wrapped(model, kind, **other)
    save_checkpoint(tmp_path, model, before)
    kept = _settings(after)
    load_checkpoint(tmp_path, model, after, keep_settings=True)
    assert _settings(after) == kept != _settings(before)
    load_checkpoint(tmp_path, model, after)
    assert _settings(after) == _settings(before)


def test_how_torch_computes_stays(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    before = _wrapped(model, torch.optim.Adam, lr=torch.tensor(0.25), foreach=False)
    after = _wrapped(model, torch.optim.Adam, lr=1, foreach=True)
    save_checkpoint(tmp_path, model, before)
    load_checkpoint(tmp_path, model, after)
    assert after.param_groups[0]["lr"] == 0.25
    assert after.param_groups[0]["foreach"] is True
    after.param_groups[0]["lr"] = torch.tensor(1.0)
    load_checkpoint(tmp_path, model, after)
    assert torch.equal(after.param_groups[0]["lr"], torch.tensor(0.25))


def _table_and_dense(optimizer: Any, **settings: Any) -> DistributedModelParallel:
    case = EachType(1, 1, optimizer=optimizer, hyperparameters=tuple(settings.items()))
    env = ShardingEnv.from_local()
    return DistributedModelParallel(case.model(), env=env, device=CPU, plan=case.plan())


def _optimizer(model: DistributedModelParallel) -> CombinedOptimizer:
    return CombinedOptimizer(
        [model.fused_optimizer, ("dense", _wrapped(model.module.over, torch.optim.Adam, lr=0.5))]
    )


def _rates(optimizer: CombinedOptimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_a_scheduler_goes_on(tmp_path: Path) -> None:
    model = _table_and_dense(RowWiseAdagrad, lr=8.0)
    optimizer = _optimizer(model)
    schedule = StepLR(optimizer, step_size=2, gamma=0.5)
    rates = []
    for step in range(6):
        if step == 3:
            save_checkpoint(tmp_path, model, optimizer, {"schedule": schedule.state_dict()})
        rates.append(_rates(optimizer))
        optimizer.step()
        schedule.step()
    again = _table_and_dense(RowWiseAdagrad, lr=1.0)
    resumed = _optimizer(again)
    extra = load_checkpoint(tmp_path, again, resumed)
    going_on = StepLR(resumed, step_size=2, gamma=0.5, last_epoch=0)  # finds its initial_lr
    load_checkpoint(tmp_path, again, resumed)
    going_on.load_state_dict(extra["schedule"])
    for expected in rates[3:]:
        assert _rates(resumed) == expected
        resumed.step()
        going_on.step()


def test_the_rate_of_tables_is_that_of_their_kernels(tmp_path: Path) -> None:
    case = EachType(1, 1, optimizer=RowWiseAdagrad)
    models = [_table_and_dense(RowWiseAdagrad, lr=lr) for lr in (0.25, 4.0)]
    models[0].fused_optimizer.param_groups[0]["lr"] = 2.0
    save_checkpoint(tmp_path, models[0], models[0].fused_optimizer)
    load_checkpoint(tmp_path, models[1], models[1].fused_optimizer)
    for model in models:
        model(case.batches(0)[0])[1].sum().backward()
    for name, parameter in models[0].named_parameters():
        assert torch.equal(dict(models[1].named_parameters())[name], parameter)


@pytest.mark.parametrize(("saved", "own"), [(LAMB, Adam), (Adam, LAMB)])
def test_lamb_does_not_load_into_adam(tmp_path: Path, saved: Any, own: Any) -> None:
    kinds = {LAMB: "lamb", Adam: "adam"}
    names = rf"holds the state of {kinds[saved]} for .*; this optimizer is {kinds[own]}"
    model = _table_and_dense(saved)
    save_checkpoint(tmp_path / "tables", model, model.fused_optimizer)
    other = _table_and_dense(own)
    with pytest.raises(CheckpointError, match=names):
        load_checkpoint(tmp_path / "tables", other, other.fused_optimizer)
    load_checkpoint(tmp_path / "tables", other)
    dense = nn.Linear(2, 1)
    save_checkpoint(tmp_path / "dense", dense, _wrapped(dense, saved))
    with pytest.raises(CheckpointError, match=names):
        load_checkpoint(tmp_path / "dense", dense, _wrapped(dense, own), keep_settings=True)


def test_a_fixed_setting_of_tables_is_an_error_or_kept(tmp_path: Path) -> None:
    model = _table_and_dense(Adam, eps=0.5)
    save_checkpoint(tmp_path, model, model.fused_optimizer)
    other = _table_and_dense(Adam, eps=0.25)
    with pytest.raises(CheckpointError, match=r"eps=0\.5 for \['ebc.*here it is 0\.25"):
        load_checkpoint(tmp_path, other, other.fused_optimizer)
    load_checkpoint(tmp_path, other, other.fused_optimizer, keep_settings=True)
    group = other.fused_optimizer.param_groups[0]
    with pytest.raises(ValueError, match=r"'eps' of tables.*fixed.* 0\.25; .*1"):
        group["eps"] = 1
    group["eps"] = 0.25


def test_parameters_of_one_group_need_one_setting(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)

    def grouped(params: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": params[:1], "lr": 1}, {"params": params[1:], "lr": 2}])

    save_checkpoint(tmp_path, model, KeyedOptimizerWrapper(dict(model.named_parameters()), grouped))
    with pytest.raises(CheckpointError, match=r"for 'bias' and .* for 'weight'"):
        load_checkpoint(tmp_path, model, _wrapped(model, torch.optim.SGD, lr=3))


def test_a_checkpoint_without_optimizer_is_an_error(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    save_checkpoint(tmp_path, model)
    optimizer = _wrapped(model, torch.optim.SGD, lr=3)  # which has no state that could lack
    with pytest.raises(CheckpointError, match=r"the optimizer of 2 parameters: \['bias'"):
        load_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, model, optimizer, allow_partial=True)
    assert optimizer.param_groups[0]["lr"] == 3


def test_a_setting_that_is_no_value_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = _wrapped(model, torch.optim.SGD, lr=3)
    optimizer.param_groups[0]["schedule"] = print
    with pytest.raises(CheckpointError, match=r"Setting 'schedule' of .* of \['weight'"):
        save_checkpoint(tmp_path, model, optimizer)


def _settings_over_plans(path: str, seed: int, saves: bool) -> list[float] | str:
    case = EachType(5, 2, optimizer=None)
    model = shard(case, case.plan(seed))
    optimizer = _wrapped(model, torch.optim.Adam, lr=0.125 if saves else 1.0)
    if saves:
        save_checkpoint(path, model, optimizer)
    else:
        load_checkpoint(path, model, optimizer)
    if seed == 9 and torch.distributed.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    if seed == 9:
        with pytest.raises(CheckpointError) as raised:
            save_checkpoint(path, model, optimizer)
        return str(raised.value)
    return _rates(optimizer)  # type: ignore[arg-type]


def test_settings_load_under_another_plan(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path)
    ranks(2, _settings_over_plans, path, 0, True, timeout=20.0)
    assert ranks(2, _settings_over_plans, path, 1, False, timeout=20.0) == [[0.125]] * 2
    one, other = ranks(2, _settings_over_plans, path, 9, False, timeout=20.0)
    assert one == other
    assert "must be the same on all ranks; received" in one
