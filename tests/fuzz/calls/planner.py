"""Calls of `recsys.distributed.planner`, of plans and of sharding generators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from recsys.distributed import sharding_plan
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.placement.layout_plot import plot_layout
from recsys.distributed.placement.plan_layout import layout_of_plan
from recsys.distributed.placement.traffic import traffic_of
from recsys.distributed.planner import (
    CustomTopologyData,
    EmbeddingEnumerator,
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    Hardware,
    HeuristicalStorageReservation,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    PoolingStats,
    Topology,
)
from recsys.distributed.planner.measured import CollectivePoint, LookupPoint
from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.tables_file import read_tables
from recsys.distributed.sharded.sharder import ModuleSharder
from recsys.distributed.types import (
    CacheParams,
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
    compute_kernel_to_embedding_location,
)
from recsys.kernels.types import BoundsCheckMode
from tests.fuzz.argument_kinds import (
    DTYPE,
    KJT,
    Kind,
    anything,
    either,
    flag,
    function,
    made,
    many,
    mapping,
    maybe,
    member,
    module,
    number,
    path,
    tensor,
    text,
    texts,
    whole,
    wholes,
)
from tests.fuzz.calls.call import Call, method
from tests.fuzz.calls.modules import bags


def topology() -> Topology:
    """Two ranks without GPUs."""
    return Topology(2, "cpu", ddr_cap=1 << 30)


def table_plan() -> EmbeddingModuleShardingPlan:
    """The plan of `bags`."""
    return sharding_plan.construct_module_sharding_plan(
        bags(), {"t": sharding_plan.row_wise()}, world_size=1, local_size=1, device_type="cpu"
    )


def plan() -> ShardingPlan:
    """A plan of the module `bags`."""
    return ShardingPlan({"": table_plan()})


def _layout() -> Any:
    return layout_of_plan(bags(), table_plan(), 1)


def _file(text: str) -> str:
    Path("file.json").write_text(text, encoding="utf-8")
    return "file.json"


def _none(value: object) -> bool:
    return False


def _apply(generator: Any) -> object:
    """Place a table by a generator: some check their arguments only then."""
    weight = torch.nn.Parameter(torch.ones(10, 8))
    return generator(weight, 2, 2, "cpu", EmbeddingBagCollectionSharder())


def _generator(name: str, arguments: dict[str, Kind]) -> Call:
    make = getattr(sharding_plan, name)
    return Call(name, lambda **given: _apply(make(**given)), arguments)


SHARDER = made(EmbeddingBagCollectionSharder, ModuleSharder)
SHARDERS = many(lambda: [EmbeddingBagCollectionSharder()], SHARDER)
NOTHING = Kind(lambda: None, lambda value: value is None)
TOPOLOGY = made(topology)
CONSTRAINTS = mapping(lambda: {"t": ParameterConstraints()}, made(ParameterConstraints))
HARDWARE = {
    name: either(number(1e9, 0), many(lambda: [1e9, 1e9], number(1e9, 0), 2))
    for name in (
        "ssd_cap", "hbm_mem_bw", "ddr_mem_bw", "ssd_mem_bw", "hbm_to_ddr_mem_bw", "inter_host_bw",
        "kernel_launch_ms", "step_ms",
    )
} | {
    name: maybe(either(number(1e9, 0), many(lambda: [1e9, 1e9], number(1e9, 0), 2)))
    for name in (
        "hbm_cap", "ddr_cap", "intra_host_bw", "intra_host_latency_ms", "inter_host_latency_ms",
    )
}  # fmt: skip
ONE_RANK = {name: number(1e9, 0) for name in HARDWARE}
DEVICE_TYPE = maybe(text("cpu"))
KERNEL = maybe(text("fused"))
STATS = made(lambda: PoolingStats.from_batches([KJT.right()]))
SAMPLES = {
    "layout": made(_layout), "samples_per_rank": whole(1), "ids_per_sample": number(1.0, 0),
    "pooled": flag(True),
}  # fmt: skip
SIZES = {"shard_offsets": wholes([0, 0]), "shard_sizes": wholes([10, 4])}
RESERVATION = {"memory_cap": whole(1 << 30, None), "dense_bytes": maybe(whole(10, None))}

CALLS = [
    Call("Topology", Topology, {
        "world_size": whole(2), "compute_device": text("cpu"),
        "local_world_size": maybe(whole(2)), **HARDWARE,
        "custom_topology_data": maybe(made(
            lambda: CustomTopologyData({"hbm_cap": [1, 2]}, world_size=2))),
    }),
    Call("Topology.from_hardware", Topology.from_hardware, {
        "hardware": many(lambda: list(topology().hardware), made(
            lambda: topology().hardware[0]), 1),
        "local_world_size": maybe(whole(2)),
        "lookup": many(list, Kind(lambda: None, lambda value: None if isinstance(
            value, LookupPoint) else False)),
        "collectives": many(list, Kind(lambda: None, lambda value: None if isinstance(
            value, CollectivePoint) else False)),
    }),
    Call("Topology.preset", Topology.preset, {
        "name": either(text("H100"), texts(["H100", "H100"], 1)), "world_size": whole(2),
        "local_world_size": maybe(whole(2)),
    }),
    Call("Topology.from_json", Topology.from_json, {
        "source": path(lambda: _file(topology().to_json())),
    }, words={"source": ("Topology file",)}),
    Call("Topology.to_json", method(topology, "to_json"), {"path": maybe(path(lambda: "t.json"))}),
    Call("Topology.with_nodes", method(topology, "with_nodes"), {"num_nodes": whole(2)}),
    Call("Topology.with_measurements", method(topology, "with_measurements"), {
        "lookup": maybe(many(list, Kind(lambda: None, _none))),
        "collectives": maybe(many(list, Kind(lambda: None, _none))),
    }),
    Call("Topology.lookup_speed", method(topology, "lookup_speed"), {
        "dim": whole(4, None), "pooling": number(1.0, is_finite=False), "rank": maybe(made(
            lambda: topology().hardware[0])),
    }),
    Call("CustomTopologyData", CustomTopologyData, {
        "data": mapping(lambda: {"hbm_cap": [1, 2]}, many(lambda: [1, 2], number(1, 0), 2)),
        "world_size": whole(2),
    }),
    Call("CustomTopologyData.get_data", method(
        lambda: CustomTopologyData({"hbm_cap": [1, 2]}, world_size=2), "get_data"), {
        "key": text("hbm_cap"),
    }),
    Call("CustomTopologyData.has_data", method(
        lambda: CustomTopologyData({"hbm_cap": [1, 2]}, world_size=2), "has_data"), {
        "key": text("hbm_cap"),
    }),
    Call("Hardware", Hardware, {"compute_device": text("cpu"), "name": text("one"), **ONE_RANK}),
    Call("ParameterConstraints", ParameterConstraints, {
        "sharding_types": maybe(texts(["row_wise"])),
        "compute_kernels": maybe(texts(["fused_uvm_caching"])),
        "min_partition": maybe(whole(32)),
        "pooling_factors": many(lambda: [1.0], number(1.0, 0)),
        "num_poolings": maybe(many(lambda: [1.0], number(1.0, 0))),
        "batch_sizes": maybe(wholes([4], 1)), "is_weighted": flag(False),
        "cache_params": maybe(made(lambda: CacheParams(load_factor=0.5))),
        "enforce_hbm": maybe(flag(False)), "stochastic_rounding": maybe(flag(False)),
        "bounds_check_mode": maybe(member(BoundsCheckMode.FATAL)),
        "feature_names": maybe(texts(["a", "b"])),
        "output_dtype": maybe(DTYPE), "device_group": DEVICE_TYPE,
        "key_value_params": NOTHING, "use_virtual_table": flag(False),
    }),
    Call("EmbeddingEnumerator", EmbeddingEnumerator, {
        "topology": TOPOLOGY, "batch_size": maybe(whole(4)), "constraints": maybe(CONSTRAINTS),
        "pooling_stats": maybe(STATS),
    }),
    Call("EmbeddingEnumerator.enumerate", method(
        lambda: EmbeddingEnumerator(topology(), 4), "enumerate"), {
        "module": module(bags), "sharders": SHARDERS,
    }),
    Call("EmbeddingShardingPlanner", EmbeddingShardingPlanner, {
        "topology": maybe(TOPOLOGY), "batch_size": maybe(whole(4)),
        "storage_reservation": maybe(made(lambda: HeuristicalStorageReservation())),
        "constraints": maybe(CONSTRAINTS), "timeout_seconds": maybe(number(1.0, 0)),
        "pooling_stats": maybe(STATS), "batches_in_flight": whole(1),
        "estimator": maybe(Kind(lambda: None, _none)),
    }),
    *(
        Call(f"EmbeddingShardingPlanner.{name}", method(
            lambda: EmbeddingShardingPlanner(Topology(1, "cpu")), name), {
            "module": module(bags), "sharders": SHARDERS if name == "plan" else maybe(SHARDERS),
        })
        for name in ("plan", "collective_plan")
    ),
    Call("EmbeddingShardingPlanner.rate", method(
        lambda: EmbeddingShardingPlanner(Topology(1, "cpu")), "rate"), {
        "module": module(bags), "sharders": SHARDERS, "plan": made(plan),
    }),
    Call("FixedPercentageStorageReservation", FixedPercentageStorageReservation, {
        "percentage": number(0.1, 0, 1),
    }),
    Call("FixedPercentageStorageReservation.usable", method(
        lambda: FixedPercentageStorageReservation(0.1), "usable"), RESERVATION),
    Call("HeuristicalStorageReservation", HeuristicalStorageReservation, {
        "percentage": number(0.1, 0, 1), "parameter_multiplier": number(6.0, 0),
        "dense_tensor_estimate": maybe(whole(10, 0)),
    }),
    Call("HeuristicalStorageReservation.usable", method(
        lambda: HeuristicalStorageReservation(0.1), "usable"), RESERVATION),
    Call("PlannerError", PlannerError, {
        "message": text("no"), "error_type": member(PlannerErrorType.OTHER),
    }),
    Call("PoolingStats.from_batches", PoolingStats.from_batches, {
        "batches": many(lambda: [KJT.right()], KJT, 1),
    }),
    Call("tables_of", tables_of, {
        "module": module(bags), "sharders": SHARDERS, "constraints": CONSTRAINTS,
        "device": text("cpu"), "batch_size": whole(4), "pooling_stats": maybe(STATS),
    }),
    Call("read_tables", read_tables, {"path": path(lambda: _file(json.dumps({"tables": [
        {"name": "t", "rows": 10, "dim": 4, "optimizer": "SGD"}]})))}),
    # plans
    Call("ShardingPlan", ShardingPlan, {"plan": mapping(
        lambda: {"": table_plan()}, made(table_plan, dict))}),
    Call("ShardingPlan.get_plan_for_module", method(plan, "get_plan_for_module"), {
        "module_path": text(""),
    }),
    Call("ShardingPlan.to_json", method(plan, "to_json"), {"path": maybe(path(lambda: "p.json"))}),
    Call("ShardingPlan.from_json", ShardingPlan.from_json, {
        "source": path(lambda: _file(plan().to_json())),
    }, words={"source": ("Plan file",)}),
    Call("ParameterSharding", ParameterSharding, {
        "sharding_type": text("table_wise"), "compute_kernel": text("fused"),
        "ranks": maybe(wholes([0])),
        "sharding_spec": maybe(made(lambda: EnumerableShardingSpec(
            [ShardMetadata([0, 0], [10, 4], "rank:0/cpu")]))),
        "cache_params": maybe(Kind(lambda: None, lambda value: None if isinstance(
            value, CacheParams) else False)),
        "enforce_hbm": maybe(Kind(lambda: None, flag(True).is_legal)),
        "stochastic_rounding": maybe(flag(False)),
        "bounds_check_mode": maybe(member(BoundsCheckMode.FATAL)),
        "output_dtype": maybe(DTYPE), "key_value_params": anything(lambda: None),
    }),
    Call("ShardMetadata", ShardMetadata, SIZES | {"placement": anything(lambda: "rank:0/cpu")}),
    Call("EnumerableShardingSpec", EnumerableShardingSpec, {"shards": many(
        lambda: [ShardMetadata([0, 0], [10, 4], "rank:0/cpu")],
        made(lambda: ShardMetadata([0, 0], [10, 4])))}),
    Call("CacheParams", CacheParams, {
        "algorithm": anything(lambda: None), "load_factor": maybe(number(0.5, 0, 2)),
        "reserved_memory": maybe(number(1.0, is_finite=False)), "precision": anything(lambda: None),
        "prefetch_pipeline": maybe(flag(False)), "stats": anything(lambda: None),
    }),
    Call("compute_kernel_to_embedding_location", compute_kernel_to_embedding_location, {
        "compute_kernel": member(EmbeddingComputeKernel.FUSED),
    }),
    Call("layout_of_plan", layout_of_plan, {
        "module": module(bags), "plan": mapping(table_plan, made(lambda: table_plan()["t"])),
        "world_size": whole(1), "local_size": maybe(whole(1)),
    }),
    Call("traffic_of", traffic_of, SAMPLES),
    Call("plot_layout", plot_layout, SAMPLES),
    # generators
    _generator("table_wise", {
        "rank": whole(1, 0), "device": DEVICE_TYPE, "compute_kernel": KERNEL,
    }),
    _generator("row_wise", {
        "sizes_placement": maybe(Kind(lambda: ([6, 4], "cpu"), lambda value: None if isinstance(
            value, tuple) and len(value) == 2 else False)),
        "compute_kernel": KERNEL,
    }),
    Call("row_wise (buckets)", lambda **given: _apply(sharding_plan.row_wise(**given)), {
        "num_buckets": maybe(whole(5)),
    }),
    _generator("column_wise", {
        "ranks": maybe(wholes([0, 1], 0, 1)), "size_per_rank": maybe(wholes([4, 4], 0, 1)),
        "compute_kernel": KERNEL, "device_types": maybe(texts(["cpu", "cpu"], 1)),
    }),
    _generator("table_row_wise", {"host_index": whole(0, 0)}),
    _generator("table_column_wise", {"host_index": whole(0, 0)}),
    _generator("grid_shard", {"host_indexes": wholes([0], 0, 1)}),
    Call("apply_to_all", sharding_plan.apply_to_all, {
        "module": module(bags), "sharder": maybe(SHARDER),
        "parameter_sharding_generator": function(sharding_plan.row_wise()),
    }),
    Call("construct_module_sharding_plan", sharding_plan.construct_module_sharding_plan, {
        "module": module(bags), "sharder": maybe(SHARDER), "local_size": maybe(whole(1)),
        "per_param_sharding": mapping(
            lambda: {"t": sharding_plan.row_wise()}, function(sharding_plan.row_wise())),
        "world_size": maybe(whole(1)), "device_type": DEVICE_TYPE,
    }),
    Call("calculate_shard_sizes_and_offsets", sharding_plan.calculate_shard_sizes_and_offsets, {
        "tensor": tensor(lambda: torch.ones(10, 4)), "world_size": whole(2),
        "local_world_size": whole(2), "sharding_type": text("row_wise"),
        "col_wise_shard_dim": maybe(whole(4)), "num_buckets": maybe(Kind(
            lambda: None, whole(2).is_legal)),
        "device_memory_sizes": maybe(many(lambda: [1, 2], number(1, 0), 2)),
    }),
    Call("placement", sharding_plan.placement, {
        "compute_device": text("cpu"), "rank": whole(0, 0), "local_size": whole(1),
    }),
    Call("placement_helper", sharding_plan.placement_helper, {
        "device_type": text("cpu"), "index": whole(0, 0), "rank": whole(0, 0),
    }),
]  # fmt: skip
