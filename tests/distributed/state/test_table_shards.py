"""Sharded models through torch's own functions for state dicts and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.distributed.types import ShardingPlan
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from tests.distributed.cases import assert_same, whole, whole_state
from tests.ranks import RankPool

CPU = torch.device("cpu")


class Model(nn.Module):
    """Tables of each kind beside dense parts, with parameters and buffers at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(8, 10, name, feature_names=[f"f_{name}"])
                for name in ("rows", "one", "columns", "copies")
            ]
        )
        self.sequences = EmbeddingCollection(
            tables=[EmbeddingConfig(4, 5, "words", feature_names=["words"])]
        )
        self.over = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, dense: Tensor) -> Tensor:
        return self.over(dense) * self.scale


def model_of(seed: int) -> DistributedModelParallel:
    """On several ranks, rank 0 alone holds two of the tables, one of them in two parts."""
    torch.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        model.seen.fill_(seed)
    apply_optimizer_in_backward(RowWiseAdagrad, model.pooled.parameters(), {"lr": 0.1})
    kinds = {
        "rows": row_wise(),
        "one": table_wise(rank=0),
        "columns": column_wise(ranks=[0, 0]),
        "copies": data_parallel(),
    }
    plan = {
        "pooled": construct_module_sharding_plan(model.pooled, kinds),
        "sequences": construct_module_sharding_plan(model.sequences, {"words": table_wise(rank=0)}),
    }
    return DistributedModelParallel(model, device=CPU, plan=ShardingPlan(plan))


def _functions_for_models() -> None:
    model = model_of(1)
    expected = whole_state(model)
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys() == Model().state_dict().keys()
    assert isinstance(state["pooled.embedding_bags.rows.weight"], ShardedTable)
    assert_same({name: whole(value) for name, value in state.items()}, expected, rtol=0, atol=0)
    on_host = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert_same({name: whole(value) for name, value in on_host.items()}, expected, rtol=0, atol=0)
    unsharded = Model()
    unsharded.load_state_dict(expected)

    def loads(state: dict[str, Any], **options: bool) -> None:
        other = model_of(2)
        result = set_model_state_dict(other, state, options=StateDictOptions(**options))
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_same(whole_state(other), expected, rtol=0, atol=0)

    loads(get_model_state_dict(model))
    loads(get_model_state_dict(unsharded))
    loads(dict(expected), full_state_dict=True)
    sent = dict(expected) if dist.get_rank() == 0 else {}
    loads(sent, full_state_dict=True, broadcast_from_rank0=True)
    around = nn.ModuleDict({"inner": model})
    names = get_model_state_dict(around)
    assert names.keys() == {f"inner.{name}" for name in expected}
    set_model_state_dict(around, names)
    other = model_of(2)
    del state["pooled.embedding_bags.one.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*pooled\.embedding_bags\.one\.weight"):
        set_model_state_dict(other, state)
    state |= expected | {"pooled.embedding_bags.one.bias": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*pooled\.embedding_bags\.one\.bias"):
        set_model_state_dict(other, state)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_functions_for_models(ranks: RankPool, num_ranks: int) -> None:
    ranks(num_ranks, _functions_for_models)


def _trained(seed: int) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    model = model_of(seed)
    dense = [p for name, p in model.named_parameters() if not name.startswith(("pooled", "seq"))]
    optimizer = torch.optim.Adam(dense, lr=0.1 * seed)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _functions_for_dense_optimizers() -> None:
    model, optimizer = _trained(1)
    other, target = _trained(2)
    state = get_optimizer_state_dict(model, optimizer)
    assert state["state"].keys() == {
        "scale",
        *(f"over.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")),
    }
    set_optimizer_state_dict(other, target, state)
    torch.testing.assert_close(target.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    other, target = _trained(2)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    set_state_dict(other, target, model_state_dict=of_model, optim_state_dict=of_optimizer)
    torch.testing.assert_close(target.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    assert_same(whole_state(other), whole_state(model), rtol=0, atol=0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_functions_for_dense_optimizers(ranks: RankPool, num_ranks: int) -> None:
    ranks(num_ranks, _functions_for_dense_optimizers)


def _saves(folder: Path, save: Callable[..., Any]) -> None:
    model = model_of(1)
    expected = whole_state(model)
    optimizer = model.fused_optimizer
    with torch.no_grad():
        for values in optimizer.state_dict()["state"].values():
            values["sum"].fill_(dist.get_world_size())
    # the saves of one state must not share files
    state = {"model": get_model_state_dict(model), "optimizer": optimizer.state_dict()}
    pending = save(state, checkpoint_id=folder)
    if pending is not None and hasattr(pending, "result"):
        with torch.no_grad():
            for value in state["model"].values():  # training continues
                value.zero_()
        pending.result()
    other = model_of(2)
    state = {"model": other.state_dict(), "optimizer": other.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"])
    other.fused_optimizer.load_state_dict(state["optimizer"])
    assert_same(whole_state(other), expected, rtol=0, atol=0)
    for values in other.fused_optimizer.state_dict()["state"].values():
        assert (values["sum"] == dist.get_world_size()).all()


def _saves_by_another_stager(state: dict[str, Any], checkpoint_id: Path) -> Any:
    return dcp.async_save(state, checkpoint_id=checkpoint_id, async_stager=BlockingAsyncStager())


@pytest.mark.parametrize("save", [dcp.save, dcp.async_save, _saves_by_another_stager])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_checkpoints_of_torch(
    ranks: RankPool, tmp_path: Path, num_ranks: int, save: Callable[..., Any]
) -> None:
    ranks(num_ranks, _saves, tmp_path, save)
