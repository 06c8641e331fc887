"""Optimizers of TorchRec that update in backward, and their kinds, for scripts."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, final

from torch.optim import Optimizer

from recsys.base.checked import checked
from recsys.kernels.types import EmbOptimType
from recsys.optim.fused import FusedOptimizer
from recsys.optim.keyed import KeyedOptimizer
from recsys.optim.specs import optimizer_spec


@final
class EmptyFusedOptimizer(FusedOptimizer):
    """Optimizer of a module without updates in backward.

    Example:
        >>> EmptyFusedOptimizer().state_dict()["state"]
        {}
    """

    def __init__(self) -> None:
        super().__init__({}, {}, [])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return the result of the closure, if there is one."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing."""


class FusedOptimizerModule(abc.ABC):
    """Module with parameters that are updated in backward."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """Optimizer of these parameters, keyed by their names."""


@checked
def optimizer_type_to_emb_opt_type(optimizer_class: type[Optimizer]) -> EmbOptimType:
    """Return the kernel algorithm of an optimizer class.

    Args:
        optimizer_class: A class of torch.optim or recsys.optim.

    Raises:
        ValueError: Tables do not support the optimizer.

    Example:
        >>> import torch
        >>> optimizer_type_to_emb_opt_type(torch.optim.Adagrad).name
        'EXACT_ADAGRAD'
    """
    return optimizer_spec(optimizer_class, {"lr": 1.0}).algorithm
