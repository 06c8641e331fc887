"""The optimizers of tables that update themselves, seen as one keyed optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, final

from torch import Tensor, nn

from recsys.distributed.lookup import Lookups
from recsys.distributed.table_shards import TableShards
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.types import EmbOptimType, OptimizerSpec
from recsys.optim.apply_optimizer_in_backward import attached_optimizer_spec
from recsys.optim.keyed import KeyedOptimizer


def optimizer_from_fused_params(fused_params: Mapping[str, Any]) -> OptimizerSpec:
    """Returns the optimizer that a sharder's ``fused_params`` describe.

    Args:
        fused_params: ``optimizer`` (an :class:`~recsys.kernels.types.EmbOptimType`, FBGEMM's enum
            of the same name, or its name) and its hyperparameters: the fields of
            :class:`~recsys.kernels.types.OptimizerSpec`.

    Raises:
        ValueError: if no optimizer is named, or one that does not exist, or a hyperparameter that
            does not.

    Example:
        >>> spec = optimizer_from_fused_params({"optimizer": "EXACT_SGD", "learning_rate": 0.5})
        >>> spec.learning_rate
        0.5
    """
    params = dict(fused_params)
    chosen = params.pop("optimizer", None)
    names = sorted(EmbOptimType.__members__)
    if chosen is None:
        raise ValueError(
            f"fused_params must name the optimizer that its other settings {sorted(params)} are "
            f"for; add "
            f"'optimizer': one of EmbOptimType.{{{', '.join(names)}}}. No table gets an "
            f"optimizer by default."
        )
    name = chosen if isinstance(chosen, str) else getattr(chosen, "name", str(chosen))
    if name not in EmbOptimType.__members__:
        raise ValueError(
            f"fused_params['optimizer'] must be one of {', '.join(names)}; received {chosen!r}."
        )
    known = {field.name for field in fields(OptimizerSpec)} - {"algorithm"}
    unknown = sorted(params.keys() - known)
    if unknown:
        raise ValueError(
            f"fused_params has settings that no optimizer reads: {unknown}; known are "
            f"{sorted(known)}."
        )
    return OptimizerSpec(algorithm=EmbOptimType[name], **params)


def optimizer_of_table(
    weight: nn.Parameter, fused_params: Mapping[str, Any]
) -> OptimizerSpec | None:
    """Returns the optimizer that updates a table in backward: its own, else the sharder's.

    Args:
        weight: of the table.
        fused_params: of its sharder, for tables that have none of their own; may be empty.

    Returns:
        None for a frozen table, and for one that any torch optimizer may train.
    """
    if not weight.requires_grad:
        return None
    attached = attached_optimizer_spec(weight)
    if attached is not None or not fused_params:
        return attached
    return optimizer_from_fused_params(fused_params)


@final
class FusedTablesOptimizer(KeyedOptimizer):
    """Learning rates and state of the tables that update themselves in the backward pass.

    :meth:`step` and :meth:`zero_grad` have nothing left to do. Setting a group's ``lr`` takes
    effect at the next backward pass. Every rank lists every table, also those it holds no part
    of.

    Args:
        tables: the parts of each table, by the name of its weight in the state dict.
        lookups: the kernels that apply the updates.
    """

    def __init__(self, tables: Mapping[str, TableShards], lookups: Sequence[Lookups]) -> None:
        owned = {name: table for name, table in tables.items() if _optimizer_of(table) is not None}
        params: dict[str, Tensor] = {name: table.whole() for name, table in owned.items()}
        state = {params[name]: table.states() for name, table in owned.items()}
        by_spec: dict[OptimizerSpec, list[Tensor]] = {}
        for name, table in owned.items():
            spec = _optimizer_of(table)
            assert spec is not None
            by_spec.setdefault(spec, []).append(params[name])
        kernels: dict[OptimizerSpec, list[TableBatchedEmbedding]] = {}
        for lookup in lookups:
            for group, kernel in zip(lookup.groups, lookup.kernels, strict=True):
                kernels.setdefault(group.key.optimizer, []).append(kernel)  # type: ignore[attr-defined]
        groups: list[dict[str, Any]] = [
            _LiveGroup(spec, params_of, kernels.get(spec, []))
            for spec, params_of in by_spec.items()
        ]
        super().__init__(params, state, groups)
        self._tables = list(tables.values())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Does nothing: the backward pass has updated the tables."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: no gradient is kept."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the tables' optimizer state by name; live."""
        for table in self._tables:
            table.flush()
        return super().state_dict()

    def post_load_state_dict(self) -> None:
        """Drops what device caches hold of the state before the load."""
        for table in self._tables:
            for shard in table.shards:
                shard.kernel.drop_cache()

    def __repr__(self) -> str:
        groups = "; ".join(
            f"{group['algorithm']} lr={group['lr']} of {len(group['params'])} tables"
            for group in self.param_groups
        )
        return f"FusedTablesOptimizer({groups})"


def _optimizer_of(table: TableShards) -> OptimizerSpec | None:
    optimizer: OptimizerSpec | None = table.table.group.optimizer  # type: ignore[attr-defined]
    return optimizer


class _LiveGroup(dict[str, Any]):
    """A parameter group whose ``lr`` is the kernels' own, so that schedulers reach them."""

    def __init__(
        self, spec: OptimizerSpec, params: list[Tensor], kernels: list[TableBatchedEmbedding]
    ) -> None:
        super().__init__(
            params=params,
            lr=spec.learning_rate,
            algorithm=spec.algorithm.value,
            weight_decay=spec.weight_decay,
        )
        self._kernels = kernels

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # kernels are not pickled

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "lr":
            for kernel in self._kernels:
                kernel.set_learning_rate(float(value))
