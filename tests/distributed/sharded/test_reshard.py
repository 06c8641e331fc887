"""Tables move to other ranks in the middle of training, and nothing else changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recsys.distributed.state import moves
from recsys.distributed.train_pipeline.even_batches import EvenBatches
from recsys.distributed.train_pipeline.pipelines import (
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from recsys.distributed.types import BoundsCheckMode, ShardingPlan, ShardingType
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import LAMB, SGD, Adam, PartialRowWiseAdam, RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tests.distributed.cases import (
    CPU,
    NEED_WHOLE_ROWS,
    Case,
    assert_same,
    counted_collectives,
    shard,
    train,
    whole,
    whole_state,
)
from tests.distributed.test_fp_embeddingbag import SHARDERS, FpCase
from tests.distributed.test_fp_embeddingbag import _train as train_fp
from tests.ranks import RankPool

WHOLE_ROWS = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)


def everything(model: DistributedModelParallel) -> dict[str, Tensor]:
    state = whole_state(model)
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        state |= {f"{name}/{key}": whole(value) for key, value in states.items()}
    return state


def _move_and_go_on(case: Case) -> list[dict[str, Tensor]]:
    """Move a model to another plan and train it; return its final state and its outputs."""
    rank = dist.get_rank()
    model = shard(case, case.plan(0))
    train(case, model, range(3), rank)
    before = everything(model)
    model.reshard(case.plan(1))
    after = everything(model)
    assert_same(after, before, rtol=0, atol=0)
    placed = shard(case, case.plan(1)).module.ebc
    assert model.module.ebc.layout == placed.layout
    assert str(model.plan) == str(case.plan(1))
    outputs = train(case, model, range(3, 6), rank)
    return [everything(model), dict(enumerate(outputs))]


@pytest.mark.parametrize("optimizer", [SGD, RowWiseAdagrad, Adam, PartialRowWiseAdam, LAMB])
@pytest.mark.parametrize(("world_size", "pooled"), [(2, True), (3, True), (2, False)])
def test_training_goes_on_as_that_of_one_process(
    ranks: RankPool, optimizer: type[torch.optim.Optimizer], world_size: int, pooled: bool
) -> None:
    for seed in range(3):
        case = Case(seed=seed, world_size=world_size, optimizer=optimizer, pooled=pooled)
        if optimizer in NEED_WHOLE_ROWS:
            case = replace(case, types=WHOLE_ROWS)
        seen = ranks(world_size, _move_and_go_on, case)
        alone = case.model()
        outputs = train(case, alone, range(6), None)[3:]
        expected = {name: value.detach() for name, value in alone.state_dict().items()}
        for rank, (state, given) in enumerate(seen):
            assert_same({k: v for k, v in state.items() if "/" not in k}, expected)
            for number, output in enumerate(outputs):
                torch.testing.assert_close(
                    given[number], case.parts(output, number + 3)[rank], rtol=1e-5, atol=1e-5
                )


def _small_rounds(case: Case) -> tuple[int, int]:
    model = shard(case, case.plan(0))
    before = everything(model)
    with mock.patch.object(moves, "ROUND_BYTES", 256), counted_collectives() as calls:
        model.reshard(case.plan(1))
    assert_same(everything(model), before, rtol=0, atol=0)
    sent = [args[1].numel() for args in calls.arguments["all_to_all_single"]]
    return len(sent), max(sent)


def test_what_travels_at_a_time_is_bounded(ranks: RankPool) -> None:
    case = Case(seed=5, world_size=3, optimizer=Adam)
    for rounds, most in ranks(3, _small_rounds, case):
        assert rounds > 3
        assert most <= 256


# -- what users hold -------------------------------------------------------------------------------


def _tables(names: str, **more: Any) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(30, 8, name, feature_names=[f"f{i}"]) for i, name in enumerate(names)
    ]
    return EmbeddingBagCollection(tables=tables, **more)


def _placed(
    placements: dict[str, Any],
    optimizer: type[torch.optim.Optimizer] | None = Adam,
    mode: str = "fused",
    row_state: str = "exact",
) -> DistributedModelParallel:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"ebc": _tables("ab"), "over": torch.nn.Linear(16, 1)})
    if optimizer is not None:
        apply_optimizer_in_backward(
            optimizer,
            model["ebc"].parameters(),
            {"lr": 0.5},
            update_mode=mode,
            row_state=row_state,
        )
    return DistributedModelParallel(model, device=CPU, plan=_plan(placements))


def _plan(placements: dict[str, Any]) -> ShardingPlan:
    placed = construct_module_sharding_plan(
        _tables("ab"), placements, EmbeddingBagCollectionSharder(), 2, 2, "cpu"
    )
    return ShardingPlan({"ebc": placed})


def _step(model: DistributedModelParallel) -> None:
    case = Case(seed=0, world_size=2)
    features = case.batches(0)[dist.get_rank()]
    model.module["ebc"](features).values().sum().backward()


def _optimizers_stay() -> None:
    model = _placed({"a": table_wise(rank=0), "b": data_parallel()})
    held = model.fused_optimizer
    dense = KeyedOptimizerWrapper(
        {f"over.{n}": p for n, p in model.module["over"].named_parameters()},
        lambda params: torch.optim.SGD(params, lr=0.5),
    )
    optimizer = CombinedOptimizer([held, dense])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    _step(model)
    optimizer.step()
    scheduler.step()
    names = list(optimizer.params)
    model.reshard(_plan({"a": row_wise(), "b": column_wise(ranks=[1, 0])}))
    assert model.fused_optimizer is held
    assert list(optimizer.params) == names
    kernels = [lookup.kernel for lookup in model.module["ebc"]._lookups]
    assert {rate for kernel in kernels for rate in kernel.learning_rates} == {0.05}
    scheduler.step()
    assert {rate for kernel in kernels for rate in kernel.learning_rates} == {0.5 * 0.1 * 0.1}
    states = optimizer.state_dict()["state"]["ebc.embedding_bags.a.weight"]
    assert [shard.metadata.shard_sizes for shard in states["exp_avg"].local_shards()] == [[15, 8]]
    before = whole(model.state_dict()["ebc.embedding_bags.b.weight"])
    _step(model)
    optimizer.step()
    assert not torch.equal(whole(model.state_dict()["ebc.embedding_bags.b.weight"]), before)


def test_optimizers_and_schedulers_that_users_hold_reach_the_tables(ranks: RankPool) -> None:
    ranks(2, _optimizers_stay)


def _others_stay() -> None:
    model = _placed({"a": table_wise(rank=0), "b": data_parallel()})
    ebc = model.module["ebc"]
    replica = ebc.lookups[0][0].kernel
    model.reshard({"ebc": {"a": model.plan.plan["ebc"]["a"]}})
    assert ebc.lookups[0][0].kernel is replica
    moved = _plan({"a": table_wise(rank=1), "b": data_parallel()}).plan["ebc"]["a"]
    model.reshard({"ebc": {"a": moved}})
    assert ebc.lookups[0][0].kernel is replica
    assert [len(lookup.parameters) for lookup in ebc._lookups] == [1] * dist.get_rank()


def test_lookups_of_which_no_table_moves_are_left_alone(ranks: RankPool) -> None:
    ranks(2, _others_stay)


# -- refused plans ---------------------------------------------------------------------------------


def _refused(name: str) -> str:
    rank = dist.get_rank()
    here, there = {"a": table_wise(rank=0), "b": row_wise()}, {"a": table_wise(1), "b": row_wise()}
    model = _placed(
        here,
        None if name == "plain" else RowWiseAdagrad,
        "deferred" if name == "waiting" else "fused",
        "per_shard" if name == "per_shard" else "exact",
    )
    plan: Any = _plan(there)
    if name == "waiting":
        _step(model)
    elif name == "differs":
        plan = _plan(there if rank else here)
    elif name == "table":
        plan = {"ebc": {"c": plan.plan["ebc"]["a"]}}
    elif name == "module":
        plan = {"abc": plan.plan["ebc"]}
    elif name == "per_shard":
        plan = _plan({"a": column_wise(ranks=[0, 1]), "b": row_wise()})
    elif name == "setting":
        plan.plan["ebc"]["a"].bounds_check_mode = BoundsCheckMode.IGNORE
    elif name == "type":
        plan = 3
    before = everything(model)
    try:
        model.reshard(plan)
    except (TypeError, ValueError) as error:
        assert_same(everything(model), before, rtol=0, atol=0)
        assert str(model.plan) == str(_plan(here))
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain", "table 'a' has none"),
        ("waiting", "Gradients of the tables of 'ebc' wait for a step"),
        ("differs", "the new plan of ebc differs: rank 0 has"),
        ("table", "not in the module: ['c']"),
        ("module", "sharded modules of the model, ['ebc']; received 'abc'"),
        ("per_shard", "Table 'a' has row_state='per_shard'"),
        ("setting", "bounds_check_mode=None of table 'a'; received BoundsCheckMode.IGNORE"),
        ("type", "reshard.plan must be a ShardingPlan"),
    ],
)
def test_what_cannot_move_is_refused_on_every_rank(
    ranks: RankPool, name: str, message: str
) -> None:
    for received in ranks(2, _refused, name):
        assert re.search(re.escape(message), received), received


def _move_wrapped(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return lookups of a wrapped collection, after a move and without one."""
    rank = dist.get_rank()
    case = FpCase(seed=seed, world_size=dist.get_world_size(), optimizer=RowWiseAdagrad)
    models = [shard(case, case.plan(0), sharders=SHARDERS) for _ in range(2)]
    for model in models:
        train_fp(case, model, range(2), rank)
    models[1].reshard(case.plan(1))
    assert str(models[1].plan) == str(case.plan(1))
    stayed, moved = (train_fp(case, model, range(2, 4), rank) for model in models)
    return stayed, moved


