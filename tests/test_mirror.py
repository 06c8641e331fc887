"""tests/ mirrors recsys/: who looks for the tests of a file finds them, and the other way round."""

from __future__ import annotations

import ast
from pathlib import Path

import recsys
from tests.without_compat import HAS_COMPAT

SOURCE = Path(recsys.__file__).parent
TESTS = Path(__file__).parent

# Test files about more than one source file, or about the tests' own tools.
BROAD = {
    "datasets/test_workers.py",
    "inference/cpp/test_manifests.py",
    "inference/packages/test_models.py",
    "inference/packages/test_recommenders.py",
    "modules/ctr/test_sharded.py",
    "features/test_engines.py",
    "features/test_containers.py",
    "features/test_hostile.py",
    "features/test_kinds.py",
    "features/test_optional.py",
    "features/test_new_kind.py",
    "features/test_separators.py",
    "distributed/checkpoint/test_values_hashed.py",
    "distributed/test_hashed_ids.py",
    "distributed/test_hashed_programs.py",
    "distributed/test_job.py",
    "distributed/test_row_store.py",
    "distributed/planner/test_report.py",
    "distributed/planner/test_shard_estimators.py",
    "distributed/test_device_reads.py",
    "distributed/test_sharding.py",
    "distributed/train_pipeline/test_structures.py",
    "distributed/test_step_cost.py",
    "inference/quant/test_saved.py",
    "inference/test_bad_ids.py",
    "inference/test_triton_serving.py",
    "metrics/test_every_metric.py",
    "optim/test_closures.py",
    "metrics/test_sync.py",
    "inference/cpp/test_columns.py",
    "inference/cpp/test_core.py",
    "inference/cpp/test_library.py",
    "inference/cpp/test_rules.py",
    "training/test_other_ranks.py",
    "test_addresses.py",
    "test_bad_input.py",
    "test_benchmarks.py",
    "test_docstrings.py",
    "test_imports_one_way.py",
    "test_lean_import.py",
    "test_messages.py",
    "test_mirror.py",
    "test_prepare_parts.py",
    "test_public_surface.py",
    "test_ranks.py",
    "test_slow.py",
}

# Source files with public names that are tested through what uses them.
TESTED_THROUGH = {
    "datasets/epoch_windows.py": "datasets/test_table_reader.py",
    "datasets/memory.py": "datasets/test_tables.py",
    "datasets/selection.py": "datasets/test_readers.py",
    "features/arrow.py": "features/test_containers.py",
    "features/counts.py": "features/test_vocabulary.py",
    "features/fingerprints.py": "features/test_extend.py",
    "features/profiles.py": "features/test_extend.py",
    "inference/deletion/values.py": "inference/deletion/test_forget.py",
    "inference/records/rows.py": "inference/records/test_recorder.py",
    "inference/records/settings.py": "inference/records/test_recorder.py",
    "inference/gate/report.py": "inference/gate/test_rules.py",
    "inference/gate/scored.py": "inference/gate/test_rules.py",
    "inference/gate/segments.py": "inference/gate/test_rules.py",
    "inference/gate/versions.py": "inference/gate/test_rules.py",
    "modules/tables/fingerprints.py": "distributed/checkpoint/test_values.py",
    "features/id_columns.py": "features/test_spec.py",
    "features/numeric.py": "features/test_scaling.py",
    "features/transform.py": "features/test_spec.py",
    "distributed/checkpoint/manifest_rules.py": "inference/packages/test_manifest_rules.py",
    "inference/packages/check.py": "inference/packages/test_writer.py",
    "inference/packages/describe.py": "inference/packages/test_writer.py",
    "inference/packages/load.py": "inference/packages/test_writer.py",
    "inference/packages/manifest.py": "inference/packages/test_writer.py",
    "inference/packages/mapping.py": "inference/packages/test_writer.py",
    "inference/packages/predictor.py": "inference/packages/test_writer.py",
    "inference/packages/safetensors.py": "inference/packages/test_writer.py",
    "inference/packages/columns.py": "inference/cpp/test_columns.py",
    "inference/packages/library.py": "inference/cpp/test_core.py",
    "inference/packages/requests.py": "inference/cpp/test_core.py",
    "inference/packages/command.py": "test_main.py",
    "modules/ids/rows.py": "modules/ids/test_hashed_group.py",
    "modules/ids/table_index.py": "modules/ids/test_hashed_group.py",
    "training/job.py": "training/test_trainer.py",
    "distributed/train_pipeline/batches.py": "distributed/train_pipeline/test_even_batches.py",
    "distributed/train_pipeline/context.py": "distributed/train_pipeline/test_pipelines.py",
    "distributed/sharded/collection_stages.py": "distributed/sharded/test_collection.py",
    "distributed/sharded/table_options.py": "distributed/sharded/test_collection.py",
    "distributed/sharded/devices.py": "distributed/ranks/test_build_transaction.py",
    "distributed/state/moves.py": "distributed/sharded/test_reshard.py",
    "base/findings.py": "test_doctor.py",
    "base/contact.py": "distributed/ranks/test_comm.py",
    "base/lazy.py": "test_public_surface.py",
    "optim/table_gradients.py": "optim/test_clipping.py",
    "distributed/ranks/agreement.py": "distributed/ranks/test_build_transaction.py",
    "distributed/stages/bags.py": "distributed/stages/test_input_dist.py",
    "distributed/stages/faults.py": "distributed/stages/test_input_dist.py",
    "distributed/stages/streams.py": "distributed/stages/test_header.py",
    "distributed/checkpoint/errors.py": "distributed/checkpoint/test_load.py",
    "distributed/checkpoint/state.py": "distributed/checkpoint/test_load.py",
    "distributed/placement/plan.py": "distributed/test_types.py",
    "distributed/placement/shard_sizes.py": "distributed/test_sharding_plan.py",
    "distributed/ranks/stop.py": "distributed/monitoring/test_preemption.py",
    "distributed/ranks/env.py": "distributed/test_types.py",
    "distributed/ranks/exchanges.py": "distributed/monitoring/test_step_report.py",
    "distributed/sharded/sharder.py": "distributed/test_types.py",
    "distributed/placement/file_checks.py": "distributed/placement/test_plan_json.py",
    "distributed/stages/routes.py": "distributed/stages/test_input_dist.py",
    "distributed/planner/agreement.py": "distributed/planner/test_planners.py",
    "distributed/planner/report_rows.py": "distributed/planner/test_report.py",
    "distributed/planner/options.py": "distributed/planner/test_option_lister.py",
    "distributed/planner/plan_cost.py": "distributed/planner/test_rating.py",
    "distributed/planner/formatting.py": "distributed/planner/test_report.py",
    "distributed/state/row_updates.py": "distributed/state/test_fused_optimizer.py",
    "distributed/stages/exchanged_rows.py": "distributed/stages/test_output_dist.py",
    "distributed/stages/node_hop.py": "distributed/stages/test_output_dist.py",
    "distributed/stages/pool_rows.py": "distributed/test_object_pools.py",
    "distributed/stages/sequence_dist.py": "distributed/stages/test_output_dist.py",
    "inference/batch_checks.py": "inference/test_quantize.py",
    "inference/packages/delta_files.py": "inference/packages/test_deltas.py",
    "inference/quant/collection.py": "inference/quant/test_modules.py",
    "inference/quant/rows.py": "inference/test_shard.py",
    "inference/quant/lookup.py": "inference/quant/test_modules.py",
    "inference/quant/options.py": "inference/test_quant_prep.py",
    "kernels/attention_blocks.py": "kernels/test_attention.py",
    "kernels/attention_grad_triton.py": "kernels/test_attention_triton.py",
    "kernels/attention_rules.py": "kernels/test_attention.py",
    "kernels/backend.py": "kernels/test_support.py",
    "kernels/deferred.py": "kernels/test_tbe.py",
    "kernels/lookup_batch.py": "kernels/test_tbe.py",
    "kernels/quantized_lookup.py": "kernels/test_quantized.py",
    "kernels/row_gradients.py": "kernels/test_tbe.py",
    "kernels/tbe_fbgemm.py": "kernels/test_tbe.py",
    "kernels/tbe_layout.py": "kernels/test_tbe.py",
    "kernels/tbe_torch.py": "kernels/test_tbe.py",
    "kernels/update_rules.py": "kernels/test_row_update.py",
    "metrics/accumulators.py": "metrics/test_metric_module.py",
    "metrics/batch.py": "metrics/test_rec_metric.py",
    "metrics/option_sums.py": "metrics/test_sum_metrics.py",
    "metrics/sums.py": "metrics/test_sync.py",
    "modules/activation.py": "modules/test_mlp.py",
    "modules/tables/embedding_inputs.py": "modules/test_embedding_bag_collection.py",
    "modules/embedding_interfaces.py": "modules/test_embedding_collection.py",
    "modules/tables/embedding_table.py": "modules/tables/test_embedding_tables.py",
    "modules/row_pool.py": "modules/test_object_pools.py",
    "modules/tables/table_lookups.py": "modules/tables/test_embedding_tables.py",
    "sparse/keyed_bags.py": "sparse/test_keyed_jagged.py",
}

