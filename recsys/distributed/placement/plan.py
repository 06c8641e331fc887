"""Classes of a plan: sharding types, compute kernels, and the shards of tables.

A plan is data. For every table of every sharded module it contains a sharding type, and the
rectangles (row range x column range) of the table with the rank that owns each. Nothing here moves
a tensor.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields
from enum import Enum, unique
from typing import final

import torch

from recsys.base.arguments import choice, whole_list
from recsys.base.checked import check_fields, checked
from recsys.kernels.types import BoundsCheckMode, EmbeddingLocation
from recsys.modules.embedding_configs import DataType, data_type_to_dtype


@unique
class ShardingType(Enum):
    """Division of a table's rows and columns among ranks."""

    DATA_PARALLEL = "data_parallel"
    """Every rank holds a whole copy; gradients are all-reduced."""
    TABLE_WISE = "table_wise"
    """One rank owns the whole table."""
    COLUMN_WISE = "column_wise"
    """Columns are divided; any rank can own a shard."""
    ROW_WISE = "row_wise"
    """Rows are divided among all ranks."""
    TABLE_ROW_WISE = "table_row_wise"
    """Rows are divided among the ranks of one node."""
    TABLE_COLUMN_WISE = "table_column_wise"
    """Columns are divided among the ranks of one node."""
    GRID_SHARD = "grid_shard"
    """Columns are divided among nodes, and the rows of each column block among the node's ranks."""


@unique
class EmbeddingComputeKernel(Enum):
    """Memory that holds a table."""

    DENSE = "dense"
    """The same as `FUSED`: a table's optimizer determines whether it is updated in backward."""
    FUSED = "fused"
    """Device memory, or host memory on a CPU. The optimizer attached to a table updates it in the
    backward pass. A table without one is a plain parameter, and backward fills its `.grad`."""
    FUSED_UVM = "fused_uvm"
    """Like `FUSED`, in host memory that the GPU reads directly."""
    FUSED_UVM_CACHING = "fused_uvm_caching"
    """Like `FUSED_UVM`, with a cache in device memory."""
    QUANT = "quant"
    """Quantized rows, for inference."""


@checked
def compute_kernel_to_embedding_location(
    compute_kernel: EmbeddingComputeKernel,
) -> EmbeddingLocation:
    """Return the memory that holds the rows of a table with this compute kernel.

    Args:
        compute_kernel: Compute kernel of the table.

    Raises:
        ValueError: It is not an `EmbeddingComputeKernel` or the value of one.

    Example:
        >>> compute_kernel_to_embedding_location(EmbeddingComputeKernel.FUSED_UVM)
        <EmbeddingLocation.MANAGED: 'managed'>
    """
    kernel = choice("compute_kernel", compute_kernel, EmbeddingComputeKernel)
    return _LOCATIONS.get(kernel, EmbeddingLocation.DEVICE)


_LOCATIONS = {
    EmbeddingComputeKernel.FUSED_UVM: EmbeddingLocation.MANAGED,
    EmbeddingComputeKernel.FUSED_UVM_CACHING: EmbeddingLocation.MANAGED_CACHING,
}


