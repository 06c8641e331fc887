"""Constraints on plans, memory reservations, and the planner's error."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, unique
from typing import Protocol, final

import torch

from recsys.base.arguments import finite, names, whole
from recsys.base.checked import check_fields, checked
from recsys.distributed.placement.plan import (
    CacheParams,
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingType,
)
from recsys.kernels.types import BoundsCheckMode


@unique
class PlannerErrorType(Enum):
    """Reason why there is no plan."""

    INSUFFICIENT_STORAGE = "insufficient_storage"
    """The tables do not fit into memory."""
    STRICT_CONSTRAINTS = "strict_constraints"
    """Constraints leave no option for a table, or contradict each other or the model."""
    PARTITION = "partition"
    """A partitioner written for TorchRec found no rank with enough memory for a shard."""
    PLANNER_INPUT_CONTEXT_MISMATCH = "planner_input_context_mismatch"
    """Ranks received different inputs."""
    INPUT_VALIDATION = "input_validation"
    """For custom planners, as the other types below; this planner raises a ValueError instead."""
    INVALID_COMPUTE_KERNEL = "invalid_compute_kernel"
    INVALID_RANK_ASSIGNMENT = "invalid_rank_assignment"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"
    PLAN_LOADING_FAILED = "plan_loading_failed"
    OTHER = "other"


class PlannerError(ValueError):
    """Error that no plan meets the constraints.

    Args:
        message: Names the tables and the missing bytes, and suggests changes.
        error_type: Reason.
    """

    @checked
    def __init__(self, message: str, error_type: PlannerErrorType = PlannerErrorType.OTHER) -> None:
        super().__init__(message)
        self.error_type = error_type


@final
@dataclass(slots=True)
class ParameterConstraints:
    """Constraints on the placement of one table, and facts about its traffic.

    Lists have one number for each feature of the table. None and empty lists leave the choice to
    the planner, or to its `pooling_stats`.

    Args:
        sharding_types: Allowed `ShardingType` values.
        compute_kernels: Allowed `EmbeddingComputeKernel` values. The planner compares all of them
            that a sharding type supports. None means "fused": tables are placed in host memory
            only if "fused_uvm" or "fused_uvm_caching" is allowed.
        min_partition: Minimum number of columns of a column shard (default 32).
        pooling_factors: Mean ids per bag (default 1).
        num_poolings: Mean bags per sample (default 1).
        batch_sizes: Samples per rank, if they differ from the planner's `batch_size`.
        is_weighted: Whether ids have weights, even if the module does not state it.
        cache_params: Settings of `fused_uvm_caching`.
        enforce_hbm: Whether optimizer state of a cached table must be in device memory. This is
            not supported, so True excludes "fused_uvm_caching".
        stochastic_rounding: Must equal the setting of the table's optimizer.
        bounds_check_mode: Handling of ids outside the table; copied into the plan. All tables of a
            module must have the same one.
        feature_names: Features of the table in the order of the lists. If several modules have a
            table of this name, the constraints apply to the table with these features.
        output_dtype: Data type of embeddings; copied into the plan. None or `torch.float32`.
        device_group: "cpu" or "cuda". A planner for the other device omits the module.
        key_value_params: Not supported.
        use_virtual_table: Not supported.

    Raises:
        ValueError: A value is out of range or not supported.
        TypeError: A value has another type.

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
            self.bounds_check_mode = _convert_bounds_check_mode(self.bounds_check_mode)
        output_dtype: object = self.output_dtype
        dtype = (
            output_dtype.name if isinstance(output_dtype, Enum) else output_dtype
        )  # TorchRec passes an enum
        caches = EmbeddingComputeKernel.FUSED_UVM_CACHING.value in (self.compute_kernels or [])
        rules = {
            "output_dtype must be None or torch.float32, the type of sharded embeddings; received "
            f"{output_dtype}. Convert the output, or set the precision of exchanges by the "
            "sharder's qcomm_codecs_registry.": dtype is None
            or dtype is torch.float32
            or (isinstance(dtype, str) and dtype == "FP32"),
            f"device_group must be 'cpu' or 'cuda'; received {self.device_group!r}.": (
                self.device_group is None or str(self.device_group) in ("cpu", "cuda")
            ),
            "key_value_params and use_virtual_table are for tables in a key-value store, which are "
            f"not supported; received {self.key_value_params}, {self.use_virtual_table}. For "
            "tables that exceed device memory allow compute_kernels=['fused_uvm_caching'].": (
                self.key_value_params is None and self.use_virtual_table is not True
            ),
            "cache_params require 'fused_uvm_caching' among compute_kernels; received "
            f"compute_kernels={self.compute_kernels}. Add 'fused_uvm_caching' to it.": (
                self.cache_params is None or self.compute_kernels is None or caches
            ),
            "enforce_hbm=True is not supported with fused_uvm_caching, which keeps optimizer state "
            f"in host memory; received compute_kernels={self.compute_kernels}. Set enforce_hbm to "
            "None, or remove 'fused_uvm_caching'.": not (self.enforce_hbm is True and caches),
        }
        for message, holds in rules.items():
            if not holds:
                raise ValueError(f"ParameterConstraints.{message}")
        # plans have torch's type instead of the enum
        self.output_dtype = None if dtype is None else torch.float32
        # after the conversions: values of TorchRec's enums have other types than the fields
        check_fields(self)

    def _check_choices(self, name: str, kinds: type[Enum]) -> None:
        if (chosen := getattr(self, name)) is None:
            return
        subject, choices = f"ParameterConstraints.{name}", [kind.value for kind in kinds]
        if not (chosen := names(subject, chosen)) or not set(chosen) <= set(choices):
            raise ValueError(
                f"{subject} must name some of {', '.join(choices)}; received {chosen}."
            )

    def _check_numbers(self, name: str, least: int) -> None:
        subject, values = f"ParameterConstraints.{name}", getattr(self, name)
        if values is None:
            return
        if not isinstance(values, Sequence) or not all(isinstance(v, numbers.Real) for v in values):
            raise TypeError(
                f"{subject} must be a list of numbers, one for each feature; received {values!r}."
            )
        for index, value in enumerate(values):
            finite(f"{subject}[{index}]", value, least)

    def apply_to(self, sharding: ParameterSharding) -> ParameterSharding:
        """Return a plan's entry with the settings of these constraints."""
        cached = sharding.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        return replace(
            sharding,
            bounds_check_mode=self.bounds_check_mode,
            output_dtype=self.output_dtype,
            cache_params=self.cache_params if cached else None,
        )


