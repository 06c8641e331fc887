"""Gradient clipping of dense parameters together with embedding tables."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.base.checked import checked
from recsys.base.contact import explained
from recsys.optim.keyed import KeyedOptimizer, OptimizerWrapper
from recsys.optim.table_gradients import TableGradients

_PART = "_is_part_of_table"


class GradientClipping(enum.Enum):
    """Quantity that clipping limits."""

    NORM = "norm"
    """The norm of all gradients together: one factor scales all, which keeps their direction."""
    VALUE = "value"
    """Each gradient value separately."""
    NONE = "none"
    """No clipping."""


@final
class GradientClippingOptimizer(OptimizerWrapper):
    """Clips the gradients, then steps the optimizer that it wraps.

    The norm covers whole tables, so results do not depend on the sharding plan. Tables that own an
    optimizer must have `update_mode="deferred"`: fused updates leave no gradient to clip.

    Args:
        optimizer: The optimizer to wrap, such as a `CombinedOptimizer` of a model's
            `fused_optimizer` and the optimizer of its dense parameters.
        clipping: The quantity to limit, or its name, such as "norm".
        max_gradient: The limit; 0 stops training.
        norm_type: Exponent of `NORM`, such as 2.0, or `inf` for the largest absolute value.
        enable_global_grad_clip: Add up the norm over all ranks, in one all-reduce of one number.
            Required for sharded tables. All ranks must step together; parameters that every rank
            holds count once.
        param_to_pgs: Other parameters that are sharded, and the process groups of their shards.
            Parameters of torch's `fully_shard` need no entry.
        track_grad_norm: Compute the norm even if `clipping` does not need it.

    Attributes:
        last_total_grad_norm: The norm before the last clipping; None before the first step.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: `max_gradient` is negative or NaN, `norm_type` is not positive, or `clipping` is
            unknown. At a step: tables are fused, or their norm needs `enable_global_grad_clip`. At
            the first step, on all ranks: clipping settings differ between ranks.
        LostContactError: At a step, contact with another rank is lost.

    Example:
        >>> from recsys.optim.keyed import KeyedOptimizerWrapper
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> sgd = KeyedOptimizerWrapper({"w": weight}, lambda p: torch.optim.SGD(p, lr=1.0))
        >>> optimizer = GradientClippingOptimizer(sgd, GradientClipping.NORM, max_gradient=1.0)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> weight.detach()
        tensor([-0.6000, -0.8000])
    """

    @checked
    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[nn.Parameter, Sequence[dist.ProcessGroup]] | None = None,
        track_grad_norm: bool = False,
    ) -> None:
        super().__init__(optimizer)
        name = "GradientClippingOptimizer"
        self._clipping = clipping
        self._max_gradient = float(max_gradient)
        if not self._max_gradient >= 0:
            raise ValueError(
                f"{name}.max_gradient must be at least 0; received {max_gradient}. Use "
                "GradientClipping.NONE to keep gradients unchanged."
            )
        with contextlib.suppress(ValueError):  # text other than 'inf' and numbers
            self._norm_type = float(norm_type)
        if not getattr(self, "_norm_type", math.nan) > 0:
            raise ValueError(
                f"{name}.norm_type must be a positive number, or 'inf'; received {norm_type!r}."
            )
        self._is_global = enable_global_grad_clip
        self._groups_of = {id(p): tuple(groups) for p, groups in (param_to_pgs or {}).items()}
        self._tracks_norm = track_grad_norm
        self._has_agreed = False
        self.last_total_grad_norm: Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, then step.

        Args:
            closure: Function that computes the gradients. They are clipped after each evaluation.

        Returns:
            The result of the closure.
        """
        if closure is None:
            self._clip()
            return self._optimizer.step()

        def clipped() -> Any:
            loss = closure()
            self._clip()
            return loss

        return self._optimizer.step(clipped)

    @torch.no_grad()
    def _clip(self) -> None:
        if self._is_global and not self._has_agreed:
            self._agree()
            self._has_agreed = True
        if self._clipping is GradientClipping.NORM:
            self.clip_grad_norm_()
        elif self._tracks_norm:
            self.last_total_grad_norm = self.compute_total_grad_norm()[0]
        if self._clipping is GradientClipping.VALUE:
            for tables in self.table_gradients():
                tables.clamp_(self._max_gradient)
            for _, values in self._gradients():
                values.clamp_(-self._max_gradient, self._max_gradient)

    def _agree(self) -> None:
        """Raise ValueError on all ranks if clipping settings differ between ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        group = self._group_of_tables()
        rank_settings = {
            "clipping": self._clipping.value,
            "max_gradient": self._max_gradient,
            "norm_type": self._norm_type,
            "track_grad_norm": self._tracks_norm,
        }
        seen = [rank_settings] * dist.get_world_size(group)
        with explained(group, "compare how gradients are clipped"):
            dist.all_gather_object(seen, rank_settings, group=group)
        for rank, settings in enumerate(seen):
            for name, value in settings.items():
                if value != seen[0][name]:
                    raise ValueError(
                        f"With enable_global_grad_clip all ranks must have the same {name}; "
                        f"received {seen[0][name]!r} on rank 0 and {value!r} on rank {rank}. "
                        "Pass the same value on every rank."
                    )

    def _group_of_tables(self) -> dist.ProcessGroup | None:
        groups = (tables.process_group for tables in self.table_gradients())
        return next((group for group in groups if group is not None), None)

    @torch.no_grad()
    def clip_grad_norm_(self) -> Tensor:
        """Scale all gradients so that their norm is at most `max_gradient`.

        Returns:
            The norm before scaling, a scalar tensor. The host does not wait for it.
        """
        total, dense = self.compute_total_grad_norm()
        self.last_total_grad_norm = total
        factor = (self._max_gradient / (total + 1e-6)).clamp_(max=1.0)
        for tables in self.table_gradients():
            tables.scale_(factor)
        for values in dense:
            values.mul_(factor.to(values.device))
        return total

    @torch.no_grad()
    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """Compute the norm of all gradients together.

        Returns:
            The norm, a scalar tensor, and the gradient values of the dense parameters.
        """
        tables = self.table_gradients()
        gradients = list(self._gradients())
        # keys: groups that share the parameters; None for the ranks that share the tables
        norms: dict[tuple[dist.ProcessGroup, ...] | None, list[Tensor]] = {
            groups: [] for groups in (None, (), *self._groups_of.values())
        }
        for settings in self.param_groups:  # even without a gradient: the same keys on all ranks
            norms.update({self._shared_by(p): [] for p in settings["params"]})
        for parameter, values in gradients:
            norms[self._shared_by(parameter)].append(values)
        has_ranks = dist.is_available() and dist.is_initialized()
        group = self._group_of_tables()
        if has_ranks and not self._is_global and (norms[None] or group is not None):
            raise ValueError(
                "enable_global_grad_clip must be True to clip the norm of sharded tables, which "
                "covers the shards of all ranks; received False."
            )
        shared = [group] if has_ranks and self._is_global else []
        device = _device_of(self, tables)
        sums = []
        for groups, values_of in norms.items():
            share = power_sum(values_of, self._norm_type, device)
            if groups is None:
                of_tables = [table.power_sum(self._norm_type).to(device) for table in tables]
                share = self._join([*of_tables, share])
            for each in shared if groups is None else groups:
                self._add_up(share, each)
            sums.append(share)
        total = self._join(sums)
        if not math.isinf(self._norm_type):
            total = total.pow(1.0 / self._norm_type)
        return total, [values for _, values in gradients]

    def _shared_by(self, parameter: Tensor) -> tuple[dist.ProcessGroup, ...] | None:
        """Return the groups whose ranks share a parameter; None for the group of the tables."""
        known = self._groups_of.get(id(parameter))
        if known is not None:
            return known
        mesh: Any = getattr(parameter, "device_mesh", None)  # a DTensor
        if mesh is None:
            return None if getattr(parameter, _PART, False) else ()
        return tuple(
            mesh.get_group(dim)
            for dim, placement in enumerate(parameter.placements)  # type: ignore[attr-defined]
            if placement.is_shard()
        )

    def _join(self, shares: Sequence[Tensor]) -> Tensor:
        stacked = torch.stack(list(shares))
        return stacked.amax() if math.isinf(self._norm_type) else stacked.sum()

    def _add_up(self, share: Tensor, group: dist.ProcessGroup | None) -> None:
        is_max = math.isinf(self._norm_type)
        with explained(group, "add up the norm of the gradients"):
            dist.all_reduce(share, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)

    def _gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter that has a gradient, and the gradient values (not a copy)."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
                    yield parameter, parameter.grad.values()
                elif hasattr(parameter.grad, "to_local"):  # a DTensor
                    yield parameter, parameter.grad.to_local()
                else:
                    yield parameter, parameter.grad


def _device_of(optimizer: KeyedOptimizer, tables: Sequence[TableGradients]) -> torch.device:
    """Return the device that adds up norms: a GPU if there is one."""
    devices = [table.device for table in tables]
    devices.extend(parameter.device for parameter in optimizer.params.values())
    on_gpu = [device for device in devices if device.type != "cpu"]
    return next(iter(on_gpu), torch.device("cpu"))


def power_sum(values: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of `|v| ** norm_type` over tensors, or the largest `|v|` for `inf`.

    Args:
        values: Any tensors; empty tensors count as zero.
        norm_type: Exponent of the norm.
        device: Device of the result.

    Returns:
        A scalar, fp32.

    Example:
        >>> power_sum([torch.tensor([3.0, -4.0])], 2.0, torch.device("cpu"))
        tensor(25.)
    """
    values = [value.float() for value in values if value.numel()]
    if not values:
        return torch.zeros((), device=device)
    norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(values, norm_type)])
    return norms.amax() if math.isinf(norm_type) else norms.pow_(norm_type).sum()


def mark_part(parameter: nn.Parameter) -> None:
    """Mark a parameter as a shard of a table, whose norm is added up over the ranks."""
    setattr(parameter, _PART, True)