@pytest.mark.parametrize("seed", range(3))
def test_plans_name_modules_as_they_were_given(ranks: RankPool, seed: int) -> None:
    for stayed, moved in ranks(2, _move_wrapped, seed):
        for expected, received in zip(stayed, moved, strict=True):
            torch.testing.assert_close(received, expected, rtol=1e-4, atol=1e-5)


# -- pipelines -------------------------------------------------------------------------------------


class _Scores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.second = _tables("ab"), _tables("cd")

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        scores = (self.ebc(batch["first"]).values() * self.second(batch["second"]).values()).sum(1)
        return scores.square().sum(), scores


def _scores_plan(seed: int) -> ShardingPlan:
    first = [table_wise(rank=0), row_wise()]
    second = [column_wise(ranks=[1, 0]), data_parallel()]
    placed = {}
    for path, names in (("ebc", "ab"), ("second", "cd")):
        kinds = [first, second][(seed + (path == "ebc")) % 2]
        placed[path] = construct_module_sharding_plan(
            _tables(names), dict(zip(names, kinds, strict=True)), None, 2, 2, "cpu"
        )
    return ShardingPlan(placed)


def _pipelined(
    make: Callable[..., Any] | None, moves_at: int, num_batches: tuple[int, int]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    scores = _Scores()
    apply_optimizer_in_backward(RowWiseAdagrad, scores.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(scores, device=CPU, plan=_scores_plan(0))
    case, rank = Case(seed=3, world_size=2), dist.get_rank()
    batches = [
        {"first": case.batches(step)[rank], "second": case.batches(step)[rank]}
        for step in range(num_batches[rank])
    ]
    even = EvenBatches(batches, model, "join")
    found: list[Tensor] = []
    pipeline = None if make is None else make(model, model.fused_optimizer, CPU)
    steps = iter(even)
    while True:
        if len(found) == moves_at:
            model.reshard(_scores_plan(1))
        if pipeline is None:
            batch = next(steps, None)
            if batch is None:
                break
            loss, out = model(batch)
            loss.backward()
            model.fused_optimizer.step()
        else:
            try:
                out = pipeline.progress(steps)
            except StopIteration:
                break
            out = out[1] if isinstance(out, tuple) else out
        found.append(out.detach().clone())
    return found, everything(model)


@pytest.mark.parametrize("make", [TrainPipelineSparseDist, TrainPipelineFusedSparseDist])
@pytest.mark.parametrize("moves_at", [1, 4])
def test_pipelines_send_again_what_they_had_sent(
    ranks: RankPool, make: Callable[..., Any], moves_at: int
) -> None:
    plain = ranks(2, _pipelined, None, moves_at, (6, 5))
    ahead = ranks(2, _pipelined, make, moves_at, (6, 5))
    for (expected, state), (received, reached) in zip(plain, ahead, strict=True):
        assert len(expected) == 6
        assert all(map(torch.equal, received, expected))
        assert_same(reached, state, rtol=0, atol=0)


def test_a_semi_synchronous_pipeline_loses_no_update(ranks: RankPool) -> None:
    stays = ranks(2, _pipelined, TrainPipelineSemiSync, 99, (6, 6))
    moved = ranks(2, _pipelined, TrainPipelineSemiSync, 3, (6, 6))
    for (expected, state), (received, reached) in zip(stays, moved, strict=True):
        assert all(map(torch.equal, received[:3], expected[:3]))
        assert len(received) == len(expected)
        name = "second.embedding_bags.c.weight"
        torch.testing.assert_close(reached[name], state[name], rtol=0.1, atol=0.1)
        assert not torch.equal(reached[name], state[name])  # one batch saw a newer table
