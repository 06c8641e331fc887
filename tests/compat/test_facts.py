"""Shared names have TorchRec's arguments, defaults and members, except for a list with reasons."""

from __future__ import annotations

import importlib
import re
import unittest
from collections.abc import Iterable, Iterator

from recsys.compat.table import home_of
from tests.compat.facts import (
    arguments_of,
    line_of,
    marked,
    ours_of,
    parameters_of,
    read_line,
    read_lines,
)
from tests.offenders import check_each

CRITEO_TEST = "torchrec.datasets.test_utils.criteo_test_utils.CriteoTest"
INNER = "belongs to the engine inside, which is another one: docs/engine.md"
HELD = "an attribute of the object, not of its class"
INDEX = "of TorchRec's index of ids, which is another one"
DIFFERENT = {
    r"EmbeddingCollection[.(]use_gather_select\w*\)?": (
        "how a lookup gathers is the kernel's choice"
    ),
    (
        r"(DistributedModelParallel|DMPCollection|ShardedModule|Sharded\w+Collection|"
        r"ShardedEmbeddingBag)\.write\w*"
    ): "writes rows into a key-value store",
    r"DistributedModelParallel\(model_tracker_configs\)": "raw ids are in the index of a table",
    (
        r"DMPCollection(Config)?[.(](sharding_strategy|ensure_reduce_scatter_complete|"
        r"rs_awaitable_hook_module)\)?"
    ): "sync() is the one way to average tables",
    r"DMPCollection\(use_sharded_relay\)": "the process group chooses how to all-reduce",
    r"(DistributedModelParallel|DMPCollection)\.(get_delta_tracker|init_torchrec_delta_tracker)": (
        "made of the model: ModelDeltaTrackerTrec(model)"
    ),
    r"\w+\.reshard\(sharded_module_fqn\)": "takes plans by module path",
    r"EmbeddingBagCollectionSharder\.reshard": "a sharded collection reshards itself",
    r"\w*Sharder\.storage_usage": "the planner knows the bytes",
    r"\w*Sharder\.sharded_module_type": "a sharder may return any module",
    r"(\w*Sharder|ShardedModule|Sharded\w+)\.qcomm_codecs_registry": HELD,
    r"CombinedOptimizer\.(param_groups|params|state)": HELD,
    r"(ModuleSharder|ShardedModule)\(qcomm_codecs_registry\)": (
        "of the sharders that exchange something"
    ),
    r"ShardedFeatureProcessedEmbeddingBagCollection\(\w*\)": (
        "its tables are sharded before it is made"
    ),
    r"\w+\(sharded_module_order_overwrite\)": "the order of outputs is the unsharded one, always",
    (
        r"ShardedModule\.(compute|compute_and_output_dist|create_context|input_dist|output_dist|"
        r"unsharded_module_type)"
    ): "of the sharded collections; a sharded module of a user's own may do without",
    r"(ShardedModule|Sharded\w+|ShardedEmbeddingBag)\.preprocess_input": (
        "input_dist takes what forward takes"
    ),
    r"(ShardedModule|Sharded\w+|ShardedEmbeddingBag)\.prefetch": (
        "FBGEMM's cache fetches rows when they are looked up"
    ),
    r"EmbeddingTower(Collection)?Sharder\.embedding_\w+": (
        "it shards the collections in towers, each as one by itself"
    ),
    (
        r"(Sharded\w+Collection|ShardedEmbeddingBag)\.(create_\w+|init_data_parallel|register_\w+|"
        r"reset_parameters|shardings|extend_shard_name|update_shards|add_fp_params\w+|"
        r"apply_feature\w+)"
    ): INNER,
    r"ShardingEnv\(output_dtensor\)": "state dicts hold ShardedTable",
    r"(QCommsConfig|CommType)[.(](fp8_output_dtype|mx4_\w+|output_dtype)\)?": (
        "no MX4 wire; fp8 arrives as fp32"
    ),
    r"DefaultDataParallelWrapper\(static_graph\)": "a model may leave dense parts unused",
    r"DefaultDataParallelWrapper\((allreduce_comm_precision|ddp_kwargs)\)": (
        "pass a wrapper of your own"
    ),
    r"EmbeddingShardingPlanner\(plan_loader\)": (
        "plans are saved, loaded and reported: docs/planner.md"
    ),
    r"EmbeddingPlannerBase\(heuristical_storage_reservation_percentage\)": (
        "pass storage_reservation=HeuristicalStorageReservation(percentage)"
    ),
    (
        r"EmbeddingPerfEstimatorFactory\.create\w*\(use_\w+\)|PerfCoefficientConfig"
        r"(\.get_coefficients)?[.(](compute_kernel|by_kernel|weighted_\w+)\)?"
    ): "of TorchRec's formulas",
    r"Embedding(Sharding)?Planner(Base)?\.hash_planner_context_inputs\w*": (
        "ranks compare what they were asked for"
    ),
    r"Topology\(ssd_cap\)": "no table is on a disk",
    r"Topology\(\w+_(mem_bw|host_bw)\)": (
        "other machines are measured or taken by name: docs/planner.md"
    ),
    (
        r"Topology[.(](pod_size|\w*compute_multiplier|uneven_\w+|generalized_\w+|"
        r"created_by_factory|comms_bandwidths|intra_group_size)\)?"
    ): "costs are bytes over speeds: docs/decisions/planner.md",
    r"EmbeddingEnumerator\(use_exact_enumerate_order\)": "the order is always the same",
    r"calculate_shard_storages\(\w+\)|EmbeddingStorageEstimator\(run_embedding_\w+\)": (
        "the memory model counts a training step at its peak"
    ),
    (
        r"((?:HardwarePerf|EmbeddingPerfEstimator)Config|ShardPerfContext|EmbeddingPerfEstimator\w*)[.(](\w*coefficients\w*|"
        r"\w*compute_multiplier|\w*sharding_type\w*|use_\w+|intra_group_size|comms_bandwidths|"
        r"hash_size_for_clamping|cache_stats_\w+|expected_miss_rate|device_bw|"
        r"hbm_to_ddr_mem_bw)\)?"
    ): "of TorchRec's formulas; speeds that are not set are the machine's",
    r"ShardPerfContext\.build_shard_perf_contexts\(use_\w+\)": "of TorchRec's formulas",
    r"EnumerableShardingSpec\.(build_metadata|shard)": "of torch's ShardedTensor",
    r"ShardedTensor[.(]\w+(\(\w+)?\)?": "torch's class; ours is ShardedTable",
    (
        r"\w+Metric\.(LABELS|PREDICTIONS|WEIGHTS|clone_update_inputs|"
        r"load_state_dict_hook|state_dict_hook)"
    ): "of how states are held, which is another way",
    (
        r"RecMetricModule\.(async_compute|get_pre_compute_states|load_pre_compute_states|"
        r"load_state_dict_hook|shutdown)"
    ): "update is cheap enough to need no second process",
    (
        r"Sharded(Tensor|KeyedJaggedTensor)Pool\.(compute\w*|create_context|input_dist|"
        r"output_dist|write\w*)"
    ): "lookup exchanges ids and rows in one call",
    r"PositionWeightedModule\w*\.pre_process_input": INNER,
    r"KTRegroupAsDict[.(](multi_device|clear_cache|embedding_cast)\)?": (
        "regroups on the tensors' device, and keeps nothing"
    ),
    r"\w*Optimizer\w*\.(set_optimizer_step|update_hyper_parameters)": (
        "set param_groups, or use a scheduler"
    ),
    r"GradientClippingOptimizer\.last_total_grad_norm": "step returns what the optimizer does",
    r"KeyedOptimizerWrapper\(pass_params_dict\)": "the factory takes a list",
    r"(ManagedCollision)?Embedding(Bag)?CollectionContext[.(]\w*\)?": "made by create_context",
    (
        r"((MCH|HashZch)?ManagedCollisionModule|\w+_EvictionPolicy)\.\w+|"
        r"\w*ManagedCollision\w*Collection\.(lookup_\w+|sync_hash_zch_weights)"
    ): INDEX,
    r"ManagedCollisionModule\(\w*\)": "made by its two subclasses",
    r"ModelDeltaTracker(Trec)?\.(record_\w+|compact|get_latest|trigger_compaction)": (
        "a row has one mark, made by its update"
    ),
    r"ManagedCollisionCollectionSharder\.\w+": "tables are sharded with their ids",
    (
        r"BaseShardedManagedCollisionEmbeddingCollection\.(prefetch|preprocess_input|"
        r"qcomm_codecs_registry|register_\w+|shardings|write\w*)"
    ): INNER,
    (
        r"\w+Pipeline\w*\((enable_inplace_copy_batch|free_features_storage_early|"
        r"clear_data_dist_inputs|enqueue_batch_after_forward)\)"
    ): "a batch is kept until it was trained on, and read when its turn comes",
    r"\w+Pipeline\w*\((emb_lookup_stream|embedding_lookup_after_data_dist|strict)\)": (
        "the order of steps is fixed: docs/pipelines.md"
    ),
    r"\w+Pipeline\w*\(context_type\)": "there is one type",
    (
        r"\w+Pipeline\w*\.(attach|copy_batch_to_gpu|dequeue_batch|embedding_backward|"
        r"enqueue_batch|extract_model_input_from_batch|fill_pipeline|inplace_copy_batch_to_gpu|"
        r"register_backward_hook|start_\w+|wait_\w+|clear_\w+|sync_embeddings)(\(.+\))?"
    ): "progress does it all: docs/pipelines.md",
    r"GradientAccumulationWrapper\.(current_step|optimizer_wrapper)": "of how it is made there",
    r"Tracer[.(](extend_leaf_fqn|is_extended_leaf_modules)\)?": "pipelines here do not trace",
    r"TrainPipelineContext[.(]\w*\)?": "of the engine inside: docs/engine.md",
    (
        r"SparseDataDistUtil\.(data_exhausted_callback|load_prefetch|prefetch|"
        r"should_assert_context_invariants|wait_sdd_fill_callback)"
    ): "its stages need no more than docs/pipelines.md says",
    r"NoopEmbeddingStats\.log\(\w+\)": "takes what it is given",
    r"TowerQPSMetric\((warmup_steps|batch_size_stages)\)": "taken by keyword, as metrics' own are",
    r"(Recall|Precision)SessionMetric\(\)|TowerQPSMetric\(\)": "the order of all metrics",
    r"\w+(\.forward)?\(\*+\w+\)": "takes what it uses, by name",
    r"(MetricName|MetricNamespace|RecMetricEnum)\.[A-Z_]+": (
        "of metrics that are not here, or of none in TorchRec either"
    ),
    r"(EmbeddingComputeKernel|BoundsCheckMode|CommType)\.[A-Z0-9_]+": (
        "of kernels, checks and codecs that are not here"
    ),
    r"(DistributedModelParallel|DMPCollection)\.(load_state_dict\(prefix\)|state_dict\(\w+\))": (
        "a model's paths begin at the model"
    ),
    r"(DistributedModelParallel|DMPCollection)\.reshard\((changed_shard_to_params)?\)": (
        "takes plans by module path"
    ),
    r"ShardedEmbeddingBag\.load_state_dict\(strict\)": "all of its one table, or nothing",
    r"(BaseSharded|Sharded)\w+\.update": "writes rows into a key-value store",
    r"Embedding(Bag)?CollectionAwaitable\(\w*\)": "made by output_dist",
    r"FusedEmbeddingCollectionSharder\(\)": "it is EmbeddingCollectionSharder",
    r"EmbeddingPlannerBase\(\)": "it is EmbeddingShardingPlanner, which takes more",
    r"GreedyPerfPartitioner\.partition\(hbm_per_device\)": "the topology has it",
    r"sharder_name\(\w*\)|skip_if_asan_class\(\w*\)": "the one argument has another name",
    r"\w+Collection\.copy": "DistributedModelParallel.copy copies",
    r"\w*Optimizer\w*\.zero_grad\(set_to_none\)": "torch's default",
    r"RowWiseAdagrad\.share_memory": "no process shares the state of an optimizer",
}
"""Patterns of differing names, and the reasons."""


