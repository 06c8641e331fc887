"""Optimizers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.compat.answers import raises


def _made(kind: Any = torch.optim.Adam, **options: Any) -> Any:
    from torchrec.optim.keyed import KeyedOptimizerWrapper

    params = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.full((3,), 2.0))}
    given = options or {"lr": 0.1}
    return params, KeyedOptimizerWrapper(params, lambda weights: kind(weights, **given))


def _step(params: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    sum((value**2).sum() for value in params.values()).backward()
    optimizer.step()


def clipped_step_with_a_closure() -> Any:
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer

    params, inner = _made(torch.optim.SGD)
    optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=1.0)
    calls = []

    def closure() -> Any:
        calls.append(1)
        return torch.tensor(3.0)

    sum((value**2).sum() for value in params.values()).backward()
    optimizer.step(closure)
    return [calls, params["a"], params["b"]]


def state_that_is_made_before_a_step() -> Any:
    params, optimizer = _made()
    optimizer.init_state()
    state = optimizer.state_dict()["state"]
    return [{name: sorted(of) for name, of in state.items()}, state["a"]["exp_avg"], params["a"]]


def state_that_does_not_fit() -> Any:
    _, optimizer = _made()
    optimizer.init_state()
    whole = optimizer.state_dict()
    found = []
    for change in ("extra parameter", "missing parameter", "extra value"):
        state = copy.deepcopy(whole)
        if change == "extra parameter":
            state["state"]["z"] = state["state"]["a"]
        elif change == "missing parameter":
            del state["state"]["a"]
        else:
            state["state"]["a"]["extra"] = torch.zeros(1)
        found.append(raises(lambda state=state: optimizer.load_state_dict(state)))
    return found


def state_that_is_loaded() -> Any:
    params, optimizer = _made()
    _step(params, optimizer)
    optimizer.save_param_groups(True)
    saved = copy.deepcopy(optimizer.state_dict())
    others, other = _made()
    other.init_state()
    for name, value in others.items():
        value.data.copy_(params[name].data)
    other.save_param_groups(True)
    other.load_state_dict(saved)
    _step(params, optimizer)
    _step(others, other)
    return [params["a"], others["a"], others["b"]]


def module_in_a_state() -> Any:
    from torchrec.optim.keyed import KeyedOptimizer

    def made(fill: float) -> Any:
        weight = nn.Parameter(torch.ones(2))
        inner = nn.Linear(1, 1)
        nn.init.constant_(inner.weight, fill)
        nn.init.constant_(inner.bias, fill)
        state = {weight: {"module": inner, "sum": torch.full((2,), fill), "step": int(fill)}}
        return KeyedOptimizer({"p": weight}, state, [{"params": [weight], "lr": 0.1}])

    one, other = made(1.0), made(2.0)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    return [one.state_dict(), other.state_dict()]


def warm_up() -> Any:
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    def made() -> Any:
        params, inner = _made(torch.optim.SGD)
        stages = [
            WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1),
            WarmupStage(WarmupPolicy.CONSTANT, max_iters=8, value=0.5),
        ]
        return params, WarmupOptimizer(inner, stages, lr=1.0)

    params, optimizer = made()
    rates = []
    for _ in range(6):
        _step(params, optimizer)
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def optimizers_together() -> Any:
    from torchrec.optim.keyed import CombinedOptimizer

    (first, one), (second, two) = _made(), _made(torch.optim.SGD)
    both = CombinedOptimizer([("x", one), ("y", two)])
    _step({**first, "c": second["a"], "d": second["b"]}, both)
    return [sorted(both.params), len(both.param_groups), first["a"], second["b"]]


def fused_params_without_an_optimizer() -> Any:
    import tempfile

    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan

    config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
    model = nn.Sequential(EmbeddingBagCollection(tables=[config]))
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.25})
    plan = construct_module_sharding_plan(
        model[0],
        {"t": table_wise(rank=0, compute_kernel="fused")},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            sharded = DistributedModelParallel(
                model,
                device=torch.device("cpu"),
                plan=ShardingPlan({"0": plan}),
                sharders=[sharder],
            )
            [table] = sharded.state_dict().values()
            weight = table.local_shards()[0].tensor
            weight.fill_(1.0)
            features = KeyedJaggedTensor(
                ["f"], torch.tensor([1, 2, 1]), lengths=torch.tensor([1, 2])
            )
            sharded(features).values().sum().backward()
            [table] = sharded.state_dict().values()
            return table.local_shards()[0].tensor
        finally:
            dist.destroy_process_group()
