"""State of tables under any plan: deferred updates, clipping, rates, decay and row states."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from recsys.distributed.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.state.fused_optimizer import optimizer_from_fused_params
from recsys.distributed.types import ShardingType
from recsys.kernels.row_update import init_state, update_rows
from recsys.kernels.types import OptimizerSpec, RowState, UpdateMode
from recsys.modules.embedding_configs import DataType, EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import (
    Adagrad,
    Adam,
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    in_backward_optimizer_filter,
)
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.keyed import set_learning_rate
from recsys.optim.specs import optimizer_spec
from tests.distributed.cases import (
    CLOSE,
    CPU,
    Case,
    EachType,
    Model,
    assert_same,
    concat_batches,
    counted_collectives,
    shard,
    train,
    whole,
    whole_state,
)
from tests.ranks import RankPool

EXACT = {"rtol": 0, "atol": 0}
Settings = dict[str, Any]


@dataclass(frozen=True)
class Owned(Case):
    """A case whose tables own an optimizer in these modes."""

    modes: tuple[tuple[str, str], ...] = ()

    def model(self) -> Model:
        model = Case.model(replace(self, optimizer=None))
        assert self.optimizer is not None
        apply_optimizer_in_backward(
            self.optimizer, model.ebc.parameters(), dict(self.hyperparameters), **dict(self.modes)
        )
        return model


def backward(case: Case, model: nn.Module, step: int, rank: int | None) -> None:
    batches = case.batches(step)
    values, logits = model(concat_batches(batches) if rank is None else batches[rank])
    scale = 1 / case.world_size if rank is None else 1.0
    (((values * values.detach().sin()).sum() + logits.pow(2).sum()) * scale).backward()


class Reference:
    """One process, plain parameters: `.grad` adds up, torch clips it, touched rows are updated."""

    def __init__(self, case: Owned) -> None:
        self.case = case
        self.model = Case.model(replace(case, optimizer=None))
        assert case.optimizer is not None
        self.spec: OptimizerSpec = optimizer_spec(case.optimizer, dict(case.hyperparameters))
        self.weights: dict[str, nn.Parameter] = self.model.ebc.table_weights()
        self.states = {n: init_state(self.spec, w.detach()) for n, w in self.weights.items()}
        self.touched: dict[str, set[int]] = {name: set() for name in self.weights}

    def backward(self, step: int) -> None:
        backward(self.case, self.model, step, rank=None)
        for config in self.case.configs():
            for batch in self.case.batches(step):
                for feature in config.feature_names:
                    self.touched[config.name].update(batch[feature].values().tolist())

    def step(self) -> None:
        for name, weight in self.weights.items():
            rows = torch.tensor(sorted(self.touched[name]), dtype=torch.int64)
            assert weight.grad is not None
            update_rows(
                self.spec,
                weight.detach(),
                self.states[name],
                rows,
                weight.grad[rows],
                self.spec.learning_rate,
            )
            self.touched[name].clear()
        for parameter in self.model.over.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.1)
        self.model.zero_grad()


def optimizer_of(sharded: DistributedModelParallel) -> CombinedOptimizer:
    """All of a model: its tables', and SGD of the rest."""
    rest = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return CombinedOptimizer([sharded.fused_optimizer, dense])


# -- deferred --------------------------------------------------------------------------------------

CLIPPINGS: dict[str, Settings] = {
    "none": {},
    "norm": {"clipping": GradientClipping.NORM, "max_gradient": 0.7},
    "largest": {"clipping": GradientClipping.NORM, "max_gradient": 0.1, "norm_type": "inf"},
    "loose": {"clipping": GradientClipping.NORM, "max_gradient": 1e4},
    "value": {"clipping": GradientClipping.VALUE, "max_gradient": 0.05},
}


def _clip(parameters: list[nn.Parameter], settings: Settings) -> Tensor | None:
    if settings.get("clipping") is GradientClipping.NORM:
        norm_type = float(settings.get("norm_type", 2.0))
        return nn.utils.clip_grad_norm_(parameters, settings["max_gradient"], norm_type)
    if settings.get("clipping") is GradientClipping.VALUE:
        nn.utils.clip_grad_value_(parameters, settings["max_gradient"])
    return None


