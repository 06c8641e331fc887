"""What may change when tables of a placed model move to other ranks, and what must not."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan, ParameterSharding
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.placement.strategies import check_plan_covers
from recsys.distributed.stages.lookup import GroupSettings
from recsys.distributed.state.table_shards import TableShards
from recsys.kernels.arguments import wrong_type

Moves: TypeAlias = ShardingPlan | Mapping[str, Mapping[str, ParameterSharding]]
"""Where tables go, by the paths of their modules and their names."""

_STAYS = ("bounds_check_mode", "output_dtype", "stochastic_rounding", "cache_params")
_FIXED = _STAYS[:3]


def merged_plan(
    path: str, old: EmbeddingModuleShardingPlan, moves: Mapping[str, ParameterSharding]
) -> EmbeddingModuleShardingPlan:
    """Return the plan of a module after some of its tables have moved.

    Args:
        path: of the module, for messages.
        old: of all its tables.
        moves: of some of them; what an entry leaves None, but for the shards, stays.

    Raises:
        ValueError: if it names an unknown table, or changes what does not change by a move.
    """
    check_plan_covers(path, EmbeddingModuleShardingPlan({**old, **moves}), old)
    plan = EmbeddingModuleShardingPlan(copy.deepcopy(dict(old)))
    for name, entry in moves.items():
        before = old[name]
        for field in _FIXED:
            asked, has = getattr(entry, field), getattr(before, field)
            if asked is not None and asked != has:
                raise ValueError(
                    f"reshard moves tables and leaves their settings; table {name!r} has {field}="
                    f"{has}, received {asked}. Leave it None."
                )
        kept = {field: getattr(before, field) for field in _STAYS if getattr(entry, field) is None}
        plan[name] = replace(copy.deepcopy(entry), **kept)
    return plan


def check_moves(old: Mapping[str, TableShards], new: Mapping[str, TableShards]) -> None:
    """Check that what a rank holds of tables can be moved.

    Raises:
        ValueError: naming the table that cannot, and why.
    """
    for name, before in old.items():
        after = new[name]
        was, group = before.table.group, after.table.group
        assert isinstance(was, GroupSettings)
        assert isinstance(group, GroupSettings)
        if before.table.rects == after.table.rects and was == group:
            continue
        if group.requires_grad and group.optimizer is None:
            raise ValueError(
                f"Table {name!r} has no optimizer of its own: the one that trains it keeps its "
                "state by the parts that the ranks hold, and would lose it. Attach one by "
                "apply_optimizer_in_backward, or leave the table where it is and change the plan "
                "by save_checkpoint and load_checkpoint."
            )
        if (was.splits_row_state or group.splits_row_state) and _columns(before) != _columns(after):
            raise ValueError(
                f"Table {name!r} has row_state='per_shard', a state for each part of its columns: "
                f"{_columns(before)} before, {_columns(after)} in the new plan. Leave the columns "
                "divided as they are."
            )


def _columns(table: TableShards) -> list[tuple[int, int]]:
    rects = table.table.rects or [table.table.whole]
    return sorted({(rect.col_start, rect.col_end) for rect in rects})


def moves_by_module(
    moves: Moves, paths: Iterable[str], world_size: int
) -> dict[str, tuple[str, Mapping[str, ParameterSharding]]]:
    """Return by path the sharded collections whose tables go elsewhere, and where these go.

    Args:
        moves: by the paths of the modules that were given to be sharded, which are those of the
            collections, or of modules around one.
        paths: of the sharded collections.
        world_size: number of ranks.

    Raises:
        TypeError: if the plan is no mapping of mappings.
        ValueError: if it names another module, or is made for another number of ranks.
    """
    given = moves.plan if isinstance(moves, ShardingPlan) else moves
    if not isinstance(given, Mapping):
        wrong_type("DistributedModelParallel.reshard.plan", "a ShardingPlan", moves)
    made_for = moves.made_for if isinstance(moves, ShardingPlan) else None
    if made_for is not None and made_for.world_size != world_size:
        raise ValueError(
            f"A plan must be for the ranks there are; received one made for {made_for.world_size} "
            f"ranks, on {world_size}."
        )
    paths = list(paths)
    found = {}
    for path, entry in given.items():
        start = f"{path}." if path else ""
        own = [p for p in paths if p == path or p.startswith(start)]
        if len(own) != 1:
            raise ValueError(
                f"A plan to reshard names sharded modules of the model, {paths}; received {path!r}."
            )
        found[path] = own[0], entry
    return found
