"""The optimizers that tables can own, as torch.optim classes for plain parameters, and a filter.

The arithmetic is that of `recsys.kernels.row_update`, so a parameter trained by one of these
classes and a table that owns the same optimizer have the same values. A parameter's rows are
its first dim; a parameter with fewer than two dims is one row. With a sparse gradient only its
rows are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recsys.kernels.row_update import init_state, update_rows
from recsys.kernels.types import EmbOptimType, OptimizerSpec

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "LarsSGD",
    "PartialRowWiseAdam",
    "RowWiseAdagrad",
    "in_backward_optimizer_filter",
]

Parameters: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]]


class _RowOptimizer(Optimizer):
    """Applies `row_update` to parameters; subclasses name the algorithm and its arguments."""

    algorithm: EmbOptimType

    def _spec(self, group: dict[str, Any]) -> OptimizerSpec:
        fields = {n: v for n, v in group.items() if n in self.defaults and n not in ("lr", "betas")}
        if "betas" in group:
            fields["beta1"], fields["beta2"] = group["betas"]
        return OptimizerSpec(algorithm=self.algorithm, learning_rate=float(group["lr"]), **fields)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings, as in torch.optim; checks the settings."""
        super().add_param_group(param_group)
        self._spec(self.param_groups[-1])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Evaluates the loss again, as in torch.optim.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            spec = self._spec(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(spec, parameter, parameter.grad, group["lr"])
        return loss

    def _update(
        self, spec: OptimizerSpec, parameter: Tensor, grad: Tensor, learning_rate: float
    ) -> None:
        weight = parameter.detach()
        weight = weight.view(weight.shape[0] if weight.dim() > 1 else 1, -1)
        state = self.state[parameter]
        if not state:
            state.update(init_state(spec, weight))
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, grads = grad.indices()[0], grad.values()
        else:
            rows = torch.arange(weight.shape[0], device=weight.device)
            grads = grad.reshape(weight.shape)
        update_rows(spec, weight, state, rows, grads, learning_rate)


class SGD(_RowOptimizer):
    """Stochastic gradient descent; weight decay is L2.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        weight_decay: L2 penalty; a table that owns it applies it to the rows of the batch only.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2)
        >>> SGD([weight], lr=0.5).step()
        >>> weight.detach()
        tensor([0.5000, 0.5000])
    """

    algorithm = EmbOptimType.SGD

    def __init__(self, params: Parameters, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})


class Adagrad(_RowOptimizer):
    """Adagrad; weight decay is L2.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        eps: Added to the square root.
        weight_decay: L2 penalty; a table that owns it applies it to the rows of the batch only.
    """

    algorithm = EmbOptimType.EXACT_ADAGRAD

    def __init__(
        self, params: Parameters, lr: float = 0.01, eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})


class RowWiseAdagrad(_RowOptimizer):
    """Adagrad with one accumulator per row, the mean of its squared gradients; weight decay is L2.

    The state of a table shrinks from as much as the table to one number per row.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        eps: Added to the square root.
        weight_decay: L2 penalty; a table that owns it applies it to the rows of the batch only.
    """

    algorithm = EmbOptimType.EXACT_ROWWISE_ADAGRAD

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.01,
        *,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})


class _AdamLike(_RowOptimizer):
    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)


class Adam(_AdamLike):
    """Adam with decoupled weight decay (AdamW).

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the square root.
        weight_decay: Decoupled; a table that owns it applies it to the rows of the batch only.
    """

    algorithm = EmbOptimType.ADAM


class PartialRowWiseAdam(_AdamLike):
    """Adam with one second moment per row; weight decay is decoupled.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the square root.
        weight_decay: Decoupled; a table that owns it applies it to the rows of the batch only.
    """

    algorithm = EmbOptimType.PARTIAL_ROWWISE_ADAM


class LAMB(_AdamLike):
    """Adam scaled by the trust ratio |w| / |update| of each row.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the square root.
        weight_decay: Decoupled, inside the trust ratio.
    """

    algorithm = EmbOptimType.LAMB


class LarsSGD(_RowOptimizer):
    """Momentum SGD scaled by the trust ratio of each row.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        momentum: Of the scaled gradients.
        eta: The trust coefficient.
        weight_decay: L2 penalty, inside the trust ratio.
    """

    algorithm = EmbOptimType.LARS_SGD

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.01,
        momentum: float = 0.9,
        eta: float = 0.001,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "eta": eta, "weight_decay": weight_decay}
        super().__init__(params, defaults)


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Leave out the parameters that are updated in backward: those another optimizer must not own.

    Args:
        named_parameters: As from `module.named_parameters()`.
        include: True: yield only those that are updated in backward.

    Returns:
        The remaining (name, parameter) pairs.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> [name for name, _ in in_backward_optimizer_filter(layer.named_parameters())]
        ['weight', 'bias']
    """
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter
