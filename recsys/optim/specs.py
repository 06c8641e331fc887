"""Which optimizer class means which table optimizer, argument by argument."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer

from recsys.kernels.types import EmbOptimType, OptimizerSpec, WeightDecayMode
from recsys.optim import optimizers as ours

__all__ = ["optimizer_spec", "supported_optimizer_classes"]


@final
class _Meaning(NamedTuple):
    algorithm: EmbOptimType
    decay: WeightDecayMode = WeightDecayMode.L2
    fields: tuple[str, ...] = ("eps",)
    """Arguments that an OptimizerSpec has under the same name, besides lr and weight_decay."""


_ADAM = ("eps", "betas")
_DECOUPLE = WeightDecayMode.DECOUPLE
_CLASSES: Mapping[type[Optimizer], _Meaning] = {
    torch.optim.SGD: _Meaning(EmbOptimType.SGD, fields=()),
    torch.optim.Adagrad: _Meaning(EmbOptimType.EXACT_ADAGRAD),
    torch.optim.Adam: _Meaning(EmbOptimType.ADAM, fields=_ADAM),
    torch.optim.AdamW: _Meaning(EmbOptimType.ADAM, _DECOUPLE, _ADAM),
    torch.optim.SparseAdam: _Meaning(EmbOptimType.ADAM, fields=_ADAM),
    ours.SGD: _Meaning(EmbOptimType.SGD, fields=()),
    ours.Adagrad: _Meaning(EmbOptimType.EXACT_ADAGRAD),
    ours.RowWiseAdagrad: _Meaning(EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ours.Adam: _Meaning(EmbOptimType.ADAM, _DECOUPLE, _ADAM),
    ours.PartialRowWiseAdam: _Meaning(EmbOptimType.PARTIAL_ROWWISE_ADAM, _DECOUPLE, _ADAM),
    ours.LAMB: _Meaning(EmbOptimType.LAMB, _DECOUPLE, _ADAM),
    ours.LarsSGD: _Meaning(EmbOptimType.LARS_SGD, fields=("momentum", "eta")),
}
_ANY_VALUE = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""How torch computes, not what."""


def supported_optimizer_classes() -> tuple[type[Optimizer], ...]:
    """The optimizer classes a table can own."""
    return tuple(_CLASSES)


def optimizer_spec(
    optimizer_class: type[Optimizer], optimizer_kwargs: Mapping[str, Any]
) -> OptimizerSpec:
    """What a table does when it owns `optimizer_class(params, **optimizer_kwargs)`.

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
        >>> optimizer_spec(torch.optim.Adagrad, {"lr": 0.5}).learning_rate
        0.5
    """
    meaning = _CLASSES.get(optimizer_class)
    if meaning is None:
        raise ValueError(
            f"Embedding tables have no optimizer like {optimizer_class.__module__}."
            f"{optimizer_class.__name__}. Choose one of "
            f"{[f'{c.__module__}.{c.__name__}' for c in _CLASSES]}."
        )
    parameters = inspect.signature(optimizer_class.__init__).parameters
    unknown = sorted(set(optimizer_kwargs) - set(parameters))
    if unknown:
        raise ValueError(
            f"{optimizer_class.__name__} has no arguments {unknown}; it knows "
            f"{[name for name in parameters if name not in ('self', 'params')]}."
        )
    values = {name: p.default for name, p in parameters.items() if name != "self"}
    values.update(optimizer_kwargs)
    algorithm = meaning.algorithm
    fields: dict[str, Any] = {
        "learning_rate": float(values.pop("lr")),
        "weight_decay": float(values.pop("weight_decay", 0.0)),
        "weight_decay_mode": meaning.decay,
    }
    if values.pop("decoupled_weight_decay", False):
        fields["weight_decay_mode"] = WeightDecayMode.DECOUPLE
    for name in meaning.fields:
        value = values.pop(name)
        if name == "betas":
            fields["beta1"], fields["beta2"] = (float(beta) for beta in value)
        else:
            fields[name] = float(value)
    ignored = {n: v for n, v in values.items() if n not in _ANY_VALUE and v not in (0, None)}
    if ignored:
        raise ValueError(
            f"The {algorithm.name} of embedding tables has no {sorted(ignored)}; received "
            f"{ignored} for {optimizer_class.__name__}. Leave them out."
        )
    return OptimizerSpec(algorithm=algorithm, **fields)
