"""Checks of plans that move tables of a sharded model to other ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from recsys.base.arguments import wrong_type
from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan, ParameterSharding
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.placement.strategies import check_plan_covers
from recsys.distributed.ranks.build_transaction import BuildTransaction
from recsys.distributed.sharded.collection_stages import (
    CollectionSettings,
    CollectionStages,
    build_stages,
)
from recsys.distributed.stages.lookup import GroupSettings
from recsys.distributed.state.moves import move_tables
from recsys.distributed.state.table_shards import TableShards

Moves: TypeAlias = ShardingPlan | Mapping[str, Mapping[str, ParameterSharding]]
"""Plan entries by path of the module and name of the table."""

_KEPT = ("bounds_check_mode", "output_dtype", "stochastic_rounding", "cache_params")
# the last one, the size of a cache, may change: no result depends on it
_FIXED = _KEPT[:3]


def merged_plan(
    path: str, old: EmbeddingModuleShardingPlan, moves: Mapping[str, ParameterSharding]
) -> EmbeddingModuleShardingPlan:
    """Return the plan of a module after some of its tables have moved.

    Args:
        path: Path of the module, for messages.
        old: Plan of all its tables.
        moves: New entries of some tables. Fields that are None, except the shards, keep their
            values.

    Raises:
        ValueError: If a table is unknown, or a move would change a fixed setting.
    """
    check_plan_covers(path, EmbeddingModuleShardingPlan({**old, **moves}), old)
    plan = EmbeddingModuleShardingPlan(copy.deepcopy(dict(old)))
    for name, entry in moves.items():
        before = old[name]
        for field in _FIXED:
            asked, has = getattr(entry, field), getattr(before, field)
            if asked is not None and asked != has:
                raise ValueError(
                    f"reshard must not change {field}={has} of table {name!r}; received {asked}. "
                    "Leave it None."
                )
        kept = {field: getattr(before, field) for field in _KEPT if getattr(entry, field) is None}
        # a copy, since the caller may change or reuse the entry
        plan[name] = replace(copy.deepcopy(entry), **kept)
    return plan


def check_moves(old: Mapping[str, TableShards], new: Mapping[str, TableShards]) -> None:
    """Check that the shards and optimizer states of tables can be moved.

    Raises:
        ValueError: If a table cannot be moved. It names the table and the reason.
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
                f"A table that moves must have an attached optimizer; table {name!r} has none, and "
                "its optimizer would lose the state of its shards. Attach one by "
                "apply_optimizer_in_backward, or change the plan by save_checkpoint and "
                "load_checkpoint."
            )
        if (was.splits_row_state or group.splits_row_state) and _columns(before) != _columns(after):
            raise ValueError(
                f"Table {name!r} has row_state='per_shard' and must keep its column shards "
                f"{_columns(before)}; received {_columns(after)}. Do not change them."
            )


def _columns(table: TableShards) -> list[tuple[int, int]]:
    rects = table.table.rects or [table.table.whole]
    return sorted({(rect.col_start, rect.col_end) for rect in rects})


def prepare_move(
    construction: BuildTransaction,
    settings: CollectionSettings,
    stages: CollectionStages,
    plan: Mapping[str, ParameterSharding],
) -> tuple[CollectionSettings, CollectionStages]:
    """Build the stages of a collection under a new plan; tables move when all ranks have agreed.

    Args:
        construction: The transaction.
        settings: Current settings.
        stages: Current stages.
        plan: New entries by table name.

    Returns:
        The new settings and stages.

    Raises:
        ValueError: If the plan does not fit, or tables cannot move.
    """
    # held gradients are rows of the old shards
    # docs/decisions/optimizers.md, "Deferred tables hold row gradients"
    if stages.finisher.deferred.wait_for_step:
        raise ValueError(
            f"Gradients of the tables of {settings.path!r} wait for a step, and would be lost by "
            "a move. Call step() or zero_grad() before reshard."
        )
    for config in settings.configs:
        if config.name in plan and config.ids is not None:
            remedy = "Save a checkpoint, and load it under the new plan."
            config.ids.check_rows_in_memory(config.name, "reshard", remedy)
    after = replace(settings, plan=merged_plan(settings.path, settings.plan, plan))
    # old shards stay until the commit: an error on any rank leaves the module as it is
    moved = build_stages(after, stages.lookups, stages.replicas)
    check_moves(stages.tables, moved.tables)
    construction.connect(moved.output_dist.connect)
    # a move copies values, so the seed is not read
    construction.load(0, lambda _: move_tables(stages.tables, moved.tables, settings.env))
    return after, moved


def check_made_for(plan: object, world_size: int) -> None:
    """Raise ValueError if a `ShardingPlan` was made for another number of ranks."""
    made_for = plan.made_for if isinstance(plan, ShardingPlan) else None
    if made_for is not None and made_for.world_size != world_size:
        raise ValueError(
            "The plan must be made for the number of ranks of the job; received one made for "
            f"{made_for.world_size} ranks, on {world_size}. Make one for {world_size} ranks."
        )


def moves_by_module(
    moves: Moves, paths: Iterable[str], world_size: int
) -> dict[str, tuple[str, Mapping[str, ParameterSharding]]]:
    """Return the path of the sharded collection and its new entries by each path of a plan.

    Args:
        moves: The plan, by the paths of sharded modules: collections, or modules around one.
        paths: Paths of the sharded collections.
        world_size: Number of ranks.

    Raises:
        TypeError: If the plan is not a mapping of mappings.
        ValueError: If it names another module, or was made for another number of ranks.
    """
    entries = moves.plan if isinstance(moves, ShardingPlan) else moves
    if not isinstance(entries, Mapping):
        wrong_type("DistributedModelParallel.reshard.plan", "a ShardingPlan", moves)
    check_made_for(moves, world_size)
    paths = list(paths)
    by_path = {}
    for path, entry in entries.items():
        start = f"{path}." if path else ""
        module_paths = [p for p in paths if p == path or p.startswith(start)]
        if len(module_paths) != 1:
            raise ValueError(
                f"A plan for reshard must name sharded modules of the model, {paths}; received "
                f"{path!r}."
            )
        by_path[path] = module_paths[0], entry
    return by_path
