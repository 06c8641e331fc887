"""Conversion of optimizer classes and their arguments to table optimizers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, final

from torch.optim import Optimizer

from recsys.base.arguments import choice
from recsys.base.checked import checked
from recsys.base.lazy import moved_names
from recsys.kernels.types import (
    EmbOptimType,
    OptimizerSpec,
    RowState,
    UpdateMode,
    WeightDecayMode,
)
from recsys.kernels.update_rules import UPDATE_RULES, RowReads
from recsys.optim.optimizers import OWN_CLASSES, make_spec, warn_of_decay


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptimizer:
    """Optimizer of a table, with its update mode and its behaviour on split columns.

    Args:
        spec: The optimizer.
        update_mode: FUSED or DEFERRED.
        row_state: Row state of optimizers that read whole rows.
    """

    spec: OptimizerSpec
    update_mode: UpdateMode = UpdateMode.FUSED
    row_state: RowState = RowState.EXACT

    @property
    def is_deferred(self) -> bool:
        """True if backward stores gradients that `step()` applies."""
        return self.update_mode is UpdateMode.DEFERRED

    @property
    def exchanges_row_state(self) -> bool:
        """True if the owners of a row's columns must exchange sums over the row."""
        return self.row_state is RowState.EXACT and self.spec.rule.reduces_rows

    @property
    def may_split_columns(self) -> bool:
        """True if several ranks may own columns of a table."""
        return not self.exchanges_row_state or self.spec.rule.reads_row is RowReads.MOMENT

    @property
    def may_replicate(self) -> bool:
        """True if replicas of a table stay equal, which stochastic rounding prevents."""
        return not self.spec.stochastic_rounding

    def rounding(self, stochastic: bool | None) -> TableOptimizer:
        """Return a copy with or without stochastic rounding; None changes nothing."""
        if stochastic is None:
            return self
        return replace(self, spec=replace(self.spec, stochastic_rounding=stochastic))


def to_update_mode(given: UpdateMode | str) -> UpdateMode:
    """Convert a mode or its name to an `UpdateMode`.

    Raises:
        TypeError: The argument is neither a mode nor a string.
        ValueError: A table owns no optimizer in this mode, or there is no such mode.

    Example:
        >>> to_update_mode("deferred").name
        'DEFERRED'
    """
    return choice("update_mode of a table", given, (UpdateMode.FUSED, UpdateMode.DEFERRED))


def to_row_state(given: RowState | str) -> RowState:
    """Convert a kind of row state or its name to a `RowState`.

    Raises:
        TypeError: The argument is neither a kind nor a string.
        ValueError: There is no such kind.

    Example:
        >>> to_row_state("per_shard").name
        'PER_SHARD'
    """
    return choice("row_state of a table", given, RowState)


_Meaning: TypeAlias = tuple[EmbOptimType, WeightDecayMode]
"""Algorithm and weight decay mode of an optimizer class."""

_CLASSES: Mapping[type[Optimizer], _Meaning] = {
    cls: (algorithm, decay)
    for algorithm, rule in UPDATE_RULES.items()
    for cls, decay in rule.torch_classes.items()
} | {
    cls: (cls.algorithm, cls.weight_decay_mode or UPDATE_RULES[cls.algorithm].decay)
    for cls in OWN_CLASSES
}
_SPEC_ARGUMENTS = ("lr", "weight_decay", "betas")
_ANY_VALUE = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Arguments that do not change results."""


@functools.cache
def _parameters_of(optimizer_class: type[Optimizer]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(optimizer_class.__init__).parameters


def supported_optimizer_classes() -> tuple[type[Optimizer], ...]:
    """Return the optimizer classes a table can own."""
    return tuple(_CLASSES)


def may_evaluate_again(optimizer: Optimizer) -> bool:
    """Return whether `step` may evaluate its closure more than once, as LBFGS does."""
    step = type(optimizer).step
    is_known = step.__module__.startswith(("torch.optim.", "recsys."))
    closure = inspect.signature(step).parameters.get("closure")
    return not is_known or (closure is not None and closure.default is inspect.Parameter.empty)


@checked
def optimizer_kind(optimizer_class: type[Optimizer]) -> str:
    """Return the name of an optimizer's state in checkpoints.

    Tables that own the optimizer and parameters that torch steps have the same name.

    Example:
        >>> import torch
        >>> from recsys.optim import LAMB
        >>> optimizer_kind(torch.optim.AdamW), optimizer_kind(LAMB)
        ('adam', 'lamb')
    """
    meaning = _CLASSES.get(optimizer_class)
    return optimizer_class.__qualname__ if meaning is None else meaning[0].value


def _meaning_of(optimizer_class: type[Optimizer]) -> _Meaning:
    meaning = _CLASSES.get(optimizer_class)
    if meaning is None:
        raise ValueError(
            f"optimizer_class must be an optimizer of embedding tables; received "
            f"{optimizer_class.__module__}.{optimizer_class.__name__}. Choose one of "
            f"{[f'{c.__module__}.{c.__name__}' for c in _CLASSES]}."
        )
    return meaning


@checked
def optimizer_spec(
    optimizer_class: type[Optimizer], optimizer_kwargs: Mapping[str, Any]
) -> OptimizerSpec:
    """Convert an optimizer class and its arguments to the specification of a table's optimizer.

    A table's optimizer updates only the rows of the batch: other rows do not decay, nor do their
    Adam moments.

    Args:
        optimizer_class: A class of torch.optim or recsys.optim.
        optimizer_kwargs: Its arguments; missing arguments have the defaults of the class.

    Returns:
        The specification for kernels.

    Raises:
        ValueError: Tables do not support the class or an argument. No argument is ignored.

    Example:
        >>> import torch
        >>> optimizer_spec(torch.optim.Adagrad, {"lr": 0.5}).learning_rate
        0.5
    """
    algorithm, decay = _meaning_of(optimizer_class)
    parameters = _parameters_of(optimizer_class)  # type: ignore[arg-type]  # a class does hash
    unknown = sorted(set(optimizer_kwargs) - set(parameters))
    if unknown:
        raise ValueError(
            f"optimizer_kwargs must be arguments of {optimizer_class.__name__}, "
            f"{[name for name in parameters if name not in ('self', 'params')]}; received "
            f"{unknown}."
        )
    values = {name: p.default for name, p in parameters.items() if name != "self"}
    values.update(optimizer_kwargs)
    warn_of_decay(optimizer_class, values.get("weight_decay"))
    if values.pop("decoupled_weight_decay", False):
        decay = WeightDecayMode.DECOUPLE
    used = {*_ANY_VALUE, *_SPEC_ARGUMENTS, *UPDATE_RULES[algorithm].settings}
    ignored = {n: v for n, v in values.items() if n not in used and v not in (0, None)}
    if ignored:
        raise ValueError(
            f"{algorithm.name} of embedding tables does not support {sorted(ignored)}; received "
            f"{ignored} for {optimizer_class.__name__}. Omit these arguments."
        )
    return make_spec(algorithm, decay, values)


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
