"""The position follows the stages of a step, and stays where an exception is raised."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch.distributed as dist

from recsys.base import step_stages
from recsys.base.step_stages import Stage, long_section, observe, waiting
from recsys.distributed.ranks.position import Position
from tests.distributed.train_pipeline.test_pipelines import build, plain, samples
from tests.ranks import RankPool


def test_a_long_section_is_declared_inside_its_block() -> None:
    position = Position()
    with observe(position):
        with step_stages.running((Stage.LOOKUP, "ebc")):
            pass
        began = position.place[2]
        with long_section("evaluation"):
            assert position.long_section == "evaluation"
            assert position.place[:2] == ("evaluation", "")
            with long_section("save"):
                assert position.long_section == "save"
            assert (position.long_section, position.place[0]) == ("evaluation", "evaluation")
    assert position.long_section == ""
    assert position.place[:2] == ("lookup", "ebc")
    assert position.place[2] > began


def test_after_an_inner_stage_comes_the_outer_one() -> None:
    position = Position()
    with observe(position), step_stages.running((Stage.OUTPUT_DIST, "ebc")):
        with step_stages.running((Stage.LOOKUP, "ebc")):
            pass
        assert position.place[:2] == ("output_dist", "ebc")
    assert position.place[:2] == ("the forward pass after output_dist", "ebc")


@pytest.mark.parametrize(
    ("section", "place"),
    [
        (lambda: long_section("save"), ("save", "")),
        (lambda: step_stages.running((Stage.LOOKUP, "ebc")), ("lookup", "ebc")),
    ],
)
def test_an_error_leaves_the_place_where_it_happened(
    section: Callable[[], object], place: tuple[str, str]
) -> None:
    position = Position()
    with observe(position):
        with suppress(ValueError), section():  # type: ignore[attr-defined]
            raise ValueError
        assert position.long_section == ""
        assert position.place[:2] == place
        with step_stages.running((Stage.OUTPUT_DIST, "ebc")):
            pass
        assert position.place[:2] == ("the forward pass after output_dist", "ebc")


def test_a_wait_is_reported_while_it_lasts() -> None:
    position = Position()
    with observe(position):
        with waiting("agree on a plan"):
            assert position.waiting_for == "agree on a plan"
        assert position.waiting_for == ""


class Recorder(Position):  # type: ignore[misc]  # final for users
    """Keeps all places."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        super().__init__()

    def _move(self, name: str, path: str) -> None:
        self.seen.append((name, path))
        super()._move(name, path)


def _places_of_a_step() -> tuple[list[tuple[str, str]], int]:
    """Return the positions of a rank in a step, and its number of exchanges."""
    model, optimizer = build("mixed")
    batch = samples(dist.get_rank(), 0)
    plain(model, optimizer, [batch])
    position = Recorder()
    with observe(position):
        plain(model, optimizer, [batch])
    assert position.waiting_for == ""
    return position.seen, position.exchanges


def test_a_step_comes_by_all_stages(ranks: RankPool) -> None:
    (first, count), (second, other_count) = ranks(2, _places_of_a_step)
    assert first == second
    assert count == other_count > 4
    assert list(dict.fromkeys(place for place, _ in first)) == [
        "input_dist",
        "lookup",
        "output_dist",
        "the forward pass after output_dist",
        "backward",
        "the update of tables",
        "the optimizer's step",
        "the loop between two steps (data, logs)",
    ]
    updates = ("backward", "the update of tables", "the optimizer's step")
    assert all(path for place, path in first if place not in (*updates, LOOP))


LOOP = "the loop between two steps (data, logs)"
