"""Data of TorchRec's planner, options with shards, and the classes that users extend.

Components extend `Enumerator`, `ShardEstimator`, `Proposer`, `Partitioner`, `PerfModel`,
`StorageReservation` or `Stats`, and are arguments of `planners.EmbeddingShardingPlanner`.
"""

from __future__ import annotations

import copy
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, Self

import torch
from torch import nn

from recsys.compat.planner.constants import bytes_to_gb, sharder_name
from recsys.compat.planner.topology import Perf, Storage, Topology
from recsys.distributed.planner.constants import BATCH_SIZE, NUM_POOLINGS
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.types import CacheParams, ModuleSharder, ShardingPlan
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_modules import EmbeddingCollectionInterface
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection


@unique
class PartitionByType(Enum):
    """Rule by which a partitioner places the shards of an option."""

    DEVICE = "device"
    """Any rank for each shard."""
    HOST = "host"
    """All shards on the ranks of one node."""
    UNIFORM = "uniform"
    """One shard on every rank, in order."""
    MULTI_HOST = "multi_host"
    """Groups of shards, each on all ranks of a node."""


@dataclass(unsafe_hash=True)
class Shard:
    """Shard of a table.

    Args:
        size: Rows and columns.
        offset: First row and first column.
        storage: Bytes, set by an estimator.
        perf: Milliseconds, set by an estimator.
        rank: Rank, set by a partitioner.

    Example:
        >>> print(Shard(size=[10, 8], offset=[0, 0], storage=Storage(0, 320), rank=1))
        Shard size: (10, 8), offset: (0, 0), storage: Storage(hbm=0, ddr=320, ssd=0), perf: None, \
rank: 1
    """

    size: list[int] = field(hash=False)
    offset: list[int] = field(hash=False)
    storage: Storage | None = None
    perf: Perf | None = None
    rank: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        """Return a copy. Planners copy thousands of shards; this is faster than the default."""
        storage, perf = copy.copy(self.storage), copy.copy(self.perf)
        return Shard(list(self.size), list(self.offset), storage, perf, self.rank)

    def __str__(self) -> str:
        return (
            f"Shard size: {tuple(self.size)}, offset: {tuple(self.offset)}, storage: "
            f"{self.storage}, perf: {self.perf}, rank: {self.rank}"
        )


