"""Variants of DLRM that only TorchRec scripts use pass the tests of the other models."""

import numpy as np
import pytest
from torch import nn

from recsys.compat.dlrm_variants import DLRM_Projection, InteractionProjectionArch
from tests.compat.again import again
from tests.modules import test_dense_inputs as dense_inputs
from tests.modules import test_dlrm_variants as variants
from tests.modules.test_dlrm_variants import DIM, collection, formula_of, mlp


def projection(tables, dense=5, **more):
    return DLRM_Projection(tables, dense, [8, DIM], [8, 1], [6, 2 * DIM], [7, 3 * DIM], **more)


def projected(state, prefix, flat, dense):
    first = mlp(state, f"{prefix}.interaction_branch1.model", flat).reshape(2, DIM)
    second = mlp(state, f"{prefix}.interaction_branch2.model", flat).reshape(DIM, 3)
    return np.concatenate([dense, (first @ second).reshape(-1)])


FORMULA = formula_of(lambda state, flat, dense: projected(state, "inter_arch", flat, dense))
PARTS = {"dense_arch", "inter_arch", "over_arch"}
BUILD = {"projection": projection}
ARCH = {"projection": InteractionProjectionArch(2, nn.Linear(12, 8), nn.Linear(12, 4))}

test_follows_the_formula = again(
    variants.test_follows_the_formula, ("build", "formula"), {"projection": (projection, FORMULA)}
)
test_trains_an_empty_batch = again(variants.test_trains_an_empty_batch, "build", BUILD)
test_without_sparse_or_dense_features = again(
    variants.test_without_sparse_or_dense_features, "build", BUILD
)
test_dropout_and_batch_norm_reach_all_parts = again(
    variants.test_dropout_and_batch_norm_reach_all_parts,
    ("build", "parts"),
    {"projection": (projection, PARTS)},
)
test_interactions_script_and_trace = again(
    variants.test_interactions_script_and_trace, "arch", ARCH
)
test_no_part_is_made_in_vain = again(variants.test_no_part_is_made_in_vain, "build", BUILD)

DENSE = {
    "DLRM_Projection": lambda ebc: DLRM_Projection(ebc, dense_inputs.DENSE, [4], [4, 1], [4], [4])
}

test_a_bad_value = again(
    dense_inputs.test_a_bad_value_is_raised_before_a_table_learns, "build", DENSE
)
test_a_bad_label = again(
    dense_inputs.test_a_bad_label_is_raised_before_a_table_learns, "build", DENSE
)
test_another_number_of_columns = again(
    dense_inputs.test_another_number_of_columns_is_named, "build", DENSE
)
test_no_dense_features = again(
    dense_inputs.test_what_are_no_dense_features_is_named, "build", DENSE
)
test_on_a_gpu_a_bad_value_is_raised_with_the_next_batch = again(
    dense_inputs.test_on_a_gpu_it_is_raised_with_the_next_batch_and_tables_stay_finite,
    "build",
    DENSE,
)
test_compiled_whole_and_exported = again(
    dense_inputs.test_compiled_whole_and_exported, "build", DENSE
)


def test_state_dict_names_are_those_of_torchrec():
    names = [name for name in projection(collection()).state_dict() if "inter_arch" in name]
    assert names == [
        f"inter_arch.interaction_branch{branch}.model._mlp.{layer}._linear.{kind}"
        for branch in (1, 2)
        for layer in (0, 1)
        for kind in ("weight", "bias")
    ]


def test_projections_of_a_wrong_size():
    expected = r"last of interaction_branch2_layer_sizes must be a multiple .* 4; received \[6, 9\]"
    with pytest.raises(ValueError, match=expected):
        DLRM_Projection(collection(), 5, [8, DIM], [8, 1], [6, 8], [6, 9])
