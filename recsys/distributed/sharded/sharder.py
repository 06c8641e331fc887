"""Base classes of sharded modules and of sharders, and copies of models that contain them."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeVar, cast

import torch
from torch import nn

from recsys.base.arguments import wrong_type
from recsys.base.checked import checked
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from recsys.distributed.ranks.agreement import run_on_all_ranks
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import QuantizedCommCodecs
from recsys.distributed.sharded.module_tree import outermost, walk

T = TypeVar("T")
S = TypeVar("S", bound=nn.Module)


class ShardedModule(nn.Module, abc.ABC):
    """Module whose tables are sharded over ranks by a plan.

    It owns its submodules: `DistributedModelParallel` does not replicate, move, copy or update
    them. To replicate some parameters, omit them in `sharded_parameter_names`, or set
    `answers_for_all` to False.
    """

    answers_for_all: ClassVar[bool] = True
    """False if only the sharded modules inside are placed by a plan."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> Any:
        """Keyed optimizer of the tables that are updated in backward."""

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names of the parameters and buffers that differ from rank to rank.

        Args:
            prefix: Path of the module, which is prepended to each name.
        """
        for name, _ in (*self.named_parameters(prefix), *self.named_buffers(prefix)):
            yield name

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(
            f"A {type(self).__name__} cannot be compiled by TorchScript: it exchanges its inputs "
            "with other ranks. Quantize the model (recsys.inference.quantize_inference_model takes "
            "a sharded one), or load its checkpoint into the unsharded model, and compile that."
        )

    def copy(self, device: torch.device) -> Self:
        """Return a copy on another device, with copies of the sharded modules inside."""
        return copy_to_device(self, None, device)


class OwnShardsModule(ShardedModule):
    """Sharded module that stores shards itself: they stay on their device and are not pickled."""

    @property
    @abc.abstractmethod
    def env(self) -> ShardingEnv:
        """The ranks."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device of this rank's shards."""

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict; a collective call. An error of one rank is raised on all."""
        load = partial(super().load_state_dict, state_dict, *args, **kwargs)
        return run_on_all_ranks(self.env, "load a state dict", load)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # `fn` may come from to(), half() or cuda(): only a tensor shows its effect
        probe = fn(torch.empty(0, device=self.device))
        if probe.device != self.device or probe.dtype != torch.float32:
            raise ValueError(
                f"A {type(self).__name__} stays on its device and keeps its dtype ({self.device}); "
                f"received a move to {probe.device}, {probe.dtype}. Shard it with device=..., or "
                "call copy of the module or of its DistributedModelParallel."
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy(self.device)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_pickle(self)


def refuse_to_pickle(module: nn.Module) -> NoReturn:
    """Raise TypeError: the module holds shards of one rank, and process groups."""
    raise TypeError(
        f"A {type(module).__name__} cannot be pickled: it holds this rank's shards and a process "
        "group. Save it by recsys.distributed.checkpoint.save_checkpoint, or its state_dict() by "
        "torch.distributed.checkpoint; copy it by copy.deepcopy."
    )


M = TypeVar("M", bound=nn.Module)


@checked
def copy_to_device(module: M, current_device: torch.device | None, to_device: torch.device) -> M:
    """Return a deep copy of a model with its tensors on another device.

    Args:
        module: The model. Sharded modules in it are copied to `to_device`.
        current_device: Device whose tensors move; None for all devices. Tensors on `meta` never
            move.
        to_device: Target device.

    Example:
        >>> cpu, meta = torch.device("cpu"), torch.device("meta")
        >>> copy_to_device(nn.Linear(2, 3), cpu, meta).weight.device
        device(type='meta')
    """

    def is_inner(root: nn.Module) -> Callable[[nn.Module], bool]:
        return lambda found: found is not root and isinstance(found, ShardedModule)

    copies: dict[int, Any] = {
        id(inner): cast(ShardedModule, inner).copy(to_device)
        for _, inner in outermost(module, is_inner(module))
    }
    # deepcopy takes the sharded modules from this memo instead of copying them
    copied = copy.deepcopy(module, copies)
    move_tensors(copied, to_device, is_inner(copied), current_device)
    return copied


def move_tensors(
    module: nn.Module,
    device: torch.device,
    is_leaf: Callable[[nn.Module], bool],
    current_device: torch.device | None = None,
) -> None:
    """Move the tensors of a model in place, except tensors of leaves and tensors on `meta`.

    Args:
        module: The model.
        device: Target device.
        is_leaf: Whether a module stays, with its submodules.
        current_device: Device whose tensors move; None for all devices.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        stays = tensor.is_meta or current_device not in (None, tensor.device)
        return tensor if stays else tensor.to(device)

    for _, child in walk(module, is_leaf):
        if not is_leaf(child):
            child._apply(moved, recurse=False)