def _train_deferred(case: Owned, accumulate: int, clipping: str) -> None:
    rank, settings = dist.get_rank(), CLIPPINGS[clipping]
    reference, sharded = Reference(case), shard(case)
    optimizer = GradientClippingOptimizer(
        optimizer_of(sharded), enable_global_grad_clip=True, **settings
    )
    for first in range(0, 3 * accumulate, accumulate):
        optimizer.zero_grad()
        before = whole_state(sharded)
        for step in range(first, first + accumulate):
            reference.backward(step)
            backward(case, sharded, step, rank)
        assert_same(whole_state(sharded), before, **EXACT)
        norm = _clip(list(reference.model.parameters()), settings)
        reference.step()
        optimizer.step()
        if norm is not None:
            assert optimizer.last_total_grad_norm is not None
            torch.testing.assert_close(optimizer.last_total_grad_norm, norm, **CLOSE)
    assert_same(whole_state(sharded), whole_state(reference.model))
    state = sharded.fused_optimizer.state_dict()["state"]
    for table, states in reference.states.items():
        for name, value in states.items():
            own = state[f"ebc.{sharded.module.ebc.tables_name}.{table}.weight"][name]
            torch.testing.assert_close(whole(own), value, **CLOSE)


def _sample(seed: int) -> tuple[Owned, int, str]:
    rng = random.Random(seed)
    world_size = rng.randint(1, 4)
    case = Owned(
        seed,
        world_size=world_size,
        node_size=rng.choice([size for size in (1, 2, 4) if world_size % size == 0]),
        types=tuple(ShardingType),
        pooled=rng.random() < 0.7,
        variable_batch=rng.random() < 0.3,
        optimizer=rng.choice([torch.optim.SGD, RowWiseAdagrad, Adagrad, Adam, PartialRowWiseAdam]),
        modes=(("update_mode", "deferred"),),
    )
    return case, rng.randint(1, 3), rng.choice(list(CLIPPINGS))


@pytest.mark.parametrize("seed", range(600, 624))
def test_deferred_tables_train_as_plain_parameters(ranks: RankPool, seed: int) -> None:
    case, accumulate, clipping = _sample(seed)
    ranks(case.world_size, _train_deferred, case, accumulate, clipping)


@pytest.mark.parametrize("clipping", list(CLIPPINGS))
def test_the_row_statistic_of_column_splits_is_of_the_clipped_gradient(
    ranks: RankPool, clipping: str
) -> None:
    case = Owned(
        7,
        world_size=2,
        types=(ShardingType.COLUMN_WISE,),
        optimizer=RowWiseAdagrad,
        modes=(("update_mode", "deferred"),),
    )
    ranks(2, _train_deferred, case, 2, clipping)


class DeferredEachType(EachType, Owned):
    """One deferred table of each sharding type."""


def each_type(seed: int, optimizer: type[torch.optim.Optimizer], **modes: str) -> DeferredEachType:
    return DeferredEachType(seed, 2, optimizer=optimizer, modes=tuple(modes.items()))


def _drop(case: Owned) -> None:
    rank, sharded = dist.get_rank(), shard(case)
    optimizer = sharded.fused_optimizer
    before = whole_state(sharded)
    optimizer.step()  # nothing has come yet
    backward(case, sharded, 0, rank)
    optimizer.zero_grad()
    optimizer.step()
    assert_same(whole_state(sharded), before, **EXACT)
    states = sharded.fused_optimizer.state_dict()["state"].values()
    assert all(whole(state["step"]) == 0 for state in states)
    backward(case, sharded, 0, rank)
    optimizer.step()
    after = whole_state(sharded)
    optimizer.step()  # each gradient is applied once
    assert_same(whole_state(sharded), after, **EXACT)
    assert all(whole(state["step"]) == 1 for state in states)


def test_dropped_gradients_change_nothing(ranks: RankPool) -> None:
    ranks(2, _drop, each_type(5, Adam, update_mode="deferred"))


