"""The cases that `make test` leaves to `make test SLOW=1`: over 5 s, beside a quick case each.

Measured on two cores that were otherwise in use. A case is slow by its id, or by its test's.
"""

from __future__ import annotations

import importlib

from tests.without_compat import HAS_COMPAT

PLANNER = "tests/distributed/planner"
LAYOUT_PLOT = "tests/distributed/placement/test_layout_plot.py"
NARROW_WIRES = (
    "tests/distributed/ranks/test_wire.py::test_tables_of_few_columns_travel_in_any_format"
)
TRACED = (
    "tests/modules/tables/test_traced.py::test_traced_and_compiled_models_train_like_the_eager_one"
)

CURVE = "tests/distributed/test_job.py::test_tables_that_move_on_the_way_continue_the_curve"

HASHED = "tests/kernels/hashed/test_native.py"

KILLED = "tests/datasets/test_table_reader.py::test_killed_jobs_read_each_row_once"

DELTAS = "tests/distributed/checkpoint/test_delta.py::test_base_and_deltas_are_the_full_checkpoint"

ATTENTION = "tests/kernels/test_attention_triton.py"
OVERFLOW = "tests/distributed/checkpoint/test_row_logs.py"
CORE_MODELS = "tests/inference/cpp/test_library.py::test_models_score_as_in_python"
CORE_RECOMMENDERS = (
    "tests/inference/cpp/test_library.py::test_recommenders_answer_with_the_values_of_python"
)

RULES = "tests/inference/cpp/test_rules.py::test_both_languages_follow_each_rule"

RECOMMENDERS = "tests/inference/packages/test_recommenders.py"

