from __future__ import annotations

import pytest
import torch
from torch import nn

from recsys.compat.planner.enumerators import EmbeddingEnumerator
from recsys.compat.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
    build_sharder_data_map,
    calculate_shard_storages,
)
from recsys.compat.planner.topology import Storage, Topology
from recsys.compat.planner.types import Shard, SharderData, ShardingOption, get_num_poolings
from recsys.compat.planner.values import PipelineType
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.planner.costs import CostModel
from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.storage import StorageModel
from recsys.distributed.planner.tables import ShardSpec
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.ranks.wire import CommType, QCommsConfig, get_qcomm_codecs_registry
from recsys.distributed.types import EmbeddingComputeKernel
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection

MACHINE = Topology(4, "cuda", local_world_size=2, hbm_cap=1 << 30, ddr_cap=1 << 30)
TABLES = [EmbeddingBagConfig(100, 256, "t", feature_names=["f", "g"])]
MODEL = EmbeddingBagCollection(tables=TABLES, device=torch.device("meta"))
SHARDER = EmbeddingBagCollectionSharder(
    fused_params={"optimizer": "ADAM", "learning_rate": 0.1},
    qcomm_codecs_registry=get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16)),
)
DEMANDS = {"t": ParameterConstraints(pooling_factors=[3.0, 5.0], num_poolings=[1.0, 2.0])}
FUSED = EmbeddingComputeKernel.FUSED


def options() -> dict[str, ShardingOption]:
    found = EmbeddingEnumerator(MACHINE, 16, DEMANDS).enumerate(MODEL, [SHARDER])
    return {option.sharding_type: option for option in found}


def test_numbers_are_those_of_the_planner() -> None:
    [table] = tables_of(MODEL, [SHARDER], DEMANDS, "cuda", batch_size=16)
    costs, storage = CostModel(MACHINE, 16), StorageModel(MACHINE, 16)
    found = options()
    for kind, part in (
        ("table_wise", ShardSpec(100, 256, FUSED)),
        ("column_wise", ShardSpec(100, 128, FUSED)),
        ("row_wise", ShardSpec(25, 256, FUSED, row_parts=4)),
        ("grid_shard", ShardSpec(50, 128, FUSED, in_node=True, row_parts=2)),
    ):
        cost = costs.shard_cost(table, part)
        size = storage.shard_storage(table, part).total
        for shard in found[kind].shards:
            assert shard.perf is not None
            assert shard.perf.total == pytest.approx(cost.total)
            parts = shard.perf.fwd_compute, shard.perf.bwd_compute, shard.perf.input_dist_comms
            assert parts == (cost.forward, cost.backward, cost.input)
            sent = shard.perf.bwd_comms - cost.update  # 2 bytes a value there, 4 back
            assert shard.perf.fwd_comms * 2 == pytest.approx(sent)
            assert shard.storage == Storage(hbm=size.device, ddr=size.host)
    copy, shard = costs.replica_cost(table, FUSED), found["data_parallel"].shards[3]
    assert shard.perf is not None
    assert shard.perf.total == pytest.approx(copy.total)
    assert found["data_parallel"].num_shards == 4


def test_an_option_may_say_other_traffic_than_its_table() -> None:
    few, many = options()["table_wise"], options()["table_wise"]
    many.input_lengths = [30.0, 50.0]
    EmbeddingPerfEstimator(MACHINE).estimate([few, many], build_sharder_data_map({}))
    assert few.shards[0].perf is not None
    assert many.shards[0].perf is not None
    ratio = many.shards[0].perf.fwd_compute / few.shards[0].perf.fwd_compute
    assert ratio == pytest.approx(10)


def test_an_empty_shard_costs_nothing() -> None:
    option = options()["row_wise"]
    option.shards.append(Shard([0, 256], [100, 0]))
    data = build_sharder_data_map({option.module_type_key: SHARDER})
    EmbeddingPerfEstimator(MACHINE).estimate([option], data)
    EmbeddingStorageEstimator(MACHINE).estimate([option], data)
    empty = option.shards[-1]
    assert empty.perf is not None
    assert (empty.perf.total, empty.storage) == (0.0, Storage(0, 0))


