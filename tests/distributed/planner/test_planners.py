"""Plans meet every demand, fit the memory, balance the ranks, and are the same on all of them."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.placement.layout import PlacedTable, Rect
from recsys.distributed.placement.strategies import rects_of
from recsys.distributed.planner import (
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    PoolingStats,
    Topology,
    advice,
)
from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.pooling_stats import FeatureStats
from recsys.distributed.ranks.wire import CommType, QCommsConfig, get_qcomm_codecs_registry
from recsys.distributed.types import CacheParams, ModuleSharder, ShardingPlan
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.hashed_ids import HashedIds
from recsys.optim import LAMB as Lamb
from recsys.optim import RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tests.ranks import RankPool

META = torch.device("meta")
SHARDERS = [EmbeddingBagCollectionSharder()]
MIB = 1 << 20


def collection(
    sizes: Mapping[str, tuple[int, int]],
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.SGD,
) -> EmbeddingBagCollection:
    """Tables by name with (rows, columns), each read by one feature."""
    ebc = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"]
            )
            for name, (rows, dim) in sizes.items()
        ],
        device=META,
    )
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, ebc.parameters(), {"lr": 0.1})
    return ebc


def plan_of(
    module: nn.Module,
    world_size: int = 2,
    mib: float = 1000,
    *,
    batch_size: int = 1,
    **constraints: ParameterConstraints,
) -> ShardingPlan:
    return EmbeddingShardingPlanner(
        Topology(world_size, "cpu", ddr_cap=int(mib * MIB)),
        batch_size=batch_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
    ).plan(module, SHARDERS)


def test_a_plan_equals_its_file() -> None:
    plan = plan_of(collection({"a": (100, 64), "b": (10, 4)}))
    loaded = ShardingPlan.from_json(plan.to_json())
    assert loaded == plan
    assert plan == loaded
    loaded.plan[""]["a"].ranks = [5]
    assert plan != loaded


def only(*sharding_types: str, **demands: object) -> ParameterConstraints:
    return ParameterConstraints(list(sharding_types), **demands)  # type: ignore[arg-type]


class TestDemands:
    @pytest.mark.parametrize(
        ("sharding_type", "ranks"),
        [
            ("table_wise", [0]),
            ("column_wise", [0, 1]),
            ("row_wise", [0, 1]),
            ("data_parallel", [0, 1]),
        ],
    )
    def test_sharding_type(self, sharding_type: str, ranks: list[int]) -> None:
        plan = plan_of(collection({"a": (100, 64)}), a=only(sharding_type))
        assert plan.plan[""]["a"].sharding_type == sharding_type
        assert plan.plan[""]["a"].ranks == ranks

    def test_any_of_several_sharding_types(self) -> None:
        plan = plan_of(collection({"a": (100, 64)}), a=only("row_wise", "column_wise"))
        assert plan.plan[""]["a"].sharding_type in ("row_wise", "column_wise")

    @pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise", "data_parallel"])
    def test_on_one_rank_too(self, sharding_type: str) -> None:
        plan = plan_of(collection({"a": (100, 64)}), world_size=1, a=only(sharding_type))
        assert plan.plan[""]["a"].sharding_type == sharding_type
        assert plan.plan[""]["a"].ranks == [0]

    def test_compute_kernel(self) -> None:
        plan = plan_of(
            collection({"a": (100, 64), "b": (100, 64)}),
            a=ParameterConstraints(compute_kernels=["dense"]),
        )
        assert plan.plan[""]["a"].compute_kernel == "dense"
        assert plan.plan[""]["b"].compute_kernel == "fused"

    @pytest.mark.parametrize(("least", "widths"), [(16, {16}), (32, {32}), (None, {32})])
    def test_least_columns_of_a_shard(self, least: int | None, widths: set[int]) -> None:
        # tables that only fit in as many parts as possible
        plan = plan_of(
            collection({"a": (1_000, 64)}),
            world_size=4,
            mib=0.26 / (64 // max(widths)),
            a=only("column_wise", min_partition=least),
        )
        spec = plan.plan[""]["a"].sharding_spec
        assert spec is not None
        assert {shard.shard_sizes[1] for shard in spec.shards} == widths

    def test_of_unknown_tables_are_refused(self) -> None:
        with pytest.raises(PlannerError, match=r"are \['a'\]; received.* \['b'\]"):
            plan_of(collection({"a": (10, 4)}), b=only("table_wise"))

    def test_say_of_their_errors_that_they_are_theirs(self) -> None:
        with pytest.raises(PlannerError) as raised:
            plan_of(collection({"a": (10, 4)}), b=only("table_wise"))
        assert raised.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS
        again = pickle.loads(pickle.dumps(raised.value))
        assert (again.error_type, str(again)) == (raised.value.error_type, str(raised.value))
        assert PlannerError("it").error_type is PlannerErrorType.OTHER

    def test_that_nothing_meets_are_refused(self) -> None:
        refused = "'a' may only be sharded column_wise with compute kernel fused, which is not"
        with pytest.raises(PlannerError, match=refused):
            plan_of(collection({"a": (10, 64)}, Lamb), a=only("column_wise"))
        refused = "with compute kernel fused_uvm, which is not supported on cpu with"
        with pytest.raises(PlannerError, match=refused):
            plan_of(
                collection({"a": (10, 4)}), a=ParameterConstraints(compute_kernels=["fused_uvm"])
            )

    def test_that_hashed_ids_cannot_meet_are_refused(self) -> None:
        config = EmbeddingBagConfig(500, 64, "t", feature_names=["f"], ids=HashedIds())
        model = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        for kind in ("data_parallel", "row_wise"):
            planner = EmbeddingShardingPlanner(
                Topology(63, "cpu", ddr_cap=1 << 40),
                constraints={"t": ParameterConstraints(sharding_types=[kind])},
            )
            if kind == "row_wise":  # on fewer ranks
                [sharding] = planner.plan(model, SHARDERS).plan[""].values()
                assert len(set(sharding.ranks)) <= 8
                continue
            with pytest.raises(PlannerError, match="in 8 regions and 512 x"):
                planner.plan(model, SHARDERS)

    def test_one_pooling_factor_per_feature(self) -> None:
        demand = ParameterConstraints(pooling_factors=[1.0, 2.0])
        with pytest.raises(PlannerError, match=r"of table 'a' must have.*\['f_a'\]"):
            plan_of(collection({"a": (10, 4)}), a=demand)


class TestMemory:
    def test_a_table_too_big_for_one_rank_is_split(self) -> None:
        big = collection({"a": (1_000, 64)})  # 0.24 MiB
        with pytest.raises(PlannerError, match=r"does not fit .*2 cpu ranks") as raised:
            plan_of(big, mib=0.2, a=only("table_wise"))
        assert raised.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
        split = plan_of(big, mib=0.2, a=only("table_wise", "row_wise")).plan[""]["a"]
        assert (split.sharding_type, split.ranks) == ("row_wise", [0, 1])

    def test_tables_go_where_there_is_room(self) -> None:
        # c fits beside a only: a is small and hot, b is big and cold
        sizes = {"a": (500, 64), "b": (1_000, 64), "c": (300, 64)}
        demands = {
            "a": only("table_wise", pooling_factors=[100.0]),
            "b": only("table_wise"),
            "c": only("table_wise"),
        }
        plan = plan_of(collection(sizes), mib=0.3, **demands).plan[""]
        assert plan["c"].ranks == plan["a"].ranks != plan["b"].ranks

    def test_optimizer_state_counts(self) -> None:
        sizes = {"a": (10_000, 4)}  # 0.153 MiB, row-wise state 0.038 MiB
        plan_of(collection(sizes, torch.optim.SGD), world_size=1, mib=0.16)
        with pytest.raises(PlannerError, match=r"10000 x 4, 0\.2 MiB.*optimizer"):
            plan_of(collection(sizes, RowWiseAdagrad), world_size=1, mib=0.16)
        plan_of(collection(sizes, RowWiseAdagrad), world_size=1, mib=0.2)
        with pytest.raises(PlannerError, match=r"10000 x 4, 0\.5 MiB.*optimizer"):
            plan_of(collection(sizes, torch.optim.Adam), world_size=1, mib=0.2)
        plan_of(collection(sizes, torch.optim.Adam), world_size=1, mib=0.5)

    def test_the_gradient_of_a_replica_counts(self) -> None:
        sizes = {"a": (10_000, 4)}  # 0.153 MiB each
        plan_of(collection(sizes), mib=0.31, a=only("data_parallel"))
        with pytest.raises(PlannerError, match=r"data_parallel +2 +0\.3 MiB"):
            plan_of(collection(sizes), mib=0.3, a=only("data_parallel"))
        # Adam moves rows without a gradient: 0.305 of state, and 0.038 of flags for the rows; these
        # and the gradient are put together to be sent
        plan_of(collection(sizes, torch.optim.Adam), mib=0.845, a=only("data_parallel"))
        with pytest.raises(PlannerError, match=r"data_parallel +2 +0\.8 MiB"):
            plan_of(collection(sizes, torch.optim.Adam), mib=0.835, a=only("data_parallel"))

    def test_no_state_is_made_up(self) -> None:
        sizes = {"a": (10_000, 4)}  # 0.153 MiB
        frozen = collection(sizes, None).requires_grad_(False)
        plan_of(frozen, world_size=1, mib=0.16)
        plan_of(collection(sizes, None), world_size=1, mib=0.31)  # backward fills its `.grad`
        with pytest.raises(PlannerError, match=r"10000 x 4, 0\.3 MiB.*gradient"):
            plan_of(collection(sizes, None), world_size=1, mib=0.16)

    def test_state_of_the_sharders_optimizer_counts(self) -> None:
        sharder = EmbeddingBagCollectionSharder({"optimizer": "ADAM"})
        planner = EmbeddingShardingPlanner(
            Topology(1, "cpu", ddr_cap=int(0.4 * MIB)),
            storage_reservation=FixedPercentageStorageReservation(0.0),
        )
        with pytest.raises(PlannerError, match=r"10000 x 4, 0\.5 MiB.*optimizer"):
            planner.plan(collection({"a": (10_000, 4)}, None), [sharder])

    @pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
    def test_tables_in_host_memory_count_there(self, kernel: str) -> None:
        def plan(hbm: float, ddr: float) -> str:
            return (
                EmbeddingShardingPlanner(
                    Topology(2, "cuda", hbm_cap=int(hbm * MIB), ddr_cap=int(ddr * MIB)),
                    batch_size=1,
                    storage_reservation=FixedPercentageStorageReservation(0.0),
                    constraints={"a": only("table_wise", compute_kernels=[kernel])},
                )
                .plan(collection({"a": (10_000, 64)}, RowWiseAdagrad), SHARDERS)  # 2.44 MiB
                .plan[""]["a"]
                .compute_kernel
            )

        # on the device: one state per row, 0.04 MiB; with a cache a fifth of the rows, 0.56 MiB
        least = 0.05 if kernel == "fused_uvm" else 0.61
        assert plan(hbm=least, ddr=2.5) == kernel
        with pytest.raises(PlannerError, match=r"(?s)of 2\.4 MiB of host.*host"):
            plan(hbm=least, ddr=2.4)
        with pytest.raises(PlannerError, match=r"table_wise +1 .* cuda\n"):
            plan(hbm=least - 0.03, ddr=2.5)

    def test_the_search_weighs_several_kernels(self) -> None:
        sizes = {"a": (1_000, 64), "b": (1_000, 64)}  # 0.24 MiB
        both = only("table_wise", compute_kernels=["fused", "fused_uvm"])

        def kernels(hbm_mib: float) -> list[str]:
            topology = Topology(1, "cuda", hbm_cap=int(hbm_mib * MIB), ddr_cap=MIB)
            reservation = FixedPercentageStorageReservation(0.0)
            planner = EmbeddingShardingPlanner(
                topology, 1, storage_reservation=reservation, constraints={"a": both, "b": both}
            )
            placed = planner.plan(collection(sizes), SHARDERS).plan[""]
            return sorted(sharding.compute_kernel for sharding in placed.values())

        assert kernels(0.6) == ["fused", "fused"]
        assert kernels(0.3) == ["fused", "fused_uvm"]
        assert kernels(0.1) == ["fused_uvm", "fused_uvm"]

    def test_what_concerns_execution_is_in_the_plan(self) -> None:
        demand = ParameterConstraints(
            compute_kernels=["fused_uvm_caching"],
            cache_params=CacheParams(load_factor=0.3),
            bounds_check_mode=BoundsCheckMode.WARNING,
            output_dtype=torch.float32,
        )
        planner = EmbeddingShardingPlanner(Topology(1, "cuda"), constraints={"a": demand})
        plan = planner.plan(collection({"a": (10, 4)}), SHARDERS).plan[""]["a"]
        assert plan.cache_params == CacheParams(load_factor=0.3)
        assert plan.bounds_check_mode is BoundsCheckMode.WARNING
        assert plan.output_dtype is torch.float32

    def test_batches_under_way_count(self) -> None:
        sizes, whole = {"a": (100, 64)}, only("table_wise", pooling_factors=[50.0])
        topology = Topology(1, "cpu", ddr_cap=MIB)

        def plan(count: int) -> None:
            EmbeddingShardingPlanner(
                topology, 500, constraints={"a": whole}, batches_in_flight=count
            ).plan(collection(sizes), SHARDERS)

        plan(1)
        with pytest.raises(PlannerError, match="does not fit"):
            plan(2)
        with pytest.raises(ValueError, match="batches_in_flight must be positive; received 0"):
            plan(0)

    def test_statistics_of_batches(self) -> None:
        hot = FeatureStats(ids_per_sample=50.0, batch_size=8.0, histogram=())
        cold = FeatureStats(ids_per_sample=1.0, batch_size=8.0, histogram=())
        module = collection({"hot": (1_000, 128), "cold": (1_000, 128)})
        stats = PoolingStats(features={"f_hot": hot, "f_cold": cold})
        planner = EmbeddingShardingPlanner(Topology(4, "cpu"), 1024, pooling_stats=stats)
        said = {n: ParameterConstraints(pooling_factors=[p]) for n, p in (("hot", 50), ("cold", 1))}
        same = EmbeddingShardingPlanner(Topology(4, "cpu"), 1024, constraints=said)
        without = EmbeddingShardingPlanner(Topology(4, "cpu"), 1024)
        plan = planner.plan(module, SHARDERS)
        assert plan == same.plan(module, SHARDERS) != without.plan(module, SHARDERS)

    def test_each_sharding_type_takes_a_kernel_it_executes(self) -> None:
        demand = only("data_parallel", compute_kernels=["fused_uvm", "fused"])
        planner = EmbeddingShardingPlanner(Topology(2, "cuda"), constraints={"a": demand})
        plan = planner.plan(collection({"a": (10, 4)}), SHARDERS).plan[""]["a"]
        assert (plan.sharding_type, plan.compute_kernel) == ("data_parallel", "fused")

    def test_buffers_of_a_batch_count(self) -> None:
        sizes, whole = {"a": (100, 64)}, only("table_wise")  # buffers: 1060 bytes a sample
        plan_of(collection(sizes), world_size=1, mib=0.6, batch_size=560, a=whole)
        with pytest.raises(PlannerError, match="does not fit"):
            plan_of(collection(sizes), world_size=1, mib=0.6, batch_size=580, a=whole)

    def test_dense_parts_count(self) -> None:
        model = nn.Sequential(collection({"a": (1_000, 64)}), nn.Linear(100, 100, device=META))
        topology = Topology(1, "cpu", ddr_cap=int(0.4 * MIB))
        planner = EmbeddingShardingPlanner(topology, batch_size=1)
        planner.plan(model[0], SHARDERS)
        with pytest.raises(PlannerError, match=r"of which 0\.1 MiB are free"):
            planner.plan(model, SHARDERS)

    def test_what_does_not_fit_is_shown_with_all_that_was_tried(self) -> None:
        with pytest.raises(PlannerError) as raised:
            plan_of(nn.ModuleDict({"ebc": collection({"a": (100_000, 64)})}), world_size=3, mib=1)
        message = str(raised.value)
        assert message.startswith(
            "Table 'a' of module 'ebc' (100000 x 64, 24.4 MiB with optimizer state) does not fit "
            "on the 3 cpu ranks of 1.0 MiB each"
        )
        assert "\nrow_wise       3      8.1 MiB         7.1 MiB   cpu\n" in message
        for tried in ("table_wise", "column_wise", "data_parallel"):
            assert f"\n{tried}" in message
        # 24.4 MiB, and buffers; nodes of three
        assert message.endswith("Each of these changes would suffice: 27 ranks like these.")

    @given(
        sizes=st.lists(
            st.tuples(st.integers(1, 2_000), st.sampled_from([4, 32, 64, 128])), min_size=1
        ),
        world_size=st.integers(1, 4),
        mib=st.floats(0.05, 3),
    )
    @settings(max_examples=60, deadline=None)
    def test_no_rank_gets_more_than_it_has(
        self, sizes: list[tuple[int, int]], world_size: int, mib: float
    ) -> None:
        names = {f"t{i}": size for i, size in enumerate(sizes)}
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(advice, "_SECONDS", 0.0)  # to look for what would fit
                plan = plan_of(collection(names), world_size, mib).plan[""]
        except PlannerError:
            # a sample's buffers are at most 15 rows
            total = sum((rows + 15) * dim * 4 for rows, dim in sizes)
            assert total > mib * MIB / 4, "this would have fitted easily"
            return
        assert list(plan) == list(names)
        used = [0] * world_size
        for name, (rows, dim) in names.items():
            rects = rects_of(name, rows, dim, plan[name], world_size)
            # raises if the rectangles leave a gap or overlap
            PlacedTable(name=name, num_rows=rows, dim=dim, features=(0,), group=0, rects=rects)
            whole = Rect(row_start=0, row_end=rows, col_start=0, col_end=dim, rank=0)
            for rank in range(world_size):
                for rect in rects or [whole]:
                    if not rects or rect.rank == rank:
                        used[rank] += rect.num_rows * rect.num_cols * 4
        assert max(used) <= mib * MIB

    def test_tables_that_fit_alone_but_not_together(self) -> None:
        sizes = {f"t{i}": (1_000, 64) for i in range(5)}  # 0.244 MiB each
        demands = {name: only("table_wise") for name in sizes}
        with pytest.raises(PlannerError) as raised:
            plan_of(collection(sizes), mib=0.5, **demands)
        message = str(raised.value)
        assert message.startswith("The 5 tables do not fit on the 2 cpu ranks of 0.5 MiB each")
        assert "0.2 MiB more of cpu memory than there is" in message
        assert "Table 't0' of module '' (1000 x 64, 0.2 MiB with optimizer state)" in message
        assert message.endswith(  # nodes of two
            " would suffice: weights of 16 bits (data_type=DataType.FP16); 4 ranks like these."
        )


class TestWhatTablesAre:
    def _seen(
        self, module: nn.Module, sharder: ModuleSharder[Any]
    ) -> tuple[tuple[float, float], bool, bool]:
        (table,) = tables_of(module, [sharder], {}, "cpu")
        return table.wire_bytes, table.is_pooled, table.is_weighted

    @pytest.mark.parametrize(
        ("precision", "size"), [("FP32", 4.0), ("BF16", 2.0), ("INT8", 1 + 4 / 32)]
    )
    def test_wire_precision(self, precision: str, size: float) -> None:
        config = QCommsConfig(forward_precision=CommType[precision])
        registry = get_qcomm_codecs_registry(config)
        ebc = collection({"a": (10, 64)})
        found = self._seen(ebc, EmbeddingBagCollectionSharder(None, registry))
        assert found == ((size, 4.0), True, False)

    def test_sequences_and_weights(self) -> None:
        table = EmbeddingConfig(10, 4, "a", feature_names=["f"])
        sequence = EmbeddingCollection(tables=[table], device=META)
        assert self._seen(sequence, EmbeddingCollectionSharder())[1:] == (False, False)
        bag = EmbeddingBagConfig(10, 4, "a", feature_names=["f"])
        weighted = EmbeddingBagCollection(tables=[bag], is_weighted=True, device=META)
        assert self._seen(weighted, EmbeddingBagCollectionSharder())[1:] == (True, True)


class TestChoice:
    def test_a_table_too_hot_for_one_rank_is_split(self) -> None:
        sizes = {"hot": (1_000, 128), "cold": (1_000, 128)}
        plan = plan_of(
            collection(sizes), 4, batch_size=1024, hot=ParameterConstraints(pooling_factors=[50.0])
        ).plan[""]
        assert plan["hot"].sharding_type != "table_wise"

    @pytest.mark.parametrize(
        ("ids", "more", "kind"),
        [
            (1.0, {}, "row_wise"),  # a row of each id returns
            (20.0, {}, "grid_shard"),  # too many
            (40.0, {}, "row_wise"),  # sums that are added up on the way
            (40.0, {"other": (2_000_000_000, 128)}, "grid_shard"),  # the other goes elsewhere
        ],
    )
    def test_a_huge_table_goes_where_least_returns(
        self, ids: float, more: dict[str, tuple[int, int]], kind: str
    ) -> None:
        batch_size, topology = 4096, Topology.preset("H100", 64)
        model = collection({"t": (2_000_000_000, 128), **more}, RowWiseAdagrad)
        demand = {"t": ParameterConstraints(pooling_factors=[ids])}
        planner = EmbeddingShardingPlanner(topology, batch_size, constraints=demand)
        plan = planner.plan(model, SHARDERS)
        assert plan.plan[""]["t"].sharding_type == kind
        if kind == "row_wise":
            assert plan.plan[""]["t"].ranks == list(range(64))
            assert plan.rating is not None
            sums_of_all = 2 * 64 * batch_size * 128 * 4 * 56 / 64 / topology.inter_host_bw
            assert plan.rating.slowest_ms < sums_of_all / (50 if ids == 1 else 5)

    def test_the_slowest_rank_is_as_fast_as_it_can_be(self) -> None:
        # greedily, largest first, one rank would get 6 + 4 + 4 and the other 5 + 5
        sizes = {name: (600 - i, 64) for i, name in enumerate("abcde")}
        load = dict(zip("abcde", (6.0, 5.0, 5.0, 4.0, 4.0), strict=True))
        demands = {n: only("table_wise", pooling_factors=[100 * load[n]]) for n in sizes}
        plan = plan_of(collection(sizes), batch_size=64, **demands).plan[""]
        of_rank = [sum(load[n] for n in sizes if plan[n].ranks == [rank]) for rank in (0, 1)]
        assert sorted(of_rank) in ([10.0, 14.0], [11.0, 13.0], [12.0, 12.0])
        assert max(of_rank) == min(
            max(sum(some), sum(load.values()) - sum(some))
            for count in range(6)
            for some in itertools.combinations(load.values(), count)
        )

    def test_equal_tables_are_spread_evenly(self) -> None:
        names = [f"t{i}" for i in range(8)]
        demands = {name: only("table_wise") for name in names}
        plan = plan_of(collection(dict.fromkeys(names, (100, 64))), world_size=4, **demands)
        ranks = [plan.plan[""][name].ranks for name in names]
        assert sorted(ranks) == [[0], [0], [1], [1], [2], [2], [3], [3]]

    def test_hot_tables_are_kept_apart(self) -> None:
        # by size alone both hot ones would be opposite the big one
        sizes = {"big": (1_000, 64), "hot1": (100, 64), "hot2": (100, 64)}
        hot = only("table_wise", pooling_factors=[50.0])
        plan = plan_of(
            collection(sizes), batch_size=64, big=only("table_wise"), hot1=hot, hot2=hot
        ).plan[""]
        assert plan["hot1"].ranks != plan["hot2"].ranks

    def test_on_one_rank_nothing_is_split(self) -> None:
        plan = plan_of(collection({"a": (100, 64), "b": (10, 4)}), world_size=1).plan[""]
        assert [(s.sharding_type, s.ranks) for s in plan.values()] == [("table_wise", [0])] * 2

    def test_is_the_same_every_time(self) -> None:
        sizes = {f"t{i}": (100 + i % 3, 32 * (1 + i % 2)) for i in range(10)}
        assert plan_of(collection(sizes), 3) == plan_of(collection(sizes), 3)

    def test_placements_are_on_the_device(self) -> None:
        planner = EmbeddingShardingPlanner(Topology(2, "cuda", hbm_cap=MIB), batch_size=1)
        spec = planner.plan(collection({"a": (10, 4)}), SHARDERS).plan[""]["a"].sharding_spec
        assert spec is not None
        assert {s.placement for s in spec.shards} <= {"rank:0/cuda:0", "rank:1/cuda:1"}

    @pytest.mark.parametrize("said_by", ["topology", "torchrun"])
    def test_placements_count_the_gpus_of_a_node(
        self, monkeypatch: pytest.MonkeyPatch, said_by: str
    ) -> None:
        nodes = {"local_world_size": 2}
        if said_by == "torchrun":
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
            nodes = {}
        topology = Topology(4, "cuda", hbm_cap=MIB, **nodes)
        planner = EmbeddingShardingPlanner(
            topology, batch_size=1, constraints={"a": only("row_wise")}
        )
        spec = planner.plan(collection({"a": (8, 4)}), SHARDERS).plan[""]["a"].sharding_spec
        assert spec is not None
        assert [s.placement for s in spec.shards] == [
            "rank:0/cuda:0",
            "rank:1/cuda:1",
            "rank:2/cuda:0",
            "rank:3/cuda:1",
        ]

    def test_modules_are_named_by_their_path(self) -> None:
        model = nn.ModuleDict({"x": collection({"a": (10, 4)}), "y": collection({"a": (20, 4)})})
        plan = plan_of(model, a=only("row_wise"))
        assert list(plan.plan) == ["x", "y"]
        spec = plan.plan["y"]["a"].sharding_spec
        assert spec is not None
        assert spec.shards[1].shard_sizes == [10, 4]


def _plan_together(mib: float, of_rank_1: dict[str, Any] | None = None) -> ShardingPlan | str:
    given: dict[str, Any] = {"mib": mib, "rows": 1_000, "batch_size": 512, "kind": "row_wise"}
    if dist.get_rank() == 1:
        given |= of_rank_1 or {}
    planner = EmbeddingShardingPlanner(
        Topology(2, given.get("device", "cpu"), ddr_cap=int(given["mib"] * MIB), ssd_cap=1),
        batch_size=given["batch_size"],
        constraints={given.get("name", "a"): only(given["kind"])},
    )
    model = collection({"a": (given["rows"], 64)}, given.get("optimizer", torch.optim.SGD))
    try:
        return planner.collective_plan(model, SHARDERS)
    except PlannerError as error:
        return f"{error.error_type.value}: {error}"


def test_all_sharders_there_are_unless_told() -> None:
    planner = EmbeddingShardingPlanner(Topology(1, "cpu"))
    model = collection({"a": (10, 4)})
    assert str(planner.collective_plan(model)) == str(planner.collective_plan(model, SHARDERS))


def test_every_rank_gets_the_plan_of_rank_0(ranks: RankPool) -> None:
    # identical hosts report a little more or less memory
    first, second = ranks(2, _plan_together, 100.0, {"mib": 101.0})
    assert first == second
    assert first.plan[""]["a"].sharding_type == "row_wise"
    assert first.rating.costs == second.rating.costs
    assert first.rating.budgets == second.rating.budgets
    assert first.rating.placement == second.rating.placement
    assert "row_wise" in second.report()


def test_every_rank_gets_the_error_of_rank_0(ranks: RankPool) -> None:
    first, second = ranks(2, _plan_together, 0.01)
    assert first == second
    assert first.startswith("insufficient_storage: Table 'a' of module ''")


@pytest.mark.parametrize(
    ("of_rank_1", "message"),
    [
        (
            {"batch_size": 256},
            "planner_input_context_mismatch: .*batch_size differs: rank 0 has 512, rank 1 has 256",
        ),
        (
            {"rows": 999},
            r"table 'a' of module '' differs: rank 0 has rows 1000, rank 1 has rows 999\.",
        ),
        (
            {"optimizer": RowWiseAdagrad},
            "table 'a' of module '' differs: rank 0 has optimizer SGD, rank 1 .* EXACT_ROWWISE_ADA",
        ),
        ({"kind": "table_wise"}, r"constraints of table 'a' .* differs: .*row_wise.*table_wise"),
        (
            {"mib": 50.0},
            "planner_input_context_mismatch: .*topology.ddr_cap differs: rank 0 has 104857600, "
            "rank 1 has 52428800",
        ),
        ({"device": "cuda"}, "topology.compute_device differs: rank 0 has 'cpu', .* 'cuda'"),
        ({"name": "b"}, r"On rank 1: Constraints .* \['b'\]"),
    ],
)
def test_ranks_that_ask_for_different_plans_all_hear_of_it(
    ranks: RankPool, of_rank_1: dict[str, Any], message: str
) -> None:
    first, second = ranks(2, _plan_together, 100.0, of_rank_1)
    assert first == second
    assert re.search(message, first), first


def _default_plan() -> list[int] | None:
    planner = EmbeddingShardingPlanner(constraints={"a": only("row_wise")})
    return planner.collective_plan(collection({"a": (10, 4)}), SHARDERS).plan[""]["a"].ranks


def test_plans_for_the_ranks_there_are(ranks: RankPool) -> None:
    assert ranks(3, _default_plan) == [[0, 1, 2]] * 3
