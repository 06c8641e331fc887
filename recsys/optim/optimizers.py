"""The optimizers that tables can own, as torch.optim classes for plain parameters, and a filter.

The arithmetic is that of `recsys.kernels.row_update`, so a parameter trained by one of these
classes and a table that owns the same optimizer have the same values. A parameter's rows are
its first dim; a parameter with fewer than two dims is one row. With a sparse gradient only its
rows are updated.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recsys.kernels.arguments import finite, wrong_type
from recsys.kernels.checked import checked
from recsys.kernels.row_update import init_state, update_rows
from recsys.kernels.types import EmbOptimType, OptimizerSpec, WeightDecayMode

Parameters: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]]


class _RowOptimizer(Optimizer):
    """Applies `row_update` to parameters; subclasses name the algorithm and its arguments."""

    algorithm: EmbOptimType
    weight_decay_mode: WeightDecayMode | None = None
    """None: the algorithm's own."""

    def __init__(self, params: Parameters, **settings: Any) -> None:
        if isinstance(params, Tensor):
            wrong_type(f"{type(self).__name__}.params", "a list of tensors or of groups", params)
        super().__init__(params, settings)

    def _spec(self, group: dict[str, Any]) -> OptimizerSpec:
        fields = {n: v for n, v in group.items() if n in self.defaults and n not in ("lr", "betas")}
        if "betas" in group:
            fields["beta1"], fields["beta2"] = group["betas"]
        return OptimizerSpec(
            algorithm=self.algorithm,
            learning_rate=finite(f"{type(self).__name__}.lr", group["lr"], least=0),
            weight_decay_mode=self.weight_decay_mode,
            **fields,
        )

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
                    self._update(spec, parameter, parameter.grad, group)
        return loss

    def _update(
        self, spec: OptimizerSpec, parameter: Tensor, grad: Tensor, group: dict[str, Any]
    ) -> None:
        weight = parameter.detach()
        weight = weight.view(weight.shape[0] if weight.dim() > 1 else 1, -1)
        state = self.state[parameter]
        lr_decay = group.get("lr_decay", 0.0)  # this and the other two are RowWiseAdagrad's
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

    The state of a table shrinks from as much as the table to one number per row.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        lr_decay: Step `t` (from 0) has the rate `lr / (1 + t * lr_decay)`.
        weight_decay: L2 penalty; a table that owns it applies it to the rows of the batch only.
        initial_accumulator_value: What the accumulators start from.
        eps: Added to the square root.
        maximize: Go up the gradient.

    A table that owns the optimizer takes no `lr_decay`, `initial_accumulator_value` and
    `maximize`: schedule its rate, and negate the loss.

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

    def _spec(self, group: dict[str, Any]) -> OptimizerSpec:
        for name in ("lr_decay", "initial_accumulator_value"):
            finite(f"RowWiseAdagrad.{name}", group[name], least=0)
        own = ("lr_decay", "initial_accumulator_value", "maximize")
        return super()._spec({name: value for name, value in group.items() if name not in own})


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
    """Adam whose weight decay is that of AdamW, not that of `torch.optim.Adam`.

    FBGEMM's and TorchRec's `Adam` decay in the same way. A weight decay warns, once per process:
    pass `AdamW`, which is the same, if this decay is meant, or `AdamL2` for the decay of
    `torch.optim.Adam`. Without weight decay all three are equal.

    Args:
        params: Parameters or groups, as in torch.optim.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the square root.
        weight_decay: Decoupled; a table that owns it applies it to the rows of the batch only.
    """

    algorithm = EmbOptimType.ADAM

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings, as in torch.optim; checks the settings."""
        super().add_param_group(param_group)
        warn_of_decay(type(self), self.param_groups[-1]["weight_decay"])


class AdamW(_AdamLike):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    A row shrinks by `lr * weight_decay`, beside Adam's update, as under `torch.optim.AdamW`.

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
    """Adam with an L2 penalty, as `torch.optim.Adam` has it (Kingma and Ba 2015, with a penalty).

    `weight_decay` times the weight is added to the gradient, so that both moments see it.

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
    """LAMB with one second moment per row, as partial row-wise Adam has it.

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
        momentum: Of the scaled gradients.
        eta: The trust coefficient.
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
"""Those that tables can own."""


def warn_of_decay(optimizer_class: type[Optimizer], weight_decay: object) -> None:
    """Warn, once per process, of a weight decay that `Adam` has and torch's does not.

    Args:
        optimizer_class: Which optimizer is asked for.
        weight_decay: What it is given.
    """
    if optimizer_class is Adam and weight_decay:
        _warn_of_decoupled_decay()


@functools.cache
def _warn_of_decoupled_decay() -> None:
    warnings.warn(
        "recsys.optim.Adam applies weight_decay as AdamW does, beside the update; torch.optim.Adam "
        "adds it to the gradient (L2). The results differ. Pass recsys.optim.AdamW for the first, "
        "recsys.optim.AdamL2 for the second.",
        UserWarning,
        stacklevel=4,
    )


@checked
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
