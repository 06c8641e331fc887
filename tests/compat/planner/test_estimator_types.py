from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from recsys.compat.planner.annotations import prefetch_coefficient
from recsys.compat.planner.estimator_types import (
    HardwarePerfConfig,
    PerfCoefficientConfig,
    PrefetchCoefficients,
    ShardPerfContext,
)
from recsys.compat.planner.shard_estimators import EmbeddingPerfEstimator
from recsys.compat.planner.topology import Perf, Topology
from recsys.compat.planner.types import Shard, SharderData, ShardingOption
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.types import CacheParams
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection

MACHINE = Topology(4, "cuda", hbm_cap=1 << 30, ddr_cap=1 << 30, local_world_size=2)
TABLES = [EmbeddingBagConfig(100, 16, "t", feature_names=["f", "g"])]
MODEL = EmbeddingBagCollection(tables=TABLES, device=torch.device("meta"))


class Slow(HardwarePerfConfig):
    name = "slow"
    hbm_mem_bw = MACHINE.hbm_mem_bw / 10
    inter_host_bw = 7.0


class Twice(HardwarePerfConfig):
    def post_process_perfs(
        self,
        shard_perfs: list[Perf],
        shard_sizes: list[list[int]],
        sharding_type: str,
        uneven_sharding_perf_multiplier: float = 1.0,
    ) -> list[Perf]:
        assert (shard_sizes, sharding_type) == ([[50, 16]] * 2, "row_wise")
        return [perf + perf for perf in shard_perfs]


def option(module: nn.Module = MODEL, kernel: str = "fused", **more: object) -> ShardingOption:
    shards = [Shard([50, 16], [0, 0]), Shard([50, 16], [50, 0])]
    weight = torch.empty(100, 16, device="meta")
    return ShardingOption(
        "t", weight, ("m", module), [3.0, 5.0], 8, "row_wise", "uniform", kernel, shards, **more
    )  # type: ignore[arg-type]


def test_a_config_changes_what_it_says() -> None:
    found = Slow().applied_to(MACHINE)
    assert (found.hbm_mem_bw, found.inter_host_bw) == (Slow.hbm_mem_bw, 7.0)
    assert found.intra_host_bw == MACHINE.intra_host_bw
    assert HardwarePerfConfig().applied_to(MACHINE) is MACHINE


def test_estimates_follow_the_config() -> None:
    as_is, slow = option(), option()
    EmbeddingPerfEstimator(MACHINE).estimate([as_is], {})
    EmbeddingPerfEstimator(MACHINE, config=Slow()).estimate([slow], {})
    for before, after in zip(as_is.shards, slow.shards, strict=True):
        assert before.perf is not None
        assert after.perf is not None
        assert after.perf.fwd_compute == pytest.approx(10 * before.perf.fwd_compute)
        assert after.perf.fwd_comms > before.perf.fwd_comms


def test_a_config_may_change_what_was_found() -> None:
    as_is, twice = option(), option()
    estimator = EmbeddingPerfEstimator(MACHINE, config=Twice(), is_inference=True)
    assert (type(estimator.config), estimator.is_inference) == (Twice, True)
    EmbeddingPerfEstimator(MACHINE, is_inference=True).estimate([as_is], {})
    estimator.estimate([twice], {})
    assert twice.total_perf == pytest.approx(2 * as_is.total_perf)


@pytest.mark.parametrize(
    ("device", "kernel", "cached", "expected"),
    [
        ("cuda", "fused", None, 100.0),
        ("cpu", "fused", None, 10.0),
        ("cuda", "fused_uvm", None, 5.0),
        ("cuda", "fused_uvm_caching", 0.5, 1 / (1 / 100 + 0.5 / 5)),
        ("cuda", "fused_uvm_caching", None, 1 / (1 / 100 + 0.8 / 5)),
    ],
)
def test_speed_of_a_kernel(device: str, kernel: str, cached: float | None, expected: float) -> None:
    found = HardwarePerfConfig().get_device_bw(device, kernel, 100.0, 10.0, 1.0, 5.0, cached)
    assert found == pytest.approx(expected)

    class Known(HardwarePerfConfig):
        kernel_device_bandwidths: ClassVar = {("cuda", "fused"): 3.0}
        device_bw = 2.0

    known = Known().get_device_bw(device, kernel, 100.0, 10.0, 1.0, 5.0, cached)
    assert known == (3.0 if (device, kernel) == ("cuda", "fused") else 2.0)


