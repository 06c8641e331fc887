"""A quantized model whose tables are on several devices of one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from recsys.distributed.module_tree import outermost
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
from recsys.distributed.sharder import ModuleSharder
from recsys.inference.quant_sharders import QuantizedSharder, devices_of
from recsys.inference.quantized_collection import QuantizedCollection
from recsys.kernels.checked import checked_but

_Found = Mapping[str, tuple[nn.Module, ModuleSharder[Any]]]
"""By path the modules that are to be sharded, each with its sharder."""


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
    """Spread the tables of a quantized model over the devices of one process.

    A device looks up its shards, and what it finds is gathered where the ids came from. Of a
    row_wise table the quantized rows of a batch are gathered first, on the device of the first
    shard, and pooled there. So outputs are those of the unsharded model, bit for bit. Nothing is
    exchanged between processes.

    Args:
        model: as `quantize_embeddings` returns it; left as it is.
        world_size: the number of devices; on "cpu" all shards are in host memory.
        compute_device: "cuda" or "cpu".
        sharding_device: "meta", "cuda" or "cpu", and all the same: each shard goes straight to the
            device that looks it up.
        sharders: one per module type to shard, others stay as they are; None or none: those of all
            quantized collections.
        device_memory_size: bytes of each device that tables may take; on "cpu" the lesser of this
            and `ddr_cap` counts. None: what a device has.
        constraints: by table name, for the planner. Tables without `sharding_types` are placed
            table_wise, if they fit so.
        ddr_cap: bytes of host memory per device; None: its share of what there is.
        sharding_plan: by module path and table its placement, table_wise, row_wise or column_wise;
            planned if None.

    Returns:
        The sharded model and its plan.

    Raises:
        ValueError: if the model has nothing to shard, a device does not exist, the plan does not
            fit the tables or the devices, or plan and constraints are both given.
        PlannerError: if tables do not fit, or a constraint leaves no choice.

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
    compute, _ = (
        _kind_of(name, device, known)
        for name, device, known in (
            ("compute_device", compute_device, ("cuda", "cpu")),
            ("sharding_device", sharding_device, ("meta", "cuda", "cpu")),
        )
    )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1; received {world_size}.")
    found = _found(model, sharders)
    device = devices_of(compute, world_size)[0]
    if sharding_plan is not None and constraints:
        raise ValueError(
            "shard_quant_model takes a sharding_plan, or constraints from which one is made; "
            f"received both, constraints for {sorted(constraints)}. Leave one out."
        )
    caps = [cap for cap in (device_memory_size, ddr_cap) if cap is not None]
    hbm_cap = device_memory_size
    if compute == "cpu":
        hbm_cap, ddr_cap = None, min(caps, default=None)
    topology = Topology(world_size, compute, hbm_cap, ddr_cap, local_world_size=world_size)
    if sharding_plan is None:
        plan = _planned(model, found, topology, constraints or {})
    else:
        plan = sharding_plan
        check_plan_paths(plan, found.keys())
        if caps:
            _planner(found, topology, {}).rate(model, _sharders_of(found), plan)
    env = ShardingEnv.from_local(world_size)
    sharded = {
        id(child): sharder.shard(child, plan.plan[path], env, device, module_fqn=path)
        for path, (child, sharder) in found.items()
        if path in plan.plan  # others are on another device, as constraints say
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
    found = {
        path: (child, by_type[type(child)])
        for path, child in outermost(model, lambda child: type(child) in by_type)
        if by_type[type(child)].shardable_parameters(child)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no quantized collection to shard. Call "
            "quantize_embeddings first."
        )
    return found


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
    """Return a plan: tables are whole, if they fit and constraints do not say otherwise.

    A table on one device is looked up with others there, in one kernel.
    """
    simple = dict(constraints)
    for child, sharder in found.values():
        for name in sharder.shardable_parameters(child):
            own = simple.get(name, ParameterConstraints())
            if own.sharding_types is None:
                simple[name] = replace(own, sharding_types=["table_wise"])
    try:
        return _planner(found, topology, simple).plan(model, _sharders_of(found))
    except PlannerError:
        return _planner(found, topology, constraints).plan(model, _sharders_of(found))


@final
class _StoredBytes:
    """Tells the planner the bytes of shards as they are stored."""

    def __init__(self, found: _Found, device_type: str) -> None:
        self._device_type = device_type
        self._collections = {path: child for path, (child, _) in found.items()}

    def estimate(self, table: PlannedTable, option: TableOption, shards: Shards) -> Shards:
        """Return shards with these bytes."""
        collection = self._collections[table.path]
        if not isinstance(collection, QuantizedCollection):  # a sharder of a user's own
            return shards
        row = collection.stored_row_bytes(table.name, shards.cols, self._device_type)
        storage = replace(shards.storage, weights=Bytes(shards.rows * row))
        return replace(shards, storage=storage)