def _convert_bounds_check_mode(mode: Enum) -> BoundsCheckMode:
    """Return the mode with the same name; FBGEMM's enum has a second one of each, `V2_...`."""
    name = str(getattr(mode, "name", mode)).removeprefix("V2_")
    if name not in BoundsCheckMode.__members__:
        raise ValueError(
            "ParameterConstraints.bounds_check_mode must be a BoundsCheckMode, one of "
            f"{', '.join(BoundsCheckMode.__members__)}; received {mode!r}."
        )
    return BoundsCheckMode[name]


class StorageReservation(Protocol):
    """Rule for the memory to keep free of tables."""

    def usable(self, memory_cap: int, dense_bytes: int | None) -> int:
        """Return the bytes of `memory_cap` that tables may use.

        Args:
            memory_cap: Bytes of memory.
            dense_bytes: Bytes of all other parameters; None for memory that does not hold them.
        """


@dataclass(frozen=True, slots=True)
class HeuristicalStorageReservation:
    """Reserves a share of the memory, and memory to train the dense parameters.

    Args:
        percentage: Share of the memory to keep free, 0 to 1.
        parameter_multiplier: Bytes to reserve for each byte of dense parameters. The default of 6
            covers the parameters, their gradients, two states of Adam, the buckets of
            DistributedDataParallel, and as many bytes of activations.
        dense_tensor_estimate: Bytes of all dense tensors, instead of that product.

    Raises:
        ValueError: A number is out of range.
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
        """Return the bytes that tables may use."""
        left = int(memory_cap * (1 - self.percentage))
        if dense_bytes is None:
            return left
        if self.dense_tensor_estimate is not None:
            return left - self.dense_tensor_estimate
        return left - int(self.parameter_multiplier * dense_bytes)


@dataclass(frozen=True, slots=True)
class FixedPercentageStorageReservation:
    """Reserves a share of the memory; dense parameters are part of that share.

    Args:
        percentage: Share of the memory to keep free, 0 to 1.
    """

    percentage: float

    def __post_init__(self) -> None:
        finite(f"{type(self).__name__}.percentage", self.percentage, least=0, below=1)

    @checked
    def usable(self, memory_cap: int, dense_bytes: int | None) -> int:
        """Return the bytes that tables may use."""
        return int(memory_cap * (1 - self.percentage))
