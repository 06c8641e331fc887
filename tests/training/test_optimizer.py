"""`whole_optimizer` joins a torch optimizer with the one of the tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recsys import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig
from recsys.distributed.types import ShardingEnv
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.optim import (
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from recsys.training.optimizer import check_all_are_updated, whole_optimizer
from tests.ranks import RankPool
from tests.training.job import adam_of, model_of


def test_a_torch_optimizer_is_joined_with_the_fused_one() -> None:
    model = model_of(dropout=False)
    adam = adam_of(model)
    found = whole_optimizer(model, adam)
    assert set(found.params) == {name for name, _ in model.named_parameters()}
    assert whole_optimizer(model, found) is found
    assert adam.param_groups[0] in list(found.param_groups)  # a scheduler changes its rate


def test_an_unsharded_model_needs_no_other() -> None:
    model = nn.Linear(2, 1)
    optimizer = whole_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
    assert isinstance(optimizer, GradientClippingOptimizer)
    assert sorted(optimizer.params) == ["bias", "weight"]


def test_optimizers_that_do_not_fit_are_errors() -> None:
    model = model_of(dropout=False)
    with pytest.raises(ValueError, match=r"must leave out .*received \["):
        whole_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="received 2 others"):
        whole_optimizer(model, torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"Trainer\.optimizer must be a KeyedOptimizer or"):
        whole_optimizer(model, "adam")  # type: ignore[arg-type]
    linear = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="clip_norm"):
        whole_optimizer(linear, torch.optim.SGD(linear.parameters(), lr=0.1), clip_norm=-1.0)


def _forgotten(updates: str) -> str:
    """Return the error about a model whose second table nothing updates."""
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(9, 4, name, feature_names=[name]) for name in ("user", "film")]
    )
    kwargs = {"update_mode": "deferred" if "deferred" in updates else "fused"}
    named = [p for n, p in tables.named_parameters() if "user" in n or updates != "dense only"]
    apply_optimizer_in_backward(RowWiseAdagrad, named, {"lr": 0.1}, **kwargs)
    model = DLRMTrain(DLRM(tables, 2, [4], [4, 1]))
    model = DistributedModelParallel(model, device=torch.device("cpu"))
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = {name: p for name, p in rest.items() if "embedding_bags" not in name}
    optimizer: torch.optim.Optimizer = torch.optim.SGD(dense.values(), lr=0.1)
    if updates == "deferred without its step":
        optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))
    whole = whole_optimizer(model, optimizer)
    assert isinstance(whole, KeyedOptimizer)
    try:
        check_all_are_updated(model, whole, ShardingEnv.default())
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_parameter_that_nothing_updates_is_refused_on_all_ranks(
    ranks: RankPool, world_size: int
) -> None:
    name = "model.sparse_arch.embedding_bag_collection.embedding_bags"
    start = "Trainer.optimizer must update all trainable parameters; received"
    for text in ranks(world_size, _forgotten, "dense only"):
        assert text.startswith(f"{start} 1 that nothing updates, ['{name}.film.weight']. Attach")
    for text in ranks(world_size, _forgotten, "deferred without its step"):
        found = [f"{name}.film.weight", f"{name}.user.weight"]
        assert text.startswith(f"{start} 2 that nothing updates, {found}. Attach")
    for updates in ("fused", "deferred"):
        assert ranks(world_size, _forgotten, updates) == [""] * world_size


def test_a_frozen_parameter_needs_no_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1).requires_grad_(False))
    optimizer = whole_optimizer(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    check_all_are_updated(model, optimizer, ShardingEnv.default())
    model[1].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"received 1 that nothing updates, \['1.bias'\]"):
        check_all_are_updated(model, optimizer, ShardingEnv.default())
