"""What a problem may not be, and what a placement says of itself."""

from __future__ import annotations

import math

import pytest

from recsys.distributed.planner.placement import Option, Pieces, Placement, Problem, Ranks, Reach
from tests.distributed.planner.search_cases import option


def placement(load: float, bound: float) -> Placement:
    return Placement(
        choices=(), load_ms=(load,), bound_ms=bound, method="heuristic", seconds=0.0, cut=False
    )


def test_gap() -> None:
    assert placement(3.0, 2.0).gap == 0.5
    assert placement(0.0, 0.0).gap == 0.0
    assert placement(1.0, 0.0).gap == math.inf
    assert placement(2.0, 2.0).optimal
    assert not placement(2.1, 2.0).optimal


def test_refuses_bad_pieces() -> None:
    with pytest.raises(ValueError, match="count must be at least 1; received 0"):
        Pieces(count=0, cost_ms=(1.0,), memory=(0, 0))
    with pytest.raises(ValueError, match="finite and not negative; received"):
        Pieces(cost_ms=(math.nan,), memory=(0, 0))
    with pytest.raises(ValueError, match=r"memory must not be negative; received \(0, -1\)"):
        Pieces(cost_ms=(1.0,), memory=(0, -1))


def test_refuses_bad_options() -> None:
    with pytest.raises(ValueError, match="at least one piece"):
        option()
    with pytest.raises(ValueError, match="2 ranks for 2 pieces that are placed fixed; received 1"):
        option(1.0, 1.0, reach=Reach.FIXED, ranks=(0,))
    with pytest.raises(ValueError, match="distinct"):
        option(1.0, 1.0, reach=Reach.FIXED, ranks=(0, 0))


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
        (option(*[1.0] * 5), "at most 4 pieces, placed anywhere; received 5"),
        (option(*[1.0] * 3, reach=Reach.ONE_NODE), "at most 2 pieces, placed one_node"),
        (option(*[1.0] * 3, reach=Reach.NODES), "a multiple of 2 pieces"),
        (option(1.0, reach=Reach.FIXED, ranks=(4,)), "ranks of 0 to 3"),
        (
            Option(reach=Reach.ANYWHERE, pieces=(Pieces(cost_ms=(1.0, 2.0), memory=(0, 0)),)),
            "a cost for each of 1 kinds",
        ),
    ],
)
def test_refuses_options_that_no_ranks_can_hold(wrong: Option, match: str) -> None:
    ranks = Ranks(memory_caps=[(1, 1)] * 4, node_size=2)
    with pytest.raises(ValueError, match=f"Option 1 of table 0 .*{match}"):
        Problem(ranks=ranks, tables=[[option(1.0), wrong]])


def test_refuses_tables_without_options() -> None:
    with pytest.raises(ValueError, match="Table 0 must have at least one option"):
        Problem(ranks=Ranks(memory_caps=[(1, 1)]), tables=[[]])
