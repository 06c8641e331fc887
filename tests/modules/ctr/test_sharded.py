"""Models of clicks on several ranks train as on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.modules.ctr.autoint import AutoInt
from recsys.modules.ctr.dcn_v2 import DCNV2
from recsys.modules.ctr.din import DIN
from recsys.modules.ctr.final_mlp import FinalMLP
from recsys.modules.ctr.multi_task import PLE, MMoE, MultiTask
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.optim import SGD, in_backward_optimizer_filter
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.modules.ctr.cases import DENSE, FEATURES, ROWS, collection
from tests.ranks import RankPool

DIM, STEPS = 4, 3
KINDS = ["dcn_v2", "autoint", "final_mlp", "mmoe", "ple", "din"]
COLUMNS = DENSE + DIM * len(FEATURES)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    pooled = collection((DIM, DIM, DIM))
    if kind == "din":
        items = EmbeddingConfig(ROWS, DIM, "items", feature_names=["seen", "item"])
        rows = EmbeddingCollection(tables=[items])
        return DIN(
            pooled, rows, DENSE, pairs=[("seen", "item")], layer_sizes=[], attention_sizes=[]
        )
    if kind == "mmoe":
        return MultiTask(pooled, DENSE, MMoE(COLUMNS, 2, 3, [8, 4], [4]))
    if kind == "ple":
        return MultiTask(pooled, DENSE, PLE(COLUMNS, 2, 2, 1, 2, [8, 4], [4]))
    if kind == "autoint":
        return AutoInt(pooled, DENSE, 2, 2, 4, [8])
    if kind == "final_mlp":
        return FinalMLP(pooled, DENSE, [8], contexts=(["user"], []), gate_hidden=4)
    return DCNV2(pooled, DENSE, 2, [8])


def batch(kind: str, seed: int, size: int = 5) -> tuple[Tensor, KeyedJaggedTensor]:
    """Return samples; the first has neither tags nor a history."""
    draw = torch.Generator().manual_seed(seed)
    names = [*FEATURES, *(["seen", "item"] if kind == "din" else [])]
    bags = [i % 3 for i in range(size)]
    lengths = [n for name in names for n in (bags if name in ("tags", "seen") else [1] * size)]
    ids = torch.randint(0, ROWS, (sum(lengths),), generator=draw)
    dense = torch.randn(size, DENSE, generator=draw)
    return dense, KeyedJaggedTensor(names, ids, lengths=torch.tensor(lengths))


def train(model: nn.Module, steps: list[list[Any]]) -> list[Tensor]:
    """Train by the mean of the batches' losses; return the logits of each step's batches."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    optimizer = torch.optim.SGD(dense, lr=0.1)
    found = []
    for batches in steps:
        optimizer.zero_grad()
        logits = torch.stack([model(*given) for given in batches])
        (logits - 1).square().mean().backward()
        optimizer.step()
        found.append(logits.detach())
    return found


def train_on_ranks(kind: str) -> list[Tensor]:
    model = build(kind)
    tables = [
        parameter
        for module in model.modules()
        if hasattr(module, "embedding_bag_configs") or hasattr(module, "embedding_configs")
        for parameter in module.parameters()
    ]
    apply_optimizer_in_backward(SGD, tables, {"lr": 0.1})
    model = DistributedModelParallel(model, env=ShardingEnv.default(), device=torch.device("cpu"))
    return train(model, [[batch(kind, 3 * step + dist.get_rank())] for step in range(STEPS)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_is_unsharded(ranks: RankPool, kind: str, world_size: int) -> None:
    steps = [[batch(kind, 3 * step + rank) for rank in range(world_size)] for step in range(STEPS)]
    expected = train(build(kind), steps)
    for rank, found in enumerate(ranks(world_size, train_on_ranks, kind)):
        of_rank = [logits[rank : rank + 1] for logits in expected]
        torch.testing.assert_close(found, of_rank, rtol=1e-5, atol=1e-5)
