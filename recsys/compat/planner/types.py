"""What TorchRec's planner is made of: options with shards, and the classes that users extend.

An extension is a class made from `Enumerator`, `ShardEstimator`, `Proposer`,
`Partitioner`, `PerfModel`, `StorageReservation` or `Stats`; see
`EmbeddingShardingPlanner`.
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

from recsys.compat.planner.topology import Perf, Storage, Topology
from recsys.distributed.planner.constants import (
    BATCH_SIZE,
    NUM_POOLINGS,
    bytes_to_gb,
    sharder_name,
)
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.types import CacheParams, ModuleSharder, ShardingPlan
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_modules import EmbeddingCollectionInterface
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection


@unique
class PartitionByType(Enum):
    """How a partitioner spreads the shards of an option."""

    DEVICE = "device"
    """Each shard on any rank."""
    HOST = "host"
    """All shards on the ranks of one node."""
    UNIFORM = "uniform"
    """One shard on every rank, in order."""
    MULTI_HOST = "multi_host"
    """The shards of a node at a time on the ranks of some nodes."""


@dataclass(unsafe_hash=True)
class Shard:
    """A part of a table.

    Args:
        size: rows and columns.
        offset: first row and first column.
        storage: bytes that it takes; an estimator says so.
        perf: milliseconds that it takes; an estimator says so.
        rank: where it is; a partitioner says so.

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
        """As of any dataclass, but quick: planners copy thousands."""
        storage, perf = copy.copy(self.storage), copy.copy(self.perf)
        return Shard(list(self.size), list(self.offset), storage, perf, self.rank)

    def __str__(self) -> str:
        return (
            f"Shard size: {tuple(self.size)}, offset: {tuple(self.offset)}, storage: "
            f"{self.storage}, perf: {self.perf}, rank: {self.rank}"
        )