def test_inference_neither_trains_nor_sends_gradients() -> None:
    [table] = [options()["table_wise"]]
    data = build_sharder_data_map({table.module_type_key: SHARDER})
    trained = table.shards[0].storage
    assert trained is not None
    EmbeddingPerfEstimator(MACHINE, is_inference=True).estimate([table], data)
    EmbeddingStorageEstimator(MACHINE, is_inference=True).estimate([table], data)
    [served] = table.shards
    assert served.perf is not None
    assert served.storage is not None
    assert (served.perf.bwd_compute, served.perf.bwd_comms) == (0.0, 0.0)
    assert served.perf.fwd_comms > 0
    states = 2 * 4 * 100 * 256  # of Adam
    assert trained.hbm - served.storage.hbm >= states


def test_a_pipeline_holds_more_batches() -> None:
    found = []
    for pipeline in (PipelineType.NONE, PipelineType.TRAIN_SPARSE_DIST):
        option = options()["table_wise"]
        EmbeddingStorageEstimator(MACHINE, DEMANDS, pipeline).estimate([option], {})
        found.append(option.total_storage.hbm)
    ids, bags = 4 * 16 * (3.0 + 2 * 5.0), 4 * 16 * 2 * 2
    assert found[1] - found[0] == ids * 4 + 2 * bags * 4


def test_on_a_cpu_all_memory_is_of_the_host() -> None:
    machine = Topology(1, "cpu", ddr_cap=1 << 30)
    option = EmbeddingEnumerator(machine).enumerate(MODEL, [SHARDER])[0]
    assert option.total_storage.hbm == 0
    assert option.total_storage.ddr >= 4 * 100 * 256


def test_a_module_needs_a_sharder() -> None:
    shards = [Shard([1, 1], [0, 0])]
    option = ShardingOption(
        "t", torch.empty(1, 1), ("", nn.Identity()), [1.0], 8, "table_wise", "device", "fused",
        shards,
    )  # fmt: skip
    with pytest.raises(ValueError, match="received a Identity"):
        EmbeddingPerfEstimator(MACHINE).estimate([option], {})


def test_storage_of_shards_without_a_module() -> None:
    option = options()["row_wise"]
    data = build_sharder_data_map({option.module_type_key: SHARDER})[option.module_type_key]
    sizes = [shard.size for shard in option.shards]
    found = calculate_shard_storages(
        data, "row_wise", option.tensor, "cuda", "fused", sizes, [16, 16], 4, 2,
        [3.0, 5.0], [1.0, 2.0], 0.2, True,
    )  # fmt: skip
    assert found == [shard.storage for shard in option.shards]
    cached = calculate_shard_storages(
        SharderData(), "table_wise", torch.empty(100, 256), "cuda", "fused_uvm_caching",
        [[100, 256]], [16], 4, 2, [1.0], [1.0], 0.5, True,
    )  # fmt: skip
    assert cached[0].ddr >= 4 * 100 * 256
    assert cached[0].hbm >= 4 * 50 * 256


def test_poolings_are_the_options_then_the_constraints() -> None:
    option = options()["table_wise"]
    assert get_num_poolings(None, option) == [1.0, 2.0]
    option.num_poolings = None
    assert get_num_poolings(None, option) == [1.0, 1.0]
    assert get_num_poolings({"u": ParameterConstraints()}, option) == [1.0, 1.0]
    assert get_num_poolings(DEMANDS, option) == [1.0, 2.0]


def test_what_estimators_know_of_sharders() -> None:
    [data] = build_sharder_data_map({"x": SHARDER}).values()
    assert data.fused_params == SHARDER.fused_params
    assert data.qcomm_dtype_sizes["POOLED_EMBEDDINGS_ALL_TO_ALL"] == (2, 4)
    plain = build_sharder_data_map({"x": EmbeddingBagCollectionSharder()})
    assert (plain["x"].fused_params, plain["x"].qcomm_dtype_sizes) == ({}, {})