if HAS_COMPAT:
    BROAD |= {
        "compat/test_answers.py",
        "compat/test_facts.py",
        "compat/test_own_pipeline.py",
        "compat/test_script_modules.py",
        "compat/test_scripts.py",
        "compat/test_spec.py",
        "compat/test_tutorial.py",
    }
    TESTED_THROUGH |= {
        "compat/__main__.py": "compat/test_torchrec.py",
        "compat/criteo_scripts.py": "compat/test_answers.py",
        "compat/decisions.py": "compat/test_answers.py",
        "compat/features_as_rows.py": "compat/test_managed_embeddings.py",
        "compat/metrics.py": "compat/test_answers.py",
        "compat/planner/annotations.py": "compat/test_answers.py",
        "compat/returned_rows.py": "compat/test_managed_embeddings.py",
        "compat/testing.py": "compat/test_answers.py",
    }


def mirror_of(source: str) -> str:
    folder, _, name = source.rpartition("/")
    return f"{folder}/test_{name}".replace("__", "").lstrip("/")


def sources_with_public_names() -> list[str]:
    return [
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "__init__.py"
        and any(
            isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
            for node in ast.parse(path.read_text()).body
        )
    ]


def test_every_test_file_has_a_source_file() -> None:
    tests = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}
    about_one_file = {mirror_of(str(path.relative_to(SOURCE))) for path in SOURCE.rglob("*.py")}
    folders = ("conformance", "docs", "examples", "fuzz", "gpu", "mutants", "parity", "second_day")
    elsewhere = {t for t in tests if t.partition("/")[0] in folders}
    assert sorted(tests - about_one_file - BROAD - elsewhere) == []
    assert sorted(BROAD - tests) == []


def test_every_source_file_has_a_test_file() -> None:
    missing = [
        source
        for source in sources_with_public_names()
        if not (TESTS / mirror_of(source)).exists() and source not in TESTED_THROUGH
    ]
    assert missing == [], "add the test file, or say in TESTED_THROUGH which one covers it"


def test_exemptions_are_needed_and_true() -> None:
    for source, test in TESTED_THROUGH.items():
        assert (SOURCE / source).exists(), source
        assert (TESTS / test).exists(), test
        assert not (TESTS / mirror_of(source)).exists(), f"{source} has its own test by now"