@final
@dataclass
class ShardMetadata:
    """One rectangle of a table and its owner.

    Args:
        shard_offsets: `[first row, first column]`.
        shard_sizes: `[rows, columns]`.
        placement: `"rank:<rank>/<device>"`, such as `"rank:0/cuda:0"` or `"rank:1/cpu"`. An object
            with a `rank()` method (torch's `_remote_device`) is accepted, too.

    Raises:
        TypeError: Offsets or sizes are not lists of whole numbers.
        ValueError: Offsets and sizes have different lengths or more than two members, or one is
            negative.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: object = None

    def __post_init__(self) -> None:
        lists = {name: getattr(self, name) for name in ("shard_offsets", "shard_sizes")}
        for name, numbers in lists.items():
            setattr(self, name, whole_list(f"{type(self).__name__}.{name}", numbers))
        num_dims = len(self.shard_offsets)
        if num_dims != len(self.shard_sizes) or num_dims > 2:
            for name, numbers in lists.items():
                # raises for at least one of them
                whole_list(f"{type(self).__name__}.{name}", numbers, length=2)
        # not isinstance: a `Placement` is a str, too
        if type(self.placement) is str:
            self.placement = Placement(self.placement)

    @property
    def rank(self) -> int:
        """The owning rank.

        Raises:
            ValueError: The placement has no rank.
        """
        return placement_rank(self.placement)


@final
class Placement(str):
    """Rank and device of a shard: a text `"rank:<rank>/<device>"` with methods for its parts.

    Example:
        >>> Placement("rank:3/cuda:1").rank(), Placement("rank:3/cuda:1").device()
        (3, device(type='cuda', index=1))
    """

    __slots__ = ()

    def rank(self) -> int:
        """Return the owning rank.

        Raises:
            ValueError: The text has no rank.
        """
        match = re.fullmatch(r"rank:(\d+)(/.*)?", self)
        if match is None:
            raise ValueError(
                "A shard's placement must be 'rank:<rank>/<device>', such as 'rank:0/cpu'; "
                f"received {str(self)!r}."
            )
        return int(match.group(1))

    def device(self) -> torch.device:
        """Return the device on that rank."""
        return torch.device(self.partition("/")[2])


def placement_rank(placement: object) -> int:
    """Return the rank of a placement, such as 3 for `"rank:3/cuda:3"`.

    Raises:
        ValueError: The placement has no rank.
    """
    rank = getattr(placement, "rank", None)
    if callable(rank):
        rank = rank()
    return rank if isinstance(rank, int) else Placement(placement).rank()


@final
@dataclass
class EnumerableShardingSpec:
    """The rectangles of one table, which cover it once."""

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        check_fields(self)


_warned_of: set[str] = set()  # ignored settings, in this process


def warn_once(setting: str, value: object, advice: str) -> None:
    """Warn, once per process, that a setting is ignored.

    Args:
        setting: Name of the setting, such as `"CacheParams.algorithm"`.
        value: The received value.
        advice: What to do instead.
    """
    if setting not in _warned_of:
        _warned_of.add(setting)
        # level 4 is the caller of the class, above warn_once, __post_init__ and __init__
        warnings.warn(f"{setting} is ignored; received {value!r}. {advice}", stacklevel=4)


@final
@dataclass(frozen=True, slots=True)
class CacheParams:
    """Device cache of a `fused_uvm_caching` table, with TorchRec's arguments.

    The cache evicts the least recently used rows. Cached rows have the dtype of the table. All
    arguments except `load_factor` are accepted for TorchRec scripts, and ignored with one warning
    per process. For statistics pass `pooling_stats` to the planner.

    Args:
        load_factor: Share of the table's rows in the cache, in (0, 1]; None for FBGEMM's default,
            0.2.

    Raises:
        ValueError: `load_factor` is out of its range.

    Example:
        >>> CacheParams(load_factor=0.1).load_factor
        0.1
    """

    algorithm: object | None = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: object | None = None
    prefetch_pipeline: bool | None = None
    stats: object | None = None
    multipass_prefetch_config: object | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.load_factor is not None and not 0 < self.load_factor <= 1:
            raise ValueError(
                f"CacheParams.load_factor must be in (0, 1]; received {self.load_factor}."
            )
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name != "load_factor" and value is not None and value is not False:
                warn_once(f"CacheParams.{setting.name}", value, "Only load_factor can be chosen.")


@final
@dataclass
class ParameterSharding:
    """Placement of one table.

    Args:
        sharding_type: A `ShardingType` value, such as `"table_wise"`.
        compute_kernel: An `EmbeddingComputeKernel` value, such as `"fused"`.
        ranks: Owners of the shards in order; the sharding spec contains them, too.
        sharding_spec: The rectangles. `None` for data-parallel tables, or if they follow from
            `sharding_type` and `ranks`.
        cache_params: Cache of a `fused_uvm_caching` table; FBGEMM's defaults if None.
        stochastic_rounding: Whether the optimizer of a table of fp16 or bf16 rounds at random, as
            in `OptimizerSpec`; None for the optimizer's setting. Ignored for other dtypes.
        bounds_check_mode: Reaction to an id outside the table.
        output_dtype: Dtype of the looked-up embeddings, one for all tables of a module: float32
            (None), float16 or bfloat16, also as a `DataType`. Sums are computed in float32 and
            converted at the end. `qcomm_codecs_registry` sets the dtype of exchanges.

    `enforce_hbm` and `key_value_params` are accepted for TorchRec scripts, and ignored with one
    warning per process.

    Raises:
        TypeError: `ranks` is not a list of whole numbers.
        ValueError: There is no such type or kernel, or a rank is negative.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: EnumerableShardingSpec | None = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    output_dtype: torch.dtype | None = None
    key_value_params: object | None = None

    def __post_init__(self) -> None:
        where = type(self).__name__
        kind = choice(f"{where}.sharding_type", self.sharding_type, ShardingType)
        kernel = choice(f"{where}.compute_kernel", self.compute_kernel, EmbeddingComputeKernel)
        self.sharding_type, self.compute_kernel = kind.value, kernel.value
        if self.ranks is not None:
            self.ranks = whole_list(f"{where}.ranks", self.ranks)
        dtype: object = self.output_dtype
        # FBGEMM's SparseType has the same names
        if isinstance(dtype, Enum) and dtype.name in DataType.__members__:
            self.output_dtype = data_type_to_dtype(DataType[dtype.name])
        check_fields(self)
        if self.enforce_hbm:
            warn_once(
                f"{where}.enforce_hbm", True, "The compute kernel determines the memory of states."
            )
        if self.key_value_params is not None:
            warn_once(
                f"{where}.key_value_params",
                self.key_value_params,
                "Tables are in device or host memory: compute kernels fused, fused_uvm, "
                "fused_uvm_caching.",
            )


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """The placement of one module's tables: table name to `ParameterSharding`.

    Its text is TorchRec's table: one line per table, then one line per shard.
    """

    def __str__(self) -> str:
        head = ("param", "sharding type", "compute kernel", "ranks")
        rows = [
            (name, sharding.sharding_type, sharding.compute_kernel, str(sharding.ranks))
            for name, sharding in self.items()
        ]
        shard_head = ("param", "shard offsets", "shard sizes", "placement")
        shard_rows = [
            (name, str(shard.shard_offsets), str(shard.shard_sizes), str(shard.placement))
            for name, sharding in self.items()
            if sharding.sharding_spec is not None
            for shard in sharding.sharding_spec.shards
        ]
        tables = (
            format_table(*table, gap=" | ") for table in ((head, rows), (shard_head, shard_rows))
        )
        return "\n\n".join(tables)


