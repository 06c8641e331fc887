"""What a user asks of a plan, and the error when it cannot be met."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, unique
from typing import Protocol, final

import torch

from recsys.distributed.placement.plan import (
    CacheParams,
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingType,
)
from recsys.kernels.arguments import finite, names, whole
from recsys.kernels.checked import check_fields, checked
from recsys.kernels.types import BoundsCheckMode


@unique
class PlannerErrorType(Enum):
    """Why there is no plan."""

    INSUFFICIENT_STORAGE = "insufficient_storage"
    """The tables do not fit into memory."""
    STRICT_CONSTRAINTS = "strict_constraints"
    """Constraints on a table leave no way to place it, or contradict each other or the model."""
    PARTITION = "partition"
    """A partitioner of the user's own found no rank with memory for a shard."""
    PLANNER_INPUT_CONTEXT_MISMATCH = "planner_input_context_mismatch"
    """Ranks were asked for different plans."""
    INPUT_VALIDATION = "input_validation"
    """An enumerator of your own left out tables or constraints."""
    INVALID_COMPUTE_KERNEL = "invalid_compute_kernel"
    """For planners of your own, as the next three; ours raises a ValueError there."""
    INVALID_RANK_ASSIGNMENT = "invalid_rank_assignment"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"
    PLAN_LOADING_FAILED = "plan_loading_failed"
    OTHER = "other"


class PlannerError(ValueError):
    """No placement meets the constraints; says which tables, how many bytes, and what would help.

    Args:
        message: says so.
        error_type: why.
    """

    @checked
    def __init__(self, message: str, error_type: PlannerErrorType = PlannerErrorType.OTHER) -> None:
        super().__init__(message)
        self.error_type = error_type


@final
@dataclass(slots=True)
class ParameterConstraints:
    """Constraints on the placement of one table, and what is known of its traffic.

    Lists have one number for each feature of the table. Fields that say nothing (None, or no
    numbers) leave the choice to the planner, or to its `pooling_stats`.

    Args:
        sharding_types: allowed `ShardingType` values.
        compute_kernels: allowed `EmbeddingComputeKernel` values;
            all that the sharding type executes are weighed. "fused" if None: tables go to host
            memory only where "fused_uvm" or "fused_uvm_caching" is asked for.
        min_partition: the least columns of a column shard (default 32).
        pooling_factors: mean ids per bag (default 1).
        num_poolings: mean bags per sample (default 1).
        batch_sizes: samples per rank, where they differ from the planner's `batch_size`.
        is_weighted: whether ids have weights, also where the module does not say so.
        cache_params: of `fused_uvm_caching`.
        enforce_hbm: whether optimizer state of a cached table must be in device memory. That is
            not supported, so True and "fused_uvm_caching" exclude each other.
        stochastic_rounding: must be what the table's optimizer does; the planner does not set it.
        bounds_check_mode: what to do with ids outside the table; goes into the plan. Tables of one
            module share one.
        feature_names: the table's features in the order of the lists. Where several modules have a
            table of this name, these are for the one with these features.
        output_dtype: of embeddings; goes into the plan. None or `torch.float32`.
        device_group: "cpu" or "cuda"; a planner for another device leaves the module out.
        key_value_params: not supported.
        use_virtual_table: not supported.

    Raises:
        ValueError: if a value is not one of the choices, or not supported.

    Example:
        >>> hot = ParameterConstraints(["row_wise", "column_wise"], pooling_factors=[20.0])
        >>> hot.sharding_types
        ['row_wise', 'column_wise']
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=list)
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    feature_names: list[str] | None = None
    output_dtype: torch.dtype | None = None
    device_group: str | None = None
    key_value_params: object | None = None
    use_virtual_table: bool = False

    def __post_init__(self) -> None:
        self._check_choices("sharding_types", ShardingType)
        self._check_choices("compute_kernels", EmbeddingComputeKernel)
        for name, least in (("pooling_factors", 0), ("num_poolings", 0), ("batch_sizes", 1)):
            self._check_numbers(name, least)
        if self.min_partition is not None:
            whole("ParameterConstraints.min_partition", self.min_partition)
        if self.bounds_check_mode is not None:
            self.bounds_check_mode = _our_bounds_check_mode(self.bounds_check_mode)
        given: object = self.output_dtype
        dtype = given.name if isinstance(given, Enum) else given  # TorchRec has an enum
        caches = EmbeddingComputeKernel.FUSED_UVM_CACHING.value in (self.compute_kernels or [])
        self._check(
            dtype is None or dtype is torch.float32 or (isinstance(dtype, str) and dtype == "FP32"),
            "output_dtype must be None or torch.float32, as sharded embeddings are; received "
            f"{self.output_dtype}. Convert the output, or choose what travels by the sharder's "
            "qcomm_codecs_registry.",
        )
        self._check(
            self.device_group is None or str(self.device_group) in ("cpu", "cuda"),
            f"device_group must be 'cpu' or 'cuda'; received {self.device_group!r}.",
        )
        self._check(
            self.key_value_params is None and self.use_virtual_table is not True,
            "key_value_params and use_virtual_table are for tables in a key-value store, which are "
            f"not supported; received {self.key_value_params}, {self.use_virtual_table}. For "
            "tables beyond device memory allow compute_kernels=['fused_uvm_caching'].",
        )
        self._check(
            self.cache_params is None or self.compute_kernels is None or caches,
            "cache_params are of fused_uvm_caching, which compute_kernels must allow; received "
            f"compute_kernels={self.compute_kernels}. Add 'fused_uvm_caching' to it.",
        )
        self._check(
            not (self.enforce_hbm is True and caches),
            "enforce_hbm=True is not supported with fused_uvm_caching: optimizer state is beside "
            "the table, in host memory. Leave it None, or leave fused_uvm_caching out of "
            f"compute_kernels; received {self.compute_kernels}.",
        )
        self.output_dtype = None if dtype is None else torch.float32
        check_fields(self)

    def _check(self, holds: bool, message: str, error: type[Exception] = ValueError) -> None:
        if not holds:
            raise error(f"ParameterConstraints.{message}")

    def _check_choices(self, name: str, kinds: type[Enum]) -> None:
        chosen, choices = getattr(self, name), [kind.value for kind in kinds]
        if chosen is not None:
            chosen = names(f"ParameterConstraints.{name}", chosen)
        self._check(
            chosen is None or (chosen != [] and set(chosen) <= set(choices)),
            f"{name} must name some of {', '.join(choices)}; received {chosen}.",
        )

    def _check_numbers(self, name: str, least: int) -> None:
        values = () if (given := getattr(self, name)) is None else given
        self._check(
            isinstance(values, Sequence) and all(isinstance(v, numbers.Real) for v in values),
            f"{name} must be a list of numbers, one for each feature; received {values!r}.",
            TypeError,
        )
        for place, value in enumerate(values):
            finite(f"ParameterConstraints.{name}[{place}]", value, least)

    def apply_to(self, sharding: ParameterSharding) -> ParameterSharding:
        """Return a plan's entry that carries what these say of the table's execution."""
        cached = sharding.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        return replace(
            sharding,
            bounds_check_mode=self.bounds_check_mode,
            output_dtype=self.output_dtype,
            cache_params=self.cache_params if cached else None,
        )


def _our_bounds_check_mode(mode: Enum) -> BoundsCheckMode:
    """Return our mode of this name; FBGEMM's has a second implementation of each, `V2_...`."""
    name = str(getattr(mode, "name", mode)).removeprefix("V2_")
    if name not in BoundsCheckMode.__members__:
        raise ValueError(
            "ParameterConstraints.bounds_check_mode must be a BoundsCheckMode, one of "
            f"{', '.join(BoundsCheckMode.__members__)}; received {mode!r}."
        )
    return BoundsCheckMode[name]


