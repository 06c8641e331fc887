"""Slow cases of `tests/compat` and `tests/parity`, as in `tests/slow.py`."""

from __future__ import annotations

COMPAT = "tests/compat"
MANAGED = f"{COMPAT}/test_managed_embeddings.py::test_they_train_as_plain_collections_in_other_ways"

QUICK_CASE_OF: dict[str, str] = {
    f"{MANAGED}[two nodes]": f"{MANAGED}[weighted]",
    f"{MANAGED}[three ranks]": f"{MANAGED}[own batch sizes]",
    f"{COMPAT}/test_own_pipeline.py::test_it_trains_as_in_torchrec": (
        f"{COMPAT}/test_own_pipeline.py::test_it_trains_as_without_the_pipeline"
    ),
    f"{COMPAT}/planner/test_partitioners.py::test_ranks_are_those_of_torchrec": (
        f"{COMPAT}/planner/test_partitioners.py::test_it_asks_for_estimates"
    ),
    f"{COMPAT}/planner/test_planners.py::TestParts::test_they_make_these_plans": (
        f"{COMPAT}/planner/test_planners.py::TestParts::test_a_model_runs_under_the_plan"
    ),
    f"{COMPAT}/planner/test_planners.py::TestParts::test_torchrec_makes_the_same": (
        f"{COMPAT}/planner/test_planners.py::TestParts::test_a_model_runs_under_the_plan"
    ),
    f"{COMPAT}/test_scripts.py::test_it_prints_what_torchrec_printed": (
        f"{COMPAT}/test_scripts.py::test_it_imports_only_torch_and_torchrec"
    ),
    f"{COMPAT}/test_spec.py::test_a_document_is_run_under_both_names": (
        f"{COMPAT}/test_spec.py::test_paragraphs_of_a_page_without_blocks"
    ),
    f"{COMPAT}/test_torchrec.py::test_a_script_runs_with_two_more_lines": (
        f"{COMPAT}/test_torchrec.py::test_a_script_runs_unchanged"
    ),
    f"{COMPAT}/test_torchrec.py::test_the_snippets_of_the_guide_run": (
        f"{COMPAT}/test_torchrec.py::test_a_script_runs_unchanged"
    ),
    f"{COMPAT}/test_tutorial.py::test_the_introduction_does_what_it_shows": (
        "tests/docs/test_tutorials.py::test_blocks_run_and_print_what_is_shown"
    ),
    # TorchRec's own processes start with the first of these, which takes over a minute.
    **{
        f"tests/parity/{case}": (
            "tests/conformance/test_matrix.py::test_sharded_models_equal_the_unsharded[2]"
        )
        for case in (
            "test_checkpoints.py::test_outcomes",
            "test_training.py::test_lookups_are_alike",
            "test_training.py::test_nodes_are_alike",
            "test_training.py::test_strategies_train_alike",
        )
    },
}