class ShardingOption:
    """One option for placing a table: a sharding type, a compute kernel, and shards.

    Args:
        name: Name of the table.
        tensor: Weight; may be on the `meta` device.
        module: Path and object of the module of the table.
        input_lengths: Mean ids per bag for each feature of the table.
        batch_size: Samples per rank and step.
        sharding_type: A `ShardingType` value.
        partition_by: A `PartitionByType` value.
        compute_kernel: An `EmbeddingComputeKernel` value.
        shards: Shards.
        cache_params: Settings of `fused_uvm_caching`; copied into the plan.
        enforce_hbm: As in the constraints.
        stochastic_rounding: As in the constraints.
        bounds_check_mode: Handling of ids outside the table; copied into the plan.
        dependency: Name that is shared by tables whose options must be on one node.
        is_pooled: Whether the table's bags are pooled; as in its module if None.
        feature_names: Features of the table.
        output_dtype: Data type of embeddings; copied into the plan.
        key_value_params: As in the constraints.
        num_poolings: Mean bags per sample for each feature.

    Attributes:
        is_weighted: Whether ids have weights.

    Example:
        >>> weight = torch.empty(100, 8, device="meta")
        >>> shards = [Shard([100, 8], [0, 0], Storage(0, 3200), Perf(1.0, 0.5, 2.0, 0.5), rank=3)]
        >>> option = ShardingOption(
        ...     "t", weight, ("sparse", nn.Module()), [2.0], 512, "table_wise", "device", "fused",
        ...     shards, is_pooled=True,
        ... )
        >>> option.fqn, option.total_perf, option.total_storage.ddr, option.get_shards_assignment()
        ('sparse.t', 4.0, 3200, [3])
    """

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        module: tuple[str, nn.Module],
        input_lengths: list[float],
        batch_size: int,
        sharding_type: str,
        partition_by: str,
        compute_kernel: str,
        shards: list[Shard],
        cache_params: CacheParams | None = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: BoundsCheckMode | None = None,
        dependency: str | None = None,
        is_pooled: bool | None = None,
        feature_names: list[str] | None = None,
        output_dtype: torch.dtype | None = None,
        key_value_params: object | None = None,
        num_poolings: list[float] | None = None,
    ) -> None:
        self.name = name
        self._tensor = tensor
        self._module = module
        self.input_lengths = input_lengths
        self.batch_size = batch_size
        self.sharding_type = sharding_type
        self.partition_by = partition_by
        self.compute_kernel = compute_kernel
        self.shards = shards
        self.cache_params = cache_params
        self.enforce_hbm = enforce_hbm
        self.stochastic_rounding = stochastic_rounding
        self.bounds_check_mode = bounds_check_mode
        self.dependency = dependency
        self._is_pooled = is_pooled
        self.is_weighted = False
        self.feature_names = feature_names
        self.output_dtype = output_dtype
        self.key_value_params = key_value_params
        self.num_poolings = num_poolings

    @property
    def tensor(self) -> torch.Tensor:
        """Weight."""
        return self._tensor

    @property
    def module(self) -> tuple[str, nn.Module]:
        """Path and object of the table's module."""
        return self._module

    @property
    def path(self) -> str:
        """Path of the table's module."""
        return self._module[0]

    @property
    def fqn(self) -> str:
        """Path of the module, a dot, and the table's name; equal for all options of a table."""
        return f"{self.path}.{self.name}"

    @property
    def module_type_key(self) -> str:
        """Module and name of the class of the table's module: the key of its sharder's data."""
        return sharder_name(type(self._module[1]))

    @property
    def has_feature_processor(self) -> bool:
        """True if the module processes features before the lookup."""
        return isinstance(self._module[1], FeatureProcessedEmbeddingBagCollection)

    @property
    def is_pooled(self) -> bool:
        """True if the table's bags are pooled."""
        if self._is_pooled is None:
            self._is_pooled = self.module_pooled(self._module[1], self.name)
        return self._is_pooled

    @staticmethod
    def module_pooled(module: nn.Module, sharding_option_name: str) -> bool:
        """Return whether a module pools a table.

        Args:
            module: Module of the table.
            sharding_option_name: Name of the table.
        """
        tables = getattr(module, "_embedding_module", module)  # of managed collisions
        return not isinstance(tables, EmbeddingCollectionInterface)

    @property
    def cache_load_factor(self) -> float | None:
        """Share of the table's rows in its cache, if it is set."""
        return None if self.cache_params is None else self.cache_params.load_factor

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)

    @property
    def num_inputs(self) -> int:
        """Number of features that read the table."""
        return len(self.input_lengths)

    @property
    def total_storage(self) -> Storage:
        """Bytes of all shards."""
        sizes = [_known(self, shard, "storage") for shard in self.shards]
        return functools.reduce(operator.add, sizes, Storage(0, 0))

    @property
    def total_perf(self) -> float:
        """Milliseconds of all shards."""
        return float(sum(_known(self, shard, "perf").total for shard in self.shards))

    def get_shards_assignment(self) -> list[int | None]:
        """Return the rank of each shard, None for unplaced shards."""
        return [shard.rank for shard in self.shards]

    def storage_hash(self) -> int:
        """Return a hash of the shards' sizes and bytes, without their milliseconds."""
        sizes = tuple((*shard.size, shard.storage) for shard in self.shards)
        return hash((self.fqn, self.sharding_type, self.compute_kernel, sizes))

    def __hash__(self) -> int:
        of_table = (self.fqn, self.sharding_type, self.compute_kernel, self.cache_params)
        return hash((*of_table, tuple(self.shards)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with copied shards; weight and module are shared."""
        kept = {id(shared): shared for shared in (self._tensor, self._module)}
        memo.update(kept)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __str__(self) -> str:
        lines = [
            f"name: {self.name}",
            f"sharding type: {self.sharding_type}",
            f"compute kernel: {self.compute_kernel}",
            f"num shards: {self.num_shards}",
        ]
        return "\n".join([*lines, *(f"\t{shard}" for shard in self.shards)])


def _known(option: ShardingOption, shard: Shard, name: str) -> Any:
    value = getattr(shard, name)
    if value is None:
        raise ValueError(
            f"Shards of table {option.name!r} must have a {name} before their total is read. Call "
            "populate_estimates(options) of the enumerator first."
        )
    return value


@dataclass
class SharderData:
    """Facts of a sharder that estimators read.

    Args:
        fused_params: Optimizer of tables without their own optimizer.
        qcomm_dtype_sizes: Bytes of a value in forward and backward, by the name of the exchange.
        storage_usage_type: Unused: the optimizer determines the storage.
        sharder: Sharder; the default one of a module's type if None.
    """

    fused_params: Mapping[str, Any] = field(default_factory=dict)
    qcomm_dtype_sizes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    storage_usage_type: object | None = None
    sharder: ModuleSharder[Any] | None = field(default=None, kw_only=True)


SharderDataMap = dict[str, SharderData]
"""Data of sharders by module and name of the module type that each one shards."""


class ShardEstimator(ABC):
    """Base of estimators of the milliseconds or bytes of shards.

    Args:
        topology: Machine.
        constraints: Constraints by table name.
    """

    def __init__(
        self, topology: Topology, constraints: dict[str, ParameterConstraints] | None = None
    ) -> None:
        self._topology = topology
        self._constraints = constraints

    @abstractmethod
    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        """Set `perf`, `storage` or both of every shard, in place.

        Args:
            sharding_options: Options.
            sharder_data_map: Data of their modules' sharders.
        """


class Enumerator(ABC):
    """Base of classes that list the options for each table.

    Args:
        topology: Machine.
        batch_size: Samples per rank and step.
        constraints: Constraints by table name.
        estimator: Estimator of shards.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
    ) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._constraints = constraints
        self._estimator = estimator

    @abstractmethod
    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Return all options of all tables with their estimates.

        Args:
            module: Model.
            sharders: One for each module type to shard.
        """

    @abstractmethod
    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set milliseconds and bytes of the shards of options, in place."""


class Proposer(ABC):
    """Base of classes that propose plans: one option for each table, without ranks."""

    @abstractmethod
    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Set the options to propose from.

        Args:
            search_space: All options of all tables.
            enumerator: Enumerator that listed them, for estimates of other options.
        """

    @abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """Return a proposal, or None if there are no more; the same one until `feedback`."""

    @abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Process the result of the last proposal.

        Args:
            partitionable: Whether it was placed.
            plan: The proposal, with ranks if it was new and was placed.
            perf_rating: Its rating, lower is better, if it was placed.
            storage_constraint: Ranks with their free memory.
        """


class Partitioner(ABC):
    """Base of classes that place a proposal on ranks."""

    @abstractmethod
    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Return the proposal with the rank of every shard set.

        Args:
            proposal: One option for each table.
            storage_constraint: Ranks with their free memory.

        Raises:
            PlannerError: The proposal does not fit.
        """


class PerfModel(ABC):
    """Base of ratings of placed plans."""

    @abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the rating; lower is better.

        Args:
            plan: One option for each table, with the rank of every shard.
        """


class StorageReservation(ABC):
    """Base of rules for the memory to keep free of tables."""

    @abstractmethod
    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> Topology:
        """Return a copy of the machine whose ranks have the memory that is free for tables.

        Args:
            topology: Machine; not changed.
            batch_size: Samples per rank and step.
            module: Model.
            sharders: One for each module type to shard.
            constraints: Constraints by table name.

        Raises:
            PlannerError: No memory is left.
        """

    @property
    def last_reserved_topology(self) -> Topology | None:
        """Copy of the last result of `reserve`, if it is stored."""
        return None


class Stats(ABC):
    """Base of reports on plans."""

    @abstractmethod
    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: dict[str, ParameterConstraints] | None = None,
        sharders: list[ModuleSharder[Any]] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = False,
        debug_stats: object | None = None,
    ) -> None:
        """Report a new plan.

        Args:
            sharding_plan: Plan.
            topology: Machine.
            batch_size: Samples per rank and step.
            storage_reservation: Storage reservation.
            num_proposals: Number of distinct proposals.
            num_plans: Number of proposals that fit.
            run_time: Seconds that planning took.
            best_plan: Options of the plan, with ranks.
            constraints: Constraints by table name.
            sharders: One for each module type to shard.
            enumerator: Enumerator that listed the options.
            debug: Argument of the planner.
            debug_stats: Always None.
        """


