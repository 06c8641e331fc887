"""Plans for machine types, which are TorchRec's since 1.9."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.compat.answers import raises


def _request(**arguments: Any) -> Any:
    from torchrec.distributed.planner.dry_run import DryRunRequest

    given = {
        "model": nn.Linear(1, 1),
        "sharders": [],
        "world_size": 4,
        "local_world_size": 2,
        "batch_size": 8,
        "training_framework": "apf",
        "sku_list": ["small", "large"],
    }
    return DryRunRequest(**{**given, **arguments})


def _without_ids(results: Any) -> Any:
    return {
        sku: {
            name: getattr(result, name)
            for name in (
                "sku",
                "success",
                "sharding_plan",
                "planner_failure_reason",
                "estimated_max_hbm_bytes",
                "planner_error_type",
                "validation_warnings",
                "solve_time_ms",
            )
        }
        for sku, result in results.items()
    }


class _Executor:
    """Fails for the machine types that are named bad."""

    def __init__(self) -> None:
        self.runs: list[Any] = []

    def run(self, sku: str, ctx: Any, pg: Any = None) -> Any:
        from torchrec.distributed.planner.types import ShardingPlanResult

        self.runs.append([sku, list(ctx.results), pg])
        if sku.startswith("bad"):
            raise MemoryError(f"{sku} is full")
        return ShardingPlanResult(
            sku=sku,
            success=True,
            sharding_plan=None,
            planner_failure_reason=None,
            estimated_max_hbm_bytes=5,
            estimated_max_ddr_bytes=7,
        )


def every_machine_type_is_planned() -> Any:
    from torchrec.distributed.planner.dry_run import DryRunOrchestrator
    from torchrec.distributed.planner.types import PlannerSessionContext

    found = []
    for skus in (["a", "b"], ["bad1", "a", "bad2"], ["a", "a"]):
        executor, request = _Executor(), _request(sku_list=skus)
        context = PlannerSessionContext(request=request, results={})
        results = DryRunOrchestrator(executor).plan(request, context)
        prints = [results[sku].request_fingerprint == request.fingerprint(sku) for sku in skus]
        found.append([_without_ids(results), executor.runs, prints, list(context.results)])
    return found


def a_context_belongs_to_its_request() -> Any:
    from torchrec.distributed.planner.dry_run import DryRunOrchestrator
    from torchrec.distributed.planner.types import PlannerSessionContext

    context = PlannerSessionContext(request=_request(), results={})
    return raises(lambda: DryRunOrchestrator(_Executor()).plan(_request(), context))


def fingerprints_tell_plans_apart() -> Any:
    from torchrec.distributed.planner.dry_run import CacheConfig, SkuOverride

    override = {"small": SkuOverride(hbm_gb=1.0)}
    others: dict[str, Any] = {
        "same": {},
        "request_id": {"request_id": "other"},
        "cache_config": {"cache_config": CacheConfig(True, None, "bucket")},
        "more": {"sku_list": ["small", "large", "huge"]},
        "world_size": {"world_size": 8},
        "batch_size": {"batch_size": 16},
        "hbm_gb": {"hbm_gb": 3.0},
        "framework": {"training_framework": "mvai"},
        "override": {"per_sku_overrides": override},
        "override of another": {"per_sku_overrides": {"large": override["small"]}},
    }
    first = _request().fingerprint("small")
    found = {
        name: _request(**arguments).fingerprint("small") == first
        for name, arguments in others.items()
    }
    return found, _request().fingerprint("large") == first, len(first)


def bad_requests_raise() -> Any:
    from torchrec.distributed.planner.dry_run import CacheConfig, SkuOverride

    arguments: list[dict[str, Any]] = [
        {},
        {"sku_list": []},
        {"training_framework": ""},
        {"training_framework": "unknown"},
        {"world_size": 0},
        {"world_size": 3},
        {"local_world_size": 0},
        {"batch_size": 0},
        {"pod_size": 5},
        {"pod_size": 2},
        {"hbm_gb": -1.0},
        {"ddr_gb": -1.0},
        {"per_sku_overrides": {"none": SkuOverride()}},
    ]
    found = [raises(lambda given=given: _request(**given)) for given in arguments]
    found += [raises(lambda: _request().fingerprint("none"))]
    found += [raises(lambda: SkuOverride(intra_host_bw=-1.0)), raises(lambda: CacheConfig(True))]
    return [*found, raises(lambda: CacheConfig(ttl_seconds=0)), raises(lambda: CacheConfig())]


def a_result_has_the_fingerprint_of_its_request() -> Any:
    from torchrec.distributed.planner.dry_run import DryRunResult

    request = _request(request_id="r")
    result = DryRunResult.from_result(request, "small", _Executor().run("small", _Context))
    is_same = result.request_fingerprint == request.fingerprint("small")
    return is_same, _without_ids({"small": result})


class _Context:
    results: Any = ()


def protocols_are_by_method() -> Any:
    from torchrec.distributed.planner.dry_run import PlanCache, PlannerExecutor

    class Cache:
        def get(self, request_fingerprint: str) -> Any: ...

        def put(self, request_fingerprint: str, plan: Any, metadata: Any) -> None: ...

    return (
        isinstance(_Executor(), PlannerExecutor),
        isinstance(Cache(), PlannerExecutor),
        isinstance(Cache(), PlanCache),
    )


def values_of_caches_have_defaults() -> Any:
    from torchrec.distributed.planner.dry_run import CacheConfig, CacheMetadata, SkuOverride

    return CacheConfig(), CacheMetadata(), SkuOverride(), CacheMetadata("me", "sku", 4)
