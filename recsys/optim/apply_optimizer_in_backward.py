"""Attach optimizers that update parameters during backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from recsys.base.arguments import instance, wrong_type
from recsys.base.checked import checked
from recsys.kernels.types import OptimizerSpec, RowState, UpdateMode
from recsys.optim.optimizers import warn_of_decay
from recsys.optim.specs import TableOptimizer, optimizer_spec, to_row_state, to_update_mode

_ATTRIBUTE = "_in_backward_optimizers"
_CLASSES, _KWARGS = "_optimizer_classes", "_optimizer_kwargs"
"""Attributes of parameters that the function of torch sets, for other libraries."""
_TORCH_HOOKS = "torch.distributed.optim.apply_optimizer_in_backward"
_NO_SETTINGS = ("params", "initial_lr")
"""Keys of param groups that are not settings; schedulers set `initial_lr`."""
_attachments = 0
_hooks: MutableMapping[Tensor, RemovableHandle] = WeakIdKeyDictionary()


@final
@dataclass(eq=False, repr=False)
class AttachedOptimizer:
    """Optimizer of a call of `apply_optimizer_in_backward`, attached to its parameters.

    It has no reference to parameters, so parameters with it can be pickled.

    Args:
        optimizer_class: The optimizer class.
        given: The arguments of the class.
        update_mode: Update mode of tables.
        row_state: Row state of tables.
        stochastic_rounding: True for stochastic rounding of tables.

    Attributes:
        param_groups: One group with the settings. A new `lr` applies from the next forward pass of
            an unsharded collection; for a sharded collection change the groups of its
            `fused_optimizer`.
    """

    optimizer_class: type[Optimizer]
    given: Mapping[str, Any]
    update_mode: UpdateMode = UpdateMode.FUSED
    row_state: RowState = RowState.EXACT
    stochastic_rounding: bool = False
    param_groups: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.param_groups = [dict(self.given)]

    def spec(self) -> OptimizerSpec:
        """Return the specification for an embedding table.

        Raises:
            ValueError: Tables do not support the optimizer or a setting.
        """
        kwargs = {k: v for k, v in self.param_groups[0].items() if k not in _NO_SETTINGS}
        spec = optimizer_spec(self.optimizer_class, kwargs)
        return replace(spec, stochastic_rounding=self.stochastic_rounding)

    def table_optimizer(self) -> TableOptimizer:
        """Return `spec()` with the update mode and the row state."""
        return TableOptimizer(
            spec=self.spec(), update_mode=self.update_mode, row_state=self.row_state
        )

    @property
    def is_only_for_tables(self) -> bool:
        """True if a setting applies to tables only."""
        changed = (self.update_mode, self.row_state) != (UpdateMode.FUSED, RowState.EXACT)
        return changed or self.stochastic_rounding

    def __repr__(self) -> str:
        settings = ""
        if self.is_only_for_tables:
            settings = (
                f", update_mode='{self.update_mode.value}', row_state='{self.row_state.value}', "
                f"stochastic_rounding={self.stochastic_rounding}"
            )
        return (
            f"AttachedOptimizer({self.optimizer_class.__name__}, {self.param_groups[0]}{settings})"
        )


@checked
def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any],
    *,
    update_mode: UpdateMode | str = UpdateMode.FUSED,
    row_state: RowState | str = RowState.EXACT,
    stochastic_rounding: bool = False,
) -> None:
    """Update parameters during backward, each as soon as its gradient is computed.

    Gradients are not stored, which saves memory of the size of the parameters. Embedding tables of
    sharded and unsharded collections are updated by their kernel, other parameters by a hook. Do
    not pass these parameters to another optimizer: see `in_backward_optimizer_filter`. Tables also
    support `torch.distributed.optim._apply_optimizer_in_backward`.

    Args:
        optimizer_class: A class of torch.optim or recsys.optim.
        params: The parameters.
        optimizer_kwargs: Arguments of the class, without the parameters. `weight_decay` of tables
            applies to the rows of the batch only. To decay all rows, do not attach an optimizer to
            the table and step torch.optim.Adam on it (measurements in docs/optimizers.md).
        update_mode: Update mode of tables. With "deferred", backward adds up row gradients, and
            `step()` of the collection's (or model's) `fused_optimizer` applies them. Required for
            gradient accumulation and clipping.
        row_state: Row state of column-split tables, for optimizers that read whole rows. With
            "per_shard", each column shard has its own state. This saves an exchange, but weights
            differ from the unsplit table, and only a table with the same columns split can load
            the state.
        stochastic_rounding: Rounding of fp16 and bf16 tables: see `OptimizerSpec`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A parameter already has an optimizer or requires no gradient, or a mode does not
            exist.

    Example:
        >>> import torch
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(layer.weight)
        >>> apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.5})
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> layer.weight.item(), layer.weight.grad
        (0.5, None)
    """
    global _attachments
    attached = AttachedOptimizer(
        optimizer_class,
        optimizer_kwargs,
        to_update_mode(update_mode),
        to_row_state(row_state),
        stochastic_rounding,
    )
    warn_of_decay(optimizer_class, optimizer_kwargs.get("weight_decay"))
    if isinstance(params, Tensor):
        wrong_type("apply_optimizer_in_backward.params", "a list of nn.Parameters", params)
    params = list(params)
    for place, parameter in enumerate(params):
        subject = f"apply_optimizer_in_backward.params[{place}]"
        instance(subject, parameter, Tensor, "an nn.Parameter")
        if not parameter.requires_grad:
            raise ValueError(
                f"{subject} must require a gradient; received a parameter of shape "
                f"{list(parameter.shape)} with requires_grad=False. Omit it, or call "
                "requires_grad_() first."
            )
        if hasattr(parameter, _ATTRIBUTE):
            raise ValueError(
                f"A parameter of shape {list(parameter.shape)} is already updated in backward by "
                f"{getattr(parameter, _ATTRIBUTE)}; received {attached} for it as well. Apply one."
            )
    for parameter in params:
        mark(parameter, attached)
        _hook(parameter, attached)
    _attachments += 1


def mark(parameter: Tensor, attached: AttachedOptimizer) -> None:
    """Record on a parameter the optimizer that updates it in backward, for other libraries."""
    setattr(parameter, _ATTRIBUTE, [attached])
    setattr(parameter, _CLASSES, [attached.optimizer_class])
    setattr(parameter, _KWARGS, [attached.given])


def _hook(parameter: nn.Parameter, attached: AttachedOptimizer) -> None:
    # Built at the first gradient, because tables need none, and SparseAdam checks parameters.
    built: list[Optimizer] = []

    def update(updated: Tensor) -> None:
        if updated.grad is None:  # torch calls hooks even without a gradient
            return
        if attached.is_only_for_tables:
            raise ValueError(
                f"{attached} is for tables of embedding collections; received another parameter of "
                f"shape {list(updated.shape)}. Omit it, and step its optimizer yourself."
            )
        if not built:
            built.append(attached.optimizer_class([updated], **attached.param_groups[0]))
        built[0].param_groups[0].update(attached.param_groups[0])
        built[0].step()
        updated.grad = None

    _hooks[parameter] = parameter.register_post_accumulate_grad_hook(update)


def drop_hook(parameter: Tensor) -> None:
    """Remove the hook of a parameter that a kernel updates."""
    hook = _hooks.pop(parameter, None)
    if hook is not None:
        hook.remove()


def attached_optimizer(parameter: Tensor) -> AttachedOptimizer | None:
    """Return the optimizer that `apply_optimizer_in_backward` attached to a parameter, or None.

    An optimizer of `torch.distributed.optim._apply_optimizer_in_backward` is converted, and its
    hook is removed, because a kernel applies it.

    Raises:
        ValueError: torch attached several optimizers, or one that has stepped.
    """
    attached: list[Any] = getattr(parameter, _ATTRIBUTE, [])
    if attached and isinstance(attached[0], Optimizer):
        attached = [_adopt(parameter, attached)]
        setattr(parameter, _ATTRIBUTE, attached)
    return attached[0] if attached else None


def _adopt(parameter: Tensor, given: Sequence[Optimizer]) -> AttachedOptimizer:
    """Convert the optimizer that the function of torch attached to a parameter."""
    names = [type(optimizer).__name__ for optimizer in given]
    if len(given) > 1:
        raise ValueError(
            f"A table can own one optimizer; received {names}, by torch.distributed.optim."
            f"_apply_optimizer_in_backward, for one of shape {list(parameter.shape)}. Apply one."
        )
    # Adagrad creates its state at construction
    if any(float(state.get("step", 1)) > 0 for state in given[0].state.values()):
        raise ValueError(
            f"{names[0]} has updated a table of shape {list(parameter.shape)} already, and its "
            "state would be lost. Attach optimizers before the first forward pass, with "
            "recsys.optim.apply_optimizer_in_backward."
        )
    group = given[0].param_groups[0]
    attached = AttachedOptimizer(type(given[0]), group | {"params": []})
    attached.given = getattr(parameter, _KWARGS, [attached.given])[0]
    # a scheduler of the given optimizer now sets the table's learning rate
    given[0].param_groups = attached.param_groups
    for handle in sys.modules[_TORCH_HOOKS].param_to_optim_hook_handle_map.pop(parameter, ()):
        handle.remove()
    return attached


def is_marked(parameter: Tensor | None) -> bool:
    """Return whether an optimizer is attached to a parameter; torch.compile can trace it."""
    return hasattr(parameter, _ATTRIBUTE)


def mark_in_backward(parameter: nn.Parameter, source: Tensor | None = None) -> None:
    """Record that a kernel updates a parameter in backward, for filters.

    Args:
        parameter: The parameter; it gets no hook.
        source: Parameter to copy the attached optimizer from, if there is one.
    """
    for name in (_ATTRIBUTE, _CLASSES, _KWARGS):
        setattr(parameter, name, list(getattr(source, name, [])))


def attachment_count() -> int:
    """Return the number of attachments; collections rebuild when it changes."""
    return _attachments
