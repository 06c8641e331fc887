"""Collections built with an optimizer that updates their tables in backward.

They equal `EmbeddingBagCollection` and `EmbeddingCollection` after `apply_optimizer_in_backward`,
and expose the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch.optim import Optimizer

from recsys.base.checked import checked
from recsys.base.lazy import moved_names
from recsys.kernels.types import BoundsCheckMode, EmbeddingLocation
from recsys.modules.embedding_bag_collection import EmbeddingBagCollection
from recsys.modules.embedding_collection import EmbeddingCollection
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.tables.embedding_tables import TableCollection
from recsys.optim.apply_optimizer_in_backward import (
    AttachedOptimizer,
    apply_optimizer_in_backward,
    attached_optimizer,
)
from recsys.optim.fused import FusedOptimizer, TablesGroup


@final
class _TablesOptimizer(FusedOptimizer):
    """Optimizer of an unsharded collection, whose updates happen in backward."""

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
        """Do nothing, as no gradient is stored."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Do nothing, as the tables have their state from the start."""


class _OwnsOptimizer(TableCollection):
    """Base of collections with an optimizer in backward."""

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
                f"{type(self).__name__}.location must be None, DEVICE or HOST; received {name}. "
                "For other locations, shard the model with compute kernel 'fused_uvm' or "
                "'fused_uvm_caching'."
            )
        # an unsupported optimizer is an error here, not at the first lookup
        AttachedOptimizer(optimizer_type, optimizer_kwargs).spec()
        apply_optimizer_in_backward(optimizer_type, self.parameters(), optimizer_kwargs)
        self._optimizer_type = optimizer_type
        self._optimizer_kwargs = dict(optimizer_kwargs)

    def optimizer_type(self) -> type[Optimizer]:
        """Return the class of the tables' optimizer."""
        return self._optimizer_type

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Return the arguments of the tables' optimizer."""
        return self._optimizer_kwargs

    def fused_optimizer(self) -> FusedOptimizer:
        """Return the tables' optimizer, to save and load its state and to set `lr`.

        `step()` does nothing. After the collection is moved, call this again.
        """
        return _TablesOptimizer(self, self._tables_name)


class FusedEmbeddingBagCollection(EmbeddingBagCollection, _OwnsOptimizer):
    """An `EmbeddingBagCollection` whose tables own an optimizer.

    Args:
        tables: As for `EmbeddingBagCollection`.
        optimizer_type: A class of torch.optim or recsys.optim that tables support.
        optimizer_kwargs: Arguments of the optimizer, such as `{"lr": 0.1}`.
        is_weighted: As for `EmbeddingBagCollection`.
        device: As for `EmbeddingBagCollection`.
        location: None, `DEVICE` or `HOST`; the tables are on `device`.
        bounds_check_mode: As for `EmbeddingBagCollection`.

    Raises:
        ValueError: As `EmbeddingBagCollection`; or tables do not support the optimizer, a setting
            of it, or the location.

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
        tables: As for `EmbeddingCollection`.
        optimizer_type: A class of torch.optim or recsys.optim that tables support.
        optimizer_kwargs: Arguments of the optimizer, such as `{"lr": 0.1}`.
        device: As for `EmbeddingCollection`.
        need_indices: As for `EmbeddingCollection`.
        location: None, `DEVICE` or `HOST`; the tables are on `device`.
        bounds_check_mode: As for `EmbeddingCollection`.

    Raises:
        ValueError: As `EmbeddingCollection`; or tables do not support the optimizer, a setting of
            it, or the location.

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


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
