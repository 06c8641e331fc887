"""Which optimizer class means which table optimizer, argument by argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

from torch.optim import Optimizer

from recsys.kernels.arguments import choice
from recsys.kernels.checked import checked
from recsys.kernels.types import (
    EmbOptimType,
    OptimizerSpec,
    RowState,
    UpdateMode,
    WeightDecayMode,
)
from recsys.kernels.update_rules import UPDATE_RULES, RowReads
from recsys.optim.optimizers import OWN_CLASSES, warn_of_decay


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptimizer:
    """The optimizer of a table, when it acts, and what it does where columns are split.

    Args:
        spec: The optimizer.
        update_mode: FUSED or DEFERRED.
        row_state: Of optimizers that read whole rows.
    """

    spec: OptimizerSpec
    update_mode: UpdateMode = UpdateMode.FUSED
    row_state: RowState = RowState.EXACT

    @property
    def is_deferred(self) -> bool:
        """Whether backward leaves gradients that `step()` applies."""
        return self.update_mode is UpdateMode.DEFERRED

    @property
    def exchanges_row_state(self) -> bool:
        """Whether the owners of a row's columns must tell each other of its whole."""
        return self.row_state is RowState.EXACT and self.spec.rule.reduces_rows

    @property
    def may_split_columns(self) -> bool:
        """Whether a table's columns may have several owners."""
        return not self.exchanges_row_state or self.spec.rule.reads_row is RowReads.MOMENT

    @property
    def may_replicate(self) -> bool:
        """Whether copies of a table stay alike: not if each rounds by its own chance."""
        return not self.spec.stochastic_rounding

    def rounding(self, stochastic: bool | None) -> TableOptimizer:
        """Return the same with or without stochastic rounding; None: as it is."""
        if stochastic is None:
            return self
        return replace(self, spec=replace(self.spec, stochastic_rounding=stochastic))


def to_update_mode(given: UpdateMode | str) -> UpdateMode:
    """Return the mode that a user names.

    Raises:
        TypeError: It is neither a mode nor text.
        ValueError: Not one in which a table owns an optimizer.

    Example:
        >>> to_update_mode("deferred").name
        'DEFERRED'
    """
    return choice("update_mode of a table", given, (UpdateMode.FUSED, UpdateMode.DEFERRED))


def to_row_state(given: RowState | str) -> RowState:
    """Return the kind of row state that a user names.

    Raises:
        TypeError: It is neither a kind nor text.
        ValueError: There is no such kind.

    Example:
        >>> to_row_state("per_shard").name
        'PER_SHARD'
    """
    return choice("row_state of a table", given, RowState)


_Meaning: TypeAlias = tuple[EmbOptimType, WeightDecayMode]
"""An optimizer, and how its class decays."""

_CLASSES: Mapping[type[Optimizer], _Meaning] = {
    cls: (algorithm, decay)
    for algorithm, rule in UPDATE_RULES.items()
    for cls, decay in rule.torch_classes.items()
} | {
    cls: (cls.algorithm, cls.weight_decay_mode or UPDATE_RULES[cls.algorithm].decay)
    for cls in OWN_CLASSES
}
_ANY_VALUE = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""How torch computes, not what."""


@functools.cache
def _parameters_of(optimizer_class: type[Optimizer]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(optimizer_class.__init__).parameters


def supported_optimizer_classes() -> tuple[type[Optimizer], ...]:
    """Return the optimizer classes a table can own."""
    return tuple(_CLASSES)


@checked
def optimizer_kind(optimizer_class: type[Optimizer]) -> str:
    """Return what the state of an optimizer is called in a checkpoint.

    It is the same for a table that owns the optimizer and for parameters that torch steps.

    Example:
        >>> import torch
        >>> from recsys.optim import LAMB
        >>> optimizer_kind(torch.optim.AdamW), optimizer_kind(LAMB)
        ('adam', 'lamb')
    """
    meaning = _CLASSES.get(optimizer_class)
    return optimizer_class.__qualname__ if meaning is None else meaning[0].value


@checked
def optimizer_type_to_emb_opt_type(optimizer_class: type[Optimizer]) -> EmbOptimType:
    """Return what kernels call an optimizer class.

    Args:
        optimizer_class: A class of torch.optim or recsys.optim.

    Raises:
        ValueError: Tables have no such optimizer.

    Example:
        >>> import torch
        >>> optimizer_type_to_emb_opt_type(torch.optim.Adagrad).name
        'EXACT_ADAGRAD'
    """
    return _meaning_of(optimizer_class)[0]


def _meaning_of(optimizer_class: type[Optimizer]) -> _Meaning:
    meaning = _CLASSES.get(optimizer_class)
    if meaning is None:
        raise ValueError(
            f"Embedding tables have no optimizer like {optimizer_class.__module__}."
            f"{optimizer_class.__name__}. Choose one of "
            f"{[f'{c.__module__}.{c.__name__}' for c in _CLASSES]}."
        )
    return meaning


@checked
def optimizer_spec(
    optimizer_class: type[Optimizer], optimizer_kwargs: Mapping[str, Any]
) -> OptimizerSpec:
    """Return what a table does when it owns `optimizer_class(params, **optimizer_kwargs)`.

    A table's optimizer moves only the rows of the batch: Adam's moments of other rows do not decay,
    and weight decay leaves them alone.

    Args:
        optimizer_class: A class of torch.optim or recsys.optim.
        optimizer_kwargs: Its arguments; the class's defaults fill the rest.

    Returns:
        The specification kernels understand.

    Raises:
        ValueError: A class or an argument that tables do not know. Nothing is ignored.

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
            f"optimizer_kwargs: {optimizer_class.__name__} has no arguments {unknown}; it knows "
            f"{[name for name in parameters if name not in ('self', 'params')]}."
        )
    values = {name: p.default for name, p in parameters.items() if name != "self"}
    values.update(optimizer_kwargs)
    warn_of_decay(optimizer_class, values.get("weight_decay"))
    fields: dict[str, Any] = {
        "learning_rate": values.pop("lr"),
        "weight_decay": values.pop("weight_decay", 0.0),
        "weight_decay_mode": decay,
    }
    if values.pop("decoupled_weight_decay", False):
        fields["weight_decay_mode"] = WeightDecayMode.DECOUPLE
    if "betas" in values:
        values["beta1"], values["beta2"] = values.pop("betas")
    fields.update((name, values.pop(name)) for name in UPDATE_RULES[algorithm].settings)
    ignored = {n: v for n, v in values.items() if n not in _ANY_VALUE and v not in (0, None)}
    if ignored:
        raise ValueError(
            f"The {algorithm.name} of embedding tables has no {sorted(ignored)}; received "
            f"{ignored} for {optimizer_class.__name__}. Leave them out."
        )
    return OptimizerSpec(algorithm=algorithm, **fields)
