"""Plans for machines that a job does not run on, one for each machine type (SKU).

A request names the machine types. A user's `PlannerExecutor` plans for one machine type, and
`DryRunOrchestrator` calls it for all and returns the results. If planning fails for a machine type,
its result has the reason, and the other machine types are still planned. Without an executor,
call `EmbeddingShardingPlanner` for each `Topology` instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from torch import nn

from recsys.compat.planner.types import Stats
from recsys.distributed.planner.types import ParameterConstraints, PlannerErrorType
from recsys.distributed.sharded.sharder import ModuleSharder
from recsys.distributed.types import ShardingPlan

logger = logging.getLogger(__name__)


class TrainingFramework(Enum):
    """Launcher that requests a plan. A `DryRunRequest` must not have `UNSET`."""

    UNSET = ""
    APF = "apf"
    PYPER = "pyper"
    MVAI = "mvai"


@dataclass(frozen=True)
class CacheConfig:
    """Location of the plans of a `PlanCache`.

    Args:
        enabled: Whether plans are cached.
        ttl_seconds: Seconds after which a plan is computed again; None: never.
        manifold_bucket: Name of the storage; required if enabled.

    Raises:
        ValueError: The time is not positive, or the cache is enabled without a storage.
    """

    enabled: bool = False
    ttl_seconds: int | None = None
    manifold_bucket: str = ""

    def __post_init__(self) -> None:
        _check_positive("ttl_seconds", self.ttl_seconds)
        if self.enabled and not self.manifold_bucket:
            raise ValueError("CacheConfig(enabled=True) needs a manifold_bucket; received none.")


@dataclass(frozen=True)
class CacheMetadata:
    """Metadata of a cached plan: its creator and its machines."""

    created_by: str = ""
    sku: str = ""
    world_size: int = 0
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SkuOverride:
    """Properties of a machine type that override the executor's values; None keeps its value.

    Args:
        hbm_gb: GiB of device memory of one rank.
        ddr_gb: GiB of host memory of one rank.
        intra_host_bw: Bytes per ms between ranks of a host.
        inter_host_bw: Bytes per ms between hosts.

    Raises:
        ValueError: A number is negative.
    """

    hbm_gb: float | None = None
    ddr_gb: float | None = None
    intra_host_bw: float | None = None
    inter_host_bw: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _check_not_negative(name, value)


@dataclass(frozen=True)
class ShardingPlanRequest:
    """A model and a job that need a plan.

    Args:
        model: Model, or a function that builds it.
        sharders: One for each type of sharded module.
        world_size: Number of ranks.
        local_world_size: Ranks of one host; must divide `world_size`.
        batch_size: Samples of one rank in a step.
        pod_size: Ranks of a pod, at most `world_size`.
        storage_reservation, constraints, planner_config: Settings of the executor's planner.
        training_framework: Launcher, as a `TrainingFramework` or its value.
        hbm_gb, ddr_gb: GiB of device and host memory of one rank.
        launcher_hardware: Machine type of the launcher.
        compute_device: `"cuda"` or `"cpu"`.
        request_id: Name for logs; random by default.
        capture_search_space: Whether the result lists the options that were compared.

    Raises:
        ValueError: A size is not positive, `local_world_size` does not divide `world_size`,
            `pod_size` is more than `world_size`, memory is negative, or the launcher is unknown.
    """

    model: nn.Module | Callable[[], nn.Module]
    sharders: list[ModuleSharder[nn.Module]]
    world_size: int
    local_world_size: int
    batch_size: int
    pod_size: int | None = None
    storage_reservation: object | None = None
    constraints: dict[str, ParameterConstraints] | None = None
    training_framework: TrainingFramework = TrainingFramework.UNSET
    hbm_gb: float | None = None
    ddr_gb: float | None = None
    launcher_hardware: str | None = None
    compute_device: str | None = None
    planner_config: object | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    capture_search_space: bool = False

    def __post_init__(self) -> None:
        try:
            framework = TrainingFramework(self.training_framework)
        except ValueError:
            known = [framework.value for framework in TrainingFramework]
            raise ValueError(
                f"training_framework must be one of {known}; received {self.training_framework!r}."
            ) from None
        object.__setattr__(self, "training_framework", framework)
        for name in ("world_size", "local_world_size", "batch_size", "pod_size"):
            _check_positive(name, getattr(self, name))
        for name in ("hbm_gb", "ddr_gb"):
            _check_not_negative(name, getattr(self, name))
        if self.world_size % self.local_world_size:
            raise ValueError(
                f"world_size must be a multiple of local_world_size; received {self.world_size} "
                f"and {self.local_world_size}."
            )
        if self.pod_size is not None and self.pod_size > self.world_size:
            raise ValueError(
                f"pod_size must be at most world_size; received {self.pod_size} and "
                f"{self.world_size}."
            )

    @property
    def request_hash(self) -> str:
        """16 hex digits that identify the requested plan."""
        return _hash_of(self, {})


@dataclass(frozen=True)
class DryRunRequest(ShardingPlanRequest):
    """A request for one plan for each machine type.

    Args:
        sku_list: Machine types, at least one.
        per_sku_overrides: Overridden properties by machine type.
        cache_config: Location of cached plans.

    Raises:
        ValueError: As in `ShardingPlanRequest`; or the machine types or the launcher are missing,
            or an override is for a machine type that is not in the list.
    """

    sku_list: list[str] = field(default_factory=list)
    per_sku_overrides: dict[str, SkuOverride] | None = None
    cache_config: CacheConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sku_list:
            raise ValueError("sku_list needs at least one machine type; received none.")
        if self.training_framework is TrainingFramework.UNSET:
            raise ValueError("A DryRunRequest needs a training_framework; received none.")
        others = sorted(set(self.per_sku_overrides or ()) - set(self.sku_list))
        if others:
            raise ValueError(
                f"per_sku_overrides must name machine types of sku_list; received {others}."
            )

    def fingerprint(self, sku: str) -> str:
        """Return 16 hex digits that identify the requested plan for a machine type.

        Args:
            sku: Machine type of the request.

        Raises:
            ValueError: The machine type is not in the list.
        """
        if sku not in self.sku_list:
            raise ValueError(f"sku must be one of sku_list={self.sku_list}; received {sku!r}.")
        return _hash_of(self, {"sku": sku, "override": (self.per_sku_overrides or {}).get(sku)})


@dataclass(frozen=True)
class ShardingPlanResult:
    """Result of an executor for one machine type.

    Args:
        sku: Machine type.
        success: Whether there is a plan.
        sharding_plan: Plan; None without success.
        planner_failure_reason: Reason of a failure.
        estimated_max_hbm_bytes, estimated_max_ddr_bytes: Bytes on the fullest rank.
        estimated_qps: Samples per second of the job.
        critical_path_ms, comms_critical_path_ms, comp_critical_path_ms: Milliseconds of a step, of
            its communication and of its computation.
        max_rank_perf, mean_rank_perf: Milliseconds of the slowest and of the mean rank.
        perf_imbalance_ratio: Quotient of these two.
        planner_error_type: Type of a failure.
        validation_warnings: Warnings about the plan.
        sharding_plan_manifold_url: Location of the cached plan.
        request_hash, request_id: Identifiers of the request.
        solve_time_ms: Milliseconds that planning took.
        sharding_options: Options that were compared.
        is_planning_rank: Whether this rank made the plan.
    """

    sku: str
    success: bool
    sharding_plan: ShardingPlan | None
    planner_failure_reason: str | None
    estimated_max_hbm_bytes: int
    estimated_max_ddr_bytes: int
    estimated_qps: float | None = None
    critical_path_ms: float | None = None
    comms_critical_path_ms: float | None = None
    comp_critical_path_ms: float | None = None
    max_rank_perf: float | None = None
    mean_rank_perf: float | None = None
    perf_imbalance_ratio: float | None = None
    planner_error_type: PlannerErrorType | None = None
    validation_warnings: tuple[str, ...] = ()
    sharding_plan_manifold_url: str | None = None
    request_hash: str = ""
    request_id: str = ""
    solve_time_ms: float | None = None
    sharding_options: tuple[object, ...] = ()
    is_planning_rank: bool = True


@dataclass(frozen=True)
class DryRunResult(ShardingPlanResult):
    """A `ShardingPlanResult` with the fingerprint of its request."""

    request_fingerprint: str = ""

    @classmethod
    def from_result(
        cls, request: DryRunRequest, sku: str, result: ShardingPlanResult
    ) -> DryRunResult:
        """Return a result with the fingerprint that its request has for a machine type."""
        values = {f.name: getattr(result, f.name) for f in fields(ShardingPlanResult)}
        return cls(**values, request_fingerprint=request.fingerprint(sku))


@dataclass
class PlannerSessionContext:
    """A request, the results so far, and the statistics for the next plan."""

    request: ShardingPlanRequest
    results: dict[str, ShardingPlanResult]
    stats: list[Stats] | None = None


@runtime_checkable
class PlanCache(Protocol):
    """Cache of plans by the fingerprint of their request."""

    def get(self, request_fingerprint: str) -> tuple[ShardingPlan, CacheMetadata] | None:
        """Return a plan; None if there is none."""

    def put(self, request_fingerprint: str, plan: ShardingPlan, metadata: CacheMetadata) -> None:
        """Store a plan."""


@runtime_checkable
class PlannerExecutor(Protocol):
    """Makes the plan for one machine type."""

    def run(
        self, sku: str, ctx: PlannerSessionContext, pg: dist.ProcessGroup | None = None
    ) -> ShardingPlanResult:
        """Return the result of planning for a machine type.

        Args:
            sku: Machine type.
            ctx: Context with the request.
            pg: Process group that receives the plan; None for this process alone.
        """


class PlanReporter(Protocol):
    """Chooses the statistics of a plan."""

    def build_stats(self, ctx: PlannerSessionContext, sku: str) -> list[Stats]:
        """Return the statistics for the plan of one machine type."""


class DryRunOrchestrator:
    """Plans for each machine type of a request.

    Args:
        executor: Makes the plan for one machine type.
        reporter: Chooses the statistics, which the executor reads from `ctx.stats`.
        broadcast_pg: Process group, passed to the executor.

    Example:
        >>> class AlwaysFull:
        ...     def run(self, sku, ctx, pg=None):
        ...         raise MemoryError(f"{sku} is full")
        >>> request = DryRunRequest(
        ...     nn.Identity(), [], 8, 8, 512, training_framework="apf", sku_list=["h100"]
        ... )
        >>> results = DryRunOrchestrator(AlwaysFull()).plan(
        ...     request, PlannerSessionContext(request, {})
        ... )
        >>> results["h100"].success, results["h100"].planner_failure_reason
        (False, 'MemoryError: h100 is full')
    """

    def __init__(
        self,
        executor: PlannerExecutor,
        reporter: PlanReporter | None = None,
        broadcast_pg: dist.ProcessGroup | None = None,
    ) -> None:
        self._executor = executor
        self._reporter = reporter
        self._broadcast_pg = broadcast_pg

    def plan(
        self, request: DryRunRequest, ctx: PlannerSessionContext
    ) -> Mapping[str, DryRunResult]:
        """Return the results by machine type, and set `ctx.results`.

        Args:
            request: Machine types, model and job.
            ctx: Context of this request.

        Raises:
            ValueError: The context belongs to another request.
        """
        if ctx.request is not request:
            raise ValueError("ctx.request must be the request; received another one.")
        results = {}
        for sku in dict.fromkeys(request.sku_list):
            results[sku] = DryRunResult.from_result(request, sku, self._run(sku, request, ctx))
            ctx.results[sku] = results[sku]
        return results

    def _run(
        self, sku: str, request: DryRunRequest, ctx: PlannerSessionContext
    ) -> ShardingPlanResult:
        try:
            if self._reporter is not None:
                ctx.stats = self._reporter.build_stats(ctx, sku)
            return self._executor.run(sku=sku, ctx=ctx, pg=self._broadcast_pg)
        except Exception as error:
            logger.warning("No plan for machine type %r: %s", sku, error, exc_info=True)
            return ShardingPlanResult(
                sku=sku,
                success=False,
                sharding_plan=None,
                planner_failure_reason=f"{type(error).__name__}: {error}",
                estimated_max_hbm_bytes=0,
                estimated_max_ddr_bytes=0,
                planner_error_type=PlannerErrorType.OTHER,
                request_hash=request.request_hash,
                request_id=request.request_id,
            )


_NOT_OF_THE_PLAN = {"request_id", "sku_list", "per_sku_overrides", "cache_config", "model"}


def _hash_of(request: ShardingPlanRequest, more: dict[str, object]) -> str:
    """Hash the inputs of a plan: the fields of the request, and the tables of a given model."""
    values = {
        f.name: repr(getattr(request, f.name))
        for f in fields(request)
        if f.name not in _NOT_OF_THE_PLAN
    }
    values["sharders"] = repr([type(sharder).__name__ for sharder in request.sharders])
    if isinstance(request.model, nn.Module):
        values["tables"] = repr(
            [
                (path, getattr(module, of_tables)())
                for path, module in request.model.named_modules()
                for of_tables in ("embedding_bag_configs", "embedding_configs")
                if hasattr(module, of_tables)
            ]
        )
    text = json.dumps({**values, **{name: repr(value) for name, value in more.items()}})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError(f"{name} must be positive; received {value}.")


def _check_not_negative(name: str, value: float | None) -> None:
    if value is not None and value < 0:
        raise ValueError(f"{name} must not be negative; received {value}.")
