"""A report finds the stage that takes the time, and leaves the engine as it was."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.base.step_stages import exchange_started
from recsys.distributed.monitoring.step_report import STAGES, StepReport
from recsys.distributed.ranks.comm import Pending
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.shard import shard
from recsys.distributed.sharding_plan import table_wise
from recsys.distributed.stages.input_dist import InputDist
from recsys.distributed.stages.output_dist import Exchange
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, whole_state
from tests.distributed.train_pipeline.test_pipelines import STEPS, build, plain, samples
from tests.ranks import RankPool

PAUSE = 0.03
SLOWED = {
    "input dist": [(InputDist, "_split")],
    "lookup": [(TableBatchedEmbedding, "forward")],
    "output dist": [(Exchange, "start_backward"), (Exchange, "finish_forward")],
}


def _slow(batches: list[Any], pause: float = PAUSE) -> Iterator[Any]:
    for batch in batches:
        time.sleep(pause)
        yield batch


def _sleeping(function: Callable[..., Any], pause: float) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(pause)
        return function(*args, **kwargs)

    return call


def _reported(
    model: Any, optimizer: Any, batches: list[Any], pause: float
) -> tuple[StepReport, list[Tensor]]:
    outputs = []
    with StepReport() as report:
        for batch in report.data(_slow(batches, pause)):
            outputs += plain(model, optimizer, [batch])
            report.step(len(batch.dense))
    return report, outputs


def _with_slow(part: str, pause: float) -> dict[str, float]:
    """Shares of a training in which one part sleeps in every step."""
    batches = [samples(dist.get_rank(), step) for step in range(STEPS)]
    model, optimizer = build("mixed")
    expected = plain(model, optimizer, batches)
    state = whole_state(model)
    model, optimizer = build("mixed")

    def sleepy(*_: Any) -> None:
        time.sleep(pause)

    if part == "dense":
        model.module.get_submodule("over").register_forward_hook(sleepy)
    elif part == "optimizer":
        optimizer._optimizer.register_step_pre_hook(sleepy)
    with contextlib.ExitStack() as stack:
        for owner, name in SLOWED.get(part, []):
            slow = _sleeping(getattr(owner, name), pause)
            stack.enter_context(mock.patch.object(owner, name, slow))
        report, outputs = _reported(model, optimizer, batches, pause if part == "data" else 0.0)
    assert all(map(torch.equal, outputs, expected))
    assert all(torch.equal(v, state[name]) for name, v in whole_state(model).items())
    assert report.steps == STEPS
    assert report.samples == sum(len(batch.dense) for batch in batches)
    assert f"{STEPS} steps, " in str(report)
    return report.shares()


@pytest.mark.parametrize("part", STAGES)
def test_the_slow_stage_is_named(ranks: RankPool, part: str) -> None:
    for pause in (PAUSE, 10 * PAUSE):  # the longer one where others keep the machine busy
        found = ranks(2, _with_slow, part, pause)
        for shares in found:
            assert sum(shares.values()) == pytest.approx(1)
            assert list(shares) == list(STAGES)
            assert all(share > 0 for share in shares.values())
        slowest = [max(shares, key=lambda stage: shares[stage]) for shares in found]
        if slowest == [part, part]:
            return
    pytest.fail(f"the slowest stage is {part}; reported: {slowest}")


class SlowWork:
    """An exchange that takes its time."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()
        threading.Timer(4 * PAUSE, self.future.set_result, [None]).start()

    def get_future(self) -> torch.futures.Future[None]:
        return self.future

    def wait(self) -> None:
        self.future.wait()


@pytest.mark.parametrize(("pauses", "low", "high"), [(0, 0.0, 0.2), (2, 0.3, 0.7), (6, 0.9, 1.0)])
def test_what_is_hidden_of_exchanges(pauses: int, low: float, high: float) -> None:
    with StepReport() as report:
        pending = Pending(torch.zeros(1), cast(Any, SlowWork()), what=ExchangeName.IDS)
        exchange_started(pending)
        time.sleep(pauses * PAUSE)  # what else the host does
        pending.wait()
        report.step(1)
    assert low <= report.overlap <= high
    if pauses == 2:
        assert f"exchanges took {report.numbers()['under way'] * 1e3:.2f} ms" in str(report)


class Writer:
    """Takes the numbers as TensorBoard's does."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))


def test_numbers_go_to_a_writer() -> None:
    writer = Writer()
    with StepReport(writer, every=2) as report:
        for number in report.data(_slow([1, 2, 3, 4, 5])):
            report.step(samples=number)
    assert {step for _, _, step in writer.scalars} == {2, 4}
    by_tag = {tag: value for tag, value, step in writer.scalars if step == 4}
    assert by_tag["step/milliseconds"] >= PAUSE * 1e3
    assert by_tag["step/samples per second"] <= (3 + 4) / (2 * PAUSE)
    assert by_tag["step/share of data"] > 0.9
    assert "step/overlap" not in by_tag


def test_steps_are_traced(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    file = tmp_path / "trace.json"
    with StepReport(trace=file, traced_steps=2) as report:
        for x in report.data(torch.ones(4, 3, 2)):
            layer(x)
            report.step(3)
            assert file.exists() == (report.steps >= 2)
    names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
    assert names.count("recsys data") == 2


def test_without_steps_there_is_nothing_to_say() -> None:
    with StepReport() as report:
        pass
    assert str(report) == "StepReport: no step yet"
    with pytest.raises(ValueError, match=r"StepReport\.every"):
        StepReport(every=0)


def test_a_profiler_of_the_users_shows_the_stages() -> None:
    table = EmbeddingBagConfig(10, 4, "t", feature_names=["f"])
    ebc = shard(EmbeddingBagCollection(tables=[table]), {"t": table_wise(0)}, device=CPU)
    ids = KeyedJaggedTensor(["f"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64))
    with StepReport() as report, torch.profiler.profile(acc_events=True) as profiler:
        ebc(ids).values()
        report.step(samples=3)
    names = {event.key for event in profiler.key_averages()}
    assert {"recsys input dist", "recsys lookup"} <= names
