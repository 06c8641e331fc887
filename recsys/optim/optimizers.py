"""Table optimizers as torch.optim classes for plain parameters, and a parameter filter.

The classes call `recsys.kernels.row_update`, so a parameter trained by one of them equals a table
that owns the same optimizer. The first dim of a parameter is its rows; a parameter with fewer than
two dims is one row. A sparse gradient updates only its rows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recsys.base.arguments import finite, wrong_type
from recsys.base.checked import checked
from recsys.kernels.row_update import init_state, update_rows
from recsys.kernels.types import EmbOptimType, OptimizerSpec, WeightDecayMode
from recsys.kernels.update_rules import UPDATE_RULES

Parameters: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]]


def make_spec(
    algorithm: EmbOptimType, decay: WeightDecayMode | None, settings: Mapping[str, Any]
) -> OptimizerSpec:
    """Convert the settings of an optimizer class to the specification that kernels read.

    Args:
        algorithm: The algorithm of the class.
        decay: Form of the weight decay; None for the default of the algorithm.
        settings: Settings by the names of torch.optim; other names are ignored.

    Raises:
        ValueError: A setting is out of range.
    """
    values = dict(settings)
    if "betas" in values:
        values["beta1"], values["beta2"] = values["betas"]
    return OptimizerSpec(
        algorithm=algorithm,
        learning_rate=values["lr"],
        weight_decay=values.get("weight_decay", 0.0),
        weight_decay_mode=decay,
        **{name: values[name] for name in UPDATE_RULES[algorithm].settings},
    )


class _RowOptimizer(Optimizer):
    """Base of the optimizers; subclasses define the algorithm and the arguments."""

    algorithm: EmbOptimType
    weight_decay_mode: WeightDecayMode | None = None
    """Form of the weight decay; None for the default of the algorithm."""

    def __init__(self, params: Parameters, **settings: Any) -> None:
        if isinstance(params, Tensor):
            wrong_type(f"{type(self).__name__}.params", "a list of tensors or of groups", params)
        super().__init__(params, settings)

    def _spec(self, group: dict[str, Any]) -> OptimizerSpec:
        for name in ("lr", "lr_decay", "initial_accumulator_value"):
            finite(f"{type(self).__name__}.{name}", group.get(name, 0.0), least=0)
        return make_spec(self.algorithm, self.weight_decay_mode, group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings, as in torch.optim, and check the settings."""
        super().add_param_group(param_group)
        self._spec(self.param_groups[-1])
        warn_of_decay(type(self), self.param_groups[-1]["weight_decay"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: Function that evaluates the loss again, as in torch.optim.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            spec = self._spec(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(spec, parameter, parameter.grad, group)
        return loss

    def _update(
        self, spec: OptimizerSpec, parameter: Tensor, grad: Tensor, group: dict[str, Any]
    ) -> None:
        weight = parameter.detach()
        weight = weight.view(weight.shape[0] if weight.dim() > 1 else 1, -1)
        state = self.state[parameter]
        lr_decay = group.get("lr_decay", 0.0)  # this and two more settings of RowWiseAdagrad
        if not state:
            state.update(init_state(spec, weight))
            if group.get("initial_accumulator_value"):
                state["sum"].fill_(group["initial_accumulator_value"])
            if lr_decay:
                state["step"] = torch.zeros(())  # counted by `update_rows`
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, grads = grad.indices()[0], grad.values()
        else:
            rows = torch.arange(weight.shape[0], device=weight.device)
            grads = grad.reshape(weight.shape)
        rate = group["lr"]
        if lr_decay:
            rate = rate / (1 + float(state.get("step", 0.0)) * lr_decay)
        update_rows(spec, weight, state, rows, -grads if group.get("maximize") else grads, rate)


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

    @checked
    def __init__(self, params: Parameters, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


class Adagrad(_RowOptimizer):
    """Adagrad; weight decay is L2.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        eps: Added to the square root.
        weight_decay: L2 penalty; a table that owns it applies it to the rows of the batch only.
    """

    algorithm = EmbOptimType.EXACT_ADAGRAD

    @checked
    def __init__(
        self, params: Parameters, lr: float = 0.01, eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay)


class RowWiseAdagrad(_RowOptimizer):
    """Adagrad with one accumulator per row, the mean of its squared gradients; weight decay is L2.

    The state is one number per row, instead of one per element.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        lr_decay: The learning rate of step `t` (from 0) is `lr / (1 + t * lr_decay)`.
        weight_decay: L2 penalty; a table that owns it applies it to the rows of the batch only.
        initial_accumulator_value: Initial value of the accumulators.
        eps: Added to the square root.
        maximize: Maximize the loss.

    Tables do not support `lr_decay`, `initial_accumulator_value` and `maximize`: use a learning
    rate schedule, and negate the loss.

    Raises:
        ValueError: A setting is negative or not finite.
    """

    algorithm = EmbOptimType.EXACT_ROWWISE_ADAGRAD

    @checked
    def __init__(
        self,
        params: Parameters,
        lr: float = 0.01,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            maximize=maximize,
        )


class _AdamLike(_RowOptimizer):
    @checked
    def __init__(
        self,
        params: Parameters,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Adam(_AdamLike):
    """Adam with the decoupled weight decay of AdamW, unlike `torch.optim.Adam`.

    `Adam` of FBGEMM and TorchRec decays in the same way. A nonzero weight decay causes a warning,
    once per process: use `AdamW` for the same decay without the warning, or `AdamL2` for the L2
    penalty of `torch.optim.Adam`. Without weight decay all three are equal.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the square root.
        weight_decay: Decoupled; a table that owns it applies it to the rows of the batch only.
    """

    algorithm = EmbOptimType.ADAM


class AdamW(_AdamLike):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    Each step also shrinks a row by the factor `1 - lr * weight_decay`, as in `torch.optim.AdamW`.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the square root.
        weight_decay: Decoupled; a table that owns it applies it to the rows of the batch only.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.zeros(2)
        >>> AdamW([weight], lr=0.1, weight_decay=0.5).step()
        >>> weight.detach()
        tensor([0.9500, 0.9500])
    """

    algorithm = EmbOptimType.ADAM
    weight_decay_mode = WeightDecayMode.DECOUPLE


class AdamL2(_AdamLike):
    """Adam with the L2 penalty of `torch.optim.Adam` (Kingma and Ba 2015, with a penalty).

    The gradient includes `weight_decay` times the weight, and so do both moments.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the square root.
        weight_decay: L2 penalty; a table that owns it applies it to the rows of the batch only.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.zeros(2)
        >>> AdamL2([weight], lr=0.1, weight_decay=0.5).step()
        >>> weight.detach()
        tensor([0.9000, 0.9000])
    """

    algorithm = EmbOptimType.ADAM
    weight_decay_mode = WeightDecayMode.L2


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


class PartialRowWiseLAMB(_AdamLike):
    """LAMB with one second moment per row, as in `PartialRowWiseAdam`.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the square root.
        weight_decay: Decoupled, inside the trust ratio.

    Example:
        >>> weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> weight.grad = torch.tensor([[1.0, 1.0]])
        >>> PartialRowWiseLAMB([weight], lr=0.1).step()
        >>> weight.detach()  # a step of 0.1 times the row's length, 5
        tensor([[2.6464, 3.6464]])
    """

    algorithm = EmbOptimType.PARTIAL_ROWWISE_LAMB


class LarsSGD(_RowOptimizer):
    """Momentum SGD scaled by the trust ratio of each row.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        momentum: Momentum of the scaled gradients.
        eta: Trust coefficient.
        weight_decay: L2 penalty, inside the trust ratio.
    """

    algorithm = EmbOptimType.LARS_SGD

    @checked
    def __init__(
        self,
        params: Parameters,
        lr: float = 0.01,
        momentum: float = 0.9,
        eta: float = 0.001,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, eta=eta, weight_decay=weight_decay)


OWN_CLASSES: tuple[type[_RowOptimizer], ...] = (
    SGD,
    Adagrad,
    RowWiseAdagrad,
    Adam,
    AdamW,
    AdamL2,
    PartialRowWiseAdam,
    LAMB,
    PartialRowWiseLAMB,
    LarsSGD,
)
"""The optimizer classes that tables can own."""


def warn_of_decay(optimizer_class: type[Optimizer], weight_decay: object) -> None:
    """Warn once per process that the weight decay of `Adam` differs from `torch.optim.Adam`.

    Args:
        optimizer_class: The optimizer class.
        weight_decay: The weight decay; 0 causes no warning.
    """
    if optimizer_class is Adam and weight_decay:
        _warn_of_decoupled_decay()


@functools.cache
def _warn_of_decoupled_decay() -> None:
    warnings.warn(
        "recsys.optim.Adam applies a decoupled weight_decay, as AdamW; torch.optim.Adam adds it to "
        "the gradient (L2). The results differ. Use recsys.optim.AdamW for the first, "
        "recsys.optim.AdamL2 for the second.",
        UserWarning,
        stacklevel=4,
    )


@checked
def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Filter out the parameters that are updated in backward, and need no other optimizer.

    Args:
        named_parameters: Pairs of name and parameter, as of `module.named_parameters()`.
        include: If True, yield only the parameters that are updated in backward.

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
