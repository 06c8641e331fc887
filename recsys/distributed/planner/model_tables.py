"""Tables of a model, with everything that the planner must know about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.distributed.placement.fused_params import optimizer_of_table
from recsys.distributed.placement.plan import EmbeddingComputeKernel, ShardingType
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.planner.constants import BATCH_SIZE
from recsys.distributed.planner.pooling_stats import IdSkew, PoolingStats, uniform_distinct
from recsys.distributed.planner.tables import UVM_KERNELS, PlannedTable
from recsys.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType
from recsys.distributed.ranks.wire import POOLED_OPS, SEQUENCE_OPS, codecs_for
from recsys.distributed.sharded.module_tree import outermost
from recsys.distributed.sharded.sharder import ModuleSharder, has_tables
from recsys.kernels.hashed.index import geometry
from recsys.kernels.support import choose_backend
from recsys.kernels.types import EmbeddingLocation, LookupSettings, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollectionInterface
from recsys.modules.hashed_ids import HashedIds
from recsys.modules.ids.table_index import index_row_bytes
from recsys.optim.specs import TableOptimizer

_OF_FEATURES = ("pooling_factors", "num_poolings", "batch_sizes")
_Kernels: TypeAlias = dict[ShardingType, tuple[EmbeddingComputeKernel, ...]]


@checked
def tables_of(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    constraints: Mapping[str, ParameterConstraints],
    device: str,
    *,
    batch_size: int = BATCH_SIZE,
    pooling_stats: PoolingStats | None = None,
) -> list[PlannedTable]:
    """Return the tables of every module that a sharder can shard.

    Args:
        module: Model; may be on the `meta` device.
        sharders: One for each module type to shard.
        constraints: Constraints by table name.
        device: "cpu" or "cuda".
        batch_size: Samples per rank and step.
        pooling_stats: Statistics of sample batches. Constraints take precedence.

    Raises:
        PlannerError: A constraint names an unknown table, or contradicts its table or module.
    """
    whole("tables_of: batch_size", batch_size)
    by_type = {sharder.module_type: sharder for sharder in sharders}
    stats = {} if pooling_stats is None else pooling_stats.features
    readers = [
        _ModuleReader(path, child, by_type[type(child)], device, batch_size, constraints)
        for path, child in outermost(module, lambda found: has_tables(found, by_type))
    ]
    tables = [table for reader in readers for table in reader.tables(stats)]
    named = [(name, of) for reader in readers for name, of in reader.constraints.items()]
    known = {name for name, _ in named}
    # by identity: a reader replaces constraints that belong to another table of this name
    unused = constraints.keys() - {name for name, of in named if of is constraints.get(name)}
    for name in sorted(unused & known):
        raise _refusal(
            f"ParameterConstraints.feature_names of table {name!r} must contain all features of a "
            f"table of that name; received {constraints[name].feature_names}. Name all features, "
            "or use None."
        )
    if unused:
        raise _refusal(
            f"Constraints must name tables of the model, which are {sorted(known)}; received "
            f"constraints for the tables {sorted(unused)}."
        )
    return tables


def _refusal(message: str) -> PlannerError:
    return PlannerError(message, PlannerErrorType.STRICT_CONSTRAINTS)


@runtime_checkable
class _HasTables(Protocol):
    """Collection of tables, trained or quantized."""

    def configs(self) -> list[Any]: ...
    def poolings(self) -> tuple[PoolingType, ...]: ...


class _Traffic(NamedTuple):
    """Traffic of one feature per sample of the planner's batch.

    Attributes:
        draws: Ids in its bags.
        ids: Ids that are sent.
        bags: Mean number of bags.
        skew: Skew of the ids, if it is known.
    """

    draws: float
    ids: float
    bags: float
    skew: IdSkew | None


@final
class _ModuleReader:
    """Reads the tables of a module, and the constraints on them."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        sharder: ModuleSharder[Any],
        device: str,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints],
    ) -> None:
        self._path, self._sharder, self._device = path, sharder, device
        self._batch_size = batch_size
        self.weights = sharder.shardable_parameters(module)
        self._features = {name: [name] for name in self.weights}
        self._poolings: dict[str, PoolingType] = {}
        self._hashed: dict[str, HashedIds] = {}
        self._is_weighted = False
        for part in module.modules():
            if isinstance(part, _HasTables):
                for config, pooling in zip(part.configs(), part.poolings(), strict=True):
                    self._features[config.name] = config.feature_names
                    self._poolings[config.name] = pooling
                    if config.ids is not None:
                        self._hashed[config.name] = config.ids
                pools: object = part
                if isinstance(pools, EmbeddingBagCollectionInterface):
                    self._is_weighted = pools.is_weighted()
        self._is_pooled = PoolingType.NONE not in self._poolings.values()
        # one object for all tables: `PlannedTable.same_options` compares identities
        none = ParameterConstraints()
        self.constraints = {name: constraints.get(name, none) for name in self.weights}
        for name, constraint in self.constraints.items():
            features = constraint.feature_names
            if features is not None and sorted(features) != sorted(self._features[name]):
                self.constraints[name] = none  # the constraints apply to another table of this name

    def tables(self, stats: Mapping[str, Any]) -> Iterator[PlannedTable]:
        """Yield the tables; none if they are placed on another device."""
        if self._is_elsewhere():
            return
        modes = {constraint.bounds_check_mode for constraint in self.constraints.values()} - {None}
        if len(modes) > 1:
            raise _refusal(
                f"All tables of module {self._path!r} must have the same bounds_check_mode; "
                f"received {sorted(m.name for m in modes if m)} in their constraints."
            )
        longest_seen = max((of.batch_size for of in stats.values()), default=0.0)
        traffic = {name: self._traffic(name, stats, longest_seen) for name in self.weights}
        # smaller batches of features are padded with empty bags
        longest = max((t.bags for of in traffic.values() for t in of), default=1.0)
        names = POOLED_OPS if self._is_pooled else SEQUENCE_OPS
        there, back = codecs_for(getattr(self._sharder, "qcomm_codecs_registry", None), *names)
        kernels = self._kernels_of_tables()
        sent = {name for name, of in kernels.items() if set(of) - {ShardingType.DATA_PARALLEL}}
        for name, weight in self.weights.items():
            constraints, of_table = self.constraints[name], traffic[name]
            optimizer = optimizer_of_table(weight, self._sharder.fused_params)
            if constraints.stochastic_rounding and not weight.requires_grad:
                raise _refusal(
                    f"ParameterConstraints.stochastic_rounding of table {name!r} must not be True, "
                    "since the table is not trained; received True. Use None."
                )
            rounds = optimizer is not None and optimizer.spec.stochastic_rounding
            if constraints.stochastic_rounding not in (None, rounds):
                raise _refusal(
                    f"ParameterConstraints.stochastic_rounding of table {name!r} must be {rounds}, "
                    f"as in its optimizer; received {constraints.stochastic_rounding}. Set it in "
                    "fused_params or in apply_optimizer_in_backward."
                )
            draws, rules = sum(t.draws for t in of_table), self._hashed.get(name)
            yield PlannedTable(
                path=self._path,
                name=name,
                rows=weight.shape[0],
                dim=weight.shape[1],
                element_bytes=weight.element_size(),
                optimizer=optimizer,
                trains=weight.requires_grad,
                writes_row_gradients=self._device == "cpu"
                and self._runs_on_torch(name, weight, optimizer),
                ids_per_sample=sum(t.ids for t in of_table),
                draws_per_sample=draws,
                bags_per_sample=longest * len(of_table),
                num_features=len(of_table),
                skews=tuple((t.draws / draws, t.skew) for t in of_table) if draws else (),
                is_pooled=self._is_pooled,
                is_mean=self._poolings.get(name) is PoolingType.MEAN,
                is_weighted=self._is_weighted or constraints.is_weighted,
                # only then a reduce-scatter is certain before a plan exists:
                # docs/decisions/row_split.md, "Reduce-scatter over NCCL"
                is_alone=sent <= {name},
                wire_bytes=(there.bytes_per_value, back.bytes_per_value),
                num_regions=0 if rules is None else geometry(len(weight), rules.num_regions)[1],
                index_row_bytes=0 if rules is None else index_row_bytes(rules),
                # one table with hashed ids widens the payload of its whole module:
                # docs/decisions/exchange.md, "One payload behind one header"
                sends_wide_ids=bool(self._hashed),
                constraints=constraints,
                kernels=kernels[name],
            )

    def _kernels_of_tables(self) -> dict[str, _Kernels]:
        """Return the kernels of each table; unconstrained tables share one mapping."""
        # one mapping, since `PlannedTable.same_options` compares identities
        usual = _kernels(self._sharder, None, None, self._device)
        kernels = {}
        for name, constraint in self.constraints.items():
            asked = constraint.sharding_types, constraint.compute_kernels
            is_usual = asked == (None, None)
            kernels[name] = usual if is_usual else _kernels(self._sharder, *asked, self._device)
        return kernels

    def _runs_on_torch(
        self, name: str, weight: nn.Parameter, optimizer: TableOptimizer | None
    ) -> bool:
        """Return whether FBGEMM's CPU kernels do not support a table."""
        if optimizer is None:
            return False
        settings = LookupSettings(
            device=torch.device("cpu"),
            weights_dtype=weight.dtype,
            output_dtype=torch.float32,
            dims=[weight.shape[1]],
            feature_table_map=[0],
            pooling=self._poolings.get(name, PoolingType.SUM),
            optimizer=optimizer.spec,
            update_mode=optimizer.update_mode,
            location=EmbeddingLocation.HOST,
        )
        return choose_backend(settings).backend == "torch"

    def _is_elsewhere(self) -> bool:
        groups = {name: constraint.device_group for name, constraint in self.constraints.items()}
        others = [name for name, group in groups.items() if group not in (None, self._device)]
        if others and len(others) < len(groups):
            raise _refusal(
                f"All {len(groups)} tables of module {self._path!r} must have the same "
                f"device_group; received another one than {self._device} for {others[:5]} only. "
                "Use one device_group, or split the module."
            )
        return bool(others)

    def _traffic(self, name: str, stats: Mapping[str, Any], longest: float) -> list[_Traffic]:
        constraint, features = self.constraints[name], self._features[name]
        rows = self.weights[name].shape[0]
        for field in _OF_FEATURES:
            numbers = getattr(constraint, field)
            if numbers and len(numbers) != len(features):
                raise _refusal(
                    f"ParameterConstraints.{field} of table {name!r} must have one number for each "
                    f"of its features {features}; received {numbers}."
                )
        place_of = {feature: i for i, feature in enumerate(constraint.feature_names or features)}
        traffic = []
        dedups = getattr(self._sharder, "use_index_dedup", False)
        for feature in features:
            place, seen = place_of[feature], stats.get(feature)
            ids, bags, skew = 1.0, 1.0, None
            if seen is not None:
                ids = seen.ids_per_sample
                bags = seen.batch_size / longest if longest else 1.0
                skew = IdSkew(seen, rows) if seen.histogram else None
            if constraint.pooling_factors:
                ids = constraint.pooling_factors[place]
            if constraint.batch_sizes:
                bags = constraint.batch_sizes[place] / self._batch_size
            if constraint.num_poolings:
                bags *= constraint.num_poolings[place]
            ids = draws = ids * bags
            if dedups:
                # each rank removes repeated ids of a feature before it splits them by rows:
                # docs/decisions/row_split.md, "Sums inside a node; sequences return by id"
                ids = uniform_distinct(rows, of_rank := draws * self._batch_size)
                ids = (ids if skew is None else skew.distinct(of_rank)) / self._batch_size
            traffic.append(_Traffic(draws=draws, ids=ids, bags=bags, skew=skew))
        return traffic


