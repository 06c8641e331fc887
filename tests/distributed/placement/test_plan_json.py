"""Plan files: written plans are read back, errors name the wrong value, and an edited plan runs."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.planner import EmbeddingShardingPlanner, PlannerError, Topology
from recsys.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    PlanRanks,
    ShardingPlan,
    ShardMetadata,
)
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.planner.test_planners import META, SHARDERS, collection
from tests.ranks import RankPool

NODES, LOCAL = 2, 4
WORLD = NODES * LOCAL


def sizes_of(draw: st.DrawFn, size: int, parts: int) -> list[int]:
    splits = sorted(draw(st.integers(0, size)) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *splits], [*splits, size], strict=True)]


@st.composite
def plans(draw: st.DrawFn) -> ShardingPlan:
    """A table of each strategy, made by hand as users do."""
    ranks = st.lists(st.integers(0, WORLD - 1), min_size=1, max_size=WORLD)
    rows, dim = draw(st.integers(WORLD, 99)), 4 * draw(st.integers(2, 9))
    kernel = draw(st.sampled_from([None, "fused", "fused_uvm", "dense"]))
    generators = {
        "whole": table_wise(rank=draw(st.integers(0, WORLD - 1)), compute_kernel=kernel),
        "rows": row_wise(compute_kernel=kernel),
        "uneven rows": row_wise(
            (sizes_of(draw, rows, WORLD), draw(st.sampled_from(["cpu", "cuda"])))
        ),
        "columns": column_wise(ranks=draw(ranks), compute_kernel=kernel),
        "uneven columns": column_wise(
            size_per_rank=sizes_of(draw, dim, draw(st.integers(1, WORLD)))
        ),
        "node": table_row_wise(draw(st.integers(0, NODES - 1))),
        "columns of a node": table_column_wise(draw(st.integers(0, NODES - 1))),
        "grid": grid_shard(draw(st.permutations(range(NODES)))),
        "copies": data_parallel(),
    }
    model = collection(dict.fromkeys(generators, (rows, dim)))
    device = draw(st.sampled_from(["cpu", "cuda"]))
    tables = construct_module_sharding_plan(
        model, generators, local_size=LOCAL, world_size=WORLD, device_type=device
    )
    known = draw(st.booleans())
    return ShardingPlan(
        {'sparse."ebc"': tables, "": EmbeddingModuleShardingPlan(tables)},
        made_for=PlanRanks(world_size=WORLD, local_world_size=LOCAL, compute_device=device)
        if known
        else None,
    )


@given(plan=plans())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(plan: ShardingPlan) -> None:
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan
    assert list(again.plan) == list(plan.plan)
    assert again.to_json() == plan.to_json()
    assert plan.made_for is None or again.made_for == plan.made_for


def test_what_follows_is_left_out(tmp_path: Path) -> None:
    tables = construct_module_sharding_plan(
        collection({"a": (8, 4), "b": (10, 4), "c": (6, 8)}),
        {"a": table_wise(rank=1), "b": data_parallel(), "c": row_wise(([1, 5], "cpu"))},
        world_size=2,
        local_size=2,
        device_type="cpu",
    )
    tables["c"].bounds_check_mode = BoundsCheckMode.WARNING
    tables["c"].output_dtype = torch.float32
    tables["c"].stochastic_rounding = False
    plan = ShardingPlan({"ebc": tables})
    assert plan.to_json(tmp_path / "plan.json") == (tmp_path / "plan.json").read_text()
    assert ShardingPlan.from_json(tmp_path / "plan.json") == plan
    assert ShardingPlan.from_json(str(tmp_path / "plan.json")) == plan
    assert (
        plan.to_json()
        == """\
{
  "format": 1,
  "world_size": 2,
  "local_world_size": 2,
  "compute_device": "cpu",
  "plan": {
    "ebc": {
      "a": {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [1], "size": [8, 4]},
      "b": {"sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": [0, 1]},
      "c": {"sharding_type": "row_wise", "compute_kernel": "fused", "shards": [
        {"rank": 0, "rows": [0, 1], "columns": [0, 8]},
        {"rank": 1, "rows": [1, 6], "columns": [0, 8]}
      ], "bounds_check_mode": "WARNING", "stochastic_rounding": false, "output_dtype": "float32"}
    }
  }
}
"""
    )


def test_a_plan_without_shards_stays_without() -> None:
    entries = EmbeddingModuleShardingPlan(
        a=ParameterSharding("row_wise", "fused"),
        b=ParameterSharding("column_wise", "fused", [3, 0]),
    )
    again = ShardingPlan.from_json(ShardingPlan({"ebc": entries}).to_json())
    assert again.plan == {"ebc": entries}
    assert again.made_for is not None
    assert again.made_for.world_size == 4


def test_many_ranks_are_few_words() -> None:
    ranks = [*range(8, 1024), 3, 5, 6]
    plan = ShardingPlan(
        {"": EmbeddingModuleShardingPlan(t=ParameterSharding("row_wise", "fused", ranks))}
    )
    assert '"ranks": ["8-1023", 3, 5, 6]' in plan.to_json()
    assert ShardingPlan.from_json(plan.to_json()) == plan


GIVEN: dict[str, Any] = {
    "format": 1,
    "world_size": 4,
    "local_world_size": 2,
    "compute_device": "cpu",
    "plan": {
        "ebc": {
            "a": {
                "sharding_type": "row_wise",
                "compute_kernel": "fused",
                "ranks": ["0-3"],
                "size": [8, 4],
            },
            "b": {
                "sharding_type": "row_wise",
                "compute_kernel": "fused",
                "shards": [{"rank": 0, "rows": [0, 8], "columns": [0, 4]}],
            },
        }
    },
}


def edited(edit: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(json.dumps(GIVEN))
    edit(data)
    return json.dumps(data)


def of_a(**changes: object) -> Callable[[dict[str, Any]], object]:
    def edit(data: dict[str, Any]) -> None:
        entry = data["plan"]["ebc"]["a"] | changes
        data["plan"]["ebc"]["a"] = {k: v for k, v in entry.items() if v is not None}

    return edit


def of_shard(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["plan"]["ebc"]["b"]["shards"][0].update(changes)


A, B = "module 'ebc', table 'a'", "module 'ebc', table 'b'"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(format=2), "Plan file: .*received 2. Files"),
        (lambda d: d.update(plans={}), "received 'plans'. The nearest is 'plan'."),
        (lambda d: d.pop("world_size"), "received none for world_size. plan.to_json"),
        (lambda d: d.update(world_size=0), "world_size must be positive; received 0"),
        (lambda d: d.update(local_world_size=3), "must divide .*received 3 and 4"),
        (lambda d: d.update(compute_device="gpu"), "one of cpu, cuda; received 'gpu'"),
        (of_a(rank=[0]), f"{A} has keys among .*; received 'rank'. The nearest is 'ranks'."),
        (of_a(sharding_type=None), f"{A} must have the keys .* none for sharding_type. Such as"),
        (
            of_a(sharding_type="row_wize"),
            f"{A}: sharding_type must be .* The nearest is 'row_wise'",
        ),
        (
            of_a(compute_kernel="fuse"),
            f"{A}: compute_kernel must be one of .* received 'fuse'. The",
        ),
        (
            of_a(ranks=[0, 4]),
            rf"{A}: ranks must be in 0..3, as the plan's world_size is 4; .* 4\.",
        ),
        (of_a(ranks=["0-9"]), rf"{A}: ranks must be in 0..3.* received 9\."),
        (of_a(ranks=["3-0"]), f"{A}: ranks must hold numbers, and runs .* received '3-0'"),
        (of_a(ranks=[-1]), f"{A}: ranks must not be negative; received -1"),
        (of_a(ranks=[]), f"{A}: ranks must name at least one rank"),
        (of_a(ranks=None), f"{A} .row_wise.: size is for shards that follow from ranks"),
        (of_a(shards=[]), f"{A} must have shards, or ranks and a size .* received both"),
        (of_a(sharding_type="table_wise"), rf"{A} .table_wise.: ranks must be one rank; .*'0-3'"),
        (
            of_a(sharding_type="data_parallel", ranks=[0, 1]),
            f"{A} .data_parallel.: ranks must be all ranks",
        ),
        (
            of_a(sharding_type="table_row_wise"),
            f"{A} .table_row_wise.: ranks must be ranks of one node",
        ),
        (
            of_a(sharding_type="table_column_wise", ranks=[1, 2]),
            r"ranks must .*received \[1, 2\]",
        ),
        (of_a(sharding_type="grid_shard", ranks=[0, 2]), "must be all .*of some nodes"),
        (
            of_a(sharding_type="table_wise", ranks=None, size=None),
            f"{A} .table_wise. must have ranks or shards; received neither",
        ),
        (of_a(sharding_type="column_wise"), "4 columns must .*of 4 ranks"),
        (of_a(size=[0, 4]), f"{A}: size must be positive; received 0"),
        (of_a(bounds_check_mode="WARN"), "bounds_check_mode must be .*nearest is 'WARNING'"),
        (of_a(output_dtype="fp16"), "output_dtype must .*received 'fp16'"),
        (of_shard(row=[0, 1]), rf"{B}: shards\[0\] has keys among .* The nearest is 'rows'"),
        (of_shard(rank=7), rf"{B}: shards\[0\]: rank must be in 0..3"),
        (of_shard(rows=[8, 0]), rf"{B}: shards\[0\]: rows and columns must not end before"),
        (of_shard(placement="rank:1/cpu"), rf"{B}: shards\[0\]: placement must be on .* rank, 0"),
    ],
)
def test_wrong_values_are_named(edit: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardingPlan.from_json(edited(edit))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(plan=[]), r"plan must .*received \[\]"),
        (lambda d: d["plan"].update(ebc=3), "module 'ebc' must .*received 3"),
        (lambda d: d["plan"]["ebc"].update(a=3), f"{A} must be an object, {{...}}; received 3"),
        (of_a(sharding_type=1), f"{A}: sharding_type must be text; received 1"),
        (of_a(ranks=0), f"{A}: ranks must be a list; received 0"),
        (of_a(ranks=[0.5]), f"{A}: ranks must be a whole number; received 0.5"),
        (of_a(size=8), rf"{A}: size must be \[rows, columns\]; received 8"),
        (of_shard(rows=[0]), r"rows must .*received \[0\]"),
    ],
)
def test_wrong_types_are_named(edit: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ShardingPlan.from_json(edited(edit))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": ' + "[" * 30_000 + "]" * 30_000 + "}", "brackets nested too deep to read"),
        ('{"format": ' + "1" * 5_000 + "}", "received one with thousands of digits"),
        (
            edited(lambda d: d.update(world_size=10**9)),
            "world_size must .*received 1000000000",
        ),
        (edited(lambda d: d.update(world_size=2**63)), "world_size must be at most 1048576"),
        (edited(of_a(ranks=["0-" + "9" * 17])), "ranks must .*received 9{17}"),
        (edited(of_a(ranks=["0-3"] * 300_000)), "ranks must name .*most 1048576 ranks"),
        (edited(of_a(size=[2**63, 4])), f"size must be at most {2**63 - 1}; received {2**63}"),
    ],
    ids=["brackets", "digits", "ranks", "more ranks", "a run", "runs", "rows"],
)
def test_what_is_beyond_measure_is_refused_at_once(text: str, message: str) -> None:
    began, held = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message):
        ShardingPlan.from_json(text)
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 500 << 10  # KiB


def test_a_table_that_is_there_twice() -> None:
    text = json.dumps(GIVEN).replace('"b": {', '"a": {')
    with pytest.raises(ValueError, match=r"must name each key once; .*'a'"):
        ShardingPlan.from_json(text)


class TestAgainstAModel:
    def rated(self, **changes: Any) -> ShardingPlan:
        model = torch.nn.ModuleDict({"ebc": collection({"a": (8, 4), "b": (8, 4)})})
        planner = EmbeddingShardingPlanner(Topology(4, "cpu", ddr_cap=1 << 30), batch_size=1)
        plan = ShardingPlan.from_json(edited(lambda d: d.update(changes)))
        return planner.rate(model, SHARDERS, plan)

    def tables(self, **tables: Any) -> dict[str, Any]:
        return {"ebc": GIVEN["plan"]["ebc"] | tables}

    def test_fits(self) -> None:
        assert self.rated().plan == ShardingPlan.from_json(json.dumps(GIVEN)).plan

    def test_unknown_module(self) -> None:
        message = r"missing: \['ebc'\].* model: \['ebd'\]. The nearest is 'ebc'"
        with pytest.raises(ValueError, match=message):
            self.rated(plan={"ebd": GIVEN["plan"]["ebc"]})

    def test_unknown_table(self) -> None:
        plan = self.tables(bb=GIVEN["plan"]["ebc"]["b"])
        with pytest.raises(ValueError, match=r"'ebc' .*: \['bb'\]\. The nearest.*'b'"):
            self.rated(plan=plan)

    def test_another_size(self) -> None:
        plan = self.tables(a=GIVEN["plan"]["ebc"]["a"] | {"size": [12, 4]})
        with pytest.raises(ValueError, match=r"'a' must cover.*0\.\.8; .*at 12"):
            self.rated(plan=plan)

    def test_what_does_not_fit_is_refused_by_name(self) -> None:
        model = collection({"big": (1000, 64), "small": (10, 64), "other": (10, 64)})
        planner = EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=200_000), batch_size=1)
        whole = {name: table_wise(rank=int(name != "other")) for name in ("big", "small", "other")}
        tables = construct_module_sharding_plan(
            model, whole, world_size=2, local_size=2, device_type="cpu"
        )
        message = (
            r"needs 0.2 MiB of cpu memory on rank 1, which has 0.2 MiB free for tables: 0.1 MiB "
            r"too much. On rank 1 are 'big' of module '' \(0.2 MiB\), 'small'"
        )
        with pytest.raises(PlannerError, match=message):
            planner.rate(model, SHARDERS, ShardingPlan({"": tables}))


def _train_with_edited_plan(path: str) -> tuple[list[int], float]:
    table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    ebc = EmbeddingBagCollection(tables=[table], device=META)
    model = DistributedModelParallel(
        ebc, device=torch.device("cpu"), plan=ShardingPlan.from_json(path)
    )
    ids = KeyedJaggedTensor(keys=["f"], values=torch.arange(10), lengths=torch.tensor([10]))
    out = model(ids).values().detach()
    assert torch.isfinite(out).all()
    weights = [p for name, p in model.named_parameters()]
    return [p.shape[0] for p in weights], float(out.sum())


def test_an_edited_plan_runs(ranks: RankPool, tmp_path: Path) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    model = EmbeddingBagCollection(tables=[table], device=META)
    planner = EmbeddingShardingPlanner(Topology(2, "cpu"))
    data = json.loads(planner.plan(model, SHARDERS).to_json())
    data["plan"][""]["t"] = {
        "sharding_type": "row_wise",
        "compute_kernel": "fused",
        "shards": [
            {"rank": 1, "rows": [0, 7], "columns": [0, 4]},
            {"rank": 0, "rows": [7, 10], "columns": [0, 4]},
        ],
    }
    (tmp_path / "plan.json").write_text(json.dumps(data))
    (rows_0, sum_0), (rows_1, sum_1) = ranks(
        2, _train_with_edited_plan, str(tmp_path / "plan.json")
    )
    assert (rows_0, rows_1) == ([3], [7])
    assert sum_0 == pytest.approx(sum_1)


def test_a_plan_for_other_ranks_is_refused() -> None:
    plan = ShardingPlan.from_json(json.dumps(GIVEN))
    with pytest.raises(ValueError, match=r"for 4 ranks, on 1\. .*1"):
        DistributedModelParallel(
            torch.nn.ModuleDict({"ebc": collection({"a": (8, 4), "b": (8, 4)})}),
            device=torch.device("cpu"),
            plan=plan,
        )


def test_placements_of_torch_are_written() -> None:
    class Remote:
        def rank(self) -> int:
            return 1

        def __str__(self) -> str:
            return "rank:1/cpu"

    spec = EnumerableShardingSpec([ShardMetadata([0, 0], [8, 4], Remote())])
    entry = ParameterSharding("table_wise", "fused", None, spec)
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(t=entry)})
    (again,) = ShardingPlan.from_json(plan.to_json()).plan[""].values()
    assert again.ranks == [1]
    assert again.sharding_spec is not None
    assert again.sharding_spec.shards[0].placement == "rank:1/cpu"
