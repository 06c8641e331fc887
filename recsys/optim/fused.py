"""Base classes and parameter groups of optimizers that update parameters in backward."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from recsys.base.arguments import finite
from recsys.base.lazy import moved_names
from recsys.optim.keyed import KeyedOptimizer


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """Keyed optimizer that updates in backward; has the arguments of KeyedOptimizer."""

    @abc.abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply pending updates, if any."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop pending gradients, if any."""


@final
class TablesGroup(dict[str, Any]):
    """Parameter group of tables that are updated in backward, with a settable `lr`.

    A negative, infinite or NaN `lr` raises ValueError, a value that is not a number TypeError. The
    other settings are fixed in the kernels: changing one raises ValueError.

    Args:
        params: The tables.
        learning_rate: The learning rate of the tables.
        settings: The other settings of the tables.
        use_rate: Function that sets the learning rate of the tables.

    Attributes:
        fixed: Names of the fixed settings.

    Example:
        >>> group = TablesGroup([], 0.5, {"eps": 1e-8}, print)
        0.5
        >>> group["lr"] = 0.25
        0.25
    """

    def __init__(
        self,
        params: list[Tensor],
        learning_rate: float,
        settings: Mapping[str, Any],
        use_rate: Callable[[float], None],
    ) -> None:
        super().__init__(params=params, **settings)
        self.fixed = frozenset(settings)
        self._use_rate = use_rate
        self["lr"] = learning_rate

    def follow(self, other: TablesGroup) -> None:
        """Rebind to the tables of another group, after resharding.

        Args:
            other: A group with the same settings. Its tables get the learning rate of this group.
        """
        self._use_rate = other._use_rate
        self["params"] = other["params"]
        self["lr"] = self["lr"]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # without tables and kernels

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several values; arguments as for `dict.update`."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.fixed and value is not self[key] and value != self[key]:
            raise ValueError(
                f"{key!r} of tables with an optimizer of their own is fixed, to {self[key]!r}; "
                f"received {value!r}. Only 'lr' can be set."
            )
        if key == "lr":
            self._use_rate(finite("The learning rate of tables", value, least=0))
        super().__setitem__(key, value)


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
