"""What a sharded module is, what makes one, and how models that hold some are copied."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeVar, cast

import torch
from torch import nn

from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import QuantizedCommCodecs
from recsys.distributed.sharded.module_tree import outermost, walk
from recsys.kernels.arguments import wrong_type
from recsys.kernels.checked import checked

T = TypeVar("T")
S = TypeVar("S", bound=nn.Module)


class ShardedModule(nn.Module, abc.ABC):
    """A module whose tables are placed on ranks by a plan.

    It answers for all that is below it: nobody else replicates, moves, copies or updates that. If a
    part of yours is to be replicated, let `sharded_parameter_names` leave it out, or set
    `answers_for_all` to False.
    """

    answers_for_all: ClassVar[bool] = True
    """False for a module of which only the sharded modules inside are placed by a plan."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> Any:
        """The keyed optimizer of the tables that update themselves in backward."""

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names of the parameters and buffers that differ from rank to rank.

        Args:
            prefix: the module's path, which leads every name.
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
        """Return a copy on another device; sharded modules inside are copied by themselves."""
        return copy_around_sharded(self, device)


def refuse_to_pickle(module: nn.Module) -> NoReturn:
    """Raise TypeError: a module holds a part of a model, and the way to the other parts."""
    raise TypeError(
        f"A {type(module).__name__} cannot be pickled: it holds this rank's part of the tables "
        "and the process group. Save it by recsys.distributed.checkpoint.save_checkpoint, or its "
        "state_dict() by torch.distributed.checkpoint; copy it by copy.deepcopy."
    )


M = TypeVar("M", bound=nn.Module)


def copy_around_sharded(
    module: M, device: torch.device, current_device: torch.device | None = None
) -> M:
    """Return a deep copy on another device; sharded modules below make their own.

    Args:
        module: whose parameters and buffers, outside of sharded modules, move to `device`.
        device: where the copy goes.
        current_device: whose tensors move; all if None.
    """

    def is_inner(root: nn.Module) -> Callable[[nn.Module], bool]:
        return lambda found: found is not root and isinstance(found, ShardedModule)

    copies: dict[int, Any] = {
        id(inner): cast(ShardedModule, inner).copy(device)
        for _, inner in outermost(module, is_inner(module))
    }
    copied = copy.deepcopy(module, copies)
    move_parts(copied, device, is_inner(copied), current_device)
    return copied


@checked
def copy_to_device(module: M, current_device: torch.device, to_device: torch.device) -> M:
    """Return a deep copy whose tensors on one device are on another; others stay where they are.

    Args:
        module: a model, or a part of one. Sharded modules in it are copied to `to_device`.
        current_device: whose tensors move; those on `meta` never do.
        to_device: where to.

    Example:
        >>> cpu, meta = torch.device("cpu"), torch.device("meta")
        >>> copy_to_device(nn.Linear(2, 3), cpu, meta).weight.device
        device(type='meta')
    """
    return copy_around_sharded(module, to_device, current_device)


def move_parts(
    module: nn.Module,
    device: torch.device,
    is_leaf: Callable[[nn.Module], bool],
    current_device: torch.device | None = None,
) -> None:
    """Move the tensors of a model, in place, save those of leaves and those on `meta`.

    Args:
        module: the model.
        device: where to.
        is_leaf: tells which parts stay, with what is below them.
        current_device: whose tensors move; all if None.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        stays = tensor.is_meta or current_device not in (None, tensor.device)
        return tensor if stays else tensor.to(device)

    for _, part in walk(module, is_leaf):
        if not is_leaf(part):
            part._apply(moved, recurse=False)


class ModuleSharder(abc.ABC, Generic[T]):
    """Makes the sharded counterpart of one module type."""

    fused_params: Mapping[str, Any] = MappingProxyType({})
    """Optimizer settings for tables that have no optimizer attached."""

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
        """Return what takes the module's place, with its weights.

        That is a `ShardedModule`, or a module that contains some. Name the parts as in the
        given module, so that the state dict keeps its names.

        Args:
            module: to be sharded.
            params: its plan.
            env: the ranks.
            device: where the tables go.
            module_fqn: the module's path in the model, by which errors name it. A sharder of your
                own may leave it out.
        """

    @abc.abstractmethod
    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return table name to weight, for every table of the module."""

    @checked
    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types this sharder can execute on that kind of device."""
        return [kind.value for kind in ShardingType]

    @checked
    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the compute kernels for that sharding type on that kind of device."""
        kernels = [EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.DENSE]
        if compute_device_type == "cuda" and sharding_type != ShardingType.DATA_PARALLEL.value:
            kernels += [EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING]
        return [kernel.value for kernel in kernels]


class CollectionSharder(ModuleSharder[T], Generic[T, S]):
    """Makes a `ShardedCollection` of a module.

    Args:
        fused_params: optimizer settings for tables that have no optimizer attached.
        qcomm_codecs_registry: what embeddings and gradients look like while they travel, from
            `get_qcomm_codecs_registry`; None: as they are.
    """

    replaces: ClassVar[type[Any]]
    """The module type."""
    makes: ClassVar[type[Any]]
    """The sharded collection's type."""

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
        """Return the sharded collection with the given module's weights."""
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
        """Return table name to weight."""
        self._check(module)
        weights: dict[str, nn.Parameter] = module.table_weights()
        return weights

    def _check(self, module: object) -> None:
        if not isinstance(module, self.replaces):
            name = type(self).__name__
            wrong_type(f"{name}: module", f"a {self.replaces.__name__}", module)

    def _collection_of(self, module: Any) -> Any:
        """Return what the sharded collection is made of: the module, itself a collection."""
        return module

    def _options(self) -> dict[str, Any]:
        """Return what else the sharded collection is made with."""
        return {}


def is_sharded(module: nn.Module) -> bool:
    """Return whether a module is a `ShardedModule` that answers for all that is below it."""
    return isinstance(module, ShardedModule) and module.answers_for_all


def has_tables(module: nn.Module, sharders: Mapping[type[nn.Module], ModuleSharder[Any]]) -> bool:
    """Return whether a module has tables that one of the sharders can place."""
    kind = type(module)
    return kind in sharders and bool(sharders[kind].shardable_parameters(module))
