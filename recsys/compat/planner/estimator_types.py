"""Input of users' estimators: speeds of a machine, and the traffic of a shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from recsys.compat.planner.topology import Perf, Topology
from recsys.compat.planner.types import SharderData, ShardingOption, get_num_poolings
from recsys.distributed.planner.constants import BIGINT_DTYPE, UVM_CACHING_RATIO
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.types import EmbeddingComputeKernel

_BANDWIDTHS = (
    "hbm_mem_bw",
    "ddr_mem_bw",
    "ssd_mem_bw",
    "hbm_to_ddr_mem_bw",
    "intra_host_bw",
    "inter_host_bw",
)


@dataclass
class PerfCoefficient:
    """Costs of the parts of a lookup, relative to the time to move their bytes.

    Args:
        input_read_size_multiplier: Factor of the bytes of ids.
        lookup_size_multiplier: Factor of the bytes of rows that are read.
        embedding_output_multiplier: Factor of the bytes of embeddings that are written.
        hash_size_multiplier: Factor of the number of rows of the shard, counted as one byte each.
    """

    input_read_size_multiplier: float = 1.0
    lookup_size_multiplier: float = 1.0
    embedding_output_multiplier: float = 1.0
    hash_size_multiplier: float = 0.0

    def milliseconds(self, ctx: ShardPerfContext, output_bytes: float) -> float:
        """Return the time of a shard's lookup.

        Args:
            ctx: Shard.
            output_bytes: Bytes of the embeddings that are written.
        """
        ids = ctx.batch_inputs * ctx.source_ranks
        total = (
            self.input_read_size_multiplier * ids * ctx.input_data_type_size
            + self.lookup_size_multiplier * ids * ctx.emb_dim * ctx.table_data_type_size
            + self.embedding_output_multiplier * output_bytes
            + self.hash_size_multiplier * ctx.hash_size
        )
        return total / ctx.device_bw


@dataclass
class EstimatorPerfCoefficients:
    """Coefficients of the lookup, and optionally of the backward pass.

    Args:
        fwd: Coefficients of the lookup.
        bwd: Coefficients of the backward pass; None: a multiple of the lookup's time.
    """

    fwd: PerfCoefficient = field(default_factory=PerfCoefficient)
    bwd: PerfCoefficient | None = None


@dataclass
class PrefetchCoefficients:
    """Coefficients of the time to fetch rows into a cache. TorchRec 1.8 accepts and ignores them.

    Args:
        expected_num_lookups_coefficient: Milliseconds per id that the shard looks up.
        expected_num_unique_lookups_coefficient: Milliseconds per distinct row. Ids are assumed to
            be uniform over all rows.
        expected_size_cache_fetches_coefficient: Milliseconds per byte of the rows that are not in
            the cache.

    Example:
        >>> of_bytes = PrefetchCoefficients(expected_size_cache_fetches_coefficient=1e-6)
        >>> shard = ShardPerfContext(
        ...     compute_kernel="fused_uvm_caching", sharding_type="row_wise", hash_size=10**9,
        ...     emb_dim=64, batch_sizes=[8], num_poolings=[1], input_lengths=[1000])
        >>> round(of_bytes.milliseconds(shard), 3)  # 80% of 8,000 rows of 256 bytes
        1.638
    """

    expected_num_lookups_coefficient: float = 0.0
    expected_num_unique_lookups_coefficient: float = 0.0
    expected_size_cache_fetches_coefficient: float = 0.0

    def milliseconds(self, ctx: ShardPerfContext) -> float:
        """Return the milliseconds per batch; 0 for a shard without a cache."""
        if not ctx.is_uvm_caching or not ctx.hash_size:
            return 0.0
        ids = ctx.batch_inputs * ctx.source_ranks
        # expected number of distinct rows among uniform ids
        rows: float = ctx.hash_size * (1 - (1 - 1 / ctx.hash_size) ** ids)
        held = UVM_CACHING_RATIO if ctx.caching_ratio is None else ctx.caching_ratio
        fetched = rows * max(0.0, 1 - held) * ctx.emb_dim * ctx.table_data_type_size
        return (
            self.expected_num_lookups_coefficient * ids
            + self.expected_num_unique_lookups_coefficient * rows
            + self.expected_size_cache_fetches_coefficient * fetched
        )


@dataclass
class PerfCoefficientConfig:
    """Coefficients by sharding type.

    Args:
        table_wise: Coefficients of `table_wise` shards.
        row_wise: Coefficients of `row_wise` shards.
        table_row_wise: Coefficients of `table_row_wise` shards.
        data_parallel: Coefficients of `data_parallel` shards.
        column_wise: Coefficients of `column_wise` shards.
        default: Coefficients of all other sharding types.
        bwd_compute_multiplier: Time of the backward pass relative to the lookup.
        prefetch: Coefficients of fetching rows into a cache; the planner's costs if None.
    """

    table_wise: EstimatorPerfCoefficients | None = None
    row_wise: EstimatorPerfCoefficients | None = None
    table_row_wise: EstimatorPerfCoefficients | None = None
    data_parallel: EstimatorPerfCoefficients | None = None
    column_wise: EstimatorPerfCoefficients | None = None
    default: EstimatorPerfCoefficients = field(
        default_factory=EstimatorPerfCoefficients, kw_only=True
    )
    bwd_compute_multiplier: float = field(default=2, kw_only=True)
    prefetch: PrefetchCoefficients | None = field(default=None, kw_only=True)

    def get_coefficients(self, sharding_type: str) -> EstimatorPerfCoefficients:
        """Return the coefficients of a sharding type."""
        return getattr(self, sharding_type, None) or self.default


class HardwarePerfConfig:
    """Speeds that override the machine's speeds. Subclasses set the speeds that they know.

    All are in bytes per millisecond; None keeps the machine's speed.

    Attributes:
        name: Label for reports.
        hbm_mem_bw: Device memory bandwidth.
        ddr_mem_bw: Host memory bandwidth.
        ssd_mem_bw: Disk bandwidth.
        hbm_to_ddr_mem_bw: Bandwidth between device and host.
        intra_host_bw: Bandwidth between ranks of a node.
        inter_host_bw: Bandwidth between nodes.
        device_bw: Bandwidth at which tables are read with any kernel.
        kernel_device_bandwidths: As `device_bw`, by device type and compute kernel.
        supported: Supported sharding types; all if None.
        coefficients: Coefficients of lookups; the planner's costs if None.

    Example:
        >>> class Slow(HardwarePerfConfig):
        ...     name = "slow"
        ...     ddr_mem_bw = 1e6
        >>> Slow().applied_to(Topology(1, "cpu", ddr_cap=1 << 30)).ddr_mem_bw
        1000000.0
    """

    name: str = "default"
    hbm_mem_bw: float | None = None
    ddr_mem_bw: float | None = None
    ssd_mem_bw: float | None = None
    hbm_to_ddr_mem_bw: float | None = None
    intra_host_bw: float | None = None
    inter_host_bw: float | None = None
    device_bw: float | None = None
    kernel_device_bandwidths: Mapping[tuple[str, str], float] = {}
    supported: frozenset[str] | None = None
    coefficients: PerfCoefficientConfig | None = None

    def formulas_of(self, sharding_type: str) -> dict[str, Callable[[ShardPerfContext], float]]:
        """Return the user's formulas for parts of `Perf`, by part.

        Args:
            sharding_type: Sharding type. Methods for it take precedence over those for all types.

        Raises:
            ValueError: The sharding type is not supported.
        """
        if self.supported is not None and sharding_type not in self.supported:
            raise ValueError(
                f"{type(self).__name__} supports {sorted(self.supported)}; received "
                f"{sharding_type!r}."
            )
        formulas: dict[str, Callable[[ShardPerfContext], float]] = {}
        coefficients = self.coefficients
        if coefficients is not None:
            of_type = coefficients.get_coefficients(sharding_type)
            formulas["fwd_compute"] = lambda ctx: of_type.fwd.milliseconds(
                ctx, self.output_bytes(ctx)
            )
            if coefficients.prefetch is not None:
                formulas["prefetch_compute"] = coefficients.prefetch.milliseconds
            if of_type.bwd is not None:
                back = of_type.bwd
                formulas["bwd_compute"] = lambda ctx: back.milliseconds(
                    ctx, self.output_bytes(ctx, is_fwd=False)
                )
        formulas |= self._marked_for(sharding_type)
        forward = formulas.get("fwd_compute")
        is_linear = coefficients is not None or hasattr(forward, "is_linear")
        if forward is not None and is_linear and "bwd_compute" not in formulas:
            multiplier = 2.0 if coefficients is None else coefficients.bwd_compute_multiplier
            formulas["bwd_compute"] = lambda ctx: multiplier * forward(ctx)
        return formulas

    def output_bytes(self, ctx: ShardPerfContext, is_fwd: bool = True) -> float:
        """Return the bytes of embeddings that a shard's lookup writes.

        Args:
            ctx: Shard.
            is_fwd: False for the gradients that the backward pass reads.
        """
        method: Any = self._marked_for(ctx.sharding_type, "output").get("output")
        if method is not None:
            return float(method(ctx, is_fwd))
        sums = ctx.sharding_type in ("row_wise", "table_row_wise")
        kind = "sr" if sums else "a2a"
        size = getattr(ctx, f"{'fwd' if is_fwd else 'bwd'}_{kind}_comm_data_type_size")
        ranks = 1 if ctx.sharding_type == "data_parallel" else ctx.world_size
        return float(ctx.batch_outputs * ranks * ctx.emb_dim * size)

    def _marked_for(self, sharding_type: str, *parts: str) -> dict[str, Any]:
        """Return the decorated methods by the part that they compute."""
        methods_by_part: dict[str, Any] = {}
        methods = [getattr(self, name) for name in dir(type(self)) if not name.startswith("__")]
        marked = [method for method in methods if hasattr(method, "computes")]
        for method in sorted(marked, key=lambda method: len(method.computes[1]) > 0):
            part, kinds = method.computes
            if (part in parts or part != "output") and (not kinds or sharding_type in kinds):
                methods_by_part[part] = method
        return methods_by_part

    def applied_to(self, topology: Topology) -> Topology:
        """Return a machine with these speeds."""
        bandwidths = {name: getattr(self, name) for name in _BANDWIDTHS}
        bandwidths = {name: value for name, value in bandwidths.items() if value is not None}
        if not bandwidths:
            return topology
        return Topology.from_hardware(
            [replace(rank, **bandwidths) for rank in topology.hardware],
            topology.local_world_size,
            lookup=topology.lookup,
            collectives=topology.collectives,
        )

    def get_device_bw(
        self,
        compute_device: str,
        compute_kernel: str,
        hbm_mem_bw: float,
        ddr_mem_bw: float,
        ssd_mem_bw: float,
        hbm_to_ddr_mem_bw: float,
        caching_ratio: float | None = None,
        prefetch_pipeline: bool = False,
    ) -> float:
        """Return the bytes per millisecond at which a kernel reads tables.

        Args:
            compute_device: "cpu" or "cuda".
            compute_kernel: An `EmbeddingComputeKernel` value.
            hbm_mem_bw: Device memory bandwidth.
            ddr_mem_bw: Host memory bandwidth.
            ssd_mem_bw: Unused: no table is on a disk.
            hbm_to_ddr_mem_bw: Bandwidth between device and host.
            caching_ratio: Share of the rows in a cache; FBGEMM's default if None.
            prefetch_pipeline: Whether missing rows are fetched before the lookup.
        """
        known = self.kernel_device_bandwidths.get((compute_device, compute_kernel), self.device_bw)
        if known is not None:
            return known
        if compute_device == "cpu":
            return ddr_mem_bw
        kernel = EmbeddingComputeKernel(compute_kernel)
        host_bw = min(ddr_mem_bw, hbm_to_ddr_mem_bw)
        if kernel is EmbeddingComputeKernel.FUSED_UVM:
            return host_bw
        if kernel is not EmbeddingComputeKernel.FUSED_UVM_CACHING or prefetch_pipeline:
            return hbm_mem_bw
        missed = 1 - (UVM_CACHING_RATIO if caching_ratio is None else caching_ratio)
        return 1 / (1 / hbm_mem_bw + missed / host_bw)

    def post_process_perfs(
        self,
        shard_perfs: list[Perf],
        shard_sizes: list[list[int]],
        sharding_type: str,
        uneven_sharding_perf_multiplier: float = 1.0,
    ) -> list[Perf]:
        """Return the estimates of an option's shards; subclasses may change them.

        Args:
            shard_perfs: Milliseconds of each shard.
            shard_sizes: Rows and columns of each shard.
            sharding_type: Sharding type of the option.
            uneven_sharding_perf_multiplier: Always 1: each shard is estimated by its own size.
        """
        return shard_perfs


@dataclass(kw_only=True)
class ShardPerfContext:
    """A shard, its traffic and the speeds of the machine, for users' formulas.

    Args:
        sharding_type: Sharding type of its option.
        compute_kernel: Compute kernel of its option.
        hash_size: Rows of the shard.
        emb_dim: Columns of the shard.
        batch_sizes: Samples per rank for each feature.
        num_poolings: Mean bags per sample for each feature.
        input_lengths: Mean ids per bag for each feature.
        world_size: Number of ranks.
        local_world_size: Ranks per node.
        input_data_type_size: Bytes of an id.
        table_data_type_size: Bytes of a weight.
        output_data_type_size: Bytes of an embedding value.
        fwd_a2a_comm_data_type_size: Bytes of an embedding value when rows are sent.
        bwd_a2a_comm_data_type_size: Bytes of its gradient.
        fwd_sr_comm_data_type_size: Bytes of an embedding value when sums are sent.
        bwd_sr_comm_data_type_size: Bytes of its gradient.
        device_bw: Bytes per millisecond at which tables are read.
        hbm_to_ddr_mem_bw: Bandwidth between device and host.
        intra_host_bw: Bandwidth between ranks of a node.
        inter_host_bw: Bandwidth between nodes.
        is_inference: Whether nothing is trained.
        is_weighted: Whether ids have weights.
        is_pooled: Whether bags are pooled.
        has_feature_processor: Whether features are processed before the lookup.
        caching_ratio: Share of the rows in a cache, if it is set.
        table_name: Name of the table.
    """

    sharding_type: str = ""
    compute_kernel: str = ""
    hash_size: int = 0
    emb_dim: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    num_poolings: list[float] = field(default_factory=list)
    input_lengths: list[float] = field(default_factory=list)
    world_size: int = 1
    local_world_size: int = 1
    input_data_type_size: float = BIGINT_DTYPE
    table_data_type_size: float = 4.0
    output_data_type_size: float = 4.0
    fwd_a2a_comm_data_type_size: float = 4.0
    bwd_a2a_comm_data_type_size: float = 4.0
    fwd_sr_comm_data_type_size: float = 4.0
    bwd_sr_comm_data_type_size: float = 4.0
    device_bw: float = 0.0
    hbm_to_ddr_mem_bw: float = 0.0
    intra_host_bw: float = 0.0
    inter_host_bw: float = 0.0
    is_inference: bool = False
    is_weighted: bool = False
    is_pooled: bool = True
    has_feature_processor: bool = False
    caching_ratio: float | None = None
    table_name: str = ""

    @classmethod
    def build_shard_perf_contexts(
        cls,
        config: HardwarePerfConfig,
        shard_sizes: list[list[int]],
        sharding_option: ShardingOption,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None,
        sharder_data: SharderData,
        is_inference: bool = False,
    ) -> list[Self]:
        """Return a context for each shard of an option.

        Args:
            config: Speeds that override the machine's speeds.
            shard_sizes: Rows and columns of each shard.
            sharding_option: Option.
            topology: Machine.
            constraints: Constraints by table name.
            sharder_data: Data of the sharder of the option's module.
            is_inference: Whether nothing is trained.
        """
        machine = config.applied_to(topology)
        demands = (constraints or {}).get(sharding_option.name)
        batch_sizes = None if demands is None else demands.batch_sizes
        weight_bytes = float(sharding_option.tensor.element_size())
        sent = sharder_data.qcomm_dtype_sizes
        pooled = "POOLED_EMBEDDINGS" if sharding_option.is_pooled else "SEQUENCE_EMBEDDINGS"
        there, back = sent.get(f"{pooled}_ALL_TO_ALL", (4.0, 4.0))
        sums_there, sums_back = sent.get(f"{pooled}_REDUCE_SCATTER", (4.0, 4.0))
        device_bw = config.get_device_bw(
            machine.compute_device,
            sharding_option.compute_kernel,
            machine.hbm_mem_bw,
            machine.ddr_mem_bw,
            machine.ssd_mem_bw,
            machine.hbm_to_ddr_mem_bw,
            caching_ratio=sharding_option.cache_load_factor,
        )
        return [
            cls(
                sharding_type=sharding_option.sharding_type,
                compute_kernel=sharding_option.compute_kernel,
                hash_size=rows,
                emb_dim=cols,
                batch_sizes=batch_sizes
                or [sharding_option.batch_size] * sharding_option.num_inputs,
                num_poolings=get_num_poolings(constraints, sharding_option),
                input_lengths=list(sharding_option.input_lengths),
                world_size=machine.world_size,
                local_world_size=machine.local_world_size,
                table_data_type_size=weight_bytes,
                fwd_a2a_comm_data_type_size=there,
                bwd_a2a_comm_data_type_size=back,
                fwd_sr_comm_data_type_size=sums_there,
                bwd_sr_comm_data_type_size=sums_back,
                device_bw=device_bw,
                hbm_to_ddr_mem_bw=machine.hbm_to_ddr_mem_bw,
                intra_host_bw=machine.intra_host_bw,
                inter_host_bw=machine.inter_host_bw,
                is_inference=is_inference,
                is_weighted=sharding_option.is_weighted
                or (demands is not None and demands.is_weighted),
                is_pooled=sharding_option.is_pooled,
                has_feature_processor=sharding_option.has_feature_processor,
                caching_ratio=sharding_option.cache_load_factor,
                table_name=sharding_option.name,
            )
            for rows, cols in shard_sizes
        ]

    @property
    def num_hosts(self) -> int:
        """Number of nodes, and of groups of ranks for `table_row_wise`."""
        return math.ceil(self.world_size / self.local_world_size)

    num_twrw_groups = num_hosts

    @property
    def source_ranks(self) -> int:
        """Number of ranks whose ids the shard receives; row shards receive an equal share."""
        whole = self.sharding_type in ("table_wise", "column_wise", "table_column_wise")
        return self.world_size if whole else 1

    @property
    def batch_inputs(self) -> float:
        """Ids of a rank's batch over all features."""
        return sum(
            length * bags for length, bags in zip(self.input_lengths, self._bags, strict=True)
        )

    @property
    def batch_outputs(self) -> float:
        """Rows of embeddings of a rank's batch: its bags, or its ids if they are not pooled."""
        return sum(self._bags) if self.is_pooled else self.batch_inputs

    @property
    def is_uvm_caching(self) -> bool:
        """True if a cache in device memory holds rows of a table in host memory."""
        return self.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING.value

    @property
    def _bags(self) -> list[float]:
        return [n * size for n, size in zip(self.num_poolings, self.batch_sizes, strict=True)]