def differences(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields what differs from the lines of facts: a name, and how."""
    seen: set[str] = set()
    for line in lines:
        dotted, words = read_line(line)
        label = dotted.rpartition(".")[2]
        said = line.removeprefix(dotted.removesuffix(label))
        if said in seen:
            continue
        seen.add(said)
        home = home_of(*dotted.rpartition(".")[::2])
        assert home is not None, dotted
        ours = getattr(importlib.import_module(home.module), home.name)
        for word in words:
            name = f"{label}.{word.name}" if word.name else label
            not_ours = marked(word, ours).not_ours
            if word.name in not_ours:
                yield name, "is not here"
                continue
            if word.arguments is None:
                continue
            function = getattr(ours, word.name, None) if word.name else ours
            if not callable(function):
                yield name, "is not a function"
                continue
            own = arguments_of(function)
            for argument, default in word.arguments.items():
                if argument in not_ours:
                    yield f"{name}({argument})", "is not taken"
                elif default is not None and own[argument] != default:
                    how = f"is {own[argument] or 'required'}, there {default}"
                    yield f"{name}({argument})", how
            # what follows an argument that we do not take is keyword-only
            order = [p.name for p in parameters_of(function) if p.kind is p.POSITIONAL_OR_KEYWORD]
            theirs = (argument for argument in word.arguments if "*" not in argument)
            if any(a != b for a, b in zip(order, theirs, strict=False)):
                yield f"{name}()", f"has the order {' '.join(order)}"


def unexplained(lines: Iterable[str]) -> list[str]:
    """Return the differences from the lines of facts that have no reason."""
    return [
        f"{name} {how}"
        for name, how in differences(lines)
        if not any(re.fullmatch(pattern, name) for pattern in DIFFERENT)
    ]


def is_here(line: str) -> None:
    dotted, words = read_line(line)
    here = line_of(dotted, (marked(word, ours_of(dotted)) for word in words))
    assert here == line, "if it is meant so, run python -m tests.compat.facts"


def test_names_are_here_with_what_they_have() -> None:
    check_each(is_here, read_lines())


def test_what_differs_has_a_reason() -> None:
    assert unexplained(read_lines()) == []


def test_reasons_are_of_what_differs() -> None:
    names = [name for name, _ in differences(read_lines())]
    idle = [
        pattern for pattern in DIFFERENT if not any(re.fullmatch(pattern, name) for name in names)
    ]
    assert idle == []


def test_facts_cover_the_classes_that_users_build() -> None:
    assert issubclass(ours_of(CRITEO_TEST), unittest.TestCase)  # its members are not in the lines
    words = {line.split(" ")[0].rpartition(".")[2]: line for line in read_lines()}
    for name in (
        "DLRM", "DistributedModelParallel", "EmbeddingBagCollection", "EmbeddingBagConfig",
        "EmbeddingCollection", "JaggedTensor", "KeyedOptimizerWrapper", "Topology",
    ):  # fmt: skip
        assert re.search(r" \(\w", words[name]), name
    assert " .from_lengths_sync(keys,values,lengths," in words["KeyedJaggedTensor"]
    assert " .regroup(keyed_tensors,groups)" in words["KeyedTensor"]
    assert " .from_process_group(pg)" in words["ShardingEnv"]
