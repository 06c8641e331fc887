"""Optimizers of a table and their rates: its own optimizer, a torch optimizer, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.optim import Adam, RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import (
    apply_optimizer_in_backward,
    attached_optimizer,
)
from recsys.optim.optimizers import in_backward_optimizer_filter
from tests.distributed.cases import (
    CLOSE,
    CPU,
    Case,
    EachType,
    Model,
    assert_same,
    concat_batches,
    shard,
    train,
    whole_state,
)
from tests.ranks import RankPool


def tables_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole tables by name, copied; every rank must call it."""
    return {name: v for name, v in whole_state(model).items() if name.startswith("ebc.")}


def learning_rate_of(model: Model) -> dict[str, float]:
    """The settings of an unsharded model's tables."""
    attached = attached_optimizer(next(model.ebc.parameters()))
    assert attached is not None
    return attached.param_groups[0]


# -- the table's own optimizer ---------------------------------------------------------------------


def _change_the_learning_rate(case: Case) -> None:
    rank = dist.get_rank()
    reference, sharded = case.model(), shard(case)
    (group,) = sharded.fused_optimizer.param_groups
    assert group["lr"] == 0.1
    train(case, reference, range(1), rank=None)
    train(case, sharded, range(1), rank=rank)
    assert_same(tables_of(sharded), tables_of(reference))
    learning_rate_of(reference)["lr"] = 0.5
    group["lr"] = 0.5
    train(case, reference, range(1, 3), rank=None)
    train(case, sharded, range(1, 3), rank=rank)
    assert_same(tables_of(sharded), tables_of(reference))
    before = tables_of(sharded)
    group["lr"] = 0.0
    train(case, sharded, range(3, 4), rank=rank)
    assert_same(tables_of(sharded), before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad])
def test_learning_rate_changes_at_once(
    ranks: RankPool, optimizer: type[torch.optim.Optimizer]
) -> None:
    ranks(2, _change_the_learning_rate, EachType(1, 2, optimizer=optimizer))


def _follow_a_scheduler(case: Case) -> None:
    rank = dist.get_rank()
    reference, sharded = case.model(), shard(case)
    optimizer = sharded.fused_optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step, learning_rate in enumerate([0.1, 0.05, 0.025]):
        learning_rate_of(reference)["lr"] = learning_rate
        assert optimizer.param_groups[0]["lr"] == learning_rate
        train(case, reference, range(step, step + 1), rank=None)
        train(case, sharded, range(step, step + 1), rank=rank)
        optimizer.step()
        scheduler.step()
    assert_same(tables_of(sharded), tables_of(reference))


def test_schedulers_of_torch_reach_the_tables(ranks: RankPool) -> None:
    ranks(2, _follow_a_scheduler, EachType(2, 2, optimizer=RowWiseAdagrad))


def _own_optimizers(case: Case) -> None:
    """Each table has another optimizer or learning rate."""
    chosen = [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.3}),
        (RowWiseAdagrad, {"lr": 0.1}),
        (Adam, {"lr": 0.1}),
    ]
    models = []
    for _ in range(2):
        model = case.model()
        for parameter, (optimizer, settings) in zip(model.ebc.parameters(), chosen, strict=True):
            apply_optimizer_in_backward(optimizer, [parameter], settings)
        models.append(model)
    reference, model = models
    sharded = DistributedModelParallel(model, device=CPU, plan=case.plan())
    groups = sharded.fused_optimizer.param_groups
    assert [g["lr"] for g in groups] == [0.1, 0.3, 0.1, 0.1]
    train(case, reference, range(3), rank=None)
    train(case, sharded, range(3), rank=dist.get_rank())
    assert_same(tables_of(sharded), tables_of(reference))
    before = tables_of(sharded)
    for group in groups:
        group["lr"] = 0.0 if group is not groups[1] else 0.3
    train(case, sharded, range(3, 4), rank=dist.get_rank())
    after = tables_of(sharded)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == [list(before)[1]]


def test_each_table_has_its_own_optimizer(ranks: RankPool) -> None:
    ranks(2, _own_optimizers, EachType(3, 2, optimizer=None))


