"""Give parameters an optimizer that updates them during backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from recsys.kernels.arguments import instance, wrong_type
from recsys.kernels.checked import checked
from recsys.kernels.types import OptimizerSpec, RowState, UpdateMode
from recsys.optim.optimizers import warn_of_decay
from recsys.optim.specs import TableOptimizer, optimizer_spec, to_row_state, to_update_mode

_ATTRIBUTE = "_in_backward_optimizers"
_CLASSES, _KWARGS = "_optimizer_classes", "_optimizer_kwargs"
"""Where torch's own function notes what it was given; public code reads them."""
_TORCH_HOOKS = "torch.distributed.optim.apply_optimizer_in_backward"
_NO_SETTINGS = ("params", "initial_lr")
"""What groups of torch's optimizers hold besides: the latter is set by schedulers."""
_attachments = 0
_hooks: MutableMapping[Tensor, RemovableHandle] = WeakIdKeyDictionary()


@final
@dataclass(eq=False, repr=False)
class AttachedOptimizer:
    """What one call of `apply_optimizer_in_backward` gave to its parameters.

    It holds no parameter, so that a parameter which carries it can be pickled.

    Args:
        optimizer_class: As given.
        given: Its arguments.
        update_mode: As given.
        row_state: As given.
        stochastic_rounding: As given.

    Attributes:
        param_groups: One group with the settings. Changing its `lr` takes effect at the next
            forward of an unsharded collection; for a sharded one change the groups of its
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
        """Return the optimizer of an embedding table that carries this.

        Raises:
            ValueError: Tables do not know the optimizer, or one of its settings.
        """
        kwargs = {k: v for k, v in self.param_groups[0].items() if k not in _NO_SETTINGS}
        spec = optimizer_spec(self.optimizer_class, kwargs)
        return replace(spec, stochastic_rounding=self.stochastic_rounding)

    def table_optimizer(self) -> TableOptimizer:
        """`spec`, and when and how it acts."""
        return TableOptimizer(
            spec=self.spec(), update_mode=self.update_mode, row_state=self.row_state
        )

    @property
    def is_only_for_tables(self) -> bool:
        """Whether some setting means nothing to a parameter that is no table."""
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
    """Let parameters be updated during backward, each as soon as its gradient is there.

    Gradients are then never kept: memory falls by the size of the parameters. Embedding tables of a
    (sharded or unsharded) collection do it inside their kernel; other parameters by a hook. Leave
    them out of the optimizer you step yourself: see `in_backward_optimizer_filter`. Tables take
    what torch's own `torch.distributed.optim._apply_optimizer_in_backward` gave them for this.

    Args:
        optimizer_class: A class of torch.optim or recsys.optim.
        params: The parameters.
        optimizer_kwargs: Arguments of the class, besides the parameters. `weight_decay` of tables
            acts on the rows of the batch only: to decay all rows, attach nothing to the table and
            step torch.optim.Adam on it (docs/optimizers.md has both measured).
        update_mode: Of tables. "deferred": backward only adds up row gradients, and `step()` of
            the sharded collection's (or model's) `fused_optimizer` applies them. Accumulating
            over several batches and clipping need it.
        row_state: Of tables that are split by columns, under an optimizer that reads whole rows.
            "per_shard": each column part keeps a state of its own. That saves an exchange, but
            the weights are not those of the unsplit table, and the state can be loaded only
            where the columns are split alike.
        stochastic_rounding: Of fp16 and bf16 tables: see `OptimizerSpec`.

    Raises:
        TypeError: An argument has a wrong type, such as parameters that are none.
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
    if isinstance(params, Tensor | Mapping):
        wrong_type("apply_optimizer_in_backward.params", "an iterable of nn.Parameter", params)
    params = list(params)
    for place, parameter in enumerate(params):
        subject = f"apply_optimizer_in_backward.params[{place}]"
        instance(subject, parameter, Tensor, "an nn.Parameter")
        if not parameter.requires_grad:
            raise ValueError(
                f"{subject} must require a gradient: backward updates it with that. Received a "
                f"parameter of shape {list(parameter.shape)} with requires_grad=False. Leave it "
                "out, or call its requires_grad_() first."
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
    """Note on a parameter which optimizer updates it in backward; public code reads it there."""
    setattr(parameter, _ATTRIBUTE, [attached])
    setattr(parameter, _CLASSES, [attached.optimizer_class])
    setattr(parameter, _KWARGS, [attached.given])


def _hook(parameter: nn.Parameter, attached: AttachedOptimizer) -> None:
    # Built at the first gradient: the tables of a collection never get there, and some classes
    # (SparseAdam) check parameters.
    built: list[Optimizer] = []

    def update(updated: Tensor) -> None:
        if updated.grad is None:  # torch calls hooks also when no gradient came
            return
        if attached.is_only_for_tables:
            raise ValueError(
                f"{attached} is for tables of embedding collections; received a parameter of shape "
                f"{list(updated.shape)} that is none. Leave it out, and step its optimizer "
                "yourself."
            )
        if not built:
            built.append(attached.optimizer_class([updated], **attached.param_groups[0]))
        built[0].param_groups[0].update(attached.param_groups[0])
        built[0].step()
        updated.grad = None

    _hooks[parameter] = parameter.register_post_accumulate_grad_hook(update)


def drop_hook(parameter: Tensor) -> None:
    """Leave the updates of a parameter to a kernel: its hook would only cost time."""
    hook = _hooks.pop(parameter, None)
    if hook is not None:
        hook.remove()


def attached_optimizer(parameter: Tensor) -> AttachedOptimizer | None:
    """Return the optimizer that `apply_optimizer_in_backward` gave to a parameter, if any.

    What torch's own `torch.distributed.optim._apply_optimizer_in_backward` gave counts too; from
    then on it is a kernel's to apply, and torch's hook is gone.

    Raises:
        ValueError: torch's gave several, or one that has stepped.
    """
    attached: list[Any] = getattr(parameter, _ATTRIBUTE, [])
    if attached and isinstance(attached[0], Optimizer):
        attached = [_adopt(parameter, attached)]
        setattr(parameter, _ATTRIBUTE, attached)
    return attached[0] if attached else None


def _adopt(parameter: Tensor, given: Sequence[Optimizer]) -> AttachedOptimizer:
    """Return what torch's own function gave to a parameter, as ours would have given it."""
    names = [type(optimizer).__name__ for optimizer in given]
    if len(given) > 1:
        raise ValueError(
            f"A table can own one optimizer; received {names}, by torch.distributed.optim."
            f"_apply_optimizer_in_backward, for one of shape {list(parameter.shape)}. Apply one."
        )
    # Adagrad has state from the start
    if any(float(state.get("step", 1)) > 0 for state in given[0].state.values()):
        raise ValueError(
            f"{names[0]} has updated a table of shape {list(parameter.shape)} already, and its "
            "state would be lost. Apply optimizers before the first forward pass, by "
            "recsys.optim.apply_optimizer_in_backward."
        )
    group = given[0].param_groups[0]
    attached = AttachedOptimizer(type(given[0]), group | {"params": []})
    attached.given = getattr(parameter, _KWARGS, [attached.given])[0]
    given[0].param_groups = attached.param_groups  # a scheduler of it reaches the table
    for handle in sys.modules[_TORCH_HOOKS].param_to_optim_hook_handle_map.pop(parameter, ()):
        handle.remove()
    return attached


def is_marked(parameter: Tensor | None) -> bool:
    """Return whether an optimizer was given to a parameter; a compiler can follow it."""
    return hasattr(parameter, _ATTRIBUTE)


def mark_in_backward(parameter: nn.Parameter, source: Tensor | None = None) -> None:
    """Record that a kernel updates a parameter in backward, so that filters leave it out.

    Args:
        parameter: The parameter; gets no hook.
        source: Where to copy the attached optimizer from, if anything was attached there.
    """
    for name in (_ATTRIBUTE, _CLASSES, _KWARGS):
        setattr(parameter, name, list(getattr(source, name, [])))


def attachment_count() -> int:
    """Return how often optimizers were attached here: a collection then looks again."""
    return _attachments
