from __future__ import annotations

import pytest
import torch

from recsys.compat.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from recsys.compat.planner.topology import Perf, Storage
from recsys.compat.planner.types import Proposer, Shard, ShardingOption
from tests.compat.planner.scripts import needs_peer, printed


def option(table: str, kind: str, ms: list[float], mib: int) -> ShardingOption:
    shards = [Shard([1, 1], [0, 0], Storage(mib, 0), Perf(each, 0.0, 0.0, 0.0)) for each in ms]
    module = ("m", torch.nn.Identity())
    weight = torch.empty(1, 1)
    return ShardingOption(table, weight, module, [1.0], 8, kind, "device", "fused", shards)


SPACE = [
    option("a", "table_wise", [5.0], 1),
    option("a", "row_wise", [3.0, 3.0], 9),
    option("b", "row_wise", [2.0, 2.0], 4),
    option("b", "table_wise", [9.0], 2),
    option("b", "column_wise", [1.0, 4.0], 3),
]


def all_of(proposer: Proposer) -> list[list[str]]:
    proposer.load(SPACE)
    found = []
    while proposal := proposer.propose():
        assert proposer.propose() == proposal, "the same until feedback"
        found.append([f"{o.name} {o.sharding_type}" for o in proposal])
        proposer.feedback(partitionable=True, plan=proposal, perf_rating=1.0)
    assert proposer.propose() is None
    return found


def test_grid_search_tries_all_best_first() -> None:
    assert all_of(GridSearchProposer()) == [
        ["a row_wise", "b row_wise"],
        ["a row_wise", "b column_wise"],
        ["a row_wise", "b table_wise"],
        ["a table_wise", "b row_wise"],
        ["a table_wise", "b column_wise"],
        ["a table_wise", "b table_wise"],
    ]
    assert len(all_of(GridSearchProposer(max_proposals=6))) == 6
    assert all_of(GridSearchProposer(max_proposals=5)) == []


def test_uniform_tries_types_that_all_tables_have() -> None:
    assert all_of(UniformProposer()) == [
        ["a table_wise", "b table_wise"],
        ["a row_wise", "b row_wise"],
    ]


def test_greedy_moves_the_table_with_the_largest_shard() -> None:
    assert all_of(GreedyProposer()) == [
        ["a row_wise", "b row_wise"],
        ["a table_wise", "b row_wise"],
        ["a table_wise", "b column_wise"],
        ["a table_wise", "b table_wise"],
    ]
    by_sums = all_of(GreedyProposer(use_depth=False))
    assert by_sums[0] == ["a table_wise", "b row_wise"]


@pytest.mark.parametrize(("threshold", "tried"), [(None, 4), (3, 4), (2, 4), (1, 3)])
def test_greedy_stops_when_ratings_do_not_improve(threshold: int | None, tried: int) -> None:
    assert len(all_of(GreedyProposer(threshold=threshold))) == tried


def test_a_proposer_starts_anew_when_it_is_loaded() -> None:
    proposer = GreedyProposer(threshold=1)
    assert all_of(proposer) == all_of(proposer)
    proposer.load([])
    assert proposer.propose() is None


@needs_peer
def test_proposals_are_those_of_torchrec() -> None:
    ours = printed("choices.py")["proposals"]
    assert ours == printed("choices.py", by_peer=True)["proposals"]
    assert all(any(len(run) > 1 for run in runs) for name, runs in ours.items() if "of" not in name)
