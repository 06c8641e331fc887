"""Helpers for `fused_params`."""

from __future__ import annotations

import pytest
import torch

from recsys.compat.fused_params import (
    add_params_from_parameter_sharding,
    convert_to_fbgemm_types,
    merge_fused_params,
)
from recsys.distributed.types import (
    CacheParams,
    ParameterSharding,
)
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import DataType


def test_the_table_wins() -> None:
    of_sharder = {"learning_rate": 1.0, "eps": 2.0}
    assert merge_fused_params(of_sharder, {"eps": 3.0}) == {"learning_rate": 1.0, "eps": 3.0}
    assert merge_fused_params() == {}
    assert of_sharder["eps"] == 2.0


def test_what_a_plan_says_is_added_under_fbgemms_names() -> None:
    with pytest.warns(UserWarning, match="enforce_hbm"):
        sharding = ParameterSharding(
            "table_wise",
            "fused",
            cache_params=CacheParams(load_factor=0.1),
            enforce_hbm=True,
            stochastic_rounding=False,
            bounds_check_mode=BoundsCheckMode.IGNORE,
            output_dtype=torch.float32,
        )
    given = {"enforce_hbm": False}
    assert add_params_from_parameter_sharding(given, sharding) is given
    assert given == {
        "cache_load_factor": 0.1,
        "enforce_hbm": True,
        "stochastic_rounding": False,
        "bounds_check_mode": BoundsCheckMode.IGNORE,
        "output_dtype": torch.float32,
    }
    assert add_params_from_parameter_sharding(None, ParameterSharding("table_wise", "fused")) == {}


def test_element_types_become_fbgemms() -> None:
    sparse_type = pytest.importorskip("fbgemm_gpu.split_embedding_configs").SparseType
    given = {"cache_precision": DataType.INT8, "output_dtype": torch.float16, "eps": 1}
    assert convert_to_fbgemm_types(given) == {
        "cache_precision": sparse_type.INT8,
        "output_dtype": sparse_type.FP16,
        "eps": 1,
    }
