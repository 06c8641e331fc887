"""What a problem may not be, and what a placement says of itself."""

from __future__ import annotations

import math

import pytest

from recsys.distributed.planner.options import Reach, TableOption
from recsys.distributed.planner.placement import Placement, Problem, Ranks
from tests.distributed.planner.search_cases import option, shards, way


def placement(load: float, bound: float) -> Placement:
    return Placement(
        choices=(),
        load_ms=(load,),
        bound_ms=bound,
        method="heuristic",
        seconds=0.0,
        timed_out=False,
    )


def test_gap() -> None:
    assert placement(3.0, 2.0).gap == 0.5
    assert placement(0.0, 0.0).gap == 0.0
    assert placement(1.0, 0.0).gap == math.inf
    assert placement(2.0, 2.0).optimal
    assert not placement(2.1, 2.0).optimal


def test_refuses_bad_shards() -> None:
    with pytest.raises(ValueError, match=r"count must be at least 1, .*received 0"):
        shards(count=0, cost_ms=(1.0,))
    with pytest.raises(ValueError, match="finite and not negative; received"):
        shards(cost_ms=(math.nan,))
    with pytest.raises(ValueError, match=r"storage not negative; received .*host=-1"):
        shards(cost_ms=(1.0,), memory=(0, -1))


def test_refuses_bad_ranks() -> None:
    caps = [(1, 1)] * 3
    with pytest.raises(ValueError, match="at least one rank"):
        Ranks(memory_caps=[])
    with pytest.raises(ValueError, match="kinds must hold one value for each of 3 ranks"):
        Ranks(memory_caps=caps, kinds=(0, 1))
    with pytest.raises(ValueError, match="must divide the 3 ranks; received 2"):
        Ranks(memory_caps=caps, node_size=2)
    with pytest.raises(ValueError, match="none of them negative"):
        Ranks(memory_caps=caps, base_ms=(0.0, -1.0, 0.0))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (option(*[1.0] * 5), "1 to 4 shards, placed anywhere; received 5"),
        (option(*[1.0] * 3, reach=Reach.ONE_NODE), "1 to 2 shards, placed one_node"),
        (option(*[1.0] * 3, reach=Reach.NODES), "a multiple of 2 shards"),
        (option(), "1 to 4 shards, placed anywhere; received 0"),
        (option(*[1.0] * 5, reach=Reach.FIXED), "1 to 4 shards, placed fixed; received 5"),
        (way(shards(cost_ms=(1.0, 2.0))), "a cost for each of 1 kinds"),
    ],
)
def test_refuses_options_that_no_ranks_can_hold(wrong: TableOption, match: str) -> None:
    ranks = Ranks(memory_caps=[(1, 1)] * 4, node_size=2)
    with pytest.raises(ValueError, match=f"Option 1 of table 0 .*{match}"):
        Problem(ranks=ranks, tables=[[option(1.0), wrong]])


def test_refuses_tables_without_options() -> None:
    with pytest.raises(ValueError, match="Table 0 must have at least one option"):
        Problem(ranks=Ranks(memory_caps=[(1, 1)]), tables=[[]])