def _mix_modes(case: Owned) -> None:
    """Every second table is deferred; stepping after each backward gives what fusing gives."""
    rank = dist.get_rank()
    reference = case.model()
    model = Case.model(replace(case, optimizer=None))
    for i, parameter in enumerate(model.ebc.parameters()):
        apply_optimizer_in_backward(
            RowWiseAdagrad,
            [parameter],
            {"lr": 0.1},
            update_mode=UpdateMode.DEFERRED if i % 2 else UpdateMode.FUSED,
        )
    sharded = DistributedModelParallel(model, device=CPU, plan=case.plan())
    modes = {g["update_mode"]: len(g["params"]) for g in sharded.fused_optimizer.param_groups}
    assert modes == {"fused": 2, "deferred": 2}
    for step in range(3):
        train(case, reference, range(step, step + 1), rank=None)
        before = whole_state(sharded)
        train(case, sharded, range(step, step + 1), rank=rank)
        after = whole_state(sharded)
        tables = [f"ebc.embedding_bags.{c.name}.weight" for c in case.configs()]
        assert all(torch.equal(before[t], after[t]) for t in tables[1::2])
        sharded.fused_optimizer.step()
    assert_same(whole_state(sharded), whole_state(reference))


@pytest.mark.parametrize("seed", [0, 1])
def test_fused_and_deferred_tables_mix(ranks: RankPool, seed: int) -> None:
    case = each_type(seed, RowWiseAdagrad)
    shuffled = tuple(random.Random(seed).sample(case.types, len(case.types)))
    ranks(2, _mix_modes, replace(case, types=shuffled))


def _count_collectives(case: Owned) -> None:
    rank, sharded = dist.get_rank(), shard(case)
    optimizer = GradientClippingOptimizer(
        optimizer_of(sharded), GradientClipping.NORM, 1.0, enable_global_grad_clip=True
    )
    backward(case, sharded, 0, rank)
    optimizer.step()  # the first one also compares the ranks' settings
    backward(case, sharded, 1, rank)
    with counted_collectives() as calls:
        optimizer.step()
    assert calls == {"all_reduce": 1, "all_to_all_single": 1}
    ((summed, *_),) = calls.arguments["all_reduce"]
    assert summed.numel() == 1


def test_clipping_costs_one_number_and_a_step_one_exchange(ranks: RankPool) -> None:
    ranks(2, _count_collectives, each_type(3, RowWiseAdagrad, update_mode="deferred"))


def _refuse(case: Owned) -> None:
    rank, sharded = dist.get_rank(), shard(case)
    for clipping in (GradientClipping.NORM, GradientClipping.VALUE):
        optimizer = GradientClippingOptimizer(
            optimizer_of(sharded), clipping, enable_global_grad_clip=True
        )
        backward(case, sharded, 0, rank)
        with pytest.raises(ValueError, match=r"only of deferred tables; .*4.*'def"):
            optimizer.step()


def test_fused_tables_cannot_be_clipped(ranks: RankPool) -> None:
    ranks(2, _refuse, each_type(3, RowWiseAdagrad))


def _refuse_local_norm(case: Owned) -> None:
    rank, sharded = dist.get_rank(), shard(case)
    optimizer = GradientClippingOptimizer(optimizer_of(sharded), GradientClipping.NORM)
    backward(case, sharded, 0, rank)
    with pytest.raises(ValueError, match=r"^enable_global_grad_clip must"):
        optimizer.step()


def test_a_norm_of_one_rank_is_refused(ranks: RankPool) -> None:
    ranks(2, _refuse_local_norm, each_type(3, RowWiseAdagrad, update_mode="deferred"))