QUICK_CASE_OF: dict[str, str] = {
    f"{RECOMMENDERS}::test_answers_are_values": (
        f"{RECOMMENDERS}::test_outputs_name_their_vocabulary"
    ),
    "tests/docs/test_notebooks.py::test_the_introduction_runs_and_has_a_picture": (
        "tests/docs/test_notebooks.py::test_a_failed_cell_fails_the_command_and_is_in_the_notebook"
    ),
    f"{ATTENTION}::test_against_the_formula_in_36_cases": (
        f"{ATTENTION}::test_against_the_formula[0]"
    ),
    f"{ATTENTION}::test_history_targets_and_positions_in_several_blocks": (
        f"{ATTENTION}::test_against_the_formula[0]"
    ),
    f"{ATTENTION}::test_large_blocks_compile_for_a_gpu_without_one": (
        f"{ATTENTION}::test_they_compile_for_a_gpu_without_one[90]"
    ),
    f"{OVERFLOW}::test_killed_saves_leave_the_last_version": (
        f"{OVERFLOW}::test_a_full_disk_keeps_the_last_version"
    ),
    "tests/modules/ids/test_row_log.py::test_folders_go_with_their_process_or_with_the_next_log": (
        "tests/modules/ids/test_row_store.py::test_logs_go_with_the_model"
    ),
    **{
        f"tests/distributed/test_row_store.py::test_programs_equal_a_large_table[{name}-2]": (
            "tests/distributed/test_row_store.py::test_programs_equal_a_large_table[RowWiseAdagrad-1]"
        )
        for name in ("Adagrad", "Adam", "SGD")
    },
    "tests/distributed/test_row_store.py::test_a_checkpoint_loads_on_other_ranks[0]": (
        "tests/distributed/test_row_store.py::test_a_checkpoint_loads_on_other_ranks[1]"
    ),
    f"{KILLED}[0-1]": f"{KILLED}[2-1]",
    f"{KILLED}[0-3]": f"{KILLED}[2-1]",
    f"{KILLED}[2-2]": f"{KILLED}[2-1]",
    "tests/test_prepare.py::test_memory_is_bounded": "tests/test_prepare.py::test_command",
    "tests/datasets/test_tables.py::test_a_slow_consumer_holds_some_rows[csv]": (
        "tests/datasets/test_tables.py::test_a_slow_consumer_holds_some_rows[parquet]"
    ),
    "tests/kernels/hashed/test_build.py::test_a_wheel_with_the_library": (
        "tests/kernels/hashed/test_build.py::"
        "test_without_a_compiler_the_library_of_the_wheel_serves"
    ),
    f"{DELTAS}[hashed, row-wise Adagrad]": f"{DELTAS}[static, row-wise Adagrad]",
    f"{HASHED}::test_a_million_operations_equal_the_twin": (
        f"{HASHED}::test_a_group_of_tables_equals_the_twin"
    ),
    f"{HASHED}::test_many_ids_of_one_line_equal_the_twin[at least 2]": (
        f"{HASHED}::test_many_ids_of_one_line_equal_the_twin[lru]"
    ),
    f"{HASHED}::test_random_calls_under_sanitizers": (
        f"{HASHED}::test_digests_are_compared_alike_by_all_instructions"
    ),
    "tests/inference/cpp/test_library.py::test_raw_columns_score_as_in_python[]": (
        "tests/inference/cpp/test_columns.py::test_raw_columns_are_converted"
    ),
    "tests/inference/cpp/test_library.py::test_raw_columns_score_as_in_python[weighted]": (
        "tests/inference/cpp/test_columns.py::test_raw_columns_are_converted"
    ),
    **{
        f"{CORE_RECOMMENDERS}[{kind}]": (
            f"tests/inference/cpp/test_columns.py::test_recommended_rows_have_values[{kind}]"
        )
        for kind in ("texts", "numbers")
    },
    **{
        f"{CORE_MODELS}[{kind}]": (
            f"tests/inference/packages/test_models.py::test_a_program_equals_the_model[{quick}]"
        )
        for kind, quick in (("clicks", "din"), ("sequences", "hstu"), ("recurrent", "gru4rec"))
    },
    "tests/inference/cpp/test_columns.py::test_random_raw_columns_under_address_sanitizer": (
        f"{RULES}[A_column_has_values_of_its_type-core]"
    ),
    "tests/inference/cpp/test_library.py::test_versions_leave_no_memory_and_no_folder": (
        f"{RULES}[A_refused_version_leaves_the_current_one_in_service-core]"
    ),
    "tests/examples/test_own_data.py::test_ranks_agree_and_the_package_scores_as_the_model": (
        "tests/docs/test_tutorials.py::test_blocks_run_and_print_what_is_shown[docs/own_data.md]"
    ),
    "tests/examples/test_stream.py::test_a_click_changes_the_answer_of_a_server": (
        "tests/examples/test_stream.py::test_a_file_is_read_as_it_grows"
    ),
    "tests/examples/test_stream.py::test_a_job_goes_on_at_its_position": (
        "tests/examples/test_stream.py::test_ranks_share_a_file"
    ),
    "tests/inference/test_publisher.py::test_a_killed_publisher_leaves_the_state_of_a_step": (
        "tests/inference/test_publisher.py::test_a_predictor_follows_a_model_that_trains"
    ),
    "tests/inference/cpp/test_core.py::test_random_calls_under_address_sanitizer": (
        f"{RULES}[A_tensor_has_the_dtype_of_its_input-core]"
    ),
    "tests/inference/cpp/test_core.py::test_threads_under_thread_sanitizer": (
        f"{RULES}[Opening_a_version_applies_all_of_its_deltas_in_order-core]"
    ),
    "tests/inference/test_batch_sizes.py::test_packages_with_attention_serve_any_batch_size": (
        "tests/inference/test_batch_sizes.py::test_attention_serves_any_batch_size[example1]"
    ),
    "tests/inference/quant/test_saved.py::test_memory_holds_the_quantized_tables_and_a_block": (
        "tests/inference/quant/test_saved.py::test_a_checkpoint_equals_the_model[dtype0]"
    ),
    "tests/inference/test_triton_serving.py::test_a_compiled_hstu_recommends_as_in_python": (
        "tests/inference/packages/test_models.py::test_a_program_equals_the_model[hstu]"
    ),
    "tests/inference/test_triton_serving.py::test_versions_are_replaced_under_load": (
        "tests/inference/test_triton_serving.py::test_a_broken_version_is_refused"
    ),
    "tests/inference/test_programs.py::test_a_package_reads_what_it_is_given": (
        "tests/inference/test_programs.py::test_inputs_are_validated_before_the_compiled_code_reads_them"
    ),
    "tests/test_benchmarks.py::test_the_gpu_benchmark_runs": (
        "tests/test_benchmarks.py::test_ranks_that_are_not_there"
    ),
    "tests/distributed/test_job.py::test_two_nodes_have_the_losses_of_one_process": CURVE,
    "tests/distributed/test_job.py::test_a_job_that_loses_a_node_goes_on_with_the_other": CURVE,
    "tests/distributed/test_job.py::test_other_numbers_of_ranks_continue_the_curve": CURVE,
    "tests/examples/test_dlrm.py::test_a_killed_job_goes_on_and_ends_alike": (
        "tests/examples/test_dlrm.py::test_random_data_on_one_process"
    ),
    "tests/examples/test_dlrm.py::test_it_goes_on_from_its_last_save": (
        "tests/examples/test_dlrm.py::test_random_data_on_one_process"
    ),
    "tests/conformance/test_checkpoints.py::test_training_goes_on_under_another_plan": (
        "tests/distributed/checkpoint/test_load.py::test_loads_under_another_plan_and_world_size"
    ),
    "tests/conformance/test_matrix.py::test_sharded_models_equal_the_unsharded[2x2]": (
        "tests/conformance/test_matrix.py::test_sharded_models_equal_the_unsharded[2x1]"
    ),
    "tests/conformance/test_matrix.py::test_sharded_models_equal_the_unsharded[4]": (
        "tests/conformance/test_matrix.py::test_sharded_models_equal_the_unsharded[2]"
    ),
    "tests/distributed/checkpoint/test_save.py::test_killed_jobs_leave_the_last_version": (
        "tests/distributed/checkpoint/test_save.py::test_a_full_disk_leaves_the_version_before"
    ),
    f"{LAYOUT_PLOT}::test_draws_any_layout_alike_each_time[200-64-8]": (
        f"{LAYOUT_PLOT}::test_draws_any_layout_alike_each_time[3-4-2]"
    ),
    f"{PLANNER}/test_planners.py::TestMemory::test_no_rank_gets_more_than_it_has": (
        f"{PLANNER}/test_planners.py::TestMemory::test_tables_go_where_there_is_room"
    ),
    f"{PLANNER}/test_search.py::test_equals_brute_force": (
        f"{PLANNER}/test_exact.py::test_equals_brute_force"
    ),
    f"{PLANNER}/test_storage.py::test_all_bytes_of_ten_random_plans": (
        f"{PLANNER}/test_storage.py::test_a_grid_over_two_nodes"
    ),
    f"{PLANNER}/test_storage.py::test_buffers_of_every_kind_of_batch": (
        f"{PLANNER}/test_storage.py::test_a_grid_over_two_nodes"
    ),
    f"{PLANNER}/test_storage.py::test_weights_and_state_to_the_byte": (
        f"{PLANNER}/test_storage.py::test_a_grid_over_two_nodes"
    ),
    "tests/distributed/monitoring/test_watchdog.py::test_the_others_end_and_name_the_rank": (
        "tests/distributed/monitoring/test_watchdog.py::test_a_late_rank_is_named_by_one_that_waits"
    ),
    "tests/docs/test_tutorials.py::test_the_readme_runs_by_python_and_by_torchrun[2]": (
        "tests/docs/test_tutorials.py::test_tutorial_runs_as_a_job_of_several_processes[2]"
    ),
    "tests/docs/test_tutorials.py::test_the_readme_runs_by_python_and_by_torchrun[None]": (
        "tests/docs/test_tutorials.py::test_tutorial_runs_as_a_job_of_several_processes[1]"
    ),
    **{
        f"tests/examples/test_cpp.py::{case}": (
            "tests/examples/test_dlrm.py::test_random_data_on_one_process"
        )
        for case in (
            "test_bad_arguments_are_errors",
            "test_bad_batches_are_errors",
            "test_scores_are_those_of_python",
            "test_times_are_printed",
        )
    },
    "tests/examples/test_dlrm.py::test_a_full_disk_ends_it_in_a_few_lines": (
        "tests/examples/test_dlrm.py::test_random_data_on_one_process"
    ),
    **{
        f"tests/examples/test_dlrm.py::{case}": (
            "tests/examples/test_dlrm.py::test_random_data_on_one_process"
        )
        for case in (
            "test_criteo_files_on_two_processes",
            "test_prepared_criteo_files_on_two_processes",
        )
    },
    **{
        f"tests/training/test_ending.py::{case}": (
            "tests/training/test_ending.py::test_a_log_on_a_full_disk"
        )
        for case in (
            "test_a_bad_loss",
            "test_a_dead_rank",
            "test_a_full_disk",
            "test_a_loader_that_raises",
            "test_ctrl_c[2]",
        )
    },
    "tests/training/test_trainer.py::test_a_job_resumes_on_another_number_of_ranks": (
        "tests/training/test_batches.py::test_other_numbers_of_ranks"
    ),
    "tests/training/test_trainer.py::test_a_killed_job_ends_as_an_undisturbed_one": (
        "tests/training/test_trainer.py::test_a_resumed_job_equals_an_unbroken_one[1-state]"
    ),
    **{
        f"tests/examples/test_models.py::test_two_ranks_train_as_one[{family}]": (
            "tests/examples/test_models.py::test_every_task_learns_tastes[ple]"
        )
        for family in ("ctr", "multi_task")
    },
    "tests/examples/test_two_tower.py::test_likes_are_among_the_nearest[1]": (
        "tests/examples/test_two_tower.py::test_likes_are_among_the_nearest[0]"
    ),
    "tests/examples/test_two_tower.py::test_likes_are_among_the_nearest[2]": (
        "tests/examples/test_two_tower.py::test_likes_are_among_the_nearest[0]"
    ),
    "tests/metrics/test_sync.py::test_synced_equals_whole": (
        "tests/metrics/test_metric_module.py::test_sync_has_the_sums_of_all_ranks"
    ),
    "tests/modules/tables/test_eager.py::test_a_compiled_model_trains_like_the_plain_one"
    "[DistributedModelParallel-pooled]": (
        "tests/modules/tables/test_eager.py::test_a_compiled_model_trains_like_the_plain_one"
        "[DistributedModelParallel-sequence]"
    ),
    "tests/modules/tables/test_onnx_lookup.py::test_onnx_programs_give_equal_values": (
        "tests/modules/tables/test_onnx_lookup.py::test_they_find_what_the_operation_finds"
    ),
    f"{TRACED}[inductor-position weights]": f"{TRACED}[compile-position weights]",
    "tests/modules/tables/test_embedding_tables.py::"
    "test_shared_memory_is_shared_with_another_process": (
        "tests/modules/tables/test_embedding_tables.py::test_pickle_carries_each_table_once"
    ),
    "tests/test_ranks.py::test_a_rank_that_hangs_is_named_with_its_stack": (
        "tests/test_ranks.py::test_a_rank_that_fails_is_named_with_its_traceback"
    ),
    "tests/distributed/checkpoint/test_torchrec_names.py::"
    "test_what_torchrec_saved_loads_under_another_plan": (
        "tests/distributed/checkpoint/test_torchrec_names.py::test_missing_steps_of_adam_are_named"
    ),
    **{
        f"tests/distributed/test_sharding.py::test_tables_of_1_to_3_columns[{optimizer}]": (
            "tests/distributed/test_sharding.py::test_tables_of_1_to_3_columns[LAMB]"
        )
        for optimizer in ("Adagrad", "Adam", "PartialRowWiseAdam", "RowWiseAdagrad", "SGD")
    },
    **{
        f"{NARROW_WIRES}[{kind}-{wire}]": (f"{NARROW_WIRES}[{kind}-int8]")
        for kind in ("pooled", "sequence")
        for wire in ("bf16", "fp16", "fp8")
    },
}
"""Each slow case, or test, and a quick one of the same stage and strategy that stays."""

if HAS_COMPAT:
    QUICK_CASE_OF |= importlib.import_module("tests.compat.slow").QUICK_CASE_OF


def is_slow(nodeid: str) -> bool:
    """Return True if a case is left to the slow tier."""
    return nodeid in QUICK_CASE_OF or nodeid.partition("[")[0] in QUICK_CASE_OF
