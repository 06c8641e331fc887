"""Dense parts that are sharded by `fully_shard` train, save and load as replicated ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from recsys.distributed.checkpoint import (
    load_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
)
from recsys.distributed.dmp_collection import DMPCollection
from recsys.distributed.fully_sharded import FullyShardWrapper
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from recsys.distributed.types import ShardingPlan
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.clipping import GradientClipping, GradientClippingOptimizer
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recsys.optim.optimizers import in_backward_optimizer_filter
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, assert_same, whole, whole_state
from tests.ranks import RankPool

State = dict[str, Tensor]
EXACT = {"rtol": 0.0, "atol": 0.0}


class Deep(nn.Module):
    """A table under dense layers, whose sizes two ranks do not divide."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        table = EmbeddingBagConfig(12, 8, "films", feature_names=["film"])
        self.ebc = EmbeddingBagCollection(tables=[table])
        apply_optimizer_in_backward(
            RowWiseAdagrad, self.ebc.parameters(), {"lr": 0.1}, update_mode="deferred"
        )
        self.under = nn.Linear(8, 5, bias=False)  # one before a batch norm has no gradient
        self.over = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 1))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        result: Tensor = self.over(self.under(self.ebc(features).values()))
        return result


def plan_for(world_size: int) -> ShardingPlan:
    tables = construct_module_sharding_plan(
        Deep().ebc, {"films": row_wise()}, local_size=world_size, world_size=world_size
    )
    return ShardingPlan({"ebc": tables})


def with_optimizer(
    model: DistributedModelParallel,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=0.01),
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def build(how: str, seed: int = 0) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """A placed model whose dense parts are replicated, or sharded in one of four ways."""
    bare, size = Deep(seed), dist.get_world_size()
    if how == "both":
        fully_shard(bare.over, mesh=init_device_mesh("cpu", (size,)))
    if how == "nested":
        for child in (bare.under, bare.over[1], bare.over):
            fully_shard(child, mesh=init_device_mesh("cpu", (size,)))
    wrapper = FullyShardWrapper() if how == "wrapper" else None
    model = DistributedModelParallel(
        bare,
        device=CPU,
        plan=plan_for(size),
        init_data_parallel=how != "later",
        data_parallel_wrapper=wrapper,
    )
    if how == "later":
        for child in (model.module.under, model.module.over):
            fully_shard(child, mesh=init_device_mesh("cpu", (size,)))
        model.init_data_parallel()
    return with_optimizer(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        film = KeyedJaggedTensor(
            ["film"],
            torch.randint(0, 12, (12,), generator=generator),
            lengths=torch.full((6,), 2),
        )
        optimizer.zero_grad()
        model(film).exp().mean().backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: CombinedOptimizer) -> State:
    """A copy of the whole weights and states; every rank must call it. Without buffers."""
    weights = {n: v for n, v in whole_state(model).items() if n in dict(Deep().named_parameters())}
    return weights | {
        f"{name}.{key}": whole(value)
        for name, states in optimizer.state_dict()["state"].items()
        for key, value in states.items()
    }


# -- training --------------------------------------------------------------------------------------

WAYS = ("both", "nested", "wrapper", "later")


def _train_each_way() -> None:
    replicated = build("")
    assert isinstance(replicated[0]._dmp_wrapped_module, DistributedDataParallel)
    train(*replicated, range(4))
    expected = everything(*replicated)
    for how in WAYS:
        model, optimizer = build(how)
        parts = {n for n, p in model.named_parameters() if isinstance(p, DTensor)}
        dense = {n for n, _ in Deep().named_parameters() if not n.startswith("ebc")}
        assert parts == {n for n in dense if how != "both" or n.startswith("over")}
        is_wrapped = isinstance(model._dmp_wrapped_module, DistributedDataParallel)
        assert is_wrapped == (how == "both")
        train(model, optimizer, range(4))
        assert_same(everything(model, optimizer), expected, rtol=0, atol=1e-6)
        # whole values load into parts
        state = {name: value + 1 for name, value in whole_state(model).items()}
        model.load_state_dict(state)
        assert_same(whole_state(model), state, **EXACT)


def test_trains_as_replicated_parts_do(ranks: RankPool) -> None:
    ranks(2, _train_each_way)


def _start_from_rank_0() -> State:
    return whole_state(build("wrapper", seed=dist.get_rank())[0])


def test_the_wrapper_takes_the_values_of_rank_0(ranks: RankPool) -> None:
    for received in ranks(2, _start_from_rank_0):
        assert_same(received, dict(Deep(0).state_dict()), **EXACT)