def _clip_plain(case: Case) -> None:
    rank = dist.get_rank()
    reference, sharded = case.model(), shard(case)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    own = KeyedOptimizerWrapper(
        dict(sharded.named_parameters()), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    optimizer = GradientClippingOptimizer(
        own, GradientClipping.NORM, 0.5, enable_global_grad_clip=True
    )
    for step in range(2):
        plain.zero_grad()
        optimizer.zero_grad()
        backward(case, reference, step, rank=None)
        backward(case, sharded, step, rank)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        optimizer.step()
        assert optimizer.last_total_grad_norm is not None
        torch.testing.assert_close(optimizer.last_total_grad_norm, norm, **CLOSE)
    assert_same(whole_state(sharded), whole_state(reference))


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_plain_tables_count_in_the_norm(ranks: RankPool, seed: int) -> None:
    ranks(3, _clip_plain, Case(seed, 3, types=tuple(ShardingType), optimizer=None))


def test_deferred_tables_need_a_sharded_model() -> None:
    case = Owned(0, 1, modes=(("update_mode", "deferred"),))
    model = case.model()
    with torch.no_grad():
        model(case.batches(0)[0])
    with pytest.raises(ValueError, match="Wrap the model in DistributedModelParallel"):
        model(case.batches(0)[0])


# -- rates -----------------------------------------------------------------------------------------


def _rates(case: Case, tolerance: dict[str, float]) -> None:
    """A rate for each table, in one lookup; then other rates."""
    rank = dist.get_rank()
    models = []
    for _ in range(2):
        model = Case.model(case)
        for i, parameter in enumerate(model.ebc.parameters()):
            apply_optimizer_in_backward(RowWiseAdagrad, [parameter], {"lr": 0.1 * (i + 1)})
        models.append(model)
    reference, model = models
    sharded = DistributedModelParallel(model, device=CPU, plan=case.plan())
    groups = sharded.fused_optimizer.param_groups
    assert [g["lr"] for g in groups] == [0.1 * (i + 1) for i in range(len(groups))]
    train(case, reference, range(2), rank=None, with_dense=False)
    train(case, sharded, range(2), rank=rank, with_dense=False)
    assert_same(whole_state(sharded), whole_state(reference), **tolerance)
    for group, parameter in zip(groups, reference.ebc.parameters(), strict=True):
        group["lr"] = 1 - group["lr"]
        parameter._in_backward_optimizers[0].param_groups[0]["lr"] = group["lr"]
    train(case, reference, range(2, 4), rank=None, with_dense=False)
    train(case, sharded, range(2, 4), rank=rank, with_dense=False)
    assert_same(whole_state(sharded), whole_state(reference), **tolerance)
    own = sharded.module.ebc
    assert len(own._lookups) <= 4  # pooling x whether it exchanges row statistics
    assert len(reference.ebc._current_lookups().groups) <= 2  # pooling


@pytest.mark.parametrize("seed", range(700, 706))
def test_tables_of_one_lookup_have_their_own_rates(ranks: RankPool, seed: int) -> None:
    case = Case(seed, 1 + seed % 3, types=tuple(ShardingType), optimizer=None)
    ranks(case.world_size, _rates, case, CLOSE)


def test_rates_of_whole_tables_are_exact(ranks: RankPool) -> None:
    case = Case(710, 2, types=(ShardingType.TABLE_WISE,), optimizer=None)
    ranks(2, _rates, case, EXACT)


def _warm_up(case: Owned) -> None:
    rank = dist.get_rank()
    sharded, expected = shard(case), shard(case)
    warm = WarmupOptimizer(
        optimizer_of(sharded), [WarmupStage(WarmupPolicy.LINEAR, 3, 0.1)], lr=0.5
    )
    plain = optimizer_of(expected)
    for step, rate in enumerate([0.05, 0.2, 0.35, 0.5, 0.5]):
        for group in plain.param_groups:
            group["lr"] = rate
        for model, optimizer in ((sharded, warm), (expected, plain)):
            optimizer.zero_grad()
            backward(case, model, step, rank)
            optimizer.step()
    assert_same(whole_state(sharded), whole_state(expected))


@pytest.mark.parametrize("mode", ["fused", "deferred"])
def test_warm_up_reaches_tables_and_dense_parameters(ranks: RankPool, mode: str) -> None:
    ranks(2, _warm_up, each_type(4, RowWiseAdagrad, update_mode=mode))


# -- weight decay ----------------------------------------------------------------------------------

DECAYS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD-L2": torch.optim.SGD,
    "Adagrad-L2": Adagrad,
    "RowWiseAdagrad-L2": RowWiseAdagrad,
    "Adam-L2": torch.optim.Adam,
    "Adam-decoupled": torch.optim.AdamW,
    "PartialRowWiseAdam-decoupled": PartialRowWiseAdam,
}


