"""Stages are reported to those who observe, each begin with its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
import torch
from torch import nn

from recsys import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from recsys.base import step_stages
from recsys.base.step_stages import Stage, long_section, observe, waiting


class Recorder:
    """Keeps the reported events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Stage, str]] = []

    def enter(self, stage: Stage, subject: str) -> None:
        self.events.append(("enter", stage, subject))

    def leave(self, stage: Stage, subject: str, *, failed: bool) -> None:
        self.events.append(("fail" if failed else "leave", stage, subject))

    def exchange_started(self, pending: Any) -> None:
        self.events.append(("started", Stage.WAIT, str(pending)))

    def exchange_finished(self, pending: Any) -> None:
        self.events.append(("finished", Stage.WAIT, str(pending)))


def test_blocks_run_in_their_stage() -> None:
    first, second = Recorder(), Recorder()
    place = Stage.INPUT_DIST, "over.ebc"
    with observe(first), observe(second):
        with step_stages.running(place):
            pass
        with suppress(ValueError), step_stages.running(place):
            raise ValueError
    with step_stages.running(place):
        pass
    enter, leave, fail = (("enter", *place), ("leave", *place), ("fail", *place))
    assert first.events == second.events == [enter, leave, enter, fail]


def test_who_observes_inside_a_stage_sees_no_end_without_a_begin() -> None:
    recorder = Recorder()
    with step_stages.running((Stage.DATA, "")), observe(recorder):
        pass
    with observe(recorder):
        late = step_stages.running((Stage.DATA, ""))
        late.__enter__()
    late.__exit__(None, None, None)
    assert [kind for kind, _, _ in recorder.events] == ["enter", "leave"]


def test_exchanges_are_reported() -> None:
    recorder = Recorder()
    with observe(recorder):
        step_stages.exchange_started("ids")
        step_stages.exchange_finished("ids")
    step_stages.exchange_started("ids")
    assert recorder.events == [("started", Stage.WAIT, "ids"), ("finished", Stage.WAIT, "ids")]


@pytest.mark.parametrize(
    ("section", "stage"), [(long_section, Stage.LONG_SECTION), (waiting, Stage.WAIT)]
)
def test_sections_are_those_of_the_main_thread(
    section: Callable[[str], AbstractContextManager[None]], stage: Stage
) -> None:
    recorder = Recorder()

    def work() -> None:
        with section("save"):
            pass

    with observe(recorder):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert recorder.events == []
        work()
    assert recorder.events == [("enter", stage, "save"), ("leave", stage, "save")]


def test_a_step_of_an_unsharded_model() -> None:
    table = EmbeddingBagConfig(10, 4, "t", feature_names=["f"])
    ebc = EmbeddingBagCollection(tables=[table])
    dense = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*ebc.parameters(), *dense.parameters()], lr=0.1)
    ids = KeyedJaggedTensor(["f"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64))
    recorder = Recorder()
    with observe(recorder):
        dense(ebc(ids).values()).sum().backward()
        optimizer.step()
    optimizer.step()
    stages = [Stage.LOOKUP, Stage.TABLE_UPDATE, Stage.OPTIMIZER]
    pairs = [(kind, stage, "") for stage in stages for kind in ("enter", "leave")]
    assert recorder.events == pairs