def check_kernels(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]], plan: ShardingPlan, device: str
) -> None:
    """Check that the sharders support the compute kernels of a plan.

    Args:
        module: Model.
        sharders: One for each module type to shard.
        plan: Plan of the model.
        device: "cpu" or "cuda".

    Raises:
        ValueError: Names the table, and the supported kernels.
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    usual = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)
    for path, child in outermost(module, lambda found: has_tables(found, by_type)):
        for name, sharding in plan.plan[path].items():
            there = by_type[type(child)].compute_kernels(sharding.sharding_type, device)
            if sharding.compute_kernel not in (*usual, *there):
                raise ValueError(
                    f"Table {name!r} of module {path!r} must have a compute kernel that trains "
                    f"{sharding.sharding_type} on {device}: {', '.join(there)}; received "
                    f"{sharding.compute_kernel!r}."
                )


def _kernels(
    sharder: ModuleSharder[Any],
    types: Sequence[str] | None,
    asked: Sequence[str] | None,
    device: str,
) -> _Kernels:
    """Return the allowed and supported sharding types, each with its kernels."""
    kernels = {}
    for name in sharder.sharding_types(device):
        if name in (types or [name]):
            usable = [EmbeddingComputeKernel(k) for k in sharder.compute_kernels(name, device)]
            if asked is None:
                # tables are in host memory only if the user allows it
                usable = [kernel for kernel in usable if kernel not in UVM_KERNELS][:1]
            else:
                usable = [of for of in map(EmbeddingComputeKernel, asked) if of in usable]
            if usable:
                kernels[ShardingType(name)] = tuple(usable)
    return kernels