class ShardingOption:
    """One way to place a table: a sharding type, a compute kernel, and shards.

    Args:
        name: of the table.
        tensor: its weight; may be on the `meta` device.
        module: path and object of the module that the table is in.
        input_lengths: mean ids per bag, for each feature of the table.
        batch_size: samples per rank and step.
        sharding_type: a `ShardingType` value.
        partition_by: a `PartitionByType` value.
        compute_kernel: an `EmbeddingComputeKernel` value.
        shards: the parts.
        cache_params: of `fused_uvm_caching`; goes into the plan.
        enforce_hbm: what the constraints say.
        stochastic_rounding: what the constraints say.
        bounds_check_mode: what to do with ids outside the table; goes into the plan.
        dependency: a name that tables share whose options go to one node together.
        is_pooled: whether the table's bags are pooled; what its module does if None.
        feature_names: of the table.
        output_dtype: of embeddings; goes into the plan.
        key_value_params: what the constraints say.
        num_poolings: mean bags per sample, for each feature.

    Attributes:
        is_weighted: whether ids have weights.

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
        """The weight."""
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
        """Path of the module, a dot, and the table's name: what the options of a table share."""
        return f"{self.path}.{self.name}"

    @property
    def module_type_key(self) -> str:
        """Where the class of the table's module lives: the key of its sharder's data."""
        return sharder_name(type(self._module[1]))

    @property
    def has_feature_processor(self) -> bool:
        """Whether the module processes features before it looks them up."""
        return isinstance(self._module[1], FeatureProcessedEmbeddingBagCollection)

    @property
    def is_pooled(self) -> bool:
        """Whether the table's bags are pooled."""
        if self._is_pooled is None:
            self._is_pooled = self.module_pooled(self._module[1], self.name)
        return self._is_pooled

    @staticmethod
    def module_pooled(module: nn.Module, sharding_option_name: str) -> bool:
        """Return whether a module pools a table.

        Args:
            module: the table's module.
            sharding_option_name: the table's name.
        """
        return not isinstance(module, EmbeddingCollectionInterface)

    @property
    def cache_load_factor(self) -> float | None:
        """Share of the table's rows that its cache holds, if it is chosen."""
        return None if self.cache_params is None else self.cache_params.load_factor

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self.shards)

    @property
    def num_inputs(self) -> int:
        """How many features read the table."""
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
        """Return the rank of each shard, None where it has none yet."""
        return [shard.rank for shard in self.shards]

    def storage_hash(self) -> int:
        """Return a hash of what decides where the option fits: not of its milliseconds."""
        sizes = tuple((*shard.size, shard.storage) for shard in self.shards)
        return hash((self.fqn, self.sharding_type, self.compute_kernel, sizes))

    def __hash__(self) -> int:
        of_table = (self.fqn, self.sharding_type, self.compute_kernel, self.cache_params)
        return hash((*of_table, tuple(self.shards)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with shards of its own; the weight and the module stay the same objects."""
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
            f"Every shard must have a {name} before it is added up; received one of table "
            f"{option.name!r} without. Estimators do: enumerator.populate_estimates(options)."
        )
    return value


@dataclass
class SharderData:
    """What estimators must know of a sharder.

    Args:
        fused_params: of the optimizer of tables that have none of their own.
        qcomm_dtype_sizes: bytes of a value on its way there and back, by the name of the exchange.
        storage_usage_type: not used here: the optimizer says what storage is needed.
        sharder: that it is of; the default one of a module's type if None.
    """

    fused_params: Mapping[str, Any] = field(default_factory=dict)
    qcomm_dtype_sizes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    storage_usage_type: object | None = None
    sharder: ModuleSharder[Any] | None = field(default=None, kw_only=True)


SharderDataMap = dict[str, SharderData]
"""Sharders' data by where the type of module that each shards lives."""


class ShardEstimator(ABC):
    """Sets the milliseconds or bytes of shards.

    Args:
        topology: the machine.
        constraints: demands by table name.
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
            sharding_options: whose shards.
            sharder_data_map: of their modules' sharders.
        """


class Enumerator(ABC):
    """Lists the ways to place each table.

    Args:
        topology: the machine.
        batch_size: samples per rank and step.
        constraints: demands by table name.
        estimator: what estimates shards.
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
        """Return all options of all tables, estimated.

        Args:
            module: the model.
            sharders: one per module type to shard.
        """

    @abstractmethod
    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set milliseconds and bytes of the shards of options, in place."""


class Proposer(ABC):
    """Proposes plans: one option for each table, not placed yet."""

    @abstractmethod
    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Take the options to propose from.

        Args:
            search_space: all options of all tables.
            enumerator: that listed them, to estimate others with.
        """

    @abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """Return a proposal, or None when there are no more; the same until `feedback`."""

    @abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Hear what became of the last proposal.

        Args:
            partitionable: whether it could be placed.
            plan: the proposal, placed if it was new and could be.
            perf_rating: its rating, the less the better, if it could be placed.
            storage_constraint: the memory that was free.
        """


class Partitioner(ABC):
    """Places a proposal on ranks."""

    @abstractmethod
    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Return the proposal with the rank of every shard set.

        Args:
            proposal: one option for each table.
            storage_constraint: the ranks, with the memory that is free.

        Raises:
            PlannerError: if it does not fit.
        """


class PerfModel(ABC):
    """Says how good a placed plan is."""

    @abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """Return a number, the less the better.

        Args:
            plan: one option for each table, with the rank of every shard.
        """


class StorageReservation(ABC):
    """Keeps memory free of tables."""

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
            topology: the machine; not changed.
            batch_size: samples per rank and step.
            module: the model.
            sharders: one per module type to shard.
            constraints: demands by table name.

        Raises:
            PlannerError: if nothing is left.
        """

    @property
    def last_reserved_topology(self) -> Topology | None:
        """A copy of what `reserve` returned last, if it remembers it."""
        return None


class Stats(ABC):
    """Reports on a plan."""

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
        """Is called once a plan is made.

        Args:
            sharding_plan: the plan.
            topology: the machine.
            batch_size: samples per rank and step.
            storage_reservation: that kept memory free.
            num_proposals: distinct proposals that were tried.
            num_plans: of them, those that fit.
            run_time: seconds that planning took.
            best_plan: the options of the plan, with ranks.
            constraints: demands by table name.
            sharders: one per module type to shard.
            enumerator: that listed the options.
            debug: the planner's argument.
            debug_stats: None: there are no other numbers here.
        """


def groups_of(options: Sequence[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """Return the options of each table, by its path and name, in the order given."""
    groups: dict[str, list[ShardingOption]] = {}
    for option in options:
        groups.setdefault(option.fqn, []).append(option)
    return groups


def get_num_poolings(
    constraints: dict[str, ParameterConstraints] | None, so: ShardingOption
) -> list[float]:
    """Return the mean bags per sample of each feature of an option's table.

    They are what the option says, else what the constraints say, else 1.

    Args:
        constraints: demands by table name.
        so: the option.
    """
    demands = constraints.get(so.name) if constraints else None
    asked = None if demands is None else demands.num_poolings
    return list(so.num_poolings or asked or [NUM_POOLINGS] * so.num_inputs)


def reset_shard_rank(proposal: list[ShardingOption]) -> None:
    """Take the shards of options from the ranks that they were placed on."""
    for option in proposal:
        for shard in option.shards:
            shard.rank = None


def storage_repr_in_gb(storage: Storage | None) -> str:
    """Write memory in GiB.

    Example:
        >>> storage_repr_in_gb(Storage(hbm=3 * 2**30, ddr=2**29))
        'Storage(hbm = 3.0 GB, ddr = 0.5 GB)'
    """
    if storage is None:
        return ""
    hbm, ddr = (round(bytes_to_gb(size), 3) for size in (storage.hbm, storage.ddr))
    return f"Storage(hbm = {hbm} GB, ddr = {ddr} GB)"
