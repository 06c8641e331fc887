"""What optimizers are called that update parameters in backward."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, final

from recsys.optim.keyed import KeyedOptimizer

__all__ = ["EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule"]


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """A keyed optimizer whose updates happen in backward; arguments are those of KeyedOptimizer."""

    @abc.abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Does what backward left to do, if anything."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drops the gradients that backward left, if any."""


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
        """Returns what the closure does, if there is one."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing."""


class FusedOptimizerModule(abc.ABC):
    """A module some of whose parameters are updated in backward."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer that says how, keyed by the parameters' names."""
