"""The tables of a model, with all that a planner must know of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from recsys.distributed.fused_optimizer import optimizer_of_table
from recsys.distributed.module_tree import outermost
from recsys.distributed.planner.tables import PlannedTable
from recsys.distributed.planner.types import ParameterConstraints, PlannerError
from recsys.distributed.types import EmbeddingComputeKernel, ModuleSharder, ShardingType
from recsys.distributed.wire import POOLED_OPS, SEQUENCE_OPS, codecs_for
from recsys.kernels.types import PoolingMode
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.embedding_tables import TableCollection


def tables_of(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    constraints: Mapping[str, ParameterConstraints],
    device: str,
) -> list[PlannedTable]:
    """Returns the tables of every module that a sharder can shard.

    Args:
        module: the model; may be on the ``meta`` device.
        sharders: one per module type to shard.
        constraints: demands by table name.
        device: "cpu" or "cuda".

    Raises:
        PlannerError: if a constraint is for no table, or does not fit its features.
    """
    tables = list(_tables(module, {s.module_type: s for s in sharders}, constraints, device))
    unknown = sorted(constraints.keys() - {table.name for table in tables})
    if unknown:
        raise PlannerError(
            f"Constraints are given for the tables {unknown}, which the model does not have; "
            f"its tables are {sorted(table.name for table in tables)}."
        )
    return tables


def _tables(
    module: nn.Module,
    sharders: Mapping[type[nn.Module], ModuleSharder[Any]],
    all_constraints: Mapping[str, ParameterConstraints],
    device: str,
) -> Iterator[PlannedTable]:
    for path, child in outermost(module, lambda found: type(found) in sharders):
        sharder = sharders[type(child)]
        features: dict[str, list[str]] = {}
        pooled, weighted = True, False
        for part in child.modules():
            if isinstance(part, TableCollection):
                features |= {config.name: config.feature_names for config in part.configs()}
                pooled = PoolingMode.NONE not in part.poolings()
                weighted = isinstance(part, EmbeddingBagCollection) and part.is_weighted()
        wire_bytes = _wire_bytes(sharder, pooled=pooled)
        for name, weight in sharder.shardable_parameters(child).items():
            constraints = all_constraints.get(name, ParameterConstraints())
            num_features = len(features.get(name, [name]))
            owned = optimizer_of_table(weight, sharder.fused_params)
            pooling = constraints.pooling_factors or [1.0] * num_features
            if len(pooling) != num_features:
                raise PlannerError(
                    f"ParameterConstraints.pooling_factors of table {name!r} must have one "
                    f"number for each of "
                    f"its features {features.get(name, [name])}; received {pooling}."
                )
            yield PlannedTable(
                path=path,
                name=name,
                rows=weight.shape[0],
                dim=weight.shape[1],
                element_bytes=weight.element_size(),
                optimizer=owned,
                trains=weight.requires_grad,
                ids_per_sample=sum(pooling),
                num_features=num_features,
                is_pooled=pooled,
                is_weighted=weighted,
                wire_bytes=wire_bytes,
                constraints=constraints,
                kernels=_kernels(sharder, constraints, device),
            )


def _kernels(
    sharder: ModuleSharder[Any], constraints: ParameterConstraints, device: str
) -> dict[ShardingType, EmbeddingComputeKernel]:
    """Returns the sharding types that are allowed and executable, each with its kernel."""
    allowed = constraints.compute_kernels
    kernels = {}
    for name in sharder.sharding_types(device):
        executable = sharder.compute_kernels(name, device)
        usable = [k for k in allowed or executable if k in executable]
        if usable and name in (constraints.sharding_types or [name]):
            kernels[ShardingType(name)] = EmbeddingComputeKernel(usable[0])
    return kernels


def _wire_bytes(sharder: ModuleSharder[Any], *, pooled: bool) -> tuple[float, float]:
    """Returns the bytes of a value on its way there, and of its gradient on its way back."""
    names = POOLED_OPS if pooled else SEQUENCE_OPS
    there, back = codecs_for(getattr(sharder, "qcomm_codecs_registry", None), *names)
    return there.bytes_per_value, back.bytes_per_value
