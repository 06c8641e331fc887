"""Loss scaling over ranks: all gradients are unscaled, and inf skips the step on all ranks."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recsys import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recsys.distributed.types import ShardingEnv, ShardingPlan
from recsys.optim import CombinedOptimizer, GradScaler, KeyedOptimizerWrapper
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tests.distributed.cases import whole_state
from tests.ranks import RankPool

RATE, ROWS, DIM, STEPS = 0.5, 7, 3, 4
TABLES = {"own": table_wise(rank=0), "cut": row_wise(), "copied": data_parallel()}
BAD_STEP = 2  # where rank 1's gradient is not finite


def _sharded(update_mode: str | None) -> DistributedModelParallel:
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])
            for n in TABLES
        ]
    )
    if update_mode is not None:
        apply_optimizer_in_backward(
            torch.optim.SGD, ebc.parameters(), {"lr": RATE}, update_mode=update_mode
        )
    plan = construct_module_sharding_plan(ebc, TABLES, world_size=2, device_type="cpu")
    return DistributedModelParallel(
        torch.nn.ModuleDict({"ebc": ebc}),
        env=ShardingEnv.default(),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
    )


def _ids(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng(10 * step + rank).integers(0, ROWS, 4)


def _factors(rank: int, step: int, bad: float) -> np.ndarray:
    """Return the factors of the pooled values in the loss."""
    factors = np.random.default_rng(100 + 10 * step + rank).standard_normal(DIM * len(TABLES))
    if rank == 1 and step == BAD_STEP:
        factors[-1] = factors[2] = bad
    return factors


def _train(update_mode: str | None, bad: float) -> tuple[dict[str, Any], list[float]]:
    rank = dist.get_rank()
    model = _sharded(update_mode)
    optimizer = model.fused_optimizer
    if update_mode is None:
        plain = KeyedOptimizerWrapper(
            dict(model.named_parameters()), lambda p: torch.optim.SGD(p, lr=RATE)
        )
        optimizer = CombinedOptimizer([optimizer, plain])
    scaler = GradScaler("cpu", init_scale=256.0)
    before = whole_state(model)
    scales = []
    for step in range(STEPS):
        batch = KeyedJaggedTensor(
            ["f"], values=torch.from_numpy(_ids(rank, step)), lengths=torch.tensor([4])
        )
        pooled = model.module["ebc"](batch).values()
        factors = torch.from_numpy(_factors(rank, step, bad)).float()
        scaler.scale((pooled * factors).sum()).backward()
        if step % 2:
            scaler.unscale_(optimizer)  # what clipping needs
        scaler.step(optimizer)
        scaler.update()
        if update_mode is None:
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    after = whole_state(model)
    return {n.split(".")[-2]: (before[n].numpy(), after[n].numpy()) for n in after}, scales


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("update_mode", ["deferred", None])
def test_trains_as_without_scaling_and_skips_on_all_ranks(
    ranks: RankPool, update_mode: str | None, bad: float
) -> None:
    for tables, scales in ranks(2, _train, update_mode, bad):
        assert scales == [256.0, 256.0, 128.0, 128.0]
        for number, name in enumerate(TABLES):
            before, after = tables[name]
            expected = before.astype(np.float64)
            for step in set(range(STEPS)) - {BAD_STEP}:
                for rank in range(2):
                    own = _factors(rank, step, bad)[number * DIM : (number + 1) * DIM]
                    np.add.at(expected, _ids(rank, step), -RATE * own / 2)  # mean over ranks
            np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)
            assert np.abs(expected - before).max() > 0.1


def _refused(update_mode: str | None) -> str:
    model = _sharded(update_mode)
    batch = KeyedJaggedTensor(["f"], values=torch.tensor([0]), lengths=torch.tensor([1]))
    loss = model.module["ebc"](batch).values().sum()
    try:
        GradScaler("cpu").scale(loss)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("update_mode", "message"),
    [("fused", "['own', 'cut', 'copied'] are updated in backward"), ("deferred", "nothing")],
)
def test_every_rank_refuses_what_would_go_wrong(
    ranks: RankPool, update_mode: str | None, message: str
) -> None:
    first, second = ranks(2, _refused, update_mode, timeout=20)
    assert first == second
    assert message in first


def test_takes_the_arguments_of_torchs() -> None:
    theirs = inspect.signature(torch.amp.GradScaler).parameters
    own = inspect.signature(GradScaler).parameters
    assert [own[name].default for name in theirs] == [p.default for p in theirs.values()]
    assert [*own] == [*theirs, "process_group"]
