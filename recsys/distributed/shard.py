"""Sharding in place: a collection, or every collection of a model, becomes its sharded counterpart.

`shard` and `shard_modules` leave the rest of the model to you: wrap it in
DistributedDataParallel, or step it by hand.
`DistributedModelParallel` takes the same steps, and
replicates the rest.
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

from recsys.distributed.default_sharders import get_default_sharders, sharder_of
from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan, ParameterSharding
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.placement.strategies import check_plan_paths
from recsys.distributed.planner import EmbeddingShardingPlanner, Topology
from recsys.distributed.ranks.build_transaction import build_on_all_ranks
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.sharded.devices import resolve_device
from recsys.distributed.sharded.module_tree import check_untied, outermost, walk
from recsys.distributed.sharded.sharder import (
    ModuleSharder,
    ShardedModule,
    has_tables,
    is_sharded,
    move_parts,
)
from recsys.distributed.sharding_plan import (
    ParameterShardingGenerator,
    apply_to_all,
    construct_module_sharding_plan,
)
from recsys.kernels.arguments import shown, wrong_type
from recsys.kernels.checked import checked

Placements = (
    Mapping[str, ParameterSharding | ParameterShardingGenerator] | ParameterShardingGenerator
)
"""By table name where it goes, or what places it; or what places all."""


@checked
def shard(
    module: nn.Module,
    plan: Placements,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    sharder: ModuleSharder[Any] | None = None,
) -> nn.Module:
    """Return the sharded counterpart of one collection, with its weights.

    Put it where the collection was. Before DistributedDataParallel wraps a model with it, call
    `exclude_sharded_from_ddp`.

    Args:
        module: such as an EmbeddingBagCollection; tables on the `meta` device are allocated here.
        plan: by table name its placement or a generator such as `row_wise()`, or one generator
            for all tables. Every rank must pass the same.
        env: the ranks; the default process group if None.
        device: where this rank works; its current GPU under NCCL, else the CPU.
        sharder: of the module; the default one for its type if None.

    Raises:
        ValueError: if the plan does not fit the module or the ranks, if there is no default sharder
            for the module, or if the process group cannot exchange tensors of the device.

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
            f"A plan holds a ParameterSharding for each table, or a generator such as row_wise(); "
            f"received {shown(plan[others[0]])} for table {others[0]!r}."
        )
    if generators and placed:
        raise ValueError(
            "A plan holds placements or generators; received placements for "
            f"{sorted(placed)} and generators for {sorted(generators)}. Turn the generators into "
            "placements by construct_module_sharding_plan."
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
    """Replace, in place, every collection of a model by its sharded counterpart.

    What is left is neither replicated nor synchronised; wrap the model in DistributedDataParallel,
    which leaves the sharded tables alone. Quantized collections are spread over the devices of one
    process, as many as the environment has ranks.

    Args:
        module: the model.
        env: the ranks; the default process group if None. `ShardingEnv.from_local(n)` names `n`
            devices of this process, for models whose collections are all quantized.
        device: where this rank works; its current GPU under NCCL, else the CPU.
        plan: the placement; planned here if None. Every rank must pass the same.
        sharders: one per module type to shard; those of `get_default_sharders` if None.
        init_params: also materialise dense parts on the `meta` device, by their
            `reset_parameters`, and move the dense parts to `device`.
        planner: makes the plan; one for these ranks, with no constraints, if None.

    Returns:
        The given model, or the sharded module if the model is itself one to shard.

    Raises:
        ValueError: if the plan does not fit the model or the ranks, or the process group cannot
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


# -- the steps, which DistributedModelParallel takes as well ---------------------------------------


def place_model(
    module: nn.Module,
    env: ShardingEnv,
    device: torch.device | None,
    plan: ShardingPlan | None,
    sharders: Sequence[ModuleSharder[Any]] | None,
    planner: EmbeddingShardingPlanner | None = None,
) -> tuple[nn.Module, ShardingPlan, torch.device]:
    """Replace, in place, what the plan names, as `replace_modules`; find what is not given.

    Args:
        module: the model.
        env: the ranks.
        device: where this rank works; the default one if None.
        plan: if None, that of the planner; every rank gets the same.
        sharders: the default ones if None.
        planner: one for these ranks, with no constraints, if None.

    Returns:
        What `replace_modules` does, the plan, and this rank's device.
    """
    with build_on_all_ranks(env):
        device = resolve_device(env, device)
        chosen = get_default_sharders() if sharders is None else sharders
        by_type = {sharder.module_type: sharder for sharder in chosen}
        if plan is None:
            topology = Topology(world_size=env.world_size, compute_device=device.type)
            planner = planner or EmbeddingShardingPlanner(topology=topology)
            of_types = list(by_type.values())
            # also one rank of a larger job by itself, or devices of one process
            if env.world_size == 1 or env.process_group is None:
                plan = planner.plan(module, of_types)
            else:
                plan = planner.collective_plan(module, of_types, env.process_group)
        return replace_modules(module, plan, by_type, env, device), plan, device


def replace_modules(
    module: nn.Module,
    plan: ShardingPlan,
    sharders: Mapping[type[nn.Module], ModuleSharder[Any]],
    env: ShardingEnv,
    device: torch.device,
    env_of: Mapping[type[nn.Module], ShardingEnv] = MappingProxyType({}),
) -> nn.Module:
    """Replace, in place, every module that the plan names; one used twice stays one.

    The model changes when all ranks have built their parts: at the end of the outermost
    `build_on_all_ranks`.

    Args:
        module: the model.
        plan: names every module to replace.
        sharders: by the type of module.
        env: the ranks.
        device: where this rank works.
        env_of: the ranks of modules of some types, where they are others.

    Returns:
        The given model, or the sharded module if the model is itself one to shard.

    Raises:
        ValueError: if the plan is for another number of ranks or does not name each shardable
            module once, a module is of a subclass that no sharder is made for, the model is in a
            DistributedModelParallel already, or another parameter shares a table's weight.
    """
    if not isinstance(plan, ShardingPlan):
        wrong_type("The plan of a model", "a ShardingPlan", plan)
    check_made_for(plan, env)
    _check_plan_paths(module, plan, sharders)

    def is_leaf(child: nn.Module) -> bool:
        return has_tables(child, sharders) or is_sharded(child)

    given = {p: m for p, m in outermost(module, is_leaf) if not is_sharded(m)}
    tables = [
        weight
        for child in given.values()
        for weight in sharders[type(child)].shardable_parameters(child).values()
    ]
    check_untied(module, tables)
    fully_sharded = [n for n, p in module.named_parameters() if _is_any(p, tables, DTensor)]
    if fully_sharded:
        raise ValueError(
            f"fully_shard is for dense modules, and tables are sharded by a plan; received a model "
            f"whose tables {fully_sharded[:5]} were given to fully_shard. Call it on the dense "
            "modules only."
        )
    made: dict[int, nn.Module] = {}
    with build_on_all_ranks(env) as construction:
        for path, child in given.items():
            construction.path = path
            shard_one = sharders[type(child)].shard
            # A sharder of a user's own may not take the path.
            named = "module_fqn" in inspect.signature(shard_one).parameters
            options = {"module_fqn": path} if named else {}
            ranks = env_of.get(type(child), env)
            made[id(child)] = shard_one(child, plan.plan[path], ranks, device, **options)
        construction.path = ""
        construction.add("the model", {"the rest": _rest(module, is_leaf)})
        construction.on_commit(lambda: _put_in(module, made, is_leaf))
    return made.get(id(module), module)


def _is_any(parameter: nn.Parameter, these: Sequence[nn.Parameter], kind: type) -> bool:
    return isinstance(parameter, kind) and any(parameter is one for one in these)


def check_made_for(plan: ShardingPlan, env: ShardingEnv) -> None:
    """Raise ValueError if a plan says that it is for another number of ranks."""
    if plan.made_for is not None and plan.made_for.world_size != env.world_size:
        raise ValueError(
            f"A plan must be for the ranks there are; received one made for "
            f"{plan.made_for.world_size} ranks, on {env.world_size}. Make one for "
            f"{env.world_size} ranks."
        )


def _rest(module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> str:
    """Return, in words, the parameters and buffers that are not placed by the plan."""
    return "; ".join(
        f"{path}.{name} {list(tensor.shape)} {tensor.dtype}"
        f"{' trained' if tensor.requires_grad else ''}"
        for path, child in walk(module, is_leaf)
        if not is_leaf(child)
        for name, tensor in (*child._parameters.items(), *child._buffers.items())
        if tensor is not None
    )


def _put_in(
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
                f"Module {path!r} is a {type(child).__name__}, a subclass that no sharder is "
                "made for; its forward would be lost. Pass a sharder for it in `sharders`."
            )
    check_plan_paths(plan, shardable.keys())


def sharded_modules(module: nn.Module) -> Iterator[tuple[str, ShardedModule]]:
    """Yield, by path, the sharded modules of a model that are not inside another one."""
    for path, child in outermost(module, is_sharded):
        yield path, cast(ShardedModule, child)


def sharded_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters and buffers that differ from rank to rank.

    These are tables' parts, and dense parameters on whose module `fully_shard` was called.
    """
    tables = {
        name
        for path, child in sharded_modules(module)
        for name in child.sharded_parameter_names(path)
    }
    return tables | {n for n, p in module.named_parameters() if isinstance(p, DTensor)}


def with_own_parts(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state in which whole values, of what is fully sharded, are this rank's part."""
    own = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
    return {
        name: distribute_tensor(
            value.to(own[name].device),
            own[name].device_mesh,
            own[name].placements,
            src_data_rank=None,
        )
        if name in own and isinstance(value, Tensor) and not isinstance(value, DTensor)
        else value
        for name, value in state.items()
    }


@checked
def exclude_sharded_from_ddp(module: nn.Module, params_to_ignore: Sequence[str] = ()) -> None:
    """Exclude what is sharded in a model from the DistributedDataParallel that will wrap it.

    Otherwise it would spread rank 0's part of each table over the other ranks' parts. Call it on
    the very module that is wrapped; `shard_modules` does it for the model it returns. Names that
    are excluded already stay excluded.

    Args:
        module: what is to be wrapped, with its sharded modules in place.
        params_to_ignore: names of further parameters and buffers to exclude.

    Example:
        >>> model = nn.ModuleDict({"over": nn.Linear(4, 1)})  # and model["ebc"] = shard(ebc, ...)
        >>> exclude_sharded_from_ddp(model)
    """
    excluded = {*names_excluded_from_ddp(module), *sharded_names(module), *params_to_ignore}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(excluded))


def names_excluded_from_ddp(module: nn.Module) -> set[str]:
    """Return the names that DistributedDataParallel leaves alone when it wraps a module."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def _stays(module: nn.Module) -> bool:
    """Return whether a module is where a plan put it; quantized collections are no others."""
    return is_sharded(module) or getattr(module, "is_placed", False)


def materialize_dense(module: nn.Module, device: torch.device) -> None:
    """Initialise, by their `reset_parameters`, what dense parts have on the `meta` device.

    Raises:
        ValueError: naming a module that has no `reset_parameters`.
    """
    for path, child in walk(module, _stays):
        own = (*child.parameters(recurse=False), *child.buffers(recurse=False))
        if _stays(child) or not any(tensor.is_meta for tensor in own):
            continue
        if not hasattr(child, "reset_parameters"):
            raise ValueError(
                f"Module {path!r} ({type(child).__name__}) has parameters on the meta device "
                "but no reset_parameters() to initialise them. Add one, or build the module on a "
                "real device."
            )
        child.to_empty(device=device, recurse=False)
        cast(Any, child).reset_parameters()


def move_dense(module: nn.Module, device: torch.device) -> None:
    """Move, in place, what is not sharded."""
    move_parts(module, device, _stays)
