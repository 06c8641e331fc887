"""A process says where it is, and takes it back."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from recsys.distributed.ranks import where
from tests.distributed.train_pipeline.test_pipelines import build, plain, samples
from tests.ranks import RankPool


def test_a_long_section_is_declared_inside_its_block() -> None:
    where.now = "lookup", "ebc", 0.0
    with where.long_section("evaluation"):
        assert where.declared == "evaluation"
        assert where.now[:2] == ("evaluation", "")
        with where.long_section("save"):
            assert where.declared == "save"
        assert (where.declared, where.now[0]) == ("evaluation", "evaluation")
    assert where.declared == ""
    assert where.now[:2] == ("lookup", "ebc")
    assert where.now[2] > 0


def test_an_error_leaves_the_place_where_it_happened() -> None:
    with suppress(ValueError), where.long_section("save"):
        raise ValueError
    assert where.declared == ""
    assert where.now[0] == "save"


@pytest.mark.parametrize("section", [where.long_section, where.waiting])
def test_other_threads_say_nothing(section: object) -> None:
    seen = []

    def work() -> None:
        with section("save"):  # type: ignore[operator]
            seen.append((where.declared, where.waits_to))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [("", "")]


def _stages_of_a_step() -> tuple[list[tuple[str, str]], int]:
    """Where a rank has been, and how many exchanges it has counted in a step."""
    model, optimizer = build("mixed")
    batch = samples(dist.get_rank(), 0)
    plain(model, optimizer, [batch])
    before, seen = where.exchanges, []

    real = where.__class__

    class Module(real):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            if name == "now":
                seen.append(value[:2])  # type: ignore[index]
            super().__setattr__(name, value)

    where.__class__ = Module
    try:
        plain(model, optimizer, [batch])
    finally:
        where.__class__ = real
    assert where.waits_to == ""
    return seen, where.exchanges - before


def test_a_step_comes_by_all_stages(ranks: RankPool) -> None:
    (first, count), (second, other_count) = ranks(2, _stages_of_a_step)
    assert first == second
    assert count == other_count > 4
    stages = list(dict.fromkeys(stage for stage, _ in first))
    assert stages == [
        "input_dist",
        "lookup",
        "output_dist",
        "the forward pass after output_dist",
        "backward",
    ]
    assert all(path for stage, path in first if stage != "backward")
    assert torch.is_grad_enabled()
