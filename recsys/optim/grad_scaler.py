"""Loss scaling for models whose tables keep their gradients until a step."""

from __future__ import annotations

import math
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from recsys.kernels.arguments import finite, whole
from recsys.kernels.checked import checked
from recsys.optim.keyed import KeyedOptimizer, TableGradients


@final
class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for models with sharded embedding tables.

    It also divides the gradients that deferred tables keep, and an inf or NaN that any rank finds
    makes all ranks skip the step and lower the scale: a table of which each rank holds a part
    stays whole. Every rank must step alike. The largest of one number per rank is found for each
    optimizer and step.

    Tables that are updated in backward cannot be scaled: `scale` refuses them. Train them in
    bf16, which needs no scaling.

    Args:
        device: where the loss is, as for `torch.amp.GradScaler`; so are the other arguments.
        init_scale: the first factor.
        growth_factor: multiplies the scale after `growth_interval` steps without inf or NaN.
        backoff_factor: multiplies it after a step that was skipped.
        growth_interval: in steps.
        enabled: False: do nothing.
        process_group: the ranks that train the model; None: all ranks, if there are several.

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

    handles_tables = True
    """Says so to `scaled_loss`."""

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

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch calls it for `unscale_`, for `step`, and for optimizers that unscale by themselves
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        device = found_inf.device
        bad = [value.to(device) for value in found.values()]
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
        (found,) = optimizer_state["found_inf_per_device"].values()
        if not found.item():
            loss: float | None = optimizer.step(*args, **kwargs)
            return loss
        for tables in _tables_of(optimizer):
            tables.zero_grad()  # a step would have dropped them
        return None


def _tables_of(optimizer: Optimizer) -> list[TableGradients]:
    return optimizer.table_gradients() if isinstance(optimizer, KeyedOptimizer) else []
