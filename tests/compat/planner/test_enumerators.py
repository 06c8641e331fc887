from __future__ import annotations

import pytest
import torch

from recsys.compat.planner.enumerators import (
    GUARDED_COMPUTE_KERNELS,
    GUARDED_SHARDING_TYPES_FOR_FP_MODULES,
    EmbeddingEnumerator,
    get_partition_by_type,
)
from recsys.compat.planner.shard_estimators import EmbeddingStorageEstimator
from recsys.compat.planner.topology import Topology
from recsys.compat.planner.types import PartitionByType, ShardingOption
from recsys.distributed.default_sharders import get_default_sharders
from recsys.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
)
from recsys.distributed.types import CacheParams, EmbeddingComputeKernel, ShardingType
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import PositionWeightedModule
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

META = torch.device("meta")
MACHINE = Topology(4, "cuda", local_world_size=2, hbm_cap=1 << 30, ddr_cap=1 << 30)


def bags(is_weighted: bool = False) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(100 * (i + 1), 256, f"t{i}", feature_names=[f"f{i}", f"g{i}"])
        for i in range(2)
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted, device=META)


def options_of(module: torch.nn.Module, **demands: object) -> list[ShardingOption]:
    constraints = {"t0": ParameterConstraints(**demands)} if demands else None  # type: ignore[arg-type]
    lister = EmbeddingEnumerator(MACHINE, 16, constraints)
    return [o for o in lister.enumerate(module, get_default_sharders()) if o.name == "t0"]


def test_all_types_are_listed_with_their_shards() -> None:
    found = options_of(torch.nn.Sequential(bags()))
    assert {o.sharding_type: o.num_shards for o in found} == {
        "data_parallel": 4,
        "table_wise": 1,
        "column_wise": 2,
        "table_column_wise": 2,
        "row_wise": 4,
        "table_row_wise": 2,
        "grid_shard": 4,
    }
    for option in found:
        assert (option.fqn, option.batch_size, option.is_pooled) == ("0.t0", 16, True)
        assert option.partition_by == get_partition_by_type(option.sharding_type)
        is_copy = option.sharding_type == "data_parallel"
        assert option.compute_kernel == ("dense" if is_copy else "fused")
        values = sum(rows * cols for rows, cols in (shard.size for shard in option.shards))
        assert values == 100 * 256 * (4 if is_copy else 1)
        assert option.total_storage.hbm >= 4 * values
        assert option.total_perf > 0


def test_what_constraints_say_is_in_the_options() -> None:
    [option] = options_of(
        bags(),
        sharding_types=["column_wise"],
        compute_kernels=["fused_uvm_caching"],
        min_partition=64,
        pooling_factors=[3.0, 5.0],
        num_poolings=[1.0, 2.0],
        is_weighted=True,
        cache_params=CacheParams(load_factor=0.5),
        bounds_check_mode=BoundsCheckMode.WARNING,
        feature_names=["f0", "g0"],
    )
    assert [shard.size for shard in option.shards] == [[100, 64]] * 4
    assert (option.input_lengths, option.num_poolings) == ([3.0, 5.0], [1.0, 2.0])
    assert (option.is_weighted, option.cache_load_factor) == (True, 0.5)
    assert option.bounds_check_mode is BoundsCheckMode.WARNING
    assert option.feature_names == ["f0", "g0"]
    assert option.total_storage.ddr >= 4 * 100 * 256


def test_guarded_kernels_and_types_are_listed_where_asked_for() -> None:
    names = {kernel.value for kernel in GUARDED_COMPUTE_KERNELS}
    assert not names & {option.compute_kernel for option in options_of(bags())}
    assert names == {o.compute_kernel for o in options_of(bags(), compute_kernels=sorted(names))}
    module = bags(is_weighted=True)
    features = [f for config in module.embedding_bag_configs() for f in config.feature_names]
    processed = FeatureProcessedEmbeddingBagCollection(
        module, {feature: PositionWeightedModule(3) for feature in features}
    )
    guarded = GUARDED_SHARDING_TYPES_FOR_FP_MODULES
    assert not guarded & {option.sharding_type for option in options_of(processed)}
    asked = options_of(processed, sharding_types=["row_wise"])
    assert [option.sharding_type for option in asked] == ["row_wise"]


def test_a_demand_that_nothing_meets() -> None:
    with pytest.raises(PlannerError, match=r"'t0' must have an option.*\['quant'\]") as raised:
        options_of(bags(), compute_kernels=["quant"])
    assert raised.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS


def test_what_it_remembers_and_who_estimates() -> None:
    lister = EmbeddingEnumerator(MACHINE, estimator=EmbeddingStorageEstimator(MACHINE))
    assert lister.last_stored_search_space is None
    table = EmbeddingConfig(10, 8, "s", feature_names=["f"])
    model = EmbeddingCollection(tables=[table], device=META)
    options = lister.enumerate(model, get_default_sharders())
    assert lister.last_stored_search_space == options
    assert {option.batch_size for option in options} == {512}
    assert not any(option.is_pooled for option in options)
    assert set(lister.sharder_map) >= {option.module_type_key for option in options}
    for shard in (shard for option in options for shard in option.shards):
        assert shard.storage is not None
        assert shard.perf is None, "nobody was asked for it"


def test_every_type_is_spread_in_some_way() -> None:
    found = {kind.value: get_partition_by_type(kind.value) for kind in ShardingType}
    assert set(found.values()) == {by.value for by in PartitionByType}
    assert found["grid_shard"] == "multi_host"
    assert EmbeddingComputeKernel.FUSED not in GUARDED_COMPUTE_KERNELS
    with pytest.raises(ValueError, match="nope"):
        get_partition_by_type("nope")