def _decay(case: Owned) -> None:
    reference, sharded = case.model(), shard(case)
    train(case, reference, range(3), rank=None)
    train(case, sharded, range(3), rank=dist.get_rank())
    assert_same(whole_state(sharded), whole_state(reference))


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("seed", [800, 801])
def test_weight_decay_is_that_of_the_unsharded_model(ranks: RankPool, seed: int, name: str) -> None:
    case = Owned(
        seed,
        2 + seed % 2,
        types=tuple(ShardingType),
        optimizer=DECAYS[name],
        hyperparameters=(("lr", 0.1), ("weight_decay", 0.3)),
    )
    ranks(case.world_size, _decay, case)


# -- row states of column splits -------------------------------------------------------------------


def _per_shard(case: Owned, folder: str) -> None:
    rank, sharded = dist.get_rank(), shard(case)
    with counted_collectives() as without:
        backward(case, sharded, 0, rank)
    exact = shard(each_type(case.seed, RowWiseAdagrad))
    with counted_collectives() as calls:
        backward(case, exact, 0, rank)
    assert calls["all_to_all_single"] == without["all_to_all_single"] + 1
    state = sharded.fused_optimizer.state_dict()["state"]
    columns = "ebc.embedding_bags.column_wise.weight"
    assert set(state[columns]) == {"sum_of_columns_0_to_4", "sum_of_columns_4_to_8"}
    assert all(set(s) == {"sum"} for table, s in state.items() if table != columns)
    model = Case.model(replace(case, optimizer=None))
    of_both = whole(exact.fused_optimizer.state_dict()["state"][columns]["sum"])
    halves = [whole(value) for value in state[columns].values()]
    # each part is trained as a table of its own
    assert not torch.equal(halves[0], halves[1])
    torch.testing.assert_close(sum(halves) / 2, of_both)
    save_checkpoint(folder, sharded, sharded.fused_optimizer)
    again = shard(case)
    load_checkpoint(folder, again, again.fused_optimizer)
    for step in range(1, 3):
        backward(case, sharded, step, rank)
        backward(case, again, step, rank)
    assert_same(whole_state(again), whole_state(sharded), **EXACT)
    assert "per_shard" in {g["row_state"] for g in again.fused_optimizer.param_groups}
    # where columns lie otherwise there is no place for such a state, and none for the whole one
    plan = case.plan()
    tables = plan.plan["ebc"]
    tables["column_wise"] = tables["table_wise"]
    apply_optimizer_in_backward(
        RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1}, row_state=RowState.PER_SHARD
    )
    other = DistributedModelParallel(model, device=CPU, plan=plan)
    with pytest.raises(CheckpointError, match=r"lacks 1 .*column_wise\.weight\.sum'"):
        load_checkpoint(folder, other, other.fused_optimizer)
    with pytest.raises(KeyError, match="sum_of_columns_0_to_4"):
        other.fused_optimizer.load_state_dict(copy.deepcopy(sharded.fused_optimizer.state_dict()))


def test_row_states_per_shard_are_recorded_as_such(ranks: RankPool, tmp_path: Path) -> None:
    case = each_type(9, RowWiseAdagrad, row_state="per_shard")
    ranks(2, _per_shard, case, str(tmp_path / "checkpoint"))


# -- checkpoints -----------------------------------------------------------------------------------


def _train_and_save(case: Owned, folder: str) -> None:
    sharded = shard(case)
    optimizer = _warmed(sharded)
    for step in range(2):
        optimizer.zero_grad()
        backward(case, sharded, step, dist.get_rank())
        optimizer.step()
    save_checkpoint(folder, sharded, optimizer)
    for step in range(2, 4):
        optimizer.zero_grad()
        backward(case, sharded, step, dist.get_rank())
        optimizer.step()
    found = whole_state(sharded)
    if dist.get_rank() == 0:
        torch.save(found, f"{folder}/expected.pt")


