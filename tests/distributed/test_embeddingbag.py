"""Common uses of a sharded collection outside of training steps leave it correct."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, FEATURES, Case, shard, train, whole_state
from tests.ranks import RankPool

DEFERRED = (ShardingType.DATA_PARALLEL, ShardingType.COLUMN_WISE)


def _single(case: Case) -> DistributedModelParallel:
    return DistributedModelParallel(
        case.model(), env=ShardingEnv.from_local(), device=CPU, plan=case.plan()
    )


def _batch(size: int = 2) -> KeyedJaggedTensor:
    count = len(FEATURES) * size
    return KeyedJaggedTensor(
        FEATURES, torch.zeros(count, dtype=torch.int64), lengths=torch.ones(count).int()
    )


def _unweighted(seed: int, world_size: int, types: tuple[ShardingType, ...]) -> Case:
    while Case(seed, world_size).is_weighted:
        seed += 1
    return Case(seed, world_size, types=types, optimizer=RowWiseAdagrad)


def _look_without_grad(case: Case) -> None:
    model = shard(case).module.ebc
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pooled = model(_batch())
    with torch.no_grad():
        assert pooled.values().isfinite().all()
    pooled.values().sum().backward()
    if dist.get_rank() == 0:  # which holds row 0 of every table
        assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_first_look_under_no_grad_does_not_cut_the_gradient(ranks: RankPool) -> None:
    ranks(2, _look_without_grad, _unweighted(3, 2, (ShardingType.ROW_WISE,)))


def _fail_once(case: Case) -> None:
    rank = dist.get_rank()
    model, other = shard(case), shard(case)
    # a leaf behind the collection's own node, so that it fails after the exchange was scheduled
    weights = model.module.over.weight
    handle = weights.register_hook(lambda grad: (_ for _ in ()).throw(MemoryError("full")))
    pooled, logits = model.module(_batch())
    with pytest.raises(MemoryError):
        (pooled.sum() + logits.sum()).backward()
    handle.remove()
    for parameter in model.module.over.parameters():
        parameter.grad = None
    other.load_state_dict(whole_state(model))
    other.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    received = train(case, model, range(3), rank=rank)
    expected = train(case, other, range(3), rank=rank)
    for one, another in zip(received, expected, strict=True):
        torch.testing.assert_close(one, another)


def test_training_goes_on_after_a_backward_that_raised(ranks: RankPool) -> None:
    ranks(2, _fail_once, _unweighted(12, 2, DEFERRED))


def test_a_collection_used_twice_is_sharded_once() -> None:
    class Twice(nn.Module):
        def __init__(self, ebc: EmbeddingBagCollection) -> None:
            super().__init__()
            self.first = self.second = ebc
            self.inner = nn.ModuleList([ebc])

    case = Case(0, 1)
    plan = ShardingPlan({"first": case.plan().plan["ebc"]})
    model = DistributedModelParallel(
        Twice(case.model().ebc), env=ShardingEnv.from_local(), device=CPU, plan=plan
    ).module
    assert model.first is model.second
    assert model.first is model.inner[0]
    assert not isinstance(model.first, EmbeddingBagCollection)


def test_a_subclass_without_a_sharder_is_refused() -> None:
    class Own(EmbeddingBagCollection):
        pass

    with pytest.raises(ValueError, match="is a Own, a subclass"):
        DistributedModelParallel(
            Own(tables=Case(0, 1).configs()),
            env=ShardingEnv.from_local(),
            device=CPU,
            plan=ShardingPlan({"": EmbeddingModuleShardingPlan()}),
        )


def test_features_that_no_table_reads_may_hold_anything() -> None:
    case = _unweighted(0, 1, (ShardingType.TABLE_WISE,))
    batch = _batch()
    extra = KeyedJaggedTensor(["other"], torch.tensor([-5, 10**9]), lengths=torch.tensor([1, 1]))
    together = KeyedJaggedTensor.concat([batch, extra])
    model = _single(case)
    torch.testing.assert_close(model(together)[0], model(batch)[0])


def test_the_unsharded_tables_are_not_kept() -> None:
    case = Case(1, 1, types=(ShardingType.TABLE_WISE,))
    model = case.model()
    tables = [weakref.ref(p) for p in model.ebc.parameters()]
    sharded = DistributedModelParallel(
        model, env=ShardingEnv.from_local(), device=CPU, plan=case.plan()
    )
    gc.collect()
    assert all(table() is None for table in tables)
    assert sharded is not None


def test_a_module_around_a_sharded_model_loads_what_it_saved() -> None:
    outer, other = (nn.ModuleDict({"m": _single(Case(2, 1))}) for _ in range(2))
    with torch.no_grad():
        for parameter in outer.parameters():
            parameter.add_(1.0)
    other.load_state_dict(outer.state_dict())
    for one, another in zip(outer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, another)


def test_moving_or_casting_is_refused() -> None:
    model = _single(Case(1, 1)).module.ebc
    assert model.to("cpu") is model
    with pytest.raises(ValueError, match=r"stays on its device.*to cpu, torch\.float16"):
        model.half()
