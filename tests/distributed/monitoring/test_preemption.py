"""A request to end stops all ranks after the same batch, and the job continues bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recsys.distributed.monitoring.preemption import PreemptedExit, Preemption
from recsys.distributed.monitoring.watchdog import Watchdog
from recsys.distributed.types import ShardingEnv
from tests.ranks import RankPool
from tests.training.job import LOADERS, model_of, saved_in, trainer_of, validation

ALONE = nn.Linear(1, 1)


def ask_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# -- loops of their own ----------------------------------------------------------------------------


def _stops(kind: str, asked: int, at: int) -> tuple[int, bool]:
    env = ShardingEnv.default()
    model: Any = nn.Linear(1, 1) if kind == "dense" else model_of()
    batches, trained = LOADERS["skips"]().batches * 2, 0
    with Watchdog(), Preemption(model) as preemption:
        for batch in preemption.until_due(batches):
            if kind == "sharded":
                model(batch)
            if trained == at and env.rank == asked:
                ask_this_process()
            trained += 1
        assert preemption.is_due == (trained < len(batches))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return trained, preemption.is_due


@pytest.mark.parametrize("kind", ["sharded", "dense"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_stop_after_the_same_batch(ranks: RankPool, kind: str, size: int) -> None:
    chance = random.Random(size)
    asked, at = chance.randrange(size), chance.randrange(6)
    found = ranks(size, _stops, kind, asked, at)
    assert len(set(found)) == 1
    trained, is_due = found[0]
    assert is_due
    # a header is built before the step that asks; dense ranks agree at each tenth batch
    most = 10 if kind == "dense" and size > 1 else at + 2
    assert at < trained <= most


@pytest.mark.parametrize("kind", ["made", "changed", "old", "ask", "fails"])
def test_a_file_or_a_function_is_a_request(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "stop"
    if kind in ("old", "changed"):
        file.touch()
    answers = iter([False, False, True])

    def ask() -> bool:
        if kind == "fails":
            raise OSError("no metadata")
        return next(answers, True)

    chosen: dict[str, Any] = {"ask": ask} if kind in ("ask", "fails") else {"file": file}
    with Preemption(ALONE, every=0.01, **chosen) as preemption:
        assert not preemption.is_requested
        if kind in ("made", "changed"):
            os.utime(file) if file.exists() else file.touch()
        end = time.monotonic() + (0.1 if kind in ("old", "fails") else 10)
        while not preemption.is_requested and time.monotonic() < end:
            time.sleep(0.005)
        assert preemption.is_requested == (kind not in ("old", "fails"))
    assert caplog.text.count("no metadata") == (kind == "fails")


def test_a_handler_of_the_script_stays() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with Preemption(ALONE) as preemption:
            ask_this_process()
            assert heard == [signal.SIGTERM]
            assert not preemption.is_requested
            os.kill(os.getpid(), signal.SIGUSR1)
            assert preemption.is_requested
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_forked_processes_end_by_the_signal() -> None:
    with Preemption(ALONE) as preemption:
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        child = context.Process(target=lambda: (ready.set(), time.sleep(60)))
        child.start()
        assert ready.wait(60)
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
        assert not preemption.is_requested


def test_another_thread_opens_it_without_signals() -> None:
    found: list[object] = []

    def open_it() -> None:
        with Preemption(ALONE):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_it_ends_with_its_code() -> None:
    with pytest.raises(PreemptedExit) as raised, Preemption(ALONE, exit_code=3) as preemption:
        preemption.leave()
    assert raised.value.code == 3
    with Preemption(ALONE), pytest.raises(RuntimeError, match="open in this process already"):
        Preemption(ALONE).__enter__()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signals": ["SIGKILL"]}, "signals must .*received 'SIGKILL'"),
        ({"signals": ["SIG_DFL"]}, "signals must .*received 'SIG_DFL'"),
        ({"signals": ["TERM"]}, "signals must .*received 'TERM'"),
        ({"every": 0.0}, "every must be positive; received 0.0"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preemption(ALONE, **arguments)


# -- jobs of a trainer -----------------------------------------------------------------------------


class Asking:
    """Batches that ask a rank to end before some of its reads."""

    def __init__(self, loader: Any, at: int) -> None:
        self.loader, self.at, self.reads = loader, at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self.reads == self.at:
                ask_this_process()
            self.reads += 1
            yield batch


def _train(folder: str, seed: int, preempts: bool) -> int:
    """A job whose settings are drawn by a seed; ended at random reads until it is complete."""
    chance, env = random.Random(seed), ShardingEnv.default()
    loader = chance.choice(list(LOADERS))
    settings = {
        "epochs": 3,
        "save_every": chance.choice([None, 4, 5]),
        "evaluate_every": chance.choice([None, 7]),
        "pipeline": chance.random() < 0.7,
        "uneven": chance.choice([None, "join", "drop"]),
        "log_every": chance.choice([None, 5]),
    }
    num_ends = 0
    while True:
        torch.manual_seed(0)
        train, held = LOADERS[loader](), validation()
        if settings["uneven"]:
            held = held[: 4 - 2 * (env.rank % 2)]
        at, victim, in_validation = (
            chance.randrange(1, 30),
            chance.randrange(env.world_size),
            chance.random() < 0.4,
        )
        if preempts and num_ends < 6 and env.rank == victim:
            if in_validation:
                held = Asking(held, at % 9)
            else:
                train = Asking(train, at)
        try:
            trainer_of(folder, **settings, resume=True).fit(train, held)
        except PreemptedExit:
            num_ends += 1
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            continue
        return num_ends


def _records(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for record in records:
        for name in ("samples_per_second", "seconds_left"):
            record.pop(name, None)
    return records


@pytest.mark.parametrize(
    ("size", "seed"),
    [(1, 1), *(pytest.param(1 + n % 3, n, marks=pytest.mark.slow) for n in (0, 4, 5, 7))],
)
def test_a_preempted_job_ends_as_an_undisturbed_one(
    ranks: RankPool, tmp_path: Path, size: int, seed: int
) -> None:
    ends = ranks(size, _train, str(tmp_path / "preempted"), seed, True)
    assert len(set(ends)) == 1
    assert ends[0] > 0
    ranks(size, _train, str(tmp_path / "undisturbed"), seed, False)
    for name in ("last", "best"):
        assert saved_in(tmp_path / "preempted", name) == saved_in(tmp_path / "undisturbed", name)
    assert _records(tmp_path / "preempted") == _records(tmp_path / "undisturbed")
