"""Plans, sharded modules and small helpers, on one rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.compat.answers import raises

CPU = torch.device("cpu")


@contextlib.contextmanager
def _world() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()


def _tables(dim: int = 16) -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=10, embedding_dim=dim, feature_names=[f"f{name}"]
            )
            for name in "ab"
        ]
    )


def _plan(world_size: int, **by_table: Any) -> Any:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan

    return construct_module_sharding_plan(
        _tables(),
        by_table,
        sharder=EmbeddingBagCollectionSharder(),
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )


def _facts(plan: Any) -> Any:
    return {
        name: [
            entry.sharding_type,
            [
                [shard.shard_offsets, shard.shard_sizes, str(shard.placement)]
                for shard in entry.sharding_spec.shards
            ],
        ]
        for name, entry in plan.items()
    }


def plans_by_column() -> Any:
    from torchrec.distributed.sharding_plan import column_wise

    return [
        _facts(_plan(4, a=column_wise(ranks=[0, 1]), b=column_wise(ranks=[3, 1, 2, 0]))),
        _facts(_plan(1, a=column_wise(ranks=[0]), b=column_wise(ranks=[0, 0]))),
    ]


def plans_by_row_and_table() -> Any:
    from torchrec.distributed.sharding_plan import row_wise, table_wise

    return [
        _facts(_plan(4, a=row_wise(), b=row_wise())),
        _facts(_plan(1, a=table_wise(rank=0), b=row_wise())),
    ]


def sharded_by_column() -> Any:
    from torchrec import KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import column_wise
    from torchrec.distributed.types import ShardedTensor, ShardingPlan

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = _tables()

        def forward(self, features: Any) -> Any:
            pooled = self.ebc(features)
            return pooled["fa"] + pooled["fb"]

    plan = _plan(1, a=column_wise(ranks=[0]), b=column_wise(ranks=[0]))
    with _world():
        model = DistributedModelParallel(
            Model(),
            device=CPU,
            plan=ShardingPlan({"ebc": plan}),
            sharders=[EmbeddingBagCollectionSharder()],
        )
        values = model.state_dict()
        for place, (_, value) in enumerate(sorted(values.items())):
            for shard in value.local_shards():
                shard.tensor.copy_(torch.arange(160.0).reshape(10, 16) / 100 + place)
        features = KeyedJaggedTensor(
            ["fa", "fb"], torch.tensor([1, 2, 3, 9]), lengths=torch.tensor([1, 2, 0, 1])
        )
        return [
            model(features),
            {name: [list(v.size()), isinstance(v, ShardedTensor)] for name, v in values.items()},
            [name for name, _ in model.named_parameters()],
        ]


def sharded_with_processors() -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel, ShardedModule
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingBagConfig(
                name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"]
            )
            self.fp = FeatureProcessedEmbeddingBagCollection(
                EmbeddingBagCollection(tables=[config], is_weighted=True),
                PositionWeightedModuleCollection({"f": 3}),
            )

        def forward(self, features: Any) -> Any:
            return self.fp(features).values()

    with _world():
        model = DistributedModelParallel(Model(), device=CPU)
        inner = model.module.fp
        for _, parameter in model.named_parameters():
            parameter.data.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 10)
        features = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 9]), lengths=torch.tensor([1, 2]))
        return [
            isinstance(inner, ShardedModule),
            type(inner).__name__,
            sorted(model.state_dict()),
            model(features),
        ]


def model_without_sparse_features() -> Any:
    from torchrec import EmbeddingBagCollection
    from torchrec.distributed import DistributedModelParallel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = EmbeddingBagCollection(tables=[])
            self.linear = nn.Linear(2, 1)

        def forward(self, dense: Any) -> Any:
            return self.linear(dense)

    with _world():
        model = DistributedModelParallel(Model(), device=CPU)
        nn.init.ones_(model.module.linear.weight)
        nn.init.zeros_(model.module.linear.bias)
        dense = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        return [model(dense), sorted(model.state_dict()), type(model.module.ebc).__name__]


def results_of_one_rank() -> Any:
    from torchrec.distributed.collective_utils import (
        invoke_on_rank_and_broadcast_result,
        is_leader,
        run_on_leader,
    )

    def refuse() -> None:
        raise ValueError("no")

    with _world() as group:
        twice = run_on_leader(group, 0)(lambda value: 2 * value)
        return [
            invoke_on_rank_and_broadcast_result(group, 0, lambda a, b=2: {"sum": a + b}, 1, b=5),
            twice(4),
            [is_leader(group), is_leader(None), is_leader(group, 1)],
            raises(lambda: invoke_on_rank_and_broadcast_result(group, 0, refuse)),
        ]


def names_with_prefixes() -> Any:
    from torchrec.distributed.utils import (
        add_prefix_to_state_dict,
        append_prefix,
        filter_state_dict,
    )

    renamed = {"x": 1, "y.z": 2}
    add_prefix_to_state_dict(renamed, "p.")
    found = filter_state_dict(OrderedDict([("a.b.c", 1), ("a.d", 2), ("ab.c", 3)]), "a")
    return [
        [append_prefix(*pair) for pair in (("a", "b"), ("", "b"), ("a", ""))],
        renamed,
        type(found).__name__,
        found,
    ]


def parameters_on_meta() -> Any:
    from torchrec.distributed.utils import init_parameters

    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    before = model[0].weight.clone()
    init_parameters(model, CPU)
    meta = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.LayerNorm(2, device="meta"))
    init_parameters(meta, CPU)
    return [torch.equal(before, model[0].weight), meta[0].weight.device, meta[1].weight]


def devices_and_bytes() -> Any:
    from torchrec.distributed.types import get_tensor_size_bytes, rank_device

    return [
        [rank_device("cuda", 3), rank_device("cpu", 3)],
        [get_tensor_size_bytes(torch.zeros(3, 4, dtype=d)) for d in (torch.half, torch.int64)],
    ]


def nodes() -> Any:
    from torchrec.distributed import comm

    with _world():
        groups = comm.intra_and_cross_node_pg(CPU)
        return [
            [comm.get_group_rank(), comm.get_local_rank(), comm.get_local_size()],
            [comm.get_num_groups(), [group.size() for group in groups]],
            list(comm.intra_and_cross_node_pg(torch.device("meta"))),
        ]


def options_chosen_before() -> Any:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.planners import extract_plan

    topology = Topology(world_size=2, compute_device="cuda", local_world_size=2)
    options = EmbeddingEnumerator(topology, batch_size=8).enumerate(
        _tables(), [EmbeddingBagCollectionSharder()]
    )
    chosen = {}
    for name in "ab":
        option = copy.deepcopy(
            next(o for o in options if (o.name, o.sharding_type) == (name, "row_wise"))
        )
        for rank, shard in enumerate(option.shards):
            shard.rank = 1 - rank
        chosen[option.storage_hash()] = option
    found = extract_plan(options, chosen)
    return [
        [[o.name, o.sharding_type, [shard.rank for shard in o.shards]] for o in found],
        {shard.rank for o in options for shard in o.shards} == {None},
        extract_plan(options, {}),
        [
            raises(functools.partial(extract_plan, given, chosen))
            for given in ([], options[:1], options + options)
        ],
    ]


def constraints_on_a_cache_alone() -> Any:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.types import CacheParams

    constraint = ParameterConstraints(cache_params=CacheParams(load_factor=0.3))
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cuda", local_world_size=1),
        constraints={"a": constraint},
    )
    plan = planner.plan(nn.Sequential(_tables()), [EmbeddingBagCollectionSharder()])
    return {name: entry.compute_kernel for name, entry in plan.plan["0"].items()}


def constants_of_inference() -> Any:
    from torchrec.inference import modules

    return [
        [type(sharder).__name__ for sharder in modules.DEFAULT_SHARDERS],
        modules.DEFAULT_QUANTIZATION_DTYPE,
        sorted(modules.DEFAULT_QUANT_MAPPING),
    ]


def pipeline_that_compiles() -> Any:
    from torchrec.distributed.train_pipeline import TorchCompileConfig, TrainPipelinePT2

    calls: list[str] = []
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> Any:
            out = self.model(batch)
            return out.mean(), out

    whole = Model()
    pipeline = TrainPipelinePT2(
        whole,
        torch.optim.SGD(whole.parameters(), lr=0.5),
        CPU,
        TorchCompileConfig(backend="eager", compile_on_iter=1),
        pre_compile_fn=lambda _: calls.append("before"),
        post_compile_fn=lambda _: calls.append("after"),
        input_transformer=lambda batch: batch + 1,
    )
    batches = iter([torch.ones(1, 2), torch.zeros(1, 2), torch.ones(3, 2)])
    found = []
    for _ in range(3):
        found.append([pipeline.progress(batches), list(calls)])
    return [found, model.weight, raises(lambda: pipeline.progress(batches))]


def kinds_of_planners() -> Any:
    from torchrec.distributed import ShardingPlanner
    from torchrec.distributed.planner import (
        EmbeddingPlannerBase,
        EmbeddingShardingPlanner,
        Topology,
    )

    topology = Topology(world_size=1, compute_device="cpu", local_world_size=1)
    return [
        isinstance(EmbeddingShardingPlanner(topology=topology), ShardingPlanner),
        issubclass(EmbeddingShardingPlanner, EmbeddingPlannerBase),
        raises(ShardingPlanner),
    ]


def estimators_with_formulas() -> Any:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.estimator import (
        EmbeddingPerfEstimatorConfig,
        EmbeddingPerfEstimatorFactory,
        EmbeddingPerfEstimatorV2,
        backward_compute,
        device_bw,
        forward_compute,
        ssd_mem_bw,
        supported_sharding_types,
    )

    topology = Topology(world_size=2, compute_device="cuda", local_world_size=2)

    def perfs(config: Any) -> Any:
        estimator = EmbeddingPerfEstimatorV2(topology, config=config)
        options = EmbeddingEnumerator(topology, batch_size=8, estimator=[estimator]).enumerate(
            _tables(), [EmbeddingBagCollectionSharder()]
        )
        return {
            option.sharding_type: [
                option.shards[0].perf.fwd_compute,
                option.shards[0].perf.bwd_compute,
            ]
            for option in options
            if option.sharding_type in ("row_wise", "table_wise")
            if option.compute_kernel == "fused"
        }

    class Whole(EmbeddingPerfEstimatorConfig):
        @forward_compute("table_wise")
        def ahead(self, ctx: Any) -> float:
            return float(ctx.batch_inputs * ctx.emb_dim * ctx.world_size + ctx.hash_size)

        @forward_compute(sharding_type="row_wise")
        def ahead_of_rows(self, ctx: Any) -> float:
            return 7.0

        @backward_compute
        def back(self, ctx: Any) -> float:
            return float(ctx.batch_outputs)

    @supported_sharding_types("grid_shard")
    class Narrow(EmbeddingPerfEstimatorConfig):
        pass

    @EmbeddingPerfEstimatorFactory.register("quick")
    @device_bw(5.0)
    @device_bw(6.0, device="cuda", compute_kernel=["fused", "dense"])
    @ssd_mem_bw(3.0)
    class Quick(EmbeddingPerfEstimatorConfig):
        name = "quick"

    made = EmbeddingPerfEstimatorFactory.create("quick", topology=topology)
    speeds = [
        made.config.get_device_bw("cuda", kernel, 1.0, 2.0, 3.0, 4.0)
        for kernel in ("fused", "dense", "fused_uvm")
    ]
    return [
        perfs(Whole()),
        raises(lambda: perfs(Narrow())),
        speeds,
        [made.config.name, made.config.ssd_mem_bw],
        EmbeddingPerfEstimatorFactory.is_registered("slow"),
        raises(lambda: EmbeddingPerfEstimatorFactory.create("slow", topology=topology)),
    ]


def estimators_with_coefficients() -> Any:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.estimator import (
        EmbeddingPerfEstimatorConfig,
        EmbeddingPerfEstimatorV2,
        EstimatorPerfCoefficients,
        PerfCoefficient,
        PerfCoefficientConfig,
        bwd_coefficient,
        fwd_coefficient,
        output_write_size,
    )

    topology = Topology(world_size=2, compute_device="cuda", local_world_size=2)
    constraints = {name: ParameterConstraints(pooling_factors=[3.0]) for name in "ab"}

    def perfs(config: Any) -> Any:
        estimator = EmbeddingPerfEstimatorV2(topology, constraints, config=config)
        enumerator = EmbeddingEnumerator(
            topology, batch_size=8, estimator=[estimator], constraints=constraints
        )
        options = enumerator.enumerate(_tables(128), [EmbeddingBagCollectionSharder()])
        return {
            f"{option.name} {option.sharding_type}": [
                option.shards[0].perf.fwd_compute,
                option.shards[0].perf.bwd_compute,
            ]
            for option in options
            if option.sharding_type in ("data_parallel", "row_wise", "table_wise")
            if option.compute_kernel == "fused" or option.sharding_type == "data_parallel"
        }

    class ByMethods(EmbeddingPerfEstimatorConfig):
        device_bw = 2.0

        @fwd_coefficient()
        def ahead(self) -> Any:
            return PerfCoefficient(1.0, 2.0, 3.0, 4.0)

        @bwd_coefficient(sharding_type=["row_wise"])
        def back(self) -> Any:
            return PerfCoefficient(5.0, 6.0, 7.0, 8.0)

    class ByTable(EmbeddingPerfEstimatorConfig):
        device_bw = 4.0
        coefficients = PerfCoefficientConfig(
            row_wise=EstimatorPerfCoefficients(fwd=PerfCoefficient(0.5, 1.5, 2.5, 3.5)),
        )

    class Outputs(EmbeddingPerfEstimatorConfig):
        device_bw = 1.0

        @fwd_coefficient()
        def ahead(self) -> Any:
            return PerfCoefficient(0.0, 0.0, 1.0, 0.0)

        @output_write_size
        def written(self, ctx: Any, is_fwd: bool = True) -> float:
            return 10.0

    return [perfs(ByMethods()), perfs(ByTable()), perfs(Outputs())]


def decisions_that_are_kept() -> Any:
    from torchrec.utils.emo_logger import (
        DecisionCategory,
        EMOLogger,
        EMOSummary,
        get_logger,
        log_emo_decision,
    )

    get_logger().reset()
    log_emo_decision(DecisionCategory.KERNEL, 20, "chose", table_name="t", rows=3)
    log_emo_decision(DecisionCategory.CLF, 10, "grew")
    kept = [[d.category, d.table_name, d.metadata] for d in get_logger().get_summary().decisions]
    get_logger().reset()
    alone = EMOSummary()
    alone.add(DecisionCategory.PROPOSER, "tried", None, number=2)
    return [
        kept,
        len(get_logger().get_summary().decisions),
        get_logger() is EMOLogger.get_instance(),
        alone,
    ]
