"""Sharding of a quantized model over several devices of one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from recsys.base.checked import checked_but
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.placement.strategies import check_plan_paths
from recsys.distributed.planner import (
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    ParameterConstraints,
    PlannerError,
    Topology,
)
from recsys.distributed.planner.options import Shards, TableOption
from recsys.distributed.planner.tables import Bytes, PlannedTable
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.sharded.devices import local_devices
from recsys.distributed.sharded.module_tree import outermost
from recsys.distributed.sharded.sharder import ModuleSharder
from recsys.inference.quant.collection import QuantizedCollection
from recsys.inference.quant.modules import QuantizedSharder

_Found = Mapping[str, tuple[nn.Module, ModuleSharder[Any]]]
"""The modules to shard, each with its sharder, by path."""


@checked_but("compute_device", "sharding_device")
def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str | torch.device = "cuda",
    sharding_device: str | torch.device = "meta",
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    device_memory_size: int | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Shard the tables of a quantized model over the devices of one process.

    Each device looks up its shards and sends the rows to the device of the ids. The quantized rows
    of a row_wise table are first gathered on the device of its first shard, and pooled there.
    Outputs equal the outputs of the unsharded model bit for bit. Processes exchange nothing.

    Args:
        model: A model of `quantize_embeddings`; not changed.
        world_size: Number of devices; on "cpu", all shards are in host memory.
        compute_device: "cuda" or "cpu".
        sharding_device: "meta", "cuda" or "cpu"; ignored, as each shard is copied directly to its
            device.
        sharders: One sharder per module type to shard. None or empty: sharders of all quantized
            collections.
        device_memory_size: Bytes per device for tables; on "cpu", the minimum of this and `ddr_cap`
            is used. None: the memory of the device.
        constraints: Constraints of the planner by table name. A table without `sharding_types` is
            placed table_wise if it fits.
        ddr_cap: Bytes of host memory per device; None: an equal share of the host memory.
        sharding_plan: Placement by module path and table: table_wise, row_wise or column_wise.
            None: planned.

    Returns:
        The sharded model and its plan.

    Raises:
        ValueError: The model has nothing to shard, a device does not exist, the plan does not match
            the tables or the devices, or both plan and constraints are given.
        PlannerError: The tables do not fit, or the constraints leave no option.

    Example:
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [EmbeddingBagConfig(10, 4, name, feature_names=[name]) for name in "ab"]
        >>> model = quantize_embeddings(nn.Sequential(EmbeddingBagCollection(tables=tables)))
        >>> constraints = {"b": ParameterConstraints(sharding_types=["row_wise"])}
        >>> sharded, plan = shard_quant_model(model, 2, "cpu", constraints=constraints)
        >>> [(entry.sharding_type, entry.ranks) for entry in plan.plan["0"].values()]
        [('table_wise', [0]), ('row_wise', [0, 1])]
    """
    compute = _kind_of("compute_device", compute_device, ("cuda", "cpu"))
    _kind_of("sharding_device", sharding_device, ("meta", "cuda", "cpu"))
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1; received {world_size}.")
    modules = _found(model, sharders)
    device = local_devices(compute, world_size)[0]
    if sharding_plan is not None and constraints:
        raise ValueError(
            "shard_quant_model takes either sharding_plan or constraints; received both, with "
            f"constraints for {sorted(constraints)}. Leave one out."
        )
    caps = [cap for cap in (device_memory_size, ddr_cap) if cap is not None]
    hbm_cap = device_memory_size
    if compute == "cpu":
        hbm_cap, ddr_cap = None, min(caps, default=None)
    topology = Topology(world_size, compute, hbm_cap, ddr_cap, local_world_size=world_size)
    if sharding_plan is None:
        plan = _planned(model, modules, topology, constraints or {})
    else:
        plan = sharding_plan
        check_plan_paths(plan, modules.keys())
        if caps:
            _planner(modules, topology, {}).rate(model, _sharders_of(modules), plan)
    env = ShardingEnv.from_local(world_size)
    sharded = {
        id(child): sharder.shard(child, plan.plan[path], env, device, module_fqn=path)
        for path, (child, sharder) in modules.items()
        if path in plan.plan  # constraints may keep a module on its device
    }
    return copy.deepcopy(model, dict(sharded)), plan


def _kind_of(name: str, device: str | torch.device, known: tuple[str, ...]) -> str:
    kind = device.type if isinstance(device, torch.device) else device
    if kind not in known:
        choices = " or ".join([", ".join(map(repr, known[:-1])), repr(known[-1])])
        raise ValueError(f"{name} must be {choices}; received {kind!r}.")
    return kind


def _found(model: nn.Module, sharders: Sequence[ModuleSharder[Any]] | None) -> _Found:
    by_type = {sharder.module_type: sharder for sharder in sharders or ()}
    if not sharders:
        for child in model.modules():
            if isinstance(child, QuantizedCollection):
                by_type[type(child)] = sharder = QuantizedSharder()
                sharder.replaces = type(child)
    modules = {
        path: (child, by_type[type(child)])
        for path, child in outermost(model, lambda child: type(child) in by_type)
        if by_type[type(child)].shardable_parameters(child)
    }
    if not modules:
        raise ValueError(
            f"{type(model).__name__} must have a quantized collection to shard; received none. "
            "Call quantize_embeddings first."
        )
    return modules


def _sharders_of(found: _Found) -> list[ModuleSharder[Any]]:
    return list({sharder.module_type: sharder for _, sharder in found.values()}.values())


def _planner(
    found: _Found, topology: Topology, constraints: Mapping[str, ParameterConstraints]
) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(
        topology,
        batch_size=1,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
        estimator=_StoredBytes(found, topology.compute_device),
    )


def _planned(
    model: nn.Module,
    found: _Found,
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints],
) -> ShardingPlan:
    """Plan with whole tables if they fit and constraints allow it.

    One kernel looks up all whole tables of a device.
    """
    simple = dict(constraints)
    for child, sharder in found.values():
        for name in sharder.shardable_parameters(child):
            constraint = simple.get(name, ParameterConstraints())
            if constraint.sharding_types is None:
                simple[name] = replace(constraint, sharding_types=["table_wise"])
    try:
        return _planner(found, topology, simple).plan(model, _sharders_of(found))
    except PlannerError:
        return _planner(found, topology, constraints).plan(model, _sharders_of(found))


@final
class _StoredBytes:
    """Estimator of the stored bytes of shards, for the planner."""

    def __init__(self, found: _Found, device_type: str) -> None:
        self._device_type = device_type
        self._collections = {path: child for path, (child, _) in found.items()}

    def estimate(self, table: PlannedTable, option: TableOption, shards: Shards) -> Shards:
        """Set the stored bytes of shards."""
        collection = self._collections[table.path]
        if not isinstance(collection, QuantizedCollection):  # of a user's sharder
            return shards
        row = collection.stored_row_bytes(table.name, shards.cols, self._device_type)
        storage = replace(shards.storage, weights=Bytes(shards.rows * row))
        return replace(shards, storage=storage)
