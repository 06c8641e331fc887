"""A sharded model is built on all ranks or on none, and ranks that differ raise an error."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.checkpoint import save_checkpoint_async
from recsys.distributed.data_parallel import DefaultDataParallelWrapper
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.ranks import build_transaction
from recsys.distributed.shard import shard, shard_modules
from recsys.distributed.sharded import collection
from recsys.distributed.sharded.devices import default_device
from recsys.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_row_wise,
    table_wise,
)
from recsys.distributed.types import ShardingEnv, ShardingPlan
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.ranks import RankPool

CPU, META = torch.device("cpu"), torch.device("meta")
NAMES = ["a", "b", "c"]


def _fails_on_rank_1(values: Tensor) -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("no such file: weights.bin")


def _threes(values: Tensor) -> None:
    values.fill_(3.0)


def _fours(values: Tensor) -> None:
    values.fill_(4.0)


def _model(
    rows: int = 10,
    lr: float = 0.1,
    width: int = 4,
    weighted: bool = False,
    device: torch.device = CPU,
    init_fn: Callable[[Tensor], None] | None = None,
    tied: bool = False,
    config: Mapping[str, Any] = MappingProxyType({}),
    trains: bool = True,
    **_: Any,
) -> nn.Module:
    tables = [
        EmbeddingBagConfig(rows, 4, name, feature_names=[f"f_{name}"], init_fn=init_fn, **config)
        for name in NAMES
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=device, is_weighted=weighted)
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": lr})
    ebc.embedding_bags["a"].weight.requires_grad_(trains)
    model = nn.ModuleDict({"ebc": ebc, "over": nn.Linear(4, width)})
    if tied:
        model["over"].weight = ebc.embedding_bags["b"].weight  # type: ignore[assignment, union-attr]
    return model


def _plan(ebc: nn.Module, owner: int = 1, lacks: str = "", **_: Any) -> ShardingPlan:
    kinds = {"a": row_wise(), "b": table_wise(rank=0), "c": table_wise(rank=owner)}
    tables = construct_module_sharding_plan(ebc, kinds, world_size=2, device_type="cpu")
    tables.pop(lacks, None)
    return ShardingPlan({"ebc": tables})


def _build(how: str, both: dict[str, Any], of_rank_1: dict[str, Any]) -> tuple[str, bool]:
    """Returns what this rank raised, and whether its model is as it was."""
    asked = {**both, **(of_rank_1 if dist.get_rank() == 1 else {})}
    model = _model(**asked)
    ebc = model["ebc"]  # type: ignore[index]
    plan = None if asked.get("no_plan") else _plan(ebc, **asked)
    seed, error = ebc.init_seed, ""
    with ExitStack() as stack:
        if "local_size" in asked:
            stack.enter_context(mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=asked["local_size"]))
        if "breaks" in asked:
            broken = mock.patch.object(collection, "build_stages", side_effect=MemoryError("2 GB"))
            stack.enter_context(broken)
        try:
            if how == "shard":
                assert plan is not None
                shard(ebc, plan.plan["ebc"], device=CPU)
            elif how == "shard_modules":
                shard_modules(model, device=CPU, plan=plan)
            else:
                wrapper = DefaultDataParallelWrapper(asked.get("bucket_cap_mb", 25))
                DistributedModelParallel(
                    model,
                    device=CPU,
                    plan=plan,
                    data_parallel_wrapper=wrapper,
                    init_data_parallel=asked.get("replicates", True),
                )
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    dist.barrier()  # neither rank waits for the other
    return error, model["ebc"] is ebc and ebc.init_seed == seed  # type: ignore[index]


# Settings of both ranks, differing settings of rank 1, and the error on both.
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a table is missing from a plan": (
        {},
        {"lacks": "b"},
        "ValueError: On rank 1: The plan of module {!r} must name each of its tables once; "
        "missing: ['b'], ",
    ),
    "plans differ": (
        {},
        {"owner": 0},
        "ValueError: All ranks must build the model from the same arguments; table 'c' of {} "
        "differs: rank 0 has shards rows 0-10 and columns 0-4 on 1, rank 1 has shards rows 0-10 "
        "and columns 0-4 on 0. Pass the same on every rank.",
    ),
    "tables differ": (
        {},
        {"rows": 9},
        "table 'a' of {} differs: rank 0 has num_embeddings 10; shards",
    ),
    "the pooling of a table differs": (
        {"config": {"pooling": "sum"}},
        {"config": {"pooling": "mean"}},
        "table 'a' of {} differs: rank 0 has pooling SUM, rank 1 has pooling MEAN.",
    ),
    "initial ranges differ": (
        {},
        {"config": {"weight_init_max": 0.5}},
        "rank 0 has weight_init_max None, rank 1 has weight_init_max 0.5.",
    ),
    "init functions differ": (
        {"init_fn": _threes},
        {"init_fn": _fours},
        "rank 0 has init_fn <function _threes>, rank 1 has init_fn <function _fours>.",
    ),
    "only one trains a table": (
        {},
        {"trains": False},
        "rank 1 has trains False; optimizer None;",
    ),
    "learning rates differ": (
        {},
        {"lr": 0.2},
        "table 'a' of {} differs: rank 0 has learning_rate 0.1, rank 1 has learning_rate 0.2.",
    ),
    "settings differ": ({}, {"weighted": True}, "'_is_weighted': False"),
    "only one has values": ({}, {"device": META}, "rank 0 has with values, rank 1 has on the meta"),
    "a node has no size": (
        {},
        {"local_size": "two"},
        "ValueError: On rank 1: The environment variable LOCAL_WORLD_SIZE must be a whole number",
    ),
    "memory is short": ({}, {"breaks": True}, "MemoryError: On rank 1: 2 GB"),
    "an init_fn fails": (
        {"device": META, "init_fn": _fails_on_rank_1},
        {},
        "RuntimeError: On rank 1: no such file: weights.bin",
    ),
}
OF_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dense parts differ": ({}, {"width": 5}, "the rest of the model differs: rank 0 has over.wei"),
    "only one has a plan": (
        {},
        {"no_plan": True},
        "ValueError: All ranks must take the same steps; rank 0 is to build the model, rank 1 to "
        "plan the model. Pass the same arguments on every rank.",
    ),
    "buckets differ": (
        {},
        {"bucket_cap_mb": 1},
        "data_parallel_wrapper of DistributedModelParallel differs: rank 0 has bucket_cap_mb 25, "
        "rank 1 has bucket_cap_mb 1.",
    ),
    "only one replicates": (
        {},
        {"replicates": False},
        "init_data_parallel of DistributedModelParallel differs: rank 0 has True, rank 1 has False",
    ),
    "a weight is tied": (
        {},
        {"tied": True},
        "ValueError: On rank 1: The weight of a sharded table cannot be shared with another "
        "parameter; received 'ebc.embedding_bags.b.weight' and 'over.weight', which are one or "
        "overlap in memory.",
    ),
}


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        *[(how, kind) for how in ("model", "shard_modules", "shard") for kind in DIFFERENCES],
        *[
            (how, kind)
            for how in ("model", "shard_modules")
            for kind in OF_MODELS
            if how == "model" or not kind.startswith(("buckets", "only one replicates"))
        ],
    ],
)
def test_all_ranks_raise_the_same_and_keep_their_model(
    ranks: RankPool, how: str, kind: str
) -> None:
    both, of_rank_1, message = (DIFFERENCES | OF_MODELS)[kind]
    (first, kept), (second, also_kept) = ranks(2, _build, how, both, of_rank_1)
    path = "EmbeddingBagCollection" if how == "shard" else "ebc"
    assert message.replace("{!r}", repr(path)).replace("{}", path) in first, first
    assert first == second
    assert kept or kind == "an init_fn fails"  # its seed is rank 0's by then
    assert also_kept or kind == "an init_fn fails"


def test_an_error_of_all_ranks_is_raised_as_it_is(ranks: RankPool) -> None:
    (first, _), (second, _) = ranks(2, _build, "model", {"lacks": "b"}, {})
    assert first == second
    assert first.startswith("ValueError: The plan of module 'ebc' must name each of its tables")


def _build_twice() -> list[list[float]]:
    """After an error the same model can be built."""
    model = _model()
    plan = _plan(model["ebc"])  # type: ignore[index]
    bad = _plan(model["ebc"], lacks="b" if dist.get_rank() else "")  # type: ignore[index]
    with pytest.raises(ValueError, match=r"On rank 1: .* module 'ebc'"):
        DistributedModelParallel(model, device=CPU, plan=bad)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan)
    features = KeyedJaggedTensor(
        [f"f_{name}" for name in NAMES], torch.tensor([1, 2, 3]), lengths=torch.ones(3).int()
    )
    values: list[list[float]] = sharded.module["ebc"](features).values().tolist()  # type: ignore[index]
    return values


def test_a_model_can_be_built_after_an_error(ranks: RankPool) -> None:
    first, second = ranks(2, _build_twice)
    assert first == second  # rank 0's weights


def _collectives(device: torch.device, num_tables: int) -> Counter[str]:
    tables = [
        EmbeddingBagConfig(10, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(num_tables)
    ]
    model = nn.Sequential(
        EmbeddingBagCollection(tables=tables, device=device),
        EmbeddingBagCollection(tables=tables, device=device),
    )
    plan = ShardingPlan(
        {
            path: construct_module_sharding_plan(
                model[int(path)],
                {table.name: row_wise() for table in tables},
                world_size=2,
                device_type="cpu",
            )
            for path in ("0", "1")
        }
    )
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    names = ("all_gather_object", "broadcast", "broadcast_object_list", "all_reduce", "barrier")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(counted(name))
        shard_modules(model, device=CPU, plan=plan)
    return calls


@pytest.mark.parametrize("num_tables", [1, 50])
def test_ranks_speak_once_and_then_send_many_tables_at_a_time(
    ranks: RankPool, num_tables: int
) -> None:
    assert ranks(2, _collectives, META, num_tables) == [{"all_gather_object": 1}] * 2
    expected = {"all_gather_object": 1, "broadcast": 2}  # one for each collection
    assert ranks(2, _collectives, CPU, num_tables) == [expected] * 2


def test_a_weight_of_two_tables_is_refused_by_shard_alone() -> None:
    model = _model()
    tables = model["ebc"].embedding_bags  # type: ignore[index, union-attr]
    tables["c"].weight = tables["a"].weight
    with pytest.raises(ValueError, match=r"'embedding_bags.a.weight' and 'embedding_bags.c.weigh"):
        shard(model["ebc"], row_wise(), device=CPU)  # type: ignore[index]


# -- many tables, many features --------------------------------------------------------------------


def _many(num_tables: int, num_features: int) -> EmbeddingBagCollection:
    each = num_features // num_tables
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                100 + i % 37, 8, f"t{i}", feature_names=[f"f{i}_{k}" for k in range(each)]
            )
            for i in range(num_tables)
        ],
        device=CPU,
    )


def _calls(num_tables: int, num_features: int) -> int:
    """Python calls of planning and sharding."""
    collection, counted = _many(num_tables, num_features), 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        DistributedModelParallel(collection, device=CPU)
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize(
    ("few", "many"),
    [((300, 300), (600, 600)), ((1, 1000), (1, 2000)), ((300, 1500), (600, 3000))],
    ids=["tables", "features", "both"],
)
def test_calls_are_linear_in_tables_and_features(
    ranks: RankPool, few: tuple[int, int], many: tuple[int, int]
) -> None:
    for once, twice in zip(ranks(2, _calls, *few), ranks(2, _calls, *many), strict=True):
        assert twice <= 2.2 * once, (once, twice)


def _seconds(num_tables: int, num_features: int) -> tuple[float, float]:
    """CPU seconds of building the unsharded collection with its lookups, and of placing it."""
    began = time.process_time()
    collection = _many(num_tables, num_features)
    collection._current_lookups()  # else built by the first batch
    built = time.process_time() - began
    began = time.process_time()
    DistributedModelParallel(collection, device=CPU)
    return built, time.process_time() - began


@pytest.mark.parametrize("size", [(2000, 2000), (1, 10_000)], ids=["tables", "features"])
def test_placing_costs_a_few_times_what_building_costs(
    ranks: RankPool, size: tuple[int, int]
) -> None:
    ranks(2, _seconds, 2, 2)  # imports
    shares = []
    for _ in range(6):  # 1.5 and 2.3 on a quiet machine
        (building, placing), _ = ranks(2, _seconds, *size)
        shares.append(placing / building)
        if shares[-1] <= 3:
            break
    assert min(shares) <= 3, shares


# -- devices ---------------------------------------------------------------------------------------


def _on_one_gpu(gpus: list[str]) -> str:
    gpu = gpus[dist.get_rank()]
    with mock.patch.object(build_transaction, "gpu_of", return_value=gpu):
        try:
            shard(_model()["ebc"], row_wise(), device=CPU)  # type: ignore[index]
        except ValueError as error:
            return str(error)
    return ""


def test_two_ranks_of_nccl_need_two_gpus(ranks: RankPool) -> None:
    first, second = ranks(2, _on_one_gpu, ["GPU-1 of here", "GPU-1 of here"])
    assert first == second
    assert "ranks 0 and 1 both use GPU GPU-1 of here. Call torch.cuda.set_device" in first
    assert ranks(2, _on_one_gpu, ["GPU-1 of here", "GPU-1 of there"]) == ["", ""]


def test_a_gpu_is_shared_freely_without_nccl() -> None:
    assert build_transaction.gpu_of(ShardingEnv(1, 0), torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("current", "local_rank", "count", "expected"),
    [
        (0, "1", 2, 1),  # without a call of set_device
        (0, None, 2, 0),
        (2, "1", 4, 2),  # somebody has
        (0, "1", 1, 0),  # each process sees one GPU, its own
    ],
)
def test_the_default_gpu_is_that_of_the_local_rank(
    monkeypatch: pytest.MonkeyPatch,
    current: int,
    local_rank: str | None,
    count: int,
    expected: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert default_device(ShardingEnv(1, 0)) == torch.device("cuda", expected)


def _use_groups(path: str) -> None:
    """Trains and saves a model whose tables are added up on nodes, where no group can be made."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        model = _model()
        ebc: Any = model["ebc"]  # type: ignore[index]
        kinds = {name: table_row_wise(host_index=0) for name in NAMES}
        tables = construct_module_sharding_plan(
            ebc, kinds, world_size=4, local_size=2, device_type="cpu"
        )
        sharded = DistributedModelParallel(
            nn.ModuleDict({"ebc": ebc}), device=CPU, plan=ShardingPlan({"ebc": tables})
        )
    features = KeyedJaggedTensor(
        [f"f_{name}" for name in NAMES], torch.tensor([1, 2, 3]), lengths=torch.ones(3).int()
    )
    with mock.patch("torch.distributed.new_group", side_effect=AssertionError("a group is made")):
        sharded.module["ebc"](features).values().sum().backward()  # type: ignore[index]
        save_checkpoint_async(path, sharded, sharded.fused_optimizer).wait()


def test_groups_are_made_while_the_model_is_built(ranks: RankPool, tmp_path: Path) -> None:
    """Making a group waits for all ranks: a rank that is lost later must not hold up the others."""
    ranks(4, _use_groups, str(tmp_path / "saved"))
