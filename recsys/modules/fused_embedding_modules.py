"""Collections that are made with the optimizer which updates their tables in backward.

`EmbeddingBagCollection` and `EmbeddingCollection` after `apply_optimizer_in_backward` are the same;
these take both steps at once and show the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from recsys.kernels.checked import checked
from recsys.kernels.types import BoundsCheckMode, EmbeddingLocation
from recsys.modules.embedding_bag_collection import EmbeddingBagCollection
from recsys.modules.embedding_collection import EmbeddingCollection
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_tables import TableCollection
from recsys.optim.apply_optimizer_in_backward import (
    AttachedOptimizer,
    apply_optimizer_in_backward,
    attached_optimizer,
)
from recsys.optim.fused import FusedOptimizer, TablesGroup


@final
class _TablesOptimizer(FusedOptimizer):
    """The optimizer of one unsharded collection; what it would do backward has done."""

    def __init__(self, collection: TableCollection, tables_name: str) -> None:
        weights = collection.table_weights()
        states = collection.optimizer_states()
        attached = attached_optimizer(next(iter(weights.values())))
        assert attached is not None
        spec, settings = attached.spec(), attached.param_groups[0]
        group = TablesGroup(
            list(weights.values()),
            spec.learning_rate,
            spec.settings(),
            lambda rate: settings.update(lr=rate),
        )
        super().__init__(
            {f"{tables_name}.{table}.weight": weight for table, weight in weights.items()},
            {weight: states[table] for table, weight in weights.items()},
            [group],
        )

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: no gradient is kept."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Do nothing: the tables have their state from the start."""