class StorageReservation(Protocol):
    """How much of a rank's memory is kept free of tables."""

    def usable(self, memory_cap: int, dense_bytes: int | None) -> int:
        """Return the bytes of `memory_cap` that are left for tables.

        Args:
            memory_cap: what there is.
            dense_bytes: of the parameters that are no tables; None in memory where they are not.
        """


@dataclass(frozen=True, slots=True)
class HeuristicalStorageReservation:
    """Keeps a share of the memory free, and enough to train the dense parts.

    Args:
        percentage: share of the memory to keep free, 0 to 1.
        parameter_multiplier: bytes for the dense parts over the bytes of their parameters. 6 holds
            them, gradients, two states of Adam, DistributedDataParallel's buckets, and as
            much of activations.
        dense_tensor_estimate: bytes of all dense tensors, instead of that product.

    Raises:
        ValueError: if a number is out of its range.
    """

    percentage: float = 0.15
    parameter_multiplier: float = 6.0
    dense_tensor_estimate: int | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        finite(f"{owner}.percentage", self.percentage, least=0, below=1)
        finite(f"{owner}.parameter_multiplier", self.parameter_multiplier, least=0)
        if self.dense_tensor_estimate is not None:
            whole(f"{owner}.dense_tensor_estimate", self.dense_tensor_estimate, least=0)

    @checked
    def usable(self, memory_cap: int, dense_bytes: int | None) -> int:
        """Return the bytes left for tables."""
        left = int(memory_cap * (1 - self.percentage))
        if dense_bytes is None:
            return left
        if self.dense_tensor_estimate is not None:
            return left - self.dense_tensor_estimate
        return left - int(self.parameter_multiplier * dense_bytes)


@dataclass(frozen=True, slots=True)
class FixedPercentageStorageReservation:
    """Keeps a share of the memory free, dense parameters included.

    Args:
        percentage: share of the memory to keep free, 0 to 1.
    """

    percentage: float

    def __post_init__(self) -> None:
        finite(f"{type(self).__name__}.percentage", self.percentage, least=0, below=1)

    @checked
    def usable(self, memory_cap: int, dense_bytes: int | None) -> int:
        """Return the bytes left for tables."""
        return int(memory_cap * (1 - self.percentage))
