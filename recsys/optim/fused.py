"""What optimizers are called that update parameters in backward."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor

from recsys.kernels.arguments import finite
from recsys.optim.keyed import KeyedOptimizer


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """A keyed optimizer whose updates happen in backward; arguments are those of KeyedOptimizer."""

    @abc.abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do what backward left to do, if anything."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the gradients that backward left, if any."""


@final
class TablesGroup(dict[str, Any]):
    """A parameter group of tables that update themselves: its `lr` is what they read next.

    Setting a rate that is negative, infinite or
    NaN raises ValueError, one that is no number TypeError. The other settings are a part of the
    tables' kernels: another value raises ValueError.

    Args:
        params: the tables.
        learning_rate: their rate.
        settings: their other settings.
        use_rate: tells the tables a rate.

    Attributes:
        fixed: the names of the settings that cannot be set.

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
        """Be the group of another one's tables: the same ones, which have moved.

        Args:
            other: a group with the same settings; its tables get the rate of this one.
        """
        self._use_rate = other._use_rate
        self["params"] = other["params"]
        self["lr"] = self["lr"]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # tables and kernels are not pickled

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several; argument as of `dict.update`."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.fixed and value is not self[key] and value != self[key]:
            raise ValueError(
                f"{key!r} of tables with an optimizer of their own is fixed when it is attached: "
                f"here {self[key]!r}; received {value!r}. Only 'lr' can be set."
            )
        if key == "lr":
            self._use_rate(finite("The learning rate of tables", value, least=0))
        super().__setitem__(key, value)


@final
class EmptyFusedOptimizer(FusedOptimizer):
    """The optimizer of a module that updates nothing in backward.

    Example:
        >>> EmptyFusedOptimizer().state_dict()["state"]
        {}
    """

    def __init__(self) -> None:
        super().__init__({}, {}, [])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return what the closure does, if there is one."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing."""


class FusedOptimizerModule(abc.ABC):
    """A module some of whose parameters are updated in backward."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer that says how, keyed by the parameters' names."""
