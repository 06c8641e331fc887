"""One step of the optimizer for several batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from recsys.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from recsys.distributed.train_pipeline.pipelines import TrainPipelineBase, TrainPipelineSparseDist
from tests.distributed.cases import CPU
from tests.distributed.train_pipeline.test_pipelines import build, samples
from tests.ranks import RankPool


def _accumulating(**settings: Any) -> tuple[nn.Linear, Any]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        return out.sum(), out

    pipeline: Any = TrainPipelineBase(model, optimizer, CPU, forward)
    config = GradientAccumulationConfig(**settings)
    return model, GradientAccumulationWrapper(pipeline, optimizer, model, config)


def test_the_optimizer_steps_once_in_several_batches() -> None:
    model, pipeline = _accumulating(is_enabled=True, num_steps=3)
    batches, weights = iter([torch.ones(1, 1)] * 9), []
    for step in range(8):
        pipeline.progress(batches, is_last_batch=step == 7)
        weights.append(model.weight.item())
    assert weights == [0, 0, -3, -3, -3, -6, -6, -8]
    pipeline.set_step(2)
    pipeline.progress(batches)
    assert model.weight.item() == -11  # with the two gradients of before, as nothing cleared them
    with pytest.raises(StopIteration):
        pipeline.progress(batches)


def test_what_was_left_over_is_dropped() -> None:
    model, pipeline = _accumulating(is_enabled=True, num_steps=2)
    pipeline.progress(iter([torch.ones(1, 1)]))
    pipeline.reset()
    batches = iter([torch.ones(1, 1)] * 2)
    pipeline.progress(batches)
    pipeline.progress(batches)
    assert model.weight.item() == -2


def test_it_may_be_off() -> None:
    model, pipeline = _accumulating(num_steps=3)
    pipeline.progress(iter([torch.ones(1, 1)]))
    assert model.weight.item() == -1


@pytest.mark.parametrize("settings", [{"num_steps": 0}, {"num_warmup_steps": 0}])
def test_numbers_are_checked(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"GradientAccumulationConfig.{next(iter(settings))}"):
        GradientAccumulationConfig(**settings)


def _on_ranks() -> list[int]:
    """Train by hand and accumulated; return the number of buckets sent with each batch."""
    batches = [samples(dist.get_rank(), step) for step in range(1, 5)]
    model, optimizer = build("towers")
    for place, batch in enumerate(batches):
        if place % 2 == 0:
            optimizer.zero_grad()
        model(batch)[0].backward()
        if place % 2:
            optimizer.step()
    by_hand = [parameter.detach() for parameter in optimizer.params.values()]
    model, optimizer = build("towers")
    buckets: list[int] = []

    def travels(group, bucket):  # DDP reads annotations, and takes none that are text
        buckets.append(bucket.index())
        return allreduce_hook(group, bucket)

    model._dmp_wrapped_module.register_comm_hook(None, travels)
    inner: Any = TrainPipelineSparseDist(model, optimizer, CPU)
    config = GradientAccumulationConfig(is_enabled=True, num_steps=2)
    pipeline: Any = GradientAccumulationWrapper(inner, optimizer, model, config)
    source, counts = iter(batches), []
    for _ in batches:
        before = len(buckets)
        pipeline.progress(source)
        counts.append(len(buckets) - before)
    for mine, theirs in zip(optimizer.params.values(), by_hand, strict=True):
        torch.testing.assert_close(mine.detach(), theirs)
    return counts


def test_dense_gradients_travel_with_the_last_batch(ranks: RankPool) -> None:
    # the first batch is one of warm-up
    assert ranks(2, _on_ranks) == [[1, 1, 0, 1]] * 2
