"""Stages of the user's own, each on another batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recsys.distributed.train_pipeline.batches import to_device
from recsys.distributed.train_pipeline.staged import (
    PipelineStage,
    SparseDataDistUtil,
    StagedTrainPipeline,
)
from tests.distributed.cases import CPU, whole_state
from tests.distributed.train_pipeline.test_pipelines import STEPS, build, plain, samples
from tests.ranks import RankPool


def _noted(events: list[Any], number: int) -> PipelineStage[Any]:
    def run(batch: int) -> int:
        events.append((number, batch))
        return batch

    return PipelineStage(
        f"stage {number}",
        run,
        fill_callback=lambda: events.append(f"filled {number}"),
        data_exhausted_callback=lambda: events.append(f"empty {number}"),
    )


def test_every_stage_has_another_batch() -> None:
    events: list[Any] = []
    stages = [_noted(events, number) for number in range(3)]
    pipeline: Any = StagedTrainPipeline(stages, on_flush_end=lambda: events.append("flushed"))
    assert pipeline.num_stages == 3
    batches = iter(range(8))
    assert pipeline.progress(batches) == 0
    first = [(0, 0), "filled 0", (1, 0), "filled 1", (2, 0), "filled 2"]
    second = [(0, 1), "filled 0", (1, 1), "filled 1", (0, 2), "filled 0"]
    assert events == [*first, *second, (0, 3), (1, 2), (2, 1)]
    events.clear()
    assert pipeline.progress(batches) == 1
    assert events == [(0, 4), (1, 3), (2, 2)]
    pipeline.set_flush(True)
    events.clear()
    assert [pipeline.progress(batches) for _ in range(3)] == [2, 3, 4]
    empty = ["empty 0", "empty 1", "empty 2"]
    assert events == [empty[0], (1, 4), (2, 3), *empty[:2], (2, 4), *empty]
    events.clear()
    assert pipeline.progress(batches) == 5
    assert events[:7] == ["flushed", (0, 5), "filled 0", (1, 5), "filled 1", (2, 5), "filled 2"]
    assert [pipeline.progress(batches) for _ in range(4)] == [6, 7, None, None]


def test_it_needs_a_stage() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        StagedTrainPipeline([])


def _staged(kind: str, looks_up: bool) -> None:
    batches = [samples(dist.get_rank(), step, kind) for step in range(STEPS)]
    model, optimizer = build(kind)
    expected = plain(model, optimizer, batches)
    state = whole_state(model)
    model, optimizer = build(kind)
    ids: Any = SparseDataDistUtil(model, None)
    stages = [
        PipelineStage("copy", partial(to_device, device=CPU)),
        ids.start_sparse_data_dist_stage(),
    ]
    pipeline: Any = StagedTrainPipeline(stages)
    source, outputs = iter(batches), []
    while (batch := pipeline.progress(source)) is not None:
        if looks_up:
            ids.wait_sparse_data_dist()
            ids.start_embedding_lookup(batch)
        outputs += plain(model, optimizer, [batch])
    assert len(outputs) == STEPS
    assert all(map(torch.equal, outputs, expected))
    for name, value in whole_state(model).items():
        assert torch.equal(value, state[name])
    pipeline.progress(iter(batches))
    assert ids.detach() is model
    model(batches[0])  # the ranks are still at one place


@pytest.mark.parametrize("kind", ["dlrm", "towers", "made"])
@pytest.mark.parametrize("looks_up", [False, True])
def test_ids_are_sent_by_a_stage(ranks: RankPool, kind: str, looks_up: bool) -> None:
    ranks(2, _staged, kind, looks_up)
