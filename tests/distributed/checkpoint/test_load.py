"""The plan is not in the checkpoint: models under other plans load it, with the optimizer state.

All strategies, and training after a load: tests/conformance/test_checkpoints.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.optim import Adam, RowWiseAdagrad
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tests.distributed.cases import (
    CPU,
    Case,
    EachType,
    concat_batches,
    shard,
    train,
    whole,
    whole_state,
)
from tests.ranks import RankPool


def _optimizer(model: DistributedModelParallel) -> CombinedOptimizer:
    dense = KeyedOptimizerWrapper(
        {f"over.{name}": p for name, p in model.module.over.named_parameters()},
        lambda params: torch.optim.Adam(params, lr=0.1),
    )
    dense.init_state()
    return CombinedOptimizer([model.fused_optimizer, dense])


def _everything(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> dict:
    state = whole_state(model)
    for param, states in optimizer.state_dict()["state"].items():
        for name, value in states.items():
            state[f"{param}/{name}"] = whole(value)
    return state


def _train_and_save(case: Case, path: str, plan_seed: int) -> dict:
    model = shard(case, case.plan(plan_seed))
    optimizer = _optimizer(model)
    train(case, model, range(3), rank=dist.get_rank())
    save_checkpoint(path, model, optimizer, {"epoch": 3})
    return _everything(model, optimizer)


def _load(case: Case, path: str, plan_seed: int) -> dict:
    torch.manual_seed(99)
    model = shard(case, case.plan(plan_seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)  # shows each value that the load leaves unset
    optimizer = _optimizer(model)
    extra = load_checkpoint(path, model, optimizer)
    assert extra == {"epoch": 3}
    return _everything(model, optimizer)


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad, Adam])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (4, 2)])
def test_loads_under_another_plan_and_world_size(
    ranks: RankPool,
    tmp_path: Path,
    saved_on: int,
    loaded_on: int,
    optimizer: type[torch.optim.Optimizer],
) -> None:
    seed = 10 * saved_on + loaded_on
    path = str(tmp_path / "checkpoint")
    saved = ranks(saved_on, _train_and_save, Case(seed, saved_on, optimizer=optimizer), path, 0)[0]
    for loaded in ranks(loaded_on, _load, Case(seed, loaded_on, optimizer=optimizer), path, 1):
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, msg=name)


def _load_into_unsharded(case: Case, path: str) -> None:
    model = case.model()
    load_checkpoint(path, model)
    saved = _train_and_save(case, path + "2", 0)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, saved[name], rtol=0, atol=0)


def test_loads_into_the_unsharded_model(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(5, 2)
    ranks(2, _train_and_save, case, str(tmp_path / "c"), 0)
    ranks(2, _load_into_unsharded, case, str(tmp_path / "c"))


def _single(case: Case) -> DistributedModelParallel:
    return DistributedModelParallel(
        case.model(), env=ShardingEnv.from_local(), device=CPU, plan=case.plan()
    )


def test_saves_and_loads_without_a_process_group(tmp_path: Path) -> None:
    case = Case(1, 1)
    model, other = _single(case), _single(Case(1, 1))
    train(case, model, range(2), rank=0)
    save_checkpoint(tmp_path / "c", model, model.fused_optimizer)
    load_checkpoint(tmp_path / "c", other, other.fused_optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(whole(other.state_dict()[name]), whole(value))


def test_missing_optimizer_state_is_an_error_unless_allowed(tmp_path: Path) -> None:
    case = Case(1, 1, optimizer=RowWiseAdagrad)
    model = _single(case)
    with pytest.warns(UserWarning, match="lacks the optimizer state of"):
        save_checkpoint(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match=r"lacks \d+ of the values.*\['optimizer"):
        load_checkpoint(tmp_path / "c", model, model.fused_optimizer)
    load_checkpoint(tmp_path / "c", model, model.fused_optimizer, allow_partial=True)


def test_damaged_and_absent_checkpoints_are_named(tmp_path: Path) -> None:
    model = _single(Case(1, 1))
    with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
        load_checkpoint(tmp_path / "nothing", model)
    save_checkpoint(tmp_path / "c", model)
    (data,) = (tmp_path / "c" / "step-1").glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"checkpoint .*/c/step-1 cannot be loaded.*rank 0:"):
        load_checkpoint(tmp_path / "c", model)


def _with_adam(case: Case) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model = _single(case)
    dense = KeyedOptimizerWrapper(
        {f"over.{name}": p for name, p in model.module.over.named_parameters()},
        lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1),
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def test_a_fresh_optimizer_gets_the_state_it_does_not_have_yet(tmp_path: Path) -> None:
    case = Case(1, 1, optimizer=RowWiseAdagrad)
    (model, optimizer), (other, fresh) = _with_adam(case), _with_adam(case)
    for step in range(2):
        model(case.batches(step)[0])[1].sum().backward()
        optimizer.step()
    save_checkpoint(tmp_path / "c", model, optimizer, {"a": {"b": [1, 2]}, "t": torch.ones(2)})
    extra = load_checkpoint(tmp_path / "c", other, fresh)
    assert extra["a"] == {"b": [1, 2]}
    assert torch.equal(extra["t"], torch.ones(2))
    saved, loaded = _everything(model, optimizer), _everything(other, fresh)
    assert loaded.keys() == saved.keys()
    assert any(name.endswith("exp_avg") for name in saved)
    for name, value in saved.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, msg=name)


def test_values_without_a_place_are_an_error_unless_allowed(tmp_path: Path) -> None:
    both = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    one = nn.ModuleDict({"a": nn.Linear(2, 2)})
    save_checkpoint(tmp_path / "c", both)
    with pytest.raises(
        CheckpointError, match=r"no place for: \['model.b.bias', 'model.b.weight'\]"
    ):
        load_checkpoint(tmp_path / "c", one)
    load_checkpoint(tmp_path / "c", one, allow_partial=True)
    torch.testing.assert_close(one["a"].weight, both["a"].weight)


def _save_and_load_in_a_part_of_the_ranks(path: str) -> dict | None:
    """Ranks 1 and 2 have a model; rank 0 does something else and takes no part."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    env = ShardingEnv.from_process_group(group)
    case = EachType(1, 2, optimizer=RowWiseAdagrad)
    models = [
        DistributedModelParallel(case.model(), env=env, device=CPU, plan=case.plan())
        for _ in range(2)
    ]
    optimizers = [_optimizer(model) for model in models]
    train(case, models[0], range(2), rank=env.rank)
    save_checkpoint(path, models[0], optimizers[0], {"epoch": 1})
    assert load_checkpoint(path, models[1], optimizers[1]) == {"epoch": 1}
    expected, received = (_everything(*pair) for pair in zip(models, optimizers, strict=True))
    assert received.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(received[name], value, rtol=0, atol=0, msg=name)
    return received