def groups_of(options: Sequence[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """Return the options by the path and name of their table, in the given order."""
    groups: dict[str, list[ShardingOption]] = {}
    for option in options:
        groups.setdefault(option.fqn, []).append(option)
    return groups


def get_num_poolings(
    constraints: dict[str, ParameterConstraints] | None, so: ShardingOption
) -> list[float]:
    """Return the mean bags per sample of each feature of an option's table.

    They are taken from the option, or else from the constraints; the default is 1.

    Args:
        constraints: Constraints by table name.
        so: Option.
    """
    demands = constraints.get(so.name) if constraints else None
    asked = None if demands is None else demands.num_poolings
    return list(so.num_poolings or asked or [NUM_POOLINGS] * so.num_inputs)


def reset_shard_rank(proposal: list[ShardingOption]) -> None:
    """Remove the ranks of all shards of some options."""
    for option in proposal:
        for shard in option.shards:
            shard.rank = None


def storage_repr_in_gb(storage: Storage | None) -> str:
    """Return memory in GiB as text.

    Example:
        >>> storage_repr_in_gb(Storage(hbm=3 * 2**30, ddr=2**29))
        'Storage(hbm = 3.0 GB, ddr = 0.5 GB)'
    """
    if storage is None:
        return ""
    hbm, ddr = (round(bytes_to_gb(size), 3) for size in (storage.hbm, storage.ddr))
    return f"Storage(hbm = {hbm} GB, ddr = {ddr} GB)"
