"""The pool of processes that other tests run their ranks in."""

from __future__ import annotations

import importlib
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import RankError, RankPool

_SLOW_MODULE = """
import multiprocessing
import time

if multiprocessing.parent_process() is not None:
    time.sleep(4)


def answer():
    return 42
"""


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.slow
def test_the_clock_starts_when_every_process_has_imported_what_it_needs(
    own_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text(_SLOW_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        module = importlib.import_module("slow_to_import")
        assert own_pool(2, module.answer, timeout=3.0) == [42, 42]
    finally:
        sys.modules.pop("slow_to_import", None)


def _hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the cause")


def _end_rank_0_first(ended: Path) -> None:
    if dist.get_rank() == 0:
        weakref.finalize(dist.group.WORLD, ended.touch)
    else:
        time.sleep(0.5)  # such as to connect another group
        assert not ended.exists()


def _rank() -> int:
    return dist.get_rank()


def test_a_rank_that_hangs_is_named_with_its_stack(own_pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"without an answer: \[1\](?s:.)*_hang_on_rank_1"):
        own_pool(2, _hang_on_rank_1, timeout=5.0)
    assert own_pool(2, _rank) == [0, 1]


def test_a_rank_that_fails_is_named_with_its_traceback(own_pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 ---(?s:.)*ValueError: the cause"):
        own_pool(2, _fail_on_rank_1)


def test_a_rank_that_ends_first_stays_connected(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, _end_rank_0_first, tmp_path / "ended")
    assert ranks(2, (tmp_path / "ended").exists) == [True, True]


class _Unreadable:
    """Pickles, and cannot be read back."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return int, ("not a number",)


def test_an_argument_that_a_process_cannot_read_is_reported(own_pool: RankPool) -> None:
    with pytest.raises(RankError, match="invalid literal"):
        own_pool(1, print, _Unreadable())
    assert own_pool(1, _rank) == [0]