class _OwnsOptimizer(TableCollection):
    """What the two kinds of collections share: the optimizer that they were made with."""

    _tables_name: ClassVar[str]

    def _attach(
        self,
        optimizer_type: type[Optimizer],
        optimizer_kwargs: Mapping[str, Any],
        location: EmbeddingLocation | None,
    ) -> None:
        name = getattr(location, "name", None)
        if name not in (None, "DEVICE", "HOST"):
            raise ValueError(
                f"A {type(self).__name__} is on its device; received location {name}. Leave it "
                "out, and shard the model with compute kernel 'fused_uvm' or 'fused_uvm_caching'."
            )
        # One that tables do not know is an error now, not at the first lookup.
        AttachedOptimizer(optimizer_type, optimizer_kwargs).spec()
        apply_optimizer_in_backward(optimizer_type, self.parameters(), optimizer_kwargs)
        self._optimizer_type = optimizer_type
        self._optimizer_kwargs = dict(optimizer_kwargs)

    def optimizer_type(self) -> type[Optimizer]:
        """Return the class of the tables' optimizer."""
        return self._optimizer_type

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Its arguments."""
        return self._optimizer_kwargs

    def fused_optimizer(self) -> FusedOptimizer:
        """Return the tables' optimizer as it is now: its state to save and load, its `lr` to set.

        `step()` has nothing left to do. Ask again after the collection was moved.
        """
        return _TablesOptimizer(self, self._tables_name)


class FusedEmbeddingBagCollection(EmbeddingBagCollection, _OwnsOptimizer):
    """An `EmbeddingBagCollection` whose tables own an optimizer.

    Args:
        tables: As of `EmbeddingBagCollection`.
        optimizer_type: A class of torch.optim or recsys.optim that tables know.
        optimizer_kwargs: Its arguments, such as `{"lr": 0.1}`.
        is_weighted: As of `EmbeddingBagCollection`.
        device: As of `EmbeddingBagCollection`.
        location: None, `DEVICE` or `HOST`: the tables are on `device`.
        bounds_check_mode: As of `EmbeddingBagCollection`.

    Raises:
        ValueError: As of `EmbeddingBagCollection`; an optimizer or a setting that tables do not
            know, or another location.

    Example:
        >>> from recsys.sparse import KeyedJaggedTensor
        >>> films = EmbeddingBagConfig(100, 4, "films", feature_names=["film"])
        >>> ebc = FusedEmbeddingBagCollection([films], torch.optim.SGD, {"lr": 0.5})
        >>> before = ebc.embedding_bags["films"].weight.detach().clone()
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([7]), lengths=torch.tensor([1]))
        >>> ebc(ids).values().sum().backward()
        >>> (ebc.embedding_bags["films"].weight - before)[7]
        tensor([-0.5000, -0.5000, -0.5000, -0.5000], grad_fn=<SelectBackward0>)
    """

    _tables_name = "embedding_bags"

    @checked
    def __init__(
        self,
        tables: Iterable[EmbeddingBagConfig],
        optimizer_type: type[Optimizer],
        optimizer_kwargs: Mapping[str, Any],
        is_weighted: bool = False,
        device: torch.device | None = None,
        location: EmbeddingLocation | None = None,
        *,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> None:
        super().__init__(tables, is_weighted, device, bounds_check_mode=bounds_check_mode)
        self._attach(optimizer_type, optimizer_kwargs, location)


class FusedEmbeddingCollection(EmbeddingCollection, _OwnsOptimizer):
    """An `EmbeddingCollection` whose tables own an optimizer.

    Args:
        tables: As of `EmbeddingCollection`.
        optimizer_type: A class of torch.optim or recsys.optim that tables know.
        optimizer_kwargs: Its arguments, such as `{"lr": 0.1}`.
        device: As of `EmbeddingCollection`.
        need_indices: As of `EmbeddingCollection`.
        location: None, `DEVICE` or `HOST`: the tables are on `device`.
        bounds_check_mode: As of `EmbeddingCollection`.

    Raises:
        ValueError: As of `EmbeddingCollection`; an optimizer or a setting that tables do not
            know, or another location.

    Example:
        >>> films = EmbeddingConfig(100, 4, "films", feature_names=["film"])
        >>> ec = FusedEmbeddingCollection([films], torch.optim.Adagrad, {"lr": 0.5})
        >>> ec.fused_optimizer().param_groups[0]["lr"]
        0.5
    """

    _tables_name = "embeddings"

    @checked
    def __init__(
        self,
        tables: Iterable[EmbeddingConfig],
        optimizer_type: type[Optimizer],
        optimizer_kwargs: Mapping[str, Any],
        device: torch.device | None = None,
        need_indices: bool = False,
        location: EmbeddingLocation | None = None,
        *,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> None:
        super().__init__(tables, device, need_indices, bounds_check_mode=bounds_check_mode)
        self._attach(optimizer_type, optimizer_kwargs, location)


@checked
def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type[Optimizer],
    optimizer_kwargs: Mapping[str, Any],
    device: torch.device,
    location: EmbeddingLocation | None = None,
) -> nn.Module:
    """Replace, in place, every collection of a model by a fused one with its weights.

    Args:
        model: The model, or a collection.
        optimizer_type: Of all tables.
        optimizer_kwargs: Of all tables.
        device: Where the tables go.
        location: As of `FusedEmbeddingBagCollection`.

    Returns:
        The model, or what takes the place of the collection.

    Raises:
        ValueError: As of `FusedEmbeddingBagCollection`.

    Example:
        >>> films = EmbeddingBagConfig(100, 4, "films", feature_names=["film"])
        >>> model = nn.Sequential(EmbeddingBagCollection([films]))
        >>> cpu = torch.device("cpu")
        >>> type(fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, cpu)[0]).__name__
        'FusedEmbeddingBagCollection'
    """
    made: dict[int, nn.Module] = {}

    def fused(module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        settings: dict[str, Any] = {"device": device, "location": location}
        new: TableCollection
        if type(module) is EmbeddingBagCollection:
            new = FusedEmbeddingBagCollection(
                module.embedding_bag_configs(), optimizer_type, optimizer_kwargs,
                module.is_weighted(), bounds_check_mode=module.bounds_check_mode, **settings,
            )  # fmt: skip
        elif type(module) is EmbeddingCollection:
            new = FusedEmbeddingCollection(
                module.embedding_configs(), optimizer_type, optimizer_kwargs,
                need_indices=module.need_indices(), bounds_check_mode=module.bounds_check_mode,
                **settings,
            )  # fmt: skip
        else:
            made[id(module)] = module
            for name, child in module._modules.items():
                module._modules[name] = None if child is None else fused(child)
            return module
        if "meta" not in (module.device.type, new.device.type):
            new.load_state_dict(module.state_dict())
        new.train(module.training)
        made[id(module)] = new
        return new

    return fused(model)
