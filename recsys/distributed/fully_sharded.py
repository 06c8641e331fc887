"""Dense parameters sharded by torch's `fully_shard` instead of replicated.

For models whose dense parameters and optimizer states are too large for one device. If you call
`fully_shard` on dense modules yourself, `DistributedModelParallel` ignores their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from recsys.base.checked import check_fields
from recsys.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.shard import sharded_modules, sharded_names
from recsys.distributed.sharded.module_tree import outermost

__all__ = ["FullyShardWrapper"]


@final
@dataclass(eq=False)
class FullyShardWrapper:
    """Wrapper that shards dense modules over the ranks, as `data_parallel_wrapper` of a model.

    Sharded parameters start with rank 0's values. Other dense parameters are replicated. With one
    rank nothing changes.

    Args:
        modules: Paths of modules that are gathered as a whole when they are called; None for the
            largest modules without a sharded table.
        mesh: The ranks; None for all. A mesh of two dimensions, `[replicate, shard]`, shards over
            the second and replicates over the first.
        options: Further arguments of `fully_shard`, such as `{"reshard_after_forward": False}`.

    Raises:
        ValueError: When the model is wrapped, if a path is not a module, or its module has a
            sharded table, no trained parameter or no forward.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(10, 4, "films", feature_names=["film"])
        >>> model = nn.ModuleDict(
        ...     {"ebc": EmbeddingBagCollection(tables=[table]), "over": nn.Linear(4, 1)}
        ... )
        >>> model = DistributedModelParallel(
        ...     model, device=torch.device("cpu"), data_parallel_wrapper=FullyShardWrapper()
        ... )
    """

    modules: Sequence[str] | None = None
    mesh: DeviceMesh | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        check_fields(self)

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Shard the chosen dense modules in place and replicate other dense parameters."""
        if env.world_size == 1:
            return
        model = dmp.module
        chosen = self._chosen(model)
        others = sharded_names(model)
        names = {
            f"{path}.{name}"
            for path, child in chosen
            for name, _ in (*child.named_parameters(), *child.named_buffers())
        }
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in names and name not in others:
                comm.broadcast(env, ExchangeName.DENSE_VALUES, tensor.data)
        mesh = self.mesh
        if mesh is None:
            group = env.group_of(range(env.world_size))
            mesh = DeviceMesh.from_group(group, device.type)
        for _, child in reversed(chosen):  # inner modules first
            fully_shard(child, mesh=mesh, **self.options)
        DefaultDataParallelWrapper().wrap(dmp, env, device)

    def _chosen(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules to shard by path, outer modules first."""
        sharded = [child for _, child in sharded_modules(model)]
        occupied = {id(child) for each in sharded for child in each.modules()}

        def is_unit(module: nn.Module) -> bool:
            return (
                all(id(child) not in occupied for child in module.modules())
                and not isinstance(module, nn.ModuleList | nn.ModuleDict)  # they have no forward
                and any(p.requires_grad for p in module.parameters())
            )

        def is_leaf(module: nn.Module) -> bool:
            return id(module) in occupied or is_unit(module)

        units = [(path, child) for path, child in outermost(model, is_leaf) if is_unit(child)]
        if self.modules is None:
            return units
        modules = dict(model.named_modules())
        for path in self.modules:
            if path not in modules or not is_unit(modules[path]):
                raise ValueError(
                    "FullyShardWrapper.modules must be paths of modules with trained parameters "
                    "and no sharded table in them, which the model calls; received "
                    f"{path!r}. The largest are {[path for path, _ in units]}."
                )
        return [(path, modules[path]) for path in sorted(set(self.modules))]
