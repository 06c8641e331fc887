"""A job whose ranks, nodes or plan change on the way has the losses of one that stays."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.distributed import job
from tests.distributed.nodes import two_nodes
from tests.ranks import RankPool

STEPS = 30
JOB = "tests.distributed.job"


def _train(saves: str | None, until: int, shift: int = 0) -> list[float]:
    own = job.Job(None if saves is None else Path(saves), shift)
    losses = [own.train_step() for _ in range(until - own.step)]
    if saves is not None:
        own.save()
    return losses


def _train_and_reshard(until: int) -> list[float]:
    own = job.Job(None)
    losses = []
    while own.step < until:
        if own.step % 5 == 4:
            shift = own.step // 5 + 1
            own.model.reshard(job.plan_for(own.env.world_size, own.env.node_size, shift))
        losses.append(own.train_step())
    return losses


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """The losses of one process that nothing happens to."""
    return _train(None, STEPS)


def test_losses_go_down(undisturbed: list[float]) -> None:
    assert sum(undisturbed[-5:]) < 0.95 * sum(undisturbed[:5])


def test_other_numbers_of_ranks_continue_the_curve(
    ranks: RankPool, tmp_path: Path, undisturbed: list[float]
) -> None:
    found = []
    for world_size, until in ((4, 10), (2, 20), (3, 30)):
        found += ranks(world_size, _train, str(tmp_path), until, world_size)[0]
    assert found == pytest.approx(undisturbed, rel=1e-5)


def test_tables_that_move_on_the_way_continue_the_curve(
    ranks: RankPool, undisturbed: list[float]
) -> None:
    for found in ranks(3, _train_and_reshard, STEPS):
        assert found == pytest.approx(undisturbed, rel=1e-5)


def test_two_nodes_have_the_losses_of_one_process(tmp_path: Path, undisturbed: list[float]) -> None:
    with two_nodes() as nodes:
        agents = [
            node.torchrun(
                nodes[0], tmp_path / f"log{number}", "tests.distributed.job", str(tmp_path)
            )
            for number, node in enumerate(nodes)
        ]
        try:
            codes = [agent.wait(timeout=130) for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    assert codes == [0, 0], (tmp_path / "log0").read_text() + (tmp_path / "log1").read_text()
    notes = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    assert {(note["world_size"], note["two_hops"]) for note in notes} == {(4, True)}
    found = job.losses_in(tmp_path)
    assert [found[step] for step in range(STEPS)] == pytest.approx(undisturbed, rel=1e-5)


def test_a_job_that_loses_a_node_goes_on_with_the_other(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    settings = (str(tmp_path), "--pause", "0.3")
    with two_nodes() as nodes:
        agents = [
            node.torchrun(
                nodes[0], tmp_path / f"log{number}", JOB, *settings,
                nnodes="1:2",
            )
            for number, node in enumerate(nodes)
        ]  # fmt: skip
        try:
            end = time.monotonic() + 120
            while not (tmp_path / "saves" / "step-1").exists():
                assert time.monotonic() < end, (tmp_path / "log0").read_text()
                time.sleep(0.1)
            agents[1].kill()  # its ranks end with it
            assert agents[0].wait(timeout=130) == 0, (tmp_path / "log0").read_text()
        finally:
            for agent in agents:
                agent.kill()
    notes = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    worlds = [note["world_size"] for note in notes]
    assert worlds[0] == 4
    assert worlds[-1] == 2
    found = job.losses_in(tmp_path)
    assert [found[step] for step in range(STEPS)] == pytest.approx(undisturbed, rel=1e-5)