def _warmed(model: DistributedModelParallel) -> KeyedOptimizer:
    stage = WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)
    clipped = GradientClippingOptimizer(
        optimizer_of(model), GradientClipping.NORM, 0.5, enable_global_grad_clip=True
    )
    return WarmupOptimizer(clipped, [stage], lr=0.2)


def _load_and_train(case: Owned, batches_of: Owned, folder: str) -> None:
    """Resume on other ranks; each rank trains on the batches of some of the old ranks."""
    sharded = shard(case, case.plan(seed=5))
    optimizer = _warmed(sharded)
    load_checkpoint(folder, sharded, optimizer)
    ranks_before = range(batches_of.world_size)
    own = list(ranks_before)[dist.get_rank() :: case.world_size]
    for step in range(2, 4):
        optimizer.zero_grad()
        joined = concat_batches([batches_of.batches(step)[r] for r in own])
        values, logits = sharded(joined)
        scale = case.world_size / batches_of.world_size
        (((values * values.detach().sin()).sum() + logits.pow(2).sum()) * scale).backward()
        optimizer.step()
    expected = torch.load(f"{folder}/expected.pt")
    assert_same(whole_state(sharded), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("seed", "before", "after"), [(900, 3, 2), (901, 2, 1), (902, 4, 2)])
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad, Adam])
def test_deferred_training_resumes_under_another_plan(
    ranks: RankPool,
    tmp_path: Path,
    seed: int,
    before: int,
    after: int,
    optimizer: type[torch.optim.Optimizer],
) -> None:
    make: Callable[[int], Owned] = lambda world_size: Owned(  # noqa: E731
        seed,
        world_size,
        types=tuple(ShardingType),
        optimizer=optimizer,
        modes=(("update_mode", "deferred"),),
    )
    folder = str(tmp_path / "checkpoint")
    ranks(before, _train_and_save, make(before), folder)
    ranks(after, _load_and_train, make(after), make(before), folder)


# -- stochastic rounding ---------------------------------------------------------------------------


def _collection() -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=500,
        embedding_dim=8,
        feature_names=["f"],
        data_type=DataType.FP16,
        init_fn=lambda weight: weight.fill_(1.0),
    )
    return EmbeddingBagCollection(tables=[config], device=CPU)


def test_updates_below_the_step_of_fp16_are_not_lost() -> None:
    from recsys.sparse import KeyedJaggedTensor

    every_row = KeyedJaggedTensor(["f"], torch.arange(500), lengths=torch.ones(500).int())
    means = []
    torch.manual_seed(0)
    for is_stochastic in (False, True):
        fused = {
            "optimizer": "EXACT_SGD",
            "learning_rate": 2**-14,
            "stochastic_rounding": is_stochastic,
        }
        model = DistributedModelParallel(
            _collection(), device=CPU, sharders=[EmbeddingBagCollectionSharder(fused)]
        )
        for _ in range(8):
            model(every_row).values().sum().backward()
        means.append(whole(model.state_dict()["embedding_bags.t.weight"]).float().mean().item())
    assert means[0] == 1.0
    assert means[1] == pytest.approx(1 - 8 * 2**-14, abs=2e-5)


def _replicas_of(case: EachType) -> None:
    model = Case.model(case)
    apply_optimizer_in_backward(
        torch.optim.SGD, model.ebc.parameters(), {"lr": 0.1}, stochastic_rounding=True
    )
    with pytest.raises(ValueError, match=r"'data_parallel' is data_parallel .*stochastic_rounding"):
        DistributedModelParallel(model, device=CPU, plan=case.plan())


def test_replicas_do_not_round_stochastically(ranks: RankPool) -> None:
    types = (ShardingType.DATA_PARALLEL,)
    ranks(1, _replicas_of, EachType(0, 1, types=types, optimizer=None))


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "kind"),
    [(float("nan"), ValueError), (-1, ValueError), (float("inf"), ValueError), ("1", TypeError)],
)
def test_a_rate_that_is_none_is_refused_where_it_is_set(rate: Any, kind: type[Exception]) -> None:
    case = EachType(0, 1)
    model = DistributedModelParallel(case.model(), device=CPU)
    group = model.fused_optimizer.param_groups[0]
    with pytest.raises(kind, match="The learning rate of tables must"):
        group["lr"] = rate
    assert group["lr"] == 0.1
    unsharded = case.model()
    table = next(iter(unsharded.ebc.parameters()))
    table._in_backward_optimizers[0].param_groups[0]["lr"] = rate  # type: ignore[attr-defined]
    with pytest.raises(kind, match=r"OptimizerSpec\.learning_rate must be .*; received"):
        unsharded(case.batches(0)[0])