class ModuleSharder(abc.ABC, Generic[T]):
    """Base of sharders, which convert modules of one type to sharded modules."""

    fused_params: Mapping[str, Any] = MappingProxyType({})
    """Optimizer settings for tables without an attached optimizer."""

    @property
    @abc.abstractmethod
    def module_type(self) -> type[nn.Module]:
        """The module type this sharder replaces."""

    @abc.abstractmethod
    def shard(
        self,
        module: Any,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Return the sharded module with the weights of the given one.

        It is a `ShardedModule`, or a module that contains some. Its submodules must have the same
        names as in the given module, so that the names in the state dict stay the same.

        Args:
            module: The module to shard.
            params: Its plan.
            env: The ranks.
            device: Device of the tables.
            module_fqn: Path of the module in the model, for error messages. A custom sharder may
                omit this parameter.
        """

    @abc.abstractmethod
    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return the weight of each table by name."""

    @checked
    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types that this sharder supports on a type of device."""
        return [kind.value for kind in ShardingType]

    @checked
    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the compute kernels for a sharding type on a type of device."""
        kernels = [EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.DENSE]
        if compute_device_type == "cuda" and sharding_type != ShardingType.DATA_PARALLEL.value:
            kernels += [EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING]
        return [kernel.value for kernel in kernels]


class CollectionSharder(ModuleSharder[T], Generic[T, S]):
    """Base of sharders that convert a module to a `ShardedCollection`.

    Args:
        fused_params: Optimizer settings for tables without an attached optimizer.
        qcomm_codecs_registry: Wire formats of embeddings and gradients, from
            `get_qcomm_codecs_registry`; None for the dtype of the values.
    """

    replaces: ClassVar[type[Any]]
    """Module type."""
    makes: ClassVar[type[Any]]
    """Type of the sharded collection."""

    @checked
    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        self.fused_params = dict(fused_params or {})
        self.qcomm_codecs_registry = qcomm_codecs_registry

    @property
    def module_type(self) -> type[nn.Module]:
        """The module type this sharder replaces."""
        return self.replaces

    @checked
    def shard(
        self,
        module: Any,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> S:
        """Return the sharded collection with the weights of the module."""
        self._check(module)
        made: S = self.makes(
            self._collection_of(module),
            params,
            env,
            self.fused_params,
            device,
            self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **self._options(),
        )
        return made

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return the weight of each table by name."""
        self._check(module)
        weights: dict[str, nn.Parameter] = module.table_weights()
        return weights

    def _check(self, module: object) -> None:
        if not isinstance(module, self.replaces):
            name = type(self).__name__
            wrong_type(f"{name}: module", f"a {self.replaces.__name__}", module)

    def _collection_of(self, module: Any) -> Any:
        """Return the module as a collection of tables."""
        return module

    def _options(self) -> dict[str, Any]:
        """Return further arguments of the sharded collection."""
        return {}


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module is a `ShardedModule` that owns its submodules."""
    return isinstance(module, ShardedModule) and module.answers_for_all


def has_tables(module: nn.Module, sharders: Mapping[type[nn.Module], ModuleSharder[Any]]) -> bool:
    """Return whether one of the sharders can shard tables of a module."""
    kind = type(module)
    return kind in sharders and bool(sharders[kind].shardable_parameters(module))
