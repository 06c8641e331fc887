from __future__ import annotations

import itertools

import pytest
import torch

from recsys.compat.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
    proposers_to_proposals_list,
)
from recsys.compat.planner.topology import Perf, Storage, Topology
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


def test_dynamic_programming_proposes_what_no_other_beats() -> None:
    proposer = DynamicProgrammingProposer(hbm_bins_per_device=13)
    machine = Topology(world_size=1, compute_device="cuda", hbm_cap=13)
    proposer.load(SPACE)
    found = []
    while proposal := proposer.propose():
        assert proposer.propose() == proposal, "the same until feedback"
        total_ms = sum(o.total_perf for o in proposal)
        found.append((total_ms, sum(o.total_storage.hbm for o in proposal)))
        proposer.feedback(partitionable=False, plan=proposal, storage_constraint=machine)
    options = [[o for o in SPACE if o.name == name] for name in "ab"]
    sums = {
        (a.total_perf + b.total_perf, a.total_storage.hbm + b.total_storage.hbm)
        for a, b in itertools.product(*options)
    }
    beaten = {x for x in sums for y in sums if y != x and y[0] <= x[0] and y[1] <= x[1]}
    assert found[1:] == sorted(sums - beaten)
    assert found[0][0] == min(ms for ms, _ in sums)


def test_dynamic_programming_keeps_to_the_memory() -> None:
    proposer = DynamicProgrammingProposer()
    proposer.load(SPACE)
    small = Topology(world_size=2, compute_device="cuda", hbm_cap=2)
    proposer.feedback(partitionable=False, storage_constraint=small)
    proposal = proposer.propose()
    assert proposal is not None
    assert sum(o.total_storage.hbm for o in proposal) <= 4
    with pytest.raises(ValueError, match="must be at least 1; received 0"):
        DynamicProgrammingProposer(0)


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


def test_proposals_of_several_proposers_come_once() -> None:
    proposers = [UniformProposer(), GridSearchProposer()]
    found = [
        [f"{o.name} {o.sharding_type}" for o in proposal]
        for proposal in proposers_to_proposals_list(proposers, SPACE)
    ]
    uniform, grid = all_of(UniformProposer()), all_of(GridSearchProposer())
    assert found == [*uniform, *(one for one in grid if one not in uniform)]
    assert len(found) == 6
