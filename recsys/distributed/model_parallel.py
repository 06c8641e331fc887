"""A whole model placed on many ranks: tables sharded by a plan, dense parts replicated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from recsys.distributed.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from recsys.distributed.default_sharders import get_default_sharders
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.planner import EmbeddingShardingPlanner
from recsys.distributed.ranks.agreement import in_words_by_name, run_on_all_ranks, stable
from recsys.distributed.ranks.build_transaction import build_on_all_ranks
from recsys.distributed.ranks.comm import LazyAwaitable
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.shard import (
    materialize_dense,
    move_dense,
    place_model,
    sharded_modules,
    with_own_parts,
)
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.sharded.devices import canonical_device, why_no_exchange
from recsys.distributed.sharded.reshard import Moves, moves_by_module
from recsys.distributed.sharded.sharder import (
    ModuleSharder,
    ShardedModule,
    copy_around_sharded,
    is_sharded,
    refuse_to_pickle,
)
from recsys.distributed.train_pipeline.ahead import InputsAhead
from recsys.kernels.arguments import flag, wrong_type
from recsys.kernels.checked import checked
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizer

__all__ = [
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "get_default_sharders",
    "get_module",
    "get_unwrapped_module",
]


@checked
def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """Return the module inside any wrappers of this file and of DistributedDataParallel."""
    while isinstance(module, DistributedModelParallel | DistributedDataParallel):
        module = (
            module._dmp_wrapped_module
            if isinstance(module, DistributedModelParallel)
            else module.module
        )
    return module


get_module = get_unwrapped_module


def check_not_wrapped(module: nn.Module) -> None:
    """Raise unless this is a model that no DistributedModelParallel holds a part of."""
    if not isinstance(module, nn.Module):
        wrong_type("DistributedModelParallel.module", "an nn.Module", module)
    for path, child in module.named_modules():
        if isinstance(child, DistributedModelParallel):
            raise ValueError(
                "DistributedModelParallel takes a model that is not placed on ranks yet; received "
                f"one whose part {path!r} is a DistributedModelParallel. Pass the unsharded model."
            )


class DistributedModelParallel(nn.Module):
    """Places a model on many ranks: sharded tables, replicated dense parts.

    The model trains as it would on one process: same outputs, same gradients (the mean over ranks
    of each rank's loss, as DistributedDataParallel takes it), same names in the state dict.

    Args:
        module: the model. Tables and dense parts on the `meta` device are allocated here.
        env: the ranks; the default process group if None.
        device: where this rank works; its current GPU under NCCL, else the CPU.
        plan: the placement; planned here if None. Every rank must pass the same.
        sharders: one per module type to shard; those of `get_default_sharders` if None.
        init_data_parallel: wrap the dense parts now; else call `init_data_parallel` before
            training.
        init_parameters: materialise dense parts on the `meta` device by their
            `reset_parameters`.
        data_parallel_wrapper: how dense parts are replicated.
        planner: makes the plan if none is given; one for these ranks, with no constraints, if None.

    Raises:
        ValueError: if the plan does not fit the model or the ranks, or the process group cannot
            exchange tensors of the device.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
        ... )
        >>> model = DistributedModelParallel(
        ...     EmbeddingBagCollection(tables=[table]), device=torch.device("cpu")
        ... )
        >>> list(model.state_dict())
        ['embedding_bags.t.weight']
    """

    @checked
    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        *,
        planner: EmbeddingShardingPlanner | None = None,
    ) -> None:
        super().__init__()
        env = env or ShardingEnv.default()
        wrapper = data_parallel_wrapper or DefaultDataParallelWrapper()
        with build_on_all_ranks(env) as construction:
            check_not_wrapped(module)
            placed = place_model(module, env, device, plan, sharders, planner)
            construction.add(
                type(self).__name__,
                in_words_by_name(
                    data_parallel_wrapper=wrapper,
                    init_data_parallel=init_data_parallel,
                    init_parameters=init_parameters,
                ),
            )
        self._finish(env, placed, wrapper, init_data_parallel, init_parameters)

    def _finish(
        self,
        env: ShardingEnv,
        placed: tuple[nn.Module, ShardingPlan, torch.device],
        wrapper: DataParallelWrapper,
        init_data_parallel: bool,
        init_parameters: bool,
    ) -> None:
        """Do with the model, its plan and its device what is left to do once tables are placed."""
        self.env = env
        self._obstacle = ""
        self._wrapper = wrapper
        module, self._plan, self.device = placed
        if init_parameters:
            materialize_dense(module, self.device)
        move_dense(module, self.device)
        self._hold(module)
        if init_data_parallel:
            self.init_data_parallel()

    def _hold(self, module: nn.Module) -> None:
        self._dmp_wrapped_module = module
        self._non_persistent_buffers_set = module._non_persistent_buffers_set  # see named_buffers
        self._optimizer = CombinedOptimizer(
            [(path, child.fused_optimizer) for path, child in sharded_modules(module)]
        )
        ahead = InputsAhead.of_model(module)
        self._ahead = ahead if len(ahead) > 1 else None
        self._register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            self._rename_for_load
        )

    def init_data_parallel(self) -> None:
        """Wrap the dense parts for data-parallel training; does nothing the second time."""
        self.env.check_can_exchange()
        self._check_exchange()
        self._wrapper.wrap(self, self.env, self.device)

    def _apply(self, fn: Any, recurse: bool = True) -> DistributedModelParallel:
        """Let the sharded modules refuse a move before a dense one has made it."""
        for child in self.module.modules():
            if is_sharded(child):
                child._apply(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    # -- use ---------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model itself, with sharded modules in the place of the given ones."""
        return get_unwrapped_module(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self._check_exchange()
        wrapped = self._dmp_wrapped_module
        ahead = self._ahead
        with nullcontext() if ahead is None else ahead.around(args, kwargs):
            if isinstance(wrapped, DistributedDataParallel) and (
                wrapped.find_unused_parameters or wrapped.static_graph
            ):
                return _call_showing_tensors(wrapped, args, kwargs)
            return wrapped(*args, **kwargs)

    def _check_exchange(self) -> None:
        if self._obstacle:
            raise ValueError(self._obstacle)

    @property
    def plan(self) -> ShardingPlan:
        """The placement of every sharded module."""
        return self._plan

    @property
    def _plan_world_size(self) -> int:
        return self.env.world_size

    def reshard(self, plan: Moves) -> None:
        """Move tables to other ranks while the job lives, with their optimizer state.

        Every rank must call it with the same plan, between an optimizer step and the next batch.
        Training goes on as if it had begun under the new plan: outputs, weights and learning rates
        are the same, to rounding, and so are the optimizers and schedulers that you hold. A
        pipeline sends again what it has sent ahead. The modules move one after another; meanwhile
        a rank holds the old and the new parts of one module's tables, and up to 64 MiB on the way.

        Args:
            plan: where tables go: a ShardingPlan, or for some modules by path, some tables by name.
                What it does not name stays. A table keeps its settings; see
                `ShardedCollection.reshard`.

        Raises:
            TypeError: if it is no plan.
            ValueError: on every rank, with nothing moved: if it does not fit the model or the ranks
                or the ranks differ; naming the module, of which nothing has moved then, if
                one of its tables cannot move.

        Example:
            >>> from recsys.distributed.sharding_plan import construct_module_sharding_plan
            >>> from recsys.distributed.sharding_plan import row_wise
            >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
            >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
            >>> from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
            >>> table = EmbeddingBagConfig(
            ...     name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
            ... )
            >>> ebc = EmbeddingBagCollection(tables=[table])
            >>> apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
            >>> rows = construct_module_sharding_plan(ebc, {"t": row_wise()}, world_size=1)
            >>> model = nn.ModuleDict({"ebc": ebc})
            >>> model = DistributedModelParallel(model, device=torch.device("cpu"))
            >>> model.reshard({"ebc": rows})
            >>> model.plan.plan["ebc"]["t"].sharding_type
            'row_wise'
        """
        collections = {
            path: child
            for path, child in sharded_modules(self.module)
            if isinstance(child, ShardedCollection)
        }
        after = dict(self._plan.plan)
        with build_on_all_ranks(self.env) as construction:
            moves = moves_by_module(plan, collections, self._plan_world_size)
            for path, (inner, entry) in moves.items():
                after[path] = collections[inner].plan_after(entry)
                construction.add(path or "the model", {"the new plan": stable(after[path])})
        for path, (inner, entry) in moves.items():
            collections[inner].reshard(entry)
            self._plan = replace(self._plan, plan={**self._plan.plan, path: after[path]})

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of all tables that update themselves, names as in `state_dict`."""
        return self._optimizer

    @checked
    def copy(self, device: torch.device) -> Self:
        """Return a copy on another device: same plan, weight and optimizer state.

        The copy is not wrapped for data-parallel training; call `init_data_parallel`. Where
        the process group cannot exchange tensors of that device (NCCL and the CPU), the copy can be
        saved and loaded but not called.

        Args:
            device: where the copy goes, such as `torch.device("cpu")` for a snapshot.
        """
        copied = type(self).__new__(type(self))
        nn.Module.__init__(copied)
        copied._take_settings(self)
        copied.device = canonical_device(device)
        copied._obstacle = why_no_exchange(copied.env, copied.device)
        module = self.module
        if isinstance(module, ShardedModule):
            copied._hold(module.copy(copied.device))
        else:
            copied._hold(copy_around_sharded(module, copied.device))
        copied.training = self.training
        return copied

    def _take_settings(self, other: Self) -> None:
        self.env, self._plan, self._wrapper = other.env, other._plan, other._wrapper

    def _rename_for_load(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Let a module around this one load: names are those of the bare model."""
        wrapped = "_dmp_wrapped_module."
        if isinstance(self._dmp_wrapped_module, DistributedDataParallel):
            wrapped += "module."
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[prefix + wrapped + name.removeprefix(prefix)] = state_dict.pop(name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_pickle(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy on the same device, wrapped if this is; then every rank must make one."""
        copied = self.copy(self.device)
        if isinstance(self._dmp_wrapped_module, DistributedDataParallel):
            copied.init_data_parallel()
        memo[id(self)] = copied
        return copied

    def sparse_grad_parameter_names(
        self, destination: set[str] | None = None, prefix: str = ""
    ) -> set[str]:
        """Return the names of the parameters whose gradients are sparse.

        Args:
            destination: a set to add to.
            prefix: leads every name.
        """
        names = set() if destination is None else destination
        for path, child in self.module.named_modules():
            if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
                names.add(f"{prefix}{path}.weight" if path else f"{prefix}weight")
        return names

    # -- names: those of the bare model ----------------------------------------------------------

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return where the bare names lead, for `torch.distributed.checkpoint.state_dict`."""
        bare = self.module
        names = (*bare._modules, *bare._parameters, *bare._buffers)
        return {**dict.fromkeys(names, "module"), "": "_dmp_wrapped_module"}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state under the unsharded model's names.

        A sharded table appears as one
        `ShardedTable` of the whole table's shape,
        which `torch.distributed.checkpoint` saves and loads under any plan.
        """
        result: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return result

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], *, strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy a state in, from the same plan or from the unsharded model.

        Every rank must call it: an error on one of them is raised on all.

        Args:
            state_dict: values by the unsharded model's names.
            strict: whether a missing or unexpected name is an error.
            assign: not supported: the tables are views of the lookups' storage.

        Raises:
            RuntimeError: if names are missing or unexpected, or shapes differ.
            ValueError: if `assign` is set.
            TypeError: if the state is no mapping.
        """
        load = partial(self._load_state_dict, state_dict, strict, assign)
        return run_on_all_ranks(self.env, "load a state dict", load)

    def _load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        flag("DistributedModelParallel.load_state_dict: strict", strict)
        if flag("DistributedModelParallel.load_state_dict: assign", assign):
            raise ValueError(
                "DistributedModelParallel.load_state_dict copies into the tables' storage; "
                "received assign=True. Leave it False."
            )
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                "DistributedModelParallel.load_state_dict takes values by name, as state_dict() "
                f"returns them; received {type(state_dict).__qualname__}. To load a file, pass "
                "what torch.load returned, or use recsys.distributed.checkpoint.load_checkpoint."
            )
        return self.module.load_state_dict(with_own_parts(self.module, state_dict), strict=strict)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under the unsharded model's names."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    bare_named_parameters = named_parameters

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's buffers under the unsharded model's names."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)


def _call_showing_tensors(ddp: DistributedDataParallel, args: Any, kwargs: Any) -> Any:
    """Call a module that looks for tensors in its output, to follow their graph.

    It would find none in a pending output or a `KeyedTensor`, and so take
    every parameter for unused. Hence pending outputs are awaited.
    """
    structures: list[pytree.TreeSpec] = []

    def flatten(module: nn.Module, args: Any, output: Any) -> list[Any]:
        arrived = pytree.tree_map_only(LazyAwaitable, lambda lazy: lazy.wait(), output)
        leaves, structure = pytree.tree_flatten(arrived)
        structures.append(structure)
        return leaves

    hook = ddp.module.register_forward_hook(flatten)
    try:
        leaves = ddp(*args, **kwargs)
    finally:
        hook.remove()
    return pytree.tree_unflatten(leaves, structures.pop())