def format_table(
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    numbers: Container[int] = (),
    gap: str = "  ",
) -> str:
    """Return text columns under a head, padded to their widest cell, with numbers aligned right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [head, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        gap.join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


@unique
class ObjectPoolShardingType(Enum):
    """Division of a pool's rows among ranks."""

    ROW_WISE = "row_wise"
    """Rows are divided among all ranks."""
    REPLICATED_ROW_WISE = "replicated_row_wise"
    """Rows are divided among the ranks of a node, and every node holds all rows. Lookups stay
    inside the node; updates are sent to all nodes."""


@dataclass
class ObjectPoolShardingPlan:
    """Plan of one pool.

    Args:
        sharding_type: Division of the rows among ranks.
        inference: Must be False: serve the unsharded pool.
        memory_capacity_per_rank: Ignored; every rank has the same number of rows.

    Raises:
        NotImplementedError: `inference` is True.
        ValueError: There is no such sharding type.

    Example:
        >>> ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE).sharding_type.value
        'row_wise'
    """

    sharding_type: ObjectPoolShardingType
    inference: bool = False
    memory_capacity_per_rank: list[int] | None = None

    def __post_init__(self) -> None:
        self.sharding_type = choice(
            "ObjectPoolShardingPlan.sharding_type", self.sharding_type, ObjectPoolShardingType
        )
        check_fields(self)
        if self.inference:
            raise NotImplementedError(
                "ObjectPoolShardingPlan.inference must be False; received True. A pool is served "
                "unsharded: load the state dict into a TensorPool or a KeyedJaggedTensorPool."
            )