def _without_optimizer(case: Case) -> Case:
    settings = {field.name: getattr(case, field.name) for field in fields(case)}
    return Case(**{**settings, "optimizer": None})


class _TorchsCase(Case):
    """Attaches the optimizer by torch's own function."""

    def model(self) -> Model:
        assert self.optimizer is not None
        model = _without_optimizer(self).model()
        _apply_optimizer_in_backward(
            self.optimizer, model.ebc.parameters(), dict(self.hyperparameters)
        )
        return model


def _train_as_attached_by_ours(case: Case) -> None:
    own = Case(**{field.name: getattr(case, field.name) for field in fields(case)})
    found, expected = shard(case), shard(own)
    for model in (found, expected):
        train(case, model, range(2), rank=dist.get_rank())
    assert_same(whole_state(found), whole_state(expected), **EXACT)
    for parameter in found.module.ebc.parameters():
        assert parameter.grad is None
        assert parameter._optimizer_classes == [case.optimizer]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_torchs_own_attachment_trains_sharded_tables(
    ranks: RankPool, optimizer: type[torch.optim.Optimizer]
) -> None:
    case = _TorchsCase(3, 2, types=tuple(ShardingType), optimizer=optimizer)
    ranks(2, _train_as_attached_by_ours, case)


def test_fused_params_name_the_modes() -> None:
    owned = optimizer_from_fused_params(
        {"optimizer": "ADAM", "update_mode": "deferred", "row_state": RowState.PER_SHARD}
    )
    assert (owned.update_mode, owned.row_state) == (UpdateMode.DEFERRED, RowState.PER_SHARD)


def test_one_call_sets_the_rate_of_tables_and_dense_parts() -> None:
    case = EachType(0, 1)
    model = DistributedModelParallel(case.model(), device=CPU)
    optimizer = optimizer_of(model)
    set_learning_rate(optimizer, 0.0)
    before = whole_state(model)
    for is_frozen in (True, False):
        pooled, logits = model(case.batches(0)[0])
        (pooled.sum() + logits.sum()).backward()
        optimizer.step()
        after = whole_state(model)
        same = [torch.equal(value, after[name]) for name, value in before.items()]
        assert same == [is_frozen] * len(same)
        set_learning_rate(optimizer, 0.5)
    set_learning_rate(optimizer, 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}
    for wrong, error in ((-1.0, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with pytest.raises(error, match="lr must be"):
            set_learning_rate(optimizer, wrong)  # type: ignore[arg-type]


def test_the_optimizer_of_a_collection_prints_its_rate() -> None:
    case = _without_optimizer(EachType(0, 1))
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.02}
    )
    model = DistributedModelParallel(case.model(), sharders=[sharder], device=CPU)
    optimizer = model.module.ebc.fused_optimizer
    assert type(optimizer) is CombinedOptimizer
    assert "Parameter Group 0\n" in repr(optimizer)
    assert "    lr: 0.02\n" in repr(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    assert "    lr: 0.5\n" in repr(optimizer)
    assert repr(model.fused_optimizer) == f"ebc: {optimizer!r}"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"update_mode": "later"}, "one of fused, deferred; received 'later'"),
        ({"update_mode": UpdateMode.GRADIENT}, "one of fused, deferred"),
        ({"row_state": "exactly"}, "one of exact, per_shard; received 'exactly'"),
        ({"rounding": True}, r"settings that no optimizer reads: \['rounding'\]"),
    ],
)
def test_unknown_settings_raise(setting: Settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_from_fused_params({"optimizer": "EXACT_SGD", **setting})
