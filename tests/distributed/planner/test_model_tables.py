"""Constraints and statistics of tables reach the planner, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.planner import ParameterConstraints, PlannerError, PoolingStats
from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.pooling_stats import FeatureStats, uniform_distinct
from recsys.distributed.planner.tables import PlannedTable, ShardSpec
from recsys.distributed.types import CacheParams, EmbeddingComputeKernel, ShardingType
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.hashed_ids import LFU, AtLeast, HashedIds
from recsys.optim import RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

META = torch.device("meta")
BATCH = 100
FUSED, UVM, CACHED = (
    EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.FUSED_UVM,
    EmbeddingComputeKernel.FUSED_UVM_CACHING,
)


def ebc(**features: list[str]) -> EmbeddingBagCollection:
    """Tables by name with their features."""
    tables = [EmbeddingBagConfig(1000, 64, name, feature_names=of) for name, of in features.items()]
    return EmbeddingBagCollection(tables=tables, device=META)


def tables(
    module: nn.Module,
    device: str = "cpu",
    stats: PoolingStats | None = None,
    **constraints: ParameterConstraints,
) -> dict[str, PlannedTable]:
    sharders = [EmbeddingBagCollectionSharder()]
    found = tables_of(module, sharders, constraints, device, batch_size=BATCH, pooling_stats=stats)
    return {f"{table.path}.{table.name}".lstrip("."): table for table in found}


def constrained(*features: str, **demands: object) -> PlannedTable:
    """One table with these features."""
    of = ParameterConstraints(**demands)  # type: ignore[arg-type]
    return tables(ebc(t=list(features)), t=of)["t"]


class TestTraffic:
    def test_one_id_per_sample_unless_said_otherwise(self) -> None:
        table = constrained("f", "g")
        assert table.load(BATCH) == (2 * BATCH, 2 * BATCH)
        assert table.touched(1000, 500) == pytest.approx(uniform_distinct(1000, 500))

    def test_pooling_factors_are_ids_of_a_bag(self) -> None:
        assert constrained("f", "g", pooling_factors=[3.0, 0.5]).load(BATCH) == (350, 200)

    def test_num_poolings_are_bags_of_a_sample(self) -> None:
        table = constrained("f", pooling_factors=[3.0], num_poolings=[2.0])
        assert table.load(BATCH) == (600, 200)

    def test_batch_sizes_of_features(self) -> None:
        # empty bags fill up features with fewer samples
        table = constrained("f", "g", pooling_factors=[3.0, 1.0], batch_sizes=[50, 200])
        assert table.load(BATCH) == (3 * 50 + 200, 2 * 200)
        small = ParameterConstraints(batch_sizes=[10])
        both = tables(ebc(a=["f"], b=["g"]), a=small)
        assert both["a"].load(BATCH) == (10, 100)
        assert both["b"].load(BATCH) == (100, 100)

    def test_feature_names_say_the_order_of_the_lists(self) -> None:
        table = constrained(
            "f",
            "g",
            feature_names=["g", "f"],
            batch_sizes=[1, 100],
            pooling_factors=[2.0, 3.0],
        )
        assert table.load(BATCH)[0] == 2 * 1 + 3 * 100

    def test_feature_names_choose_among_tables_of_one_name(self) -> None:
        model = nn.ModuleDict({"x": ebc(t=["f"]), "y": ebc(t=["g"])})
        demand = ParameterConstraints(feature_names=["g"], pooling_factors=[7.0])
        found = tables(model, t=demand)
        assert found["x.t"].ids_per_sample == 1
        assert found["y.t"].ids_per_sample == 7
        with pytest.raises(PlannerError, match=r"feature_names of table 't' .*\['h'\]"):
            tables(model, t=ParameterConstraints(feature_names=["h"]))

    def test_weights(self) -> None:
        assert not constrained("f").is_weighted
        assert constrained("f", is_weighted=True).is_weighted

    @pytest.mark.parametrize("name", ["pooling_factors", "num_poolings", "batch_sizes"])
    def test_lists_have_a_number_for_each_feature(self, name: str) -> None:
        message = rf"{name} of table 't' must have one number .*\['f', 'g'\]; received \[2\]"
        with pytest.raises(PlannerError, match=message):
            constrained("f", "g", **{name: [2]})


class TestStats:
    STATS = PoolingStats(
        features={
            # one id is half of all
            "f": FeatureStats(
                ids_per_sample=4.0, batch_size=50.0, histogram=((1, 1000), (1000, 1))
            ),
            "g": FeatureStats(ids_per_sample=1.0, batch_size=25.0, histogram=((1, 10),)),
        }
    )

    def test_are_used_where_nothing_is_said(self) -> None:
        found = tables(ebc(a=["f"], b=["g"], c=["h"]), stats=self.STATS)
        assert found["a"].load(BATCH) == (400, 100)
        assert found["b"].load(BATCH) == (50, 100)  # half the samples
        assert found["c"].load(BATCH) == (100, 100)

    def test_constraints_win(self) -> None:
        said = ParameterConstraints(pooling_factors=[2.0], batch_sizes=[10])
        assert tables(ebc(a=["f"]), stats=self.STATS, a=said)["a"].load(BATCH) == (20, 10)

    def test_skewed_ids_touch_fewer_rows_and_hit_the_cache_more_often(self) -> None:
        found = tables(ebc(a=["f"], c=["h"]), stats=self.STATS)
        assert found["a"].touched(1000, 400) < 0.65 * found["c"].touched(1000, 400)
        # a part of the rows has its share of both
        assert found["a"].touched(250, 100) == pytest.approx(found["a"].touched(1000, 400) / 4)
        assert (found["a"].hit_rate, found["c"].hit_rate) == (pytest.approx(0.6, abs=0.01), 0.2)

    def test_features_share_a_tables_rows_by_chance(self) -> None:
        table = tables(ebc(a=["f", "g"]), stats=self.STATS)["a"]
        assert [share for share, _ in table.skews] == pytest.approx([8 / 9, 1 / 9])
        draws = [400.0, 50.0]
        alone = [skew.distinct(n) for (_, skew), n in zip(table.skews, draws, strict=True) if skew]
        both = alone[0] + alone[1] - alone[0] * alone[1] / 1000
        assert table.touched(1000, 450) == pytest.approx(both)

    def test_ids_that_travel_once(self) -> None:
        sharder = EmbeddingCollectionSharder(use_index_dedup=True)
        config = EmbeddingConfig(1000, 64, "t", feature_names=["f"])
        module = EmbeddingCollection(tables=[config], device=META)
        demand = {"t": ParameterConstraints(pooling_factors=[20.0])}
        (table,) = tables_of(module, [sharder], demand, "cpu", batch_size=BATCH)
        distinct = uniform_distinct(1000, 20 * BATCH)
        assert table.load(BATCH)[0] == pytest.approx(distinct)
        # all draws of all ranks touch rows
        rows = table.touched(1000, 4 * distinct)
        assert rows == pytest.approx(uniform_distinct(1000, 4 * 20 * BATCH))


class TestKernels:
    def test_host_memory_only_where_it_is_asked_for(self) -> None:
        (free,) = tables(ebc(t=["f"]), "cuda").values()
        assert set(free.kernels.values()) == {(FUSED,)}
        asked = ParameterConstraints(compute_kernels=["fused_uvm_caching", "fused", "fused_uvm"])
        (table,) = tables(ebc(t=["f"]), "cuda", t=asked).values()
        assert table.kernels[ShardingType.TABLE_WISE] == (CACHED, FUSED, UVM)
        assert table.kernels[ShardingType.DATA_PARALLEL] == (FUSED,)

    def test_cache_size(self) -> None:
        def cache(share: float | None) -> int:
            demand = ParameterConstraints(
                compute_kernels=["fused_uvm_caching"],
                cache_params=None if share is None else CacheParams(load_factor=share),
            )
            (table,) = tables(ebc(t=["f"]), "cuda", t=demand).values()
            return table.storage_of(ShardSpec(1000, 64, CACHED)).cache.device

        row = 64 * 4 + 16
        assert cache(None) == cache(0.2) == 200 * row + 4 * 1000
        assert cache(0.5) - cache(0.2) == 300 * row


class TestModules:
    def test_a_table_is_alone_if_its_module_sends_no_other(self) -> None:
        two, copied = ebc(t=["f"], u=["g"]), ParameterConstraints(["data_parallel"])
        assert tables(ebc(t=["f"]))["t"].is_alone
        assert not any(table.is_alone for table in tables(two).values())
        found = tables(two, u=copied)
        assert (found["t"].is_alone, found["u"].is_alone) == (True, False)
        found = tables(nn.ModuleList([two, ebc(v=["f"])]))
        assert [table.is_alone for table in found.values()] == [False, False, True]

    def test_tables_of_another_device_are_left_out(self) -> None:
        model = nn.ModuleDict({"x": ebc(a=["f"], b=["f"]), "y": ebc(c=["f"])})
        on_gpu = ParameterConstraints(device_group="cuda")
        assert list(tables(model, "cpu", a=on_gpu, b=on_gpu)) == ["y.c"]
        assert len(tables(model, "cuda", a=on_gpu, b=on_gpu)) == 3
        with pytest.raises(PlannerError, match=r"module 'x' .*device_group.* cpu for \['a'\]"):
            tables(model, "cpu", a=on_gpu)

    def test_a_module_has_one_bounds_check_mode(self) -> None:
        modes = [
            ParameterConstraints(bounds_check_mode=mode)
            for mode in (BoundsCheckMode.WARNING, BoundsCheckMode.FATAL)
        ]
        tables(ebc(a=["f"], b=["g"]), a=modes[0])
        with pytest.raises(
            PlannerError, match=r"module '' .*bounds_check_mode.*\['FATAL', 'WARNING'\]"
        ):
            tables(ebc(a=["f"], b=["g"]), a=modes[0], b=modes[1])

    def test_rounding_is_the_optimizers(self) -> None:
        half = ebc(t=["f"]).half()
        apply_optimizer_in_backward(
            RowWiseAdagrad, half.parameters(), {"lr": 0.1}, stochastic_rounding=True
        )
        tables(half, t=ParameterConstraints(stochastic_rounding=True))
        with pytest.raises(
            PlannerError, match=r"stochastic_rounding of table 't'.*True.*received False"
        ):
            tables(half, t=ParameterConstraints(stochastic_rounding=False))
        with pytest.raises(
            PlannerError, match=r"stochastic_rounding of table 't'.*False.*received True"
        ):
            constrained("f", stochastic_rounding=True)

    @pytest.mark.parametrize(
        ("optimizer", "by_rows"), [(RowWiseAdagrad, False), (torch.optim.Adam, True)]
    )
    def test_row_gradients_where_the_cpu_fuses_no_update(
        self, optimizer: type[torch.optim.Optimizer], by_rows: bool
    ) -> None:
        module = ebc(t=["f"])
        apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1})
        pytest.importorskip("fbgemm_gpu")
        assert tables(module)["t"].writes_row_gradients is by_rows
        assert not tables(module, "cuda")["t"].writes_row_gradients


def test_tables_with_hashed_ids() -> None:
    rules = HashedIds(eviction=LFU(), admission=AtLeast(2), num_regions=8)
    configs = [
        EmbeddingBagConfig(1000, 64, "hashed", feature_names=["f"], ids=rules),
        EmbeddingBagConfig(1000, 64, "rows", feature_names=["g"]),
    ]
    found = tables(EmbeddingBagCollection(tables=configs, device=META))
    assert [table.num_regions for table in found.values()] == [8, 0]
    assert [table.rows for table in found.values()] == [1024, 1000]
    assert [table.index_row_bytes for table in found.values()] == [8 + 4 + 1 + 4 + 4, 0]
    assert all(table.sends_wide_ids for table in found.values())
    assert not tables(ebc(t=["f"]))["t"].sends_wide_ids
