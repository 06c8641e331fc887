"""Problems to search, and slow, obvious ways to check the results."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.options import Reach, Shards, TableOption
from recsys.distributed.planner.placement import (
    Choice,
    InfeasibleError,
    Problem,
    Ranks,
    SearchResult,
)
from recsys.distributed.planner.search import search
from recsys.distributed.planner.tables import Bytes, RankMemory
from recsys.distributed.types import EmbeddingComputeKernel, ShardingType


def shards(*, count: int = 1, cost_ms: Sequence[float], memory: tuple[int, int] = (0, 0)) -> Shards:
    """Like shards with a cost for each kind of rank and bytes on device and host."""
    return Shards(
        count=count,
        rows=1,
        cols=1,
        costs=tuple(Cost(forward=cost) for cost in cost_ms),
        storage=RankMemory(weights=Bytes(*memory)),
    )


def way(*alike: Shards, reach: Reach = Reach.ANYWHERE) -> TableOption:
    """An option with these shards."""
    return TableOption(
        sharding_type=ShardingType.COLUMN_WISE,
        compute_kernel=EmbeddingComputeKernel.FUSED,
        reach=reach,
        shards=alike,
    )


def option(*costs: float, reach: Reach = Reach.ANYWHERE, memory: int = 0) -> TableOption:
    """An option with a shard for each cost, on ranks of one kind."""
    return way(*(shards(cost_ms=(cost,), memory=(memory, 0)) for cost in costs), reach=reach)


def shards_of(option: TableOption) -> list[Shards]:
    return [alike for alike in option.shards for _ in range(alike.count)]


def ways(option: TableOption, num_ranks: int, node_size: int) -> Iterator[tuple[int, ...]]:
    """All ranks that the shards may have."""
    if option.reach is Reach.FIXED:
        yield tuple(range(option.num_ranks))
        return
    for ranks in itertools.permutations(range(num_ranks), option.num_ranks):
        nodes = [rank // node_size for rank in ranks]
        if option.reach is Reach.ONE_NODE and len(set(nodes)) > 1:
            continue
        if option.reach is Reach.NODES:
            groups = [set(nodes[i : i + node_size]) for i in range(0, len(nodes), node_size)]
            if any(len(group) > 1 for group in groups) or len(set(nodes)) < len(groups):
                continue
        yield ranks


def totals(
    problem: Problem, choices: Sequence[Choice]
) -> tuple[list[float], list[tuple[int, int]]]:
    """Loads and bytes of every rank, added up shard by shard."""
    ranks = problem.ranks
    load = list(ranks.base_ms or [0.0] * len(ranks))
    used = [list(both) for both in ranks.base_memory or [(0, 0)] * len(ranks)]
    for options, choice in zip(problem.tables, choices, strict=True):
        for shard, rank in zip(shards_of(options[choice.option]), choice.ranks, strict=True):
            load[rank] += shard.cost_ms[ranks.kinds[rank] if ranks.kinds else 0]
            used[rank][0] += shard.memory[0]
            used[rank][1] += shard.memory[1]
    return load, [(device, host) for device, host in used]


def brute_force(problem: Problem) -> float:
    """Load of the slowest rank of the best placement; inf if none fits."""
    num_ranks, node_size = len(problem.ranks), problem.ranks.node_size or len(problem.ranks)
    kinds = problem.ranks.kinds or [0] * num_ranks
    caps = problem.ranks.memory_caps
    start = totals(problem_without_tables(problem), [])
    states = {(tuple(start[0]), tuple(start[1]))}
    for options in problem.tables:
        after = set()
        for one in options:
            of_option = shards_of(one)
            for ranks in ways(one, num_ranks, node_size):
                for load, used in states:
                    new_load, new_used = list(load), list(used)
                    for shard, rank in zip(of_option, ranks, strict=True):
                        new_load[rank] += shard.cost_ms[kinds[rank]]
                        device, host = new_used[rank]
                        new_used[rank] = (device + shard.memory[0], host + shard.memory[1])
                    if all(
                        u <= c
                        for both in zip(new_used, caps, strict=True)
                        for u, c in zip(*both, strict=True)
                    ):
                        after.add((tuple(new_load), tuple(new_used)))
        states = after
    return min((max(load) for load, _ in states), default=math.inf)


def problem_without_tables(problem: Problem) -> Problem:
    return Problem(ranks=problem.ranks, tables=[])


def check(problem: Problem, found: SearchResult) -> None:
    """Fails unless the placement keeps all rules and is described truly."""
    num_ranks, node_size = len(problem.ranks), problem.ranks.node_size or len(problem.ranks)
    assert len(found.choices) == len(problem.tables)
    for options, choice in zip(problem.tables, found.choices, strict=True):
        chosen, ranks = options[choice.option], list(choice.ranks)
        assert len(ranks) == chosen.num_ranks
        assert len(set(ranks)) == len(ranks)
        assert all(0 <= rank < num_ranks for rank in ranks)
        nodes = [rank // node_size for rank in ranks]
        if chosen.reach is Reach.FIXED:
            assert ranks == list(range(chosen.num_ranks))
        if chosen.reach is Reach.ONE_NODE:
            assert len(set(nodes)) == 1
        if chosen.reach is Reach.NODES:
            groups = [set(nodes[i : i + node_size]) for i in range(0, len(nodes), node_size)]
            assert all(len(group) == 1 for group in groups)
            assert len(set(nodes)) == len(groups)
    load, used = totals(problem, found.choices)
    assert all(
        taken <= cap
        for both in zip(used, problem.ranks.memory_caps, strict=True)
        for taken, cap in zip(*both, strict=True)
    )
    assert all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
        for a, b in zip(load, found.load_ms, strict=True)
    )
    assert found.bound_ms <= found.slowest_ms


def realistic(
    num_tables: int, num_ranks: int, *, seed: int = 0, fullness: float = 0.1, node_size: int = 8
) -> Problem:
    """Tables of 100 to 30 million rows and 16 to 128 columns on GPUs.

    ``fullness`` is the share of all memory that the options with the least bytes take.
    """
    rng = random.Random(seed)
    node_size = min(node_size, num_ranks)
    num_nodes = num_ranks // node_size
    samples = 4096 * num_ranks
    memory_bw, node_bw = 2e9, 3e8
    net_bw = node_bw if num_nodes == 1 else 2.5e7

    def alike(count: int, ids: float, sums: float, cols: float, rows: float, ms: float) -> Shards:
        traffic = ids * 8 / net_bw + 8 * sums * cols / net_bw
        cost = 12 * ids * cols / memory_bw + traffic + ms + 0.002
        return shards(count=count, cost_ms=(cost,), memory=(int(rows * cols * 4.4), 0))

    tables = []
    for _ in range(num_tables):
        rows = int(math.exp(rng.uniform(math.log(100), math.log(30e6))))
        dim = rng.choice([16, 32, 64, 96, 128])
        ids = samples * math.exp(rng.uniform(0, math.log(30)))
        options = [
            way(alike(parts, ids, samples, dim / parts, rows, 0))
            for parts in range(1, min(num_ranks, dim // 16) + 1)
        ]
        block = rows // num_ranks
        row_wise = alike(num_ranks, ids / num_ranks, samples, dim, block + 1, 0)
        replica = alike(num_ranks, ids / num_ranks, 0, dim, rows, 8 * rows * dim / net_bw)
        for fixed in (row_wise, replica):
            options.append(way(fixed, reach=Reach.FIXED))
        for parts in (1, 2, 4) if num_nodes > 1 else ():
            if parts <= num_nodes and dim // parts >= 32:
                shard = alike(
                    node_size * parts,
                    ids / node_size,
                    samples / node_size,
                    dim / parts,
                    rows / node_size,
                    8 * samples * dim / parts / node_bw,
                )
                reach = Reach.NODES if parts > 1 else Reach.ONE_NODE
                options.append(way(shard, reach=reach))
        tables.append(options)
    least = sum(
        min(sum(p.count * p.memory[0] for p in one.shards) for one in options) for options in tables
    )
    cap = int(least / num_ranks / fullness) + 1
    if fullness < 0.5:
        cap = max(cap, 80 << 30)
    return Problem(
        ranks=Ranks(memory_caps=[(cap, 0)] * num_ranks, node_size=node_size), tables=tables
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small problems with all reaches, one or two kinds of rank, and memory that may be tight."""
    num_nodes, node_size = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (2, 2)]))
    num_ranks = num_nodes * node_size
    num_kinds = draw(st.integers(1, min(2, num_ranks)))
    kinds = [rank % num_kinds for rank in range(num_ranks)]
    costs = st.integers(0, 12).map(lambda tenths: tenths / 4)
    memories = st.tuples(st.integers(0, 6), st.sampled_from([0, 0, 0, 1]))

    def some(count: int) -> tuple[Shards, ...]:
        counts = [count] if draw(st.booleans()) else [1] * count
        return tuple(
            shards(
                count=alike,
                cost_ms=tuple(draw(costs) for _ in range(num_kinds)),
                memory=draw(memories),
            )
            for alike in counts
        )

    def one_option() -> TableOption:
        reach = draw(st.sampled_from(Reach))
        if reach is Reach.NODES:
            return way(*some(node_size * draw(st.integers(1, num_nodes))), reach=reach)
        count = draw(st.integers(1, node_size if reach is Reach.ONE_NODE else num_ranks))
        return way(*some(count), reach=reach)

    num_tables = draw(st.integers(1, 5 if num_ranks < 4 else 3))
    tables = [[one_option() for _ in range(draw(st.integers(1, 4)))] for _ in range(num_tables)]
    cap = draw(st.integers(4, 14))
    base = draw(st.booleans())
    return Problem(
        ranks=Ranks(
            memory_caps=[
                (cap + rank % 2 * draw(st.integers(0, 2)), 2) for rank in range(num_ranks)
            ],
            kinds=kinds,
            node_size=node_size,
            base_ms=[draw(costs) for _ in range(num_ranks)] if base else (),
            base_memory=[(draw(st.integers(0, 3)), 0) for _ in range(num_ranks)] if base else (),
        ),
        tables=tables,
    )


def search_or_none(problem: Problem) -> SearchResult | None:
    """The best placement, or None if it is certain that nothing fits."""
    try:
        return search(problem, tolerance=0.0)
    except InfeasibleError as error:
        if not error.proven:
            raise
        return None
