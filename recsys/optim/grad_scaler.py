"""Loss scaling for models with deferred table updates."""

from __future__ import annotations

import math
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from recsys.base.arguments import finite, whole
from recsys.base.checked import checked
from recsys.kernels.scaled_loss import check_scaled_loss
from recsys.optim.keyed import KeyedOptimizer
from recsys.optim.table_gradients import TableGradients


@final
class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for models with sharded embedding tables.

    It also divides the gradients that deferred tables keep. If any rank finds an inf or NaN, all
    ranks skip the step and lower the scale, so that the shards of a table stay consistent. Every
    rank must step the same optimizers: each step all-reduces one number per optimizer.

    Tables that are updated in backward cannot be trained with a scaled loss: `scale` raises an
    error. Train them in bf16, which needs no scaling. `torch.amp.GradScaler` has no such check.

    Args:
        device: Device of the loss; all arguments are as for `torch.amp.GradScaler`.
        init_scale: Initial scale.
        growth_factor: Factor of the scale after `growth_interval` steps without inf or NaN.
        backoff_factor: Factor of the scale after a skipped step.
        growth_interval: Number of steps.
        enabled: False disables scaling.
        process_group: Ranks that train the model; None for all ranks.

    Example:
        >>> from recsys.optim import KeyedOptimizerWrapper
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> sgd = KeyedOptimizerWrapper({"w": weight}, lambda p: torch.optim.SGD(p, lr=0.5))
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale(weight.sum()).backward()
        >>> weight.grad
        tensor([1024.])
        >>> _ = scaler.step(sgd)
        >>> scaler.update()
        >>> weight.detach()
        tensor([0.5000])
    """

    @checked
    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        finite("GradScaler.init_scale", init_scale, least=0)
        if finite("GradScaler.growth_factor", growth_factor) <= 1:
            raise ValueError(f"GradScaler.growth_factor must be > 1; received {growth_factor}.")
        finite("GradScaler.backoff_factor", backoff_factor, least=0, below=1)
        whole("GradScaler.growth_interval", growth_interval)
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Multiply losses by the scale.

        Args:
            outputs: A tensor or an iterable of tensors.

        Returns:
            The scaled losses, of the same kind.

        Raises:
            ValueError: A loss depends on tables that are updated in backward.
        """
        if self.is_enabled():
            if not isinstance(outputs, Tensor | list | tuple):
                outputs = list(outputs)
            check_scaled_loss(self, [outputs] if isinstance(outputs, Tensor) else outputs)
        return super().scale(outputs)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch calls it for `unscale_`, `step`, and optimizers that unscale themselves
        found_by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        device = found_inf.device
        bad = [value.to(device) for value in found_by_device.values()]
        for tables in _tables_of(optimizer):
            tables.scale_(inv_scale)
            largest = tables.power_sum(math.inf).to(device)
            bad.append((~largest.isfinite()).float())
        total = torch.stack([found_inf, *bad]).amax()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self._process_group)
        return {device: total}

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        (is_infinite,) = optimizer_state["found_inf_per_device"].values()
        if not is_infinite.item():
            loss: float | None = optimizer.step(*args, **kwargs)
            return loss
        for tables in _tables_of(optimizer):
            tables.zero_grad()  # as a step would
        return None


def _tables_of(optimizer: Optimizer) -> list[TableGradients]:
    return optimizer.table_gradients() if isinstance(optimizer, KeyedOptimizer) else []
