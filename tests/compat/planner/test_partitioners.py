from __future__ import annotations

import pytest
import torch

from recsys.compat.planner.partitioners import (
    GreedyPerfPartitioner,
    MemoryBalancedPartitioner,
    SortBy,
)
from recsys.compat.planner.topology import Perf, Storage, Topology
from recsys.compat.planner.types import Shard, ShardingOption
from recsys.distributed.planner.types import PlannerError, PlannerErrorType
from tests.compat.planner.scripts import needs_peer, printed

MACHINE = Topology(4, "cuda", local_world_size=2, hbm_cap=10, ddr_cap=0)


def option(
    table: str, by: str, shards: list[tuple[int, float]], kind: str = "table_wise", **more: str
) -> ShardingOption:
    parts = [Shard([1, 1], [0, 0], Storage(mib, 0), Perf(ms, 0.0, 0.0, 0.0)) for mib, ms in shards]
    module = (more.get("path", "m"), torch.nn.Identity())
    weight = torch.empty(1, 1)
    return ShardingOption(
        table, weight, module, [1.0], 8, kind, by, "fused", parts, dependency=more.get("dependency")
    )


def ranks(proposal: list[ShardingOption], **how: object) -> list[list[int | None]]:
    plan = GreedyPerfPartitioner(**how).partition(proposal, MACHINE)  # type: ignore[arg-type]
    assert plan is proposal
    return [option.get_shards_assignment() for option in plan]


def test_the_largest_goes_first_and_nodes_take_turns() -> None:
    tables = [option(str(mib), "device", [(mib, 1.0)]) for mib in (2, 5, 4, 3)]
    assert ranks(tables) == [[3], [0], [2], [1]]
    assert MACHINE.devices[0].storage == Storage(10, 0), "the machine stays as it is"
    by_time = [option(str(ms), "device", [(1, ms)]) for ms in (1.0, 9.0)]
    assert ranks(by_time, sort_by=SortBy.PERF) == [[2], [0]]


def test_memory_is_evened_out_where_that_costs_no_time() -> None:
    def tables() -> list[ShardingOption]:
        sizes = enumerate((6, 1, 1, 1, 2, 2, 1, 1))
        return [option(f"t{place}", "device", [(mib, 1.0)]) for place, mib in sizes]

    def fullest(plan: list[ShardingOption]) -> int:
        used = [0] * 4
        for table in plan:
            [shard] = table.shards
            assert shard.rank is not None
            assert shard.storage is not None
            used[shard.rank] += shard.storage.hbm
        return max(used)

    fast = GreedyPerfPartitioner(SortBy.PERF).partition(tables(), MACHINE)
    assert fullest(fast) == 8, "two tables a rank"
    assert fullest(MemoryBalancedPartitioner().partition(tables(), MACHINE)) == 7
    even = MemoryBalancedPartitioner(tolerance=0.5).partition(tables(), MACHINE)
    assert fullest(even) == 6, "a rank with one table, another with three"
    assert fullest(MemoryBalancedPartitioner(0, 0.5).partition(tables(), MACHINE)) == 8
    assert MACHINE.devices[0].storage == Storage(10, 0), "the machine stays as it is"
    too_large = [option("a", "device", [(11, 1.0)])]
    with pytest.raises(PlannerError):
        MemoryBalancedPartitioner().partition(too_large, MACHINE)
    with pytest.raises(ValueError, match="at least 0; received -1 and 0"):
        MemoryBalancedPartitioner(max_search_count=-1, tolerance=0)


def test_what_goes_everywhere_comes_first() -> None:
    everywhere = option("a", "uniform", [(1, 9.0), (1, 5.0), (1, 1.0), (1, 7.0)])
    assert ranks([option("b", "device", [(9, 1.0)]), everywhere]) == [[2], [0, 1, 2, 3]]


def test_a_node_takes_all_shards_of_an_option_or_none() -> None:
    busy = option("a", "device", [(5, 3.0)])
    node = option("b", "host", [(4, 1.0), (6, 1.0)], "table_row_wise")
    assert ranks([busy, node]) == [[2], [0, 1]]
    full = option("c", "uniform", [(8, 1.0)] * 4)
    with pytest.raises(PlannerError, match=r"table 'b', table_row_wise.*Storage") as raised:
        ranks([full, node])
    assert raised.value.error_type is PlannerErrorType.PARTITION


def test_columns_of_a_node_may_share_a_rank() -> None:
    columns = option("a", "host", [(1, 5.0), (1, 1.0), (1, 1.0)], "table_column_wise")
    assert ranks([columns]) == [[0, 1, 1]]


def test_a_grid_takes_whole_nodes() -> None:
    grid = option("a", "multi_host", [(1, 1.0)] * 4, "grid_shard")
    busy = option("b", "device", [(9, 1.0)])
    assert ranks([busy, grid]) == [[0], [2, 3, 0, 1]]


def test_tables_that_depend_on_each_other_go_to_one_node() -> None:
    two = [
        option(name, "host", [(2, 1.0), (2, 1.0)], "table_row_wise", dependency="tower")
        for name in "ab"
    ]
    assert ranks(two) == [[0, 1], [0, 1]]


def test_modules_with_few_tables_may_go_first() -> None:
    tables = [option(n, "device", [(9, 1.0)]) for n in "ab"]
    tables.append(option("c", "device", [(1, 1.0)], path="other"))
    assert ranks(tables) == [[0], [2], [1]]
    assert ranks(tables, balance_modules=True) == [[2], [1], [0]]


def test_it_asks_for_estimates() -> None:
    bare = option("a", "device", [(1, 1.0)])
    bare.shards[0].storage = None
    with pytest.raises(ValueError, match=r"must have a storage.*populate_estimates"):
        ranks([bare])


@needs_peer
def test_ranks_are_those_of_torchrec() -> None:
    for part in ("ranks", "shards"):
        ours = printed("choices.py")[part]
        assert ours == printed("choices.py", by_peer=True)[part]
    refused = [found for found in printed("choices.py")["ranks"] if found == "PARTITION"]
    assert 0 < len(refused) < len(printed("choices.py")["ranks"])