def _replicas(case: Case) -> dict[str, Tensor]:
    rank = dist.get_rank()
    reference, sharded = case.model(), shard(case)
    assert not torch.equal(case.batches(0)[0].lengths(), case.batches(0)[1].lengths())
    train(case, reference, range(3), rank=None)
    train(case, sharded, range(3), rank=rank)
    name = "ebc.embedding_bags.data_parallel.weight"
    states = sharded.fused_optimizer.state_dict()["state"][name]
    for key, value in reference.ebc.optimizer_states()["data_parallel"].items():
        torch.testing.assert_close(states[key], value, **CLOSE)
    return {"weight": sharded.state_dict()[name].clone(), **states}


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad, Adam])
def test_replicated_tables_keep_their_optimizer(
    ranks: RankPool, optimizer: type[torch.optim.Optimizer]
) -> None:
    first, second = ranks(2, _replicas, EachType(4, 2, optimizer=optimizer))
    assert len(first) > 1
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=0, atol=0)


def _nothing_left_to_step(case: Case) -> None:
    sharded = shard(case)
    train(case, sharded, range(1), rank=dist.get_rank())
    before = tables_of(sharded)
    sharded.fused_optimizer.step()
    sharded.fused_optimizer.zero_grad()
    assert_same(tables_of(sharded), before)
    own = [p for n, p in sharded.named_parameters() if n.startswith("ebc.")]
    assert own
    assert all(parameter.grad is None for parameter in own)
    left = {name for name, _ in in_backward_optimizer_filter(sharded.named_parameters())}
    assert left == {"over.weight", "over.bias"}


def test_no_gradient_is_kept(ranks: RankPool) -> None:
    ranks(2, _nothing_left_to_step, EachType(5, 2, optimizer=RowWiseAdagrad))


# -- no optimizer ----------------------------------------------------------------------------------


def _freeze(case: Case, frozen: list[str]) -> None:
    models = [case.model(), case.model()]
    for model in models:
        for name in frozen:
            model.ebc.embedding_bags[name].weight.requires_grad_(False)
    reference, model = models
    before = tables_of(reference)
    sharded = DistributedModelParallel(model, device=CPU, plan=case.plan())
    train(case, reference, range(3), rank=None)
    train(case, sharded, range(3), rank=dist.get_rank())
    after = tables_of(sharded)
    assert_same(after, tables_of(reference))
    for name in case.configs():
        key = f"ebc.embedding_bags.{name.name}.weight"
        assert torch.equal(after[key], before[key]) == (name.name in frozen), key
        assert (key not in sharded.fused_optimizer.params) == (name.name in frozen), key
    for name, parameter in sharded.named_parameters():
        assert parameter.requires_grad != any(f".{table}." in name for table in frozen), name


TYPES = ["table_wise", "row_wise", "column_wise", "data_parallel"]


@pytest.mark.parametrize("frozen", [*([name] for name in TYPES), TYPES], ids=lambda f: "+".join(f))
def test_frozen_tables_stay(ranks: RankPool, frozen: list[str]) -> None:
    ranks(2, _freeze, EachType(6, 2, optimizer=RowWiseAdagrad), frozen)


# -- a torch optimizer -----------------------------------------------------------------------------

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _step(case: Case, model: nn.Module, step: int, rank: int | None) -> None:
    batches = case.batches(step)
    pooled, logits = model(concat_batches(batches) if rank is None else batches[rank])
    scale = 1 / case.world_size if rank is None else 1.0
    (((pooled * pooled.detach().sin()).sum() + logits.pow(2).sum()) * scale).backward()


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adagrad(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def _train_by(case: Case, make: Make, accumulate: int) -> None:
    rank = dist.get_rank()
    reference, sharded = case.model(), shard(case)
    assert not sharded.fused_optimizer.params
    plain = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    assert plain.keys() == dict(sharded.named_parameters()).keys()
    both = [(reference, make(reference.parameters()), None), (sharded, make(plain.values()), rank)]
    for model, optimizer, who in both:
        for first in range(0, 3 * accumulate, accumulate):
            optimizer.zero_grad()
            for step in range(first, first + accumulate):
                _step(case, model, step, who)
            optimizer.step()
    assert_same(tables_of(sharded), tables_of(reference))
    torch.testing.assert_close(sharded.module.over.weight, reference.over.weight, **CLOSE)


@pytest.mark.parametrize("make", [_sgd, _adagrad, _adamw])
def test_tables_without_an_optimizer_are_plain_parameters(ranks: RankPool, make: Make) -> None:
    ranks(2, _train_by, EachType(7, 2, optimizer=None), make, 1)


def test_gradients_of_plain_parameters_add_up(ranks: RankPool) -> None:
    ranks(2, _train_by, EachType(8, 2, optimizer=None), _adagrad, 2)