def test_a_model_on_a_part_of_the_ranks_is_saved_by_them_alone(
    ranks: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "c")
    idle, saved, _ = ranks(3, _save_and_load_in_a_part_of_the_ranks, path, timeout=20.0)
    assert idle is None
    alone = _single(EachType(1, 1, optimizer=RowWiseAdagrad))
    load_checkpoint(path, alone)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(whole(value), saved[name], rtol=0, atol=0, msg=name)


def test_a_process_of_a_job_without_a_group_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # torchrun's, after destroy_process_group()
    model = nn.Linear(1, 1)
    save_checkpoint(tmp_path, model, extra={"epoch": 1})
    assert load_checkpoint(tmp_path, model) == {"epoch": 1}


def _save_alone(path: str) -> None:
    if dist.get_rank() == 1:
        model = _single(Case(1, 1))
        save_checkpoint(path, model, model.fused_optimizer)
        load_checkpoint(path, model, model.fused_optimizer)


def test_one_rank_of_a_job_saves_its_own_model(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, _save_alone, str(tmp_path / "c"), timeout=20.0)


# -- tables that a torch optimizer trains ----------------------------------------------------------


def _adam(model: nn.Module) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda params: torch.optim.Adam(params, lr=0.1)
    )


def _train_by_adam(case: Case, path: str) -> None:
    model = shard(case)
    optimizer = _adam(model)
    for step in range(3):
        optimizer.zero_grad()
        model(case.batches(step)[dist.get_rank()])[1].pow(2).sum().backward()
        optimizer.step()
    save_checkpoint(path, model, optimizer)


def _load_and_save_again(case: Case, path: str) -> None:
    model = shard(case, case.plan(seed=1))
    optimizer = _adam(model)
    load_checkpoint(path, model, optimizer)
    save_checkpoint(path + "2", model, optimizer)


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (3, 2), (1, 4)])
def test_torch_optimizers_of_tables_load_under_any_plan(
    ranks: RankPool, tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    seed, path = 10 * saved_on + loaded_on, str(tmp_path / "c")
    case = Case(seed, saved_on, optimizer=None)
    ranks(saved_on, _train_by_adam, case, path, timeout=20.0)
    ranks(
        loaded_on, _load_and_save_again, Case(seed, loaded_on, optimizer=None), path, timeout=20.0
    )
    states = []
    for folder in (path, path + "2"):
        model = case.model()
        optimizer = _adam(model)
        load_checkpoint(folder, model, optimizer)
        states.append({**model.state_dict(), **optimizer.state_dict()["state"]})
    expected = case.model()
    adam = _adam(expected)
    for step in range(3):
        adam.zero_grad()
        loss = expected(concat_batches(case.batches(step)))[1].pow(2).sum() / saved_on
        loss.backward()
        adam.step()
    states.append({**expected.state_dict(), **adam.state_dict()["state"]})
    first, second, unsharded = states
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    torch.testing.assert_close(first, unsharded, rtol=1e-4, atol=1e-4)


class _OddState(torch.optim.SGD):
    """Keeps what cannot be placed: one value per column."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["columns"] = param.detach().sum(0)


def _save_odd_state(path: str) -> str:
    case = EachType(1, 2, optimizer=None)
    model = shard(case)
    params = dict(model.named_parameters())
    optimizer = KeyedOptimizerWrapper(params, lambda params: _OddState(params, lr=0.1))
    if dist.get_rank() == 1:
        optimizer.step()
    with pytest.raises(CheckpointError) as raised:
        save_checkpoint(path, model, optimizer)
    return str(raised.value)


def test_state_that_cannot_be_placed_is_refused_on_every_rank(
    ranks: RankPool, tmp_path: Path
) -> None:
    one, other = ranks(2, _save_odd_state, str(tmp_path / "c"), timeout=20.0)
    assert one == other
    assert one.startswith("On rank 1: State 'columns' of 'ebc.embedding_bags.")


def _load_what_one_rank_lacks(path: str) -> str:
    case = EachType(1, 2, optimizer=None)
    model = shard(case)
    save_checkpoint(path, model)
    if dist.get_rank() == 1:
        model.module.extra = nn.Linear(1, 1)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path, model)
    return str(raised.value)


def test_errors_of_one_rank_are_raised_on_all(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks(2, _load_what_one_rank_lacks, str(tmp_path / "c"), timeout=20.0)
    assert one == other
    assert re.match(r"On rank 1: The checkpoint .* lacks 2 of the values to load: .*extra", one)