def _clip(norm_type: float) -> None:
    found = []
    for how in ("", "both", "wrapper"):
        model, optimizer = build(how)
        clipping = GradientClippingOptimizer(
            optimizer, GradientClipping.NORM, 0.05, norm_type, enable_global_grad_clip=True
        )
        train(model, clipping, range(3))
        assert clipping.last_total_grad_norm is not None
        assert clipping.last_total_grad_norm > 0.05
        found.append((everything(model, optimizer), clipping.last_total_grad_norm))
    for state, norm in found[1:]:
        torch.testing.assert_close(norm, found[0][1])
        assert_same(state, found[0][0])


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_are_those_of_whole_gradients(ranks: RankPool, norm_type: float) -> None:
    ranks(2, _clip, norm_type)


def _train_groups() -> None:
    assert dist.group.WORLD is not None
    found = []
    for wrapped in (False, True):
        options: dict[str, Any] = {}
        if wrapped:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            options["data_parallel_wrapper"] = FullyShardWrapper(mesh=mesh)
        model, optimizer = with_optimizer(
            DMPCollection(Deep(), CPU, plan_for(2), 4, 2, dist.group.WORLD, **options)
        )
        assert isinstance(model, DMPCollection)
        clipped = GradientClippingOptimizer(
            optimizer, GradientClipping.NORM, enable_global_grad_clip=True
        )
        with pytest.raises(ValueError, match=r"norm in a DMPCollection: .*2 groups"):
            train(model, clipped, range(1))
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            model.sync()
        found.append(everything(model, optimizer))
    assert_same(found[1], found[0], rtol=0, atol=1e-5)


def test_groups_of_ranks_train_as_with_replicated_parts(ranks: RankPool) -> None:
    ranks(4, _train_groups)


# -- checkpoints -----------------------------------------------------------------------------------


def _save(path: Path) -> State:
    pair = build("wrapper")
    train(*pair, range(3))
    save_checkpoint(path / "own", *pair)
    save_checkpoint_async(path / "aside", *pair).wait()
    saved = everything(*pair)
    train(*pair, range(3, 5))
    for how in ("", "both", "wrapper"):
        for name in ("own", "aside"):
            other = build(how, seed=7)
            load_checkpoint(path / name, *other)
            assert_same(everything(*other), saved, **EXACT)
            if name == "own":
                save_checkpoint(path / f"again-{how}", *other)
            train(*other, range(3, 5))
            assert_same(everything(*other), everything(*pair), rtol=0, atol=1e-6)
    back = build("wrapper", seed=8)
    load_checkpoint(path / "again-", *back)
    assert_same(everything(*back), saved, **EXACT)
    return saved


def _load_alone(path: Path) -> State:
    pair = build("wrapper", seed=9)  # one rank: nothing is sharded
    assert not any(isinstance(p, DTensor) for p in pair[0].parameters())
    load_checkpoint(path / "own", *pair)
    return everything(*pair)


def test_checkpoints_load_under_any_way_and_on_any_ranks(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks(2, _save, tmp_path)[0]
    assert "over.1.weight.exp_avg" in saved
    for name in ("own", "aside"):
        model = Deep(5)
        load_checkpoint(tmp_path / name, model, allow_partial=True)
        for parameter, value in model.named_parameters():
            assert torch.equal(value, saved[parameter])
    assert_same(ranks(1, _load_alone, tmp_path)[0], saved, **EXACT)
    assert_same(ranks(3, _load_alone_on_more, tmp_path)[0], saved, **EXACT)


def _load_alone_on_more(path: Path) -> State:
    pair = build("both", seed=9)
    load_checkpoint(path / "own", *pair)
    return everything(*pair)


# -- errors ----------------------------------------------------------------------------------------


def _fail() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole_model = Deep()
    fully_shard(whole_model, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"tables \['ebc.embedding_bags.films.weight'\] were given"
    ):
        DistributedModelParallel(whole_model, device=CPU, plan=plan_for(2))
    for path in ("ebc", "upper", "over.2"):
        with pytest.raises(ValueError, match=rf"received '{path}'.*\['under', 'over'\]"):
            DistributedModelParallel(
                Deep(),
                device=CPU,
                plan=plan_for(2),
                data_parallel_wrapper=FullyShardWrapper(modules=[path]),
            )


def test_tables_are_not_for_fully_shard(ranks: RankPool) -> None:
    ranks(2, _fail)


def _through_torchs_functions() -> None:
    for how in ("both", "nested", "wrapper"):
        model, other, third = (build(how, seed)[0] for seed in range(3))
        expected = whole_state(model)
        result = set_model_state_dict(other, get_model_state_dict(model))
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert_same(whole_state(other), expected, **EXACT)
        set_model_state_dict(third, expected, options=StateDictOptions(full_state_dict=True))
        assert_same(whole_state(third), whole_state(model), **EXACT)


def test_state_dict_functions_of_torch() -> None:
    pool = RankPool()  # DTensor looks up groups of earlier tests in processes that ran them
    try:
        pool(2, _through_torchs_functions)
    finally:
        pool.close()