def test_contexts_say_a_shards_traffic() -> None:
    demands = {"t": ParameterConstraints(num_poolings=[1.0, 2.0], batch_sizes=[16, 32])}
    sent = {"POOLED_EMBEDDINGS_ALL_TO_ALL": (2.0, 1.0)}
    data = SharderData(qcomm_dtype_sizes=sent)
    first, second = ShardPerfContext.build_shard_perf_contexts(
        Slow(), [[60, 16], [40, 16]], option(), MACHINE, demands, data
    )
    assert [(c.hash_size, c.emb_dim) for c in (first, second)] == [(60, 16), (40, 16)]
    assert (first.batch_inputs, first.batch_outputs) == (3 * 16 + 5 * 2 * 32, 16 + 2 * 32)
    assert first.num_twrw_groups == 2
    assert (first.num_hosts, first.world_size, first.is_uvm_caching) == (2, 4, False)
    assert (first.fwd_a2a_comm_data_type_size, first.bwd_a2a_comm_data_type_size) == (2.0, 1.0)
    assert (first.fwd_sr_comm_data_type_size, first.table_data_type_size) == (4.0, 4.0)
    assert (first.device_bw, first.inter_host_bw) == (Slow.hbm_mem_bw, 7.0)


def test_contexts_without_constraints() -> None:
    cached = option(
        kernel="fused_uvm_caching", is_pooled=False, cache_params=CacheParams(load_factor=0.5)
    )
    [found] = ShardPerfContext.build_shard_perf_contexts(
        HardwarePerfConfig(), [[100, 16]], cached, MACHINE, None, SharderData(), is_inference=True
    )
    assert found.batch_sizes == [8, 8]
    assert found.batch_inputs == found.batch_outputs == 8 * (3 + 5)
    assert (found.caching_ratio, found.is_uvm_caching, found.is_inference) == (0.5, True, True)
    assert found.device_bw < MACHINE.hbm_to_ddr_mem_bw / 0.5


def test_prefetch_coefficients_count_ids_rows_and_bytes() -> None:
    class Fetching(HardwarePerfConfig):
        of = PrefetchCoefficients()

        @prefetch_coefficient()
        def of_caches(self) -> PrefetchCoefficients:
            return self.of

    def milliseconds(*coefficients: float, kernel: str = "fused_uvm_caching") -> float:
        config = Fetching()
        config.of = PrefetchCoefficients(*coefficients)
        with_cache = option(kernel=kernel, cache_params=CacheParams(load_factor=0.25))
        data = {with_cache.module_type_key: SharderData()}
        EmbeddingPerfEstimator(MACHINE, config=config).estimate([with_cache], data)
        assert with_cache.shards[0].perf is not None
        return with_cache.shards[0].perf.prefetch_compute

    ids = 8 * (3 + 5)  # a rank's ids; each of four ranks receives a fourth of them, from four ranks
    drawn = torch.randint(0, 50, (2000, ids), generator=torch.Generator().manual_seed(0))
    rows = sum(len(ids_of_batch.unique()) for ids_of_batch in drawn) / len(drawn)
    assert milliseconds(2.0, 0.0, 0.0) == 2 * ids
    assert milliseconds(0.0, 1.0, 0.0) == pytest.approx(rows, rel=0.01)
    assert milliseconds(0.0, 0.0, 1.0) == pytest.approx(0.75 * rows * 16 * 4, rel=0.01)
    assert milliseconds(1.0, 1.0, 1.0, kernel="fused") == 0.0
    by_table = PerfCoefficientConfig(prefetch=PrefetchCoefficients(2.0))
    config = HardwarePerfConfig()
    config.coefficients = by_table
    assert list(config.formulas_of("row_wise")) == [
        "fwd_compute",
        "prefetch_compute",
        "bwd_compute",
    ]
