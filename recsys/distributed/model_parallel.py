"""Model parallelism for a whole model: tables sharded by a plan, dense parameters replicated."""

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

from recsys.base.arguments import flag, wrong_type
from recsys.base.checked import checked
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
    copy_to_device,
    is_sharded,
    refuse_to_pickle,
)
from recsys.distributed.train_pipeline.input_prefetch import InputPrefetcher
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
    """Return the module inside DistributedModelParallel and DistributedDataParallel wrappers."""
    while isinstance(module, DistributedModelParallel | DistributedDataParallel):
        if isinstance(module, DistributedModelParallel):
            module = module._dmp_wrapped_module
        else:
            module = module.module
    return module


get_module = get_unwrapped_module


def _check_not_wrapped(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        wrong_type("DistributedModelParallel.module", "an nn.Module", module)
    for path, child in module.named_modules():
        if isinstance(child, DistributedModelParallel):
            raise ValueError(
                "DistributedModelParallel.module must be an unsharded model; received one whose "
                f"submodule {path!r} is a DistributedModelParallel. Pass the unsharded model."
            )


class DistributedModelParallel(nn.Module):
    """Model with sharded tables and replicated dense parameters.

    The model trains as on one process: it has the same outputs and the same names in the state
    dict. Its gradients are the mean over ranks of each rank's loss, as in
    DistributedDataParallel.

    Args:
        module: The model. Parameters on the `meta` device are allocated here.
        env: The ranks; None for the default process group.
        device: Device of this rank; None for its current GPU under NCCL, else the CPU.
        plan: The plan, the same on every rank; None to make one here.
        sharders: One for each module type to shard; None for `get_default_sharders`.
        init_data_parallel: Whether to wrap the dense parameters now. If False, call
            `init_data_parallel` before training.
        init_parameters: Whether to initialize dense parameters on the `meta` device by
            `reset_parameters`.
        data_parallel_wrapper: Wrapper that replicates dense parameters.
        planner: Planner that makes the plan; None for one without constraints.

    Raises:
        ValueError: If the plan does not fit the model or the ranks, or the process group cannot
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

    _groups: Sequence[ShardingEnv] = ()
    """Groups of ranks over which tables are sharded; none if they are sharded over all ranks."""

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
        self.env = env = env or ShardingEnv.default()
        self._obstacle = ""
        self._wrapper = wrapper = data_parallel_wrapper or DefaultDataParallelWrapper()
        with build_on_all_ranks(env, self._groups) as construction:
            _check_not_wrapped(module)
            module, self._plan, self.device = self._place(module, device, plan, sharders, planner)
            construction.add(
                type(self).__name__,
                in_words_by_name(
                    data_parallel_wrapper=wrapper,
                    init_data_parallel=init_data_parallel,
                    init_parameters=init_parameters,
                ),
            )
        if init_parameters:
            materialize_dense(module, self.device)
        move_dense(module, self.device)
        self._hold(module)
        self.training = module.training
        if init_data_parallel:
            self.init_data_parallel()

    def _place(
        self,
        module: nn.Module,
        device: torch.device | None,
        plan: ShardingPlan | None,
        sharders: Sequence[ModuleSharder[Any]] | None,
        planner: EmbeddingShardingPlanner | None,
    ) -> tuple[nn.Module, ShardingPlan, torch.device]:
        """Shard the tables; return the module, its plan and this rank's device."""
        return place_model(module, self.env, device, plan, sharders, planner)

    def _hold(self, module: nn.Module) -> None:
        self._dmp_wrapped_module = module
        self._non_persistent_buffers_set = module._non_persistent_buffers_set  # see named_buffers
        self._optimizer = CombinedOptimizer(
            [(path, child.fused_optimizer) for path, child in sharded_modules(module)]
        )
        prefetcher = InputPrefetcher(module)
        self._prefetcher = prefetcher if len(prefetcher) > 1 else None
        self._register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            self._rename_for_load
        )

    def init_data_parallel(self) -> None:
        """Wrap the dense parameters for data-parallel training, once."""
        self.env.check_can_exchange()
        self._check_exchange()
        self._wrapper.wrap(self, self.env, self.device)

    def _apply(self, fn: Any, recurse: bool = True) -> DistributedModelParallel:
        """Check that sharded modules allow the move before dense modules move."""
        for child in self.module.modules():
            if is_sharded(child):
                child._apply(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    # -- use ---------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model, with sharded modules instead of the given ones."""
        return get_unwrapped_module(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; arguments and output are the model's."""
        self._check_exchange()
        wrapped = self._dmp_wrapped_module
        prefetcher = self._prefetcher
        with nullcontext() if prefetcher is None else prefetcher.around(args, kwargs):
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
        """The plan of every sharded module."""
        return self._plan

    def reshard(self, plan: Moves) -> None:
        """Move tables to other ranks during training, with their optimizer state.

        Call it on every rank with the same plan, between an optimizer step and the next batch.
        Outputs, weights and learning rates then equal training under the new plan, up to rounding;
        optimizer and scheduler objects stay valid. Pipelines send prefetched batches again. Modules
        move one after another. Meanwhile a rank has the old and the new shards of one module, and
        up to 64 MiB of send buffers.

        Args:
            plan: New plan: a ShardingPlan, or entries by path of the module and name of the table.
                Other tables stay. Tables keep their settings; see `ShardedCollection.reshard`.

        Raises:
            TypeError: If it is not a plan.
            ValueError: On every rank, before anything moves: if the plan does not fit the model or
                the ranks, or differs between ranks. If a table cannot move, its module stays, and
                the error names both.

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
            group = self._groups[0] if self._groups else self.env
            moves = moves_by_module(plan, collections, group.world_size)
            for path, (inner, entry) in moves.items():
                after[path] = collections[inner].plan_after(entry)
                construction.add(path or "the model", {"the new plan": stable(after[path])})
        for path, (inner, entry) in moves.items():
            collections[inner].reshard(entry)
            self._plan = replace(self._plan, plan={**self._plan.plan, path: after[path]})

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Keyed optimizer of all tables with fused updates; names as in `state_dict`."""
        return self._optimizer

    @checked
    def copy(self, device: torch.device) -> Self:
        """Return a copy on another device, with the same plan, weights and optimizer state.

        The copy is not wrapped for data-parallel training; call `init_data_parallel`. If the
        process group cannot exchange tensors of the device (NCCL and the CPU), the copy can be
        saved and loaded but not called.

        Args:
            device: Device of the copy, such as `torch.device("cpu")` for a snapshot.
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
            copied._hold(copy_to_device(module, None, copied.device))
        copied.training = self.training
        return copied

    def _take_settings(self, other: Self) -> None:
        self.env, self._plan, self._wrapper = other.env, other._plan, other._wrapper

    def _rename_for_load(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Rename entries for a module around this one, which uses the names of the bare model."""
        wrapped = "_dmp_wrapped_module."
        if isinstance(self._dmp_wrapped_module, DistributedDataParallel):
            wrapped += "module."
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[prefix + wrapped + name.removeprefix(prefix)] = state_dict.pop(name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_pickle(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy on the same device; a collective call if dense parameters are wrapped."""
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
            destination: Set to add to.
            prefix: Prefix of each name.
        """
        names = set() if destination is None else destination
        for path, child in self.module.named_modules():
            if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
                names.add(f"{prefix}{path}.weight" if path else f"{prefix}weight")
        return names

    # -- names of the bare model ----------------------------------------------------------

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the attribute of each bare name, for `torch.distributed.checkpoint.state_dict`."""
        bare = self.module
        names = (*bare._modules, *bare._parameters, *bare._buffers)
        return {**dict.fromkeys(names, "module"), "": "_dmp_wrapped_module"}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state under the unsharded model's names.

        A sharded table is one `ShardedTable` of the whole table's shape, which
        `torch.distributed.checkpoint` saves and loads under any plan.
        """
        result: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return result

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], *, strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of any plan or of the unsharded model; a collective call.

        An error of one rank is raised on all.

        Args:
            state_dict: Values by the unsharded model's names.
            strict: Whether a missing or unexpected name is an error.
            assign: Not supported: tables are views of the lookups' storage.

        Raises:
            RuntimeError: If names are missing or unexpected, or shapes differ.
            ValueError: If `assign` is set.
            TypeError: If the state is not a mapping.
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
                "DistributedModelParallel.load_state_dict needs values by name, as state_dict() "
                f"returns them; received {type(state_dict).__qualname__}. To load a file, pass "
                "the result of torch.load or use recsys.distributed.checkpoint.load_checkpoint."
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
    """Call a DistributedDataParallel module with its output flattened to tensors.

    It searches the output for tensors to find unused parameters, but does not look inside a
    pending output or a `KeyedTensor`. Pending outputs are awaited.
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
