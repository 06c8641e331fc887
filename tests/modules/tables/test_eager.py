"""torch.compile of a model with a collection: one named graph break, and the same training."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.types import ShardingType
from recsys.modules.tables.eager import REASON
from recsys.optim import RowWiseAdagrad
from tests.distributed.cases import Case, shard
from tests.ranks import RankPool

# torch.compile itself looks at the `.grad` of tensors from a graph break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Over(nn.Module):
    """Dense work behind a model with a collection."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: Any) -> Tensor:
        values, logits = self.inner(features)
        result: Tensor = (logits * 2).relu().sum() + values.tanh().sum()
        return result


def _train(model: nn.Module, case: Case, rank: int) -> list[Tensor]:
    losses = []
    for step in range(4):  # batches of different sizes, some empty
        loss = model(case.batches(step)[rank])
        loss.backward()
        losses.append(loss.detach())
    return losses


def _tensors(model: nn.Module) -> list[Tensor]:
    found = []
    for _, parameter in sorted(model.named_parameters()):
        found.append(parameter.detach().clone())
        if parameter.grad is not None:
            found.append(parameter.grad.clone())
    return found


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "unsharded"])
def test_one_named_graph_break(pooled: bool, sharded: bool) -> None:
    case = Case(3, 1, pooled=pooled, optimizer=RowWiseAdagrad)
    model = shard(case).module if sharded else case.model()
    dynamo.reset()
    dynamo.utils.counters.clear()
    torch.compile(Over(model), backend="eager")(case.batches(3)[0])
    (reason,) = dynamo.utils.counters["graph_break"]  # counted once per frame that contains it
    assert REASON in reason


def _compare(case: Case, whole: bool) -> tuple[list[Tensor], list[Tensor]]:
    rank = dist.get_rank()
    found = []
    for compiled in (False, True):
        model: Any = shard(case)
        over: Any = Over(model if whole else model.module)
        if compiled:
            dynamo.reset()
            over = torch.compile(over, backend="aot_eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            found.append(_train(over, case, rank) + _tensors(model))
    return found[0], found[1]


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize("whole", [True, False], ids=["DistributedModelParallel", "its module"])
def test_a_compiled_model_trains_like_the_plain_one(
    ranks: RankPool, pooled: bool, whole: bool
) -> None:
    case = Case(5, 2, types=tuple(ShardingType), pooled=pooled, optimizer=RowWiseAdagrad)
    for plain, compiled in ranks(2, _compare, case, whole, timeout=240):
        assert len(plain) > 5
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
