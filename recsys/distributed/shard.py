"""Sharding in place: replaces a collection, or all collections of a model, by sharded ones.

`shard` and `shard_modules` do not replicate dense parameters: wrap the model in
DistributedDataParallel. `DistributedModelParallel` replicates them itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from recsys.base.arguments import shown, wrong_type
from recsys.base.checked import checked
from recsys.distributed.default_sharders import get_default_sharders, sharder_of
from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan, ParameterSharding
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.placement.strategies import check_plan_paths
from recsys.distributed.planner import EmbeddingShardingPlanner, Topology
from recsys.distributed.ranks.build_transaction import build_on_all_ranks
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.sharded.devices import resolve_device
from recsys.distributed.sharded.module_tree import check_untied, outermost, walk
from recsys.distributed.sharded.reshard import check_made_for
from recsys.distributed.sharded.sharder import (
    ModuleSharder,
    ShardedModule,
    has_tables,
    is_sharded,
    move_tensors,
)
from recsys.distributed.sharding_plan import (
    ParameterShardingGenerator,
    apply_to_all,
    construct_module_sharding_plan,
)

Placements = (
    Mapping[str, ParameterSharding | ParameterShardingGenerator] | ParameterShardingGenerator
)
"""Plan entries or generators by table name, or one generator for all tables."""


@checked
def shard(
    module: nn.Module,
    plan: Placements,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    sharder: ModuleSharder[Any] | None = None,
) -> nn.Module:
    """Return the sharded collection with the weights of an unsharded one.

    Replace the collection in the model by the result. Before DistributedDataParallel wraps the
    model, call `exclude_sharded_from_ddp`.

    Args:
        module: Collection, such as an EmbeddingBagCollection. Tables on the `meta` device are
            allocated here.
        plan: Plan entry or generator, such as `row_wise()`, by table name, or one generator for
            all tables; the same on every rank.
        env: The ranks; None for the default process group.
        device: Device of this rank; None for its current GPU under NCCL, else the CPU.
        sharder: Sharder of the module; None for the default one.

    Raises:
        ValueError: If the plan does not fit the module or the ranks, if the module has no default
            sharder, or if the process group cannot exchange tensors of the device.

    Example:
        >>> from recsys.distributed.sharding_plan import row_wise
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
        ... )
        >>> ebc = shard(
        ...     EmbeddingBagCollection(tables=[table]), row_wise(), device=torch.device("cpu")
        ... )
        >>> type(ebc).__name__, list(ebc.state_dict())
        ('ShardedEmbeddingBagCollection', ['embedding_bags.t.weight'])
    """
    env = env or ShardingEnv.default()
    with build_on_all_ranks(env):
        device = resolve_device(env, device)
        sharder = sharder or sharder_of(module)
        placed = _placements(module, plan, env, device, sharder)
        return sharder.shard(module, placed, env, device)


def _placements(
    module: nn.Module,
    plan: Placements,
    env: ShardingEnv,
    device: torch.device,
    sharder: ModuleSharder[Any],
) -> EmbeddingModuleShardingPlan:
    if not isinstance(plan, Mapping):
        plan = apply_to_all(module, plan, sharder)
    generators = {name: entry for name, entry in plan.items() if callable(entry)}
    placed = {n: entry for n, entry in plan.items() if isinstance(entry, ParameterSharding)}
    others = sorted(plan.keys() - generators.keys() - placed.keys())
    if others:
        raise TypeError(
            "A plan must have a ParameterSharding or a generator such as row_wise() for each "
            f"table; received {shown(plan[others[0]])} for table {others[0]!r}."
        )
    if generators and placed:
        raise ValueError(
            "A plan must have placements or generators; received placements for "
            f"{sorted(placed)} and generators for {sorted(generators)}. Convert the generators by "
            "construct_module_sharding_plan."
        )
    if generators:
        return construct_module_sharding_plan(
            module, generators, sharder, env.node_size, env.world_size, device.type
        )
    return EmbeddingModuleShardingPlan(placed)


@checked
def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    init_params: bool = False,
    planner: EmbeddingShardingPlanner | None = None,
) -> nn.Module:
    """Replace every collection of a model by its sharded counterpart, in place.

    Dense parameters are neither replicated nor synchronized; wrap the model in
    DistributedDataParallel, which ignores the sharded tables. Quantized collections are sharded
    over the devices of one process, one for each rank of `env`.

    Args:
        module: The model.
        env: The ranks; None for the default process group. `ShardingEnv.from_local(n)` stands for
            `n` devices of this process, for models with quantized collections only.
        device: Device of this rank; None for its current GPU under NCCL, else the CPU.
        plan: The plan, the same on every rank; None to make one here.
        sharders: One for each module type to shard; None for `get_default_sharders`.
        init_params: Whether to initialize dense parameters on the `meta` device by
            `reset_parameters`, and to move dense parameters to `device`.
        planner: Planner that makes the plan; None for one without constraints.

    Returns:
        The given model, or the sharded module if the model is a collection.

    Raises:
        ValueError: If the plan does not fit the model or the ranks, or the process group cannot
            exchange tensors of the device.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
        ... )
        >>> model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table])})
        >>> model = shard_modules(model, device=torch.device("cpu"))
        >>> type(model["ebc"]).__name__
        'ShardedEmbeddingBagCollection'
    """
    env = env or ShardingEnv.default()
    module, _, device = place_model(module, env, device, plan, sharders, planner)
    if init_params:
        materialize_dense(module, device)
        move_dense(module, device)
    exclude_sharded_from_ddp(module)
    return module


def sharders_by_type(
    sharders: Sequence[ModuleSharder[Any]] | None,
) -> dict[type[nn.Module], ModuleSharder[Any]]:
    """Return sharders by module type, the default ones for None."""
    chosen = get_default_sharders() if sharders is None else sharders
    return {sharder.module_type: sharder for sharder in chosen}


def plan_model(
    module: nn.Module,
    env: ShardingEnv,
    group: ShardingEnv,
    device: torch.device,
    sharders: Sequence[ModuleSharder[Any]],
    planner: EmbeddingShardingPlanner | None,
) -> ShardingPlan:
    """Return the plan of a model, the same on every rank.

    Args:
        module: The model.
        env: The ranks.
        group: Ranks over which tables are sharded: all ranks, or one of several groups.
        device: Device of this rank.
        sharders: One for each module type to shard.
        planner: The planner; None for one without constraints.
    """
    planner = planner or EmbeddingShardingPlanner(
        topology=Topology(
            world_size=group.world_size,
            local_world_size=group.node_size,
            compute_device=device.type,
        )
    )
    # one rank of a larger job by itself, or devices of one process
    if env.world_size == 1 or env.process_group is None:
        return planner.plan(module, list(sharders))
    return planner.collective_plan(module, list(sharders), env.process_group)


def place_model(
    module: nn.Module,
    env: ShardingEnv,
    device: torch.device | None,
    plan: ShardingPlan | None,
    sharders: Sequence[ModuleSharder[Any]] | None,
    planner: EmbeddingShardingPlanner | None = None,
) -> tuple[nn.Module, ShardingPlan, torch.device]:
    """Plan a model if needed, and replace modules as `replace_modules`.

    Args:
        module: The model.
        env: The ranks.
        device: Device of this rank; None for the default one.
        plan: The plan; None to make one.
        sharders: One for each module type to shard; None for the default ones.
        planner: The planner; None for one without constraints.

    Returns:
        The result of `replace_modules`, the plan, and this rank's device.
    """
    with build_on_all_ranks(env):
        device = resolve_device(env, device)
        by_type = sharders_by_type(sharders)
        if plan is None:
            plan = plan_model(module, env, env, device, list(by_type.values()), planner)
        return replace_modules(module, plan, by_type, env, device), plan, device


def replace_modules(
    module: nn.Module,
    plan: ShardingPlan,
    sharders: Mapping[type[nn.Module], ModuleSharder[Any]],
    env: ShardingEnv,
    device: torch.device,
    env_of: Mapping[type[nn.Module], ShardingEnv] = MappingProxyType({}),
) -> nn.Module:
    """Replace every module of a plan in place. A module with two paths stays one module.

    The model changes at the end of the outermost `build_on_all_ranks`, when all ranks have built
    their shards.

    Args:
        module: The model.
        plan: Plan with every module to replace.
        sharders: Sharders by module type.
        env: The ranks.
        device: Device of this rank.
        env_of: Ranks of modules of some types, if they differ from `env`.

    Returns:
        The given model, or the sharded module if the model is a collection.

    Raises:
        ValueError: If the plan is for another number of ranks or does not name each shardable
            module once; if a module has a subclass type without a sharder; if the model is sharded
            already; or if another parameter shares a table's weight.
    """
    if not isinstance(plan, ShardingPlan):
        wrong_type("The plan of a model", "a ShardingPlan", plan)
    check_made_for(plan, env.world_size)
    _check_plan_paths(module, plan, sharders)

    def is_leaf(child: nn.Module) -> bool:
        return has_tables(child, sharders) or is_sharded(child)

    unsharded = {p: m for p, m in outermost(module, is_leaf) if not is_sharded(m)}
    tables = [
        weight
        for child in unsharded.values()
        for weight in sharders[type(child)].shardable_parameters(child).values()
    ]
    check_untied(module, tables)
    table_ids = {id(weight) for weight in tables}
    fully_sharded = [n for n, p in _fully_sharded(module).items() if id(p) in table_ids]
    if fully_sharded:
        raise ValueError(
            "Tables must not be sharded by fully_shard; received a model whose tables "
            f"{fully_sharded[:5]} were given to fully_shard. Call it on dense modules only."
        )
    made: dict[int, nn.Module] = {}
    with build_on_all_ranks(env) as construction:
        for path, child in unsharded.items():
            construction.path = path
            shard_one = sharders[type(child)].shard
            # a custom sharder may lack the argument
            named = "module_fqn" in inspect.signature(shard_one).parameters
            options = {"module_fqn": path} if named else {}
            ranks = env_of.get(type(child), env)
            made[id(child)] = shard_one(child, plan.plan[path], ranks, device, **options)
            made[id(child)].training = child.training
        construction.path = ""
        construction.add("the model", {"the rest": _rest(module, is_leaf)})
        construction.on_commit(lambda: _replace(module, made, is_leaf))
    return made.get(id(module), module)


def _fully_sharded(module: nn.Module) -> dict[str, DTensor]:
    """Return the parameters that `fully_shard` sharded, by name."""
    return {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}


def _rest(module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> str:
    """Describe the parameters and buffers outside sharded modules."""
    return "; ".join(
        f"{path}.{name} {list(tensor.shape)} {tensor.dtype}"
        f"{' trained' if tensor.requires_grad else ''}"
        for path, child in walk(module, is_leaf)
        if not is_leaf(child)
        for name, tensor in (*child._parameters.items(), *child._buffers.items())
        if tensor is not None
    )


def _replace(
    module: nn.Module, made: Mapping[int, nn.Module], is_leaf: Callable[[nn.Module], bool]
) -> None:
    for _, parent in list(walk(module, is_leaf)):
        if not is_leaf(parent):
            for name, child in parent._modules.items():
                parent._modules[name] = made.get(id(child), child)


def _check_plan_paths(
    module: nn.Module, plan: ShardingPlan, sharders: Mapping[type[nn.Module], ModuleSharder[Any]]
) -> None:
    shardable = dict(outermost(module, lambda child: has_tables(child, sharders)))
    for path, child in walk(module, lambda child: type(child) in sharders):
        if type(child) not in sharders and isinstance(child, tuple(sharders)):
            raise ValueError(
                f"Module {path!r} is a {type(child).__name__}, a subclass without a sharder; its "
                "forward would be lost. Pass a sharder for it in `sharders`."
            )
    check_plan_paths(plan, shardable.keys())


def sharded_modules(module: nn.Module) -> Iterator[tuple[str, ShardedModule]]:
    """Yield the outermost sharded modules of a model with their paths."""
    for path, child in outermost(module, is_sharded):
        yield path, cast(ShardedModule, child)


def sharded_names(module: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that are sharded: by a plan or `fully_shard`."""
    tables = {
        name
        for path, child in sharded_modules(module)
        for name in child.sharded_parameter_names(path)
    }
    return tables | {*_fully_sharded(module)}


