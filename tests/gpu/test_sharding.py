"""The conformance cases on one GPU: sharded there equals unsharded on the CPU."""

from __future__ import annotations

import pytest
import torch

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import Adagrad, Adam, RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed import cases
from tests.distributed.cases import FEATURES, Case, train, whole_state

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def _shard(
    case: Case,
    device: torch.device,
    kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
) -> DistributedModelParallel:
    plan = case.plan()
    for sharding in plan.plan["ebc"].values():
        if sharding.sharding_type != ShardingType.DATA_PARALLEL.value:
            sharding.compute_kernel = kernel.value
    return DistributedModelParallel(
        case.model(), env=ShardingEnv.default(), device=device, plan=plan
    )


def _train_both(case: Case, device: torch.device, kernel: EmbeddingComputeKernel) -> None:
    reference, sharded = case.model(), _shard(case, device, kernel)
    expected = train(case, reference, range(3), rank=None)
    received = train(case, sharded, range(3), rank=0)
    for one, own in zip(expected, received, strict=True):
        torch.testing.assert_close(own.cpu(), one, **CLOSE)
    for lookup in sharded.module.ebc._lookups:
        lookup.kernel.flush()
    state = whole_state(sharded)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), value, **CLOSE)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Adagrad, RowWiseAdagrad, Adam])
@pytest.mark.parametrize("seed", range(6))
def test_trains_as_the_unsharded_model(
    nccl: torch.device, seed: int, optimizer: type[torch.optim.Optimizer]
) -> None:
    _train_both(Case(seed, 1, optimizer=optimizer), nccl, EmbeddingComputeKernel.FUSED)


@pytest.mark.parametrize(
    "kernel", [EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING]
)
@pytest.mark.parametrize("seed", range(3))
def test_tables_in_host_memory_train_as_the_unsharded_model(
    nccl: torch.device,
    seed: int,
    kernel: EmbeddingComputeKernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cases, "DIMS", (4, 8, 12))  # FBGEMM alone has tables there: multiples of 4
    case = Case(seed, 1, types=(ShardingType.TABLE_WISE,), optimizer=RowWiseAdagrad)
    _train_both(case, nccl, kernel)


def test_bad_id_is_raised(nccl: torch.device) -> None:
    case = Case(0, 1)
    model = _shard(case, nccl)
    values = torch.full((len(FEATURES),), 10**6, device=nccl)
    weights = torch.ones(len(FEATURES), device=nccl) if case.is_weighted else None
    lengths = torch.ones(len(FEATURES), dtype=torch.int64, device=nccl)
    with pytest.raises(IndexError, match="On rank 0: Id 1000000 at"):
        model(KeyedJaggedTensor(FEATURES, values, weights, lengths))


def _alone(
    device: torch.device, last: PoolingType = PoolingType.SUM
) -> tuple[DistributedModelParallel, KeyedJaggedTensor]:
    """Tables of one rank and a batch, as one lookup reads it if the `last` table sums, too."""
    poolings = [PoolingType.SUM] * (len(FEATURES) - 1) + [last]
    tables = [
        EmbeddingBagConfig(100, 8, f"t{f}", feature_names=[f], pooling=pooling)
        for f, pooling in zip(FEATURES, poolings, strict=True)
    ]
    ebc = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    plan = EmbeddingModuleShardingPlan(
        {t.name: parameter_sharding(ShardingType.TABLE_WISE, 100, 8, [0]) for t in tables}
    )
    model = DistributedModelParallel(
        ebc, env=ShardingEnv.default(), device=device, plan=ShardingPlan({"": plan})
    )
    lengths = torch.full((len(FEATURES) * 16,), 2)
    batch = KeyedJaggedTensor(FEATURES, torch.arange(128) % 100, lengths=lengths)
    if last is not PoolingType.SUM:  # the host must know how many ids each feature has
        batch.length_per_key()
    return model, batch.to(device)


@pytest.mark.parametrize("last", [PoolingType.SUM, PoolingType.MEAN])
def test_the_host_waits_for_nothing(nccl: torch.device, last: PoolingType) -> None:
    model, batch = _alone(nccl, last)
    for _ in range(4):  # kernels, index tensors and memory are made on first use
        model(batch).values().sum().backward()
        torch.cuda.synchronize()
    behind = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # cycles: seconds
    behind.record()
    model(batch).values().sum().backward()
    assert not behind.query()
    torch.cuda.synchronize()
    model.module.check_ids()


@pytest.mark.parametrize("fault", ["ids", "lengths"])
def test_what_is_wrong_with_a_batch_is_raised_later(nccl: torch.device, fault: str) -> None:
    model, batch = _alone(nccl)
    lengths, values = batch.lengths().clone(), batch.values().clone()
    if fault == "ids":
        values[3] = 10**6
    else:
        lengths[3] = -1
    bad = KeyedJaggedTensor(FEATURES, values, lengths=lengths)
    before = model(batch).values()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # the result of the check arrives after the call
    assert model(bad).values().shape == before.shape
    error, text = {
        "ids": (IndexError, "On rank 0: Id 1000000 at position"),
        "lengths": (ValueError, "On rank 0: .*lengths must not be negative"),
    }[fault]
    with pytest.raises(error, match=text):
        model.module.check_ids()
    assert torch.equal(model(batch).values(), before)


def test_the_host_waits_once_per_batch(nccl: torch.device) -> None:
    case = Case(3, 1, types=(ShardingType.TABLE_WISE, ShardingType.ROW_WISE))
    model = _shard(case, nccl).module.ebc
    batch = case.batches(1)[0].to(nccl)
    for _ in range(2):  # index tensors and placements are built on first use
        model(batch).values().sum().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(acc_events=True) as profile:
        model(batch).values().sum().backward()
    names = [event.name for event in profile.events()]
    waits = [name for name in names if name in ("cudaStreamSynchronize", "cudaEventSynchronize")]
    assert len(waits) <= 1, waits
    assert not [name for name in names if "DtoH (Device -> Pageable)" in name]


def test_checkpoint_of_the_gpu_loads_on_the_cpu(nccl: torch.device, tmp_path) -> None:
    case = Case(1, 1, optimizer=RowWiseAdagrad)
    model = _shard(case, nccl)
    train(case, model, range(2), rank=0)
    save_checkpoint(tmp_path / "c", model, model.fused_optimizer)
    unsharded = case.model()
    load_checkpoint(tmp_path / "c", unsharded)
    state = whole_state(model)
    for name, value in unsharded.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), value)