def with_own_parts(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with whole values of fully sharded parameters split to this rank's shards."""
    sharded = _fully_sharded(module)
    return {
        name: distribute_tensor(
            value.to(sharded[name].device),
            sharded[name].device_mesh,
            sharded[name].placements,
            src_data_rank=None,
        )
        if name in sharded and isinstance(value, Tensor) and not isinstance(value, DTensor)
        else value
        for name, value in state.items()
    }


@checked
def exclude_sharded_from_ddp(module: nn.Module, params_to_ignore: Sequence[str] = ()) -> None:
    """Exclude sharded parameters from the DistributedDataParallel that will wrap a model.

    Otherwise it would broadcast the shards of rank 0 to the other ranks. Call it on the module that
    is wrapped; `shard_modules` does so for the model it returns. Names that are excluded already
    stay excluded.

    Args:
        module: Model to wrap, with its sharded modules.
        params_to_ignore: Names of further parameters and buffers to exclude.

    Example:
        >>> model = nn.ModuleDict({"over": nn.Linear(4, 1)})  # and model["ebc"] = shard(ebc, ...)
        >>> exclude_sharded_from_ddp(model)
    """
    excluded = {*names_excluded_from_ddp(module), *sharded_names(module), *params_to_ignore}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(excluded))


def names_excluded_from_ddp(module: nn.Module) -> set[str]:
    """Return the names that DistributedDataParallel ignores when it wraps a module."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def _stays(module: nn.Module) -> bool:
    """Return whether a module is sharded, or a placed quantized collection."""
    return is_sharded(module) or getattr(module, "is_placed", False)


def materialize_dense(module: nn.Module, device: torch.device) -> None:
    """Initialize dense parameters on the `meta` device by `reset_parameters` of their module.

    Raises:
        ValueError: If a module has no `reset_parameters`.
    """
    for path, child in walk(module, _stays):
        tensors = (*child.parameters(recurse=False), *child.buffers(recurse=False))
        if _stays(child) or not any(tensor.is_meta for tensor in tensors):
            continue
        if not hasattr(child, "reset_parameters"):
            raise ValueError(
                f"Module {path!r} ({type(child).__name__}) has parameters on the meta device "
                "but no reset_parameters() to initialize them. Add one, or build the module on a "
                "real device."
            )
        child.to_empty(device=device, recurse=False)
        cast(Any, child).reset_parameters()


def move_dense(module: nn.Module, device: torch.device) -> None:
    """Move dense parameters and buffers in place."""
    move_tensors(module, device, _stays)
