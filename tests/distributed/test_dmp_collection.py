"""Groups of ranks against plain models on as many ranks, and means taken by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.dmp_collection import DMPCollection, DMPCollectionConfig
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
)
from recsys.distributed.train_pipeline.even_batches import EvenBatches
from recsys.distributed.train_pipeline.pipelines import TrainPipelineSparseDist
from recsys.distributed.types import PlanRanks, ShardingPlan, ShardingType
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import Adam, RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import (
    CPU,
    Case,
    EachType,
    assert_same,
    concat_batches,
    counted_collectives,
    shard,
    train,
    whole,
    whole_state,
)
from tests.ranks import RankPool

State = dict[str, Tensor]
MADE_FOR_TWO = PlanRanks(world_size=2, local_world_size=2, compute_device="cpu")


def place_of(rank: int, world_size: int, size: int, *, neighbours: bool = False) -> tuple[int, int]:
    """A rank's group, and its number in it."""
    if neighbours:
        return rank // size, rank % size
    return rank % (world_size // size), rank // (world_size // size)


def build(case: Case, world_size: int, **options: Any) -> DMPCollection:
    assert dist.group.WORLD is not None
    model = case.model()
    for parameter in model.parameters():  # rank 0's count, in every group
        parameter.data.add_(dist.get_rank())
    return DMPCollection(
        model,
        CPU,
        options.pop("plan", None) or case.plan(),
        world_size,
        options.pop("size", case.world_size),
        dist.group.WORLD,
        **options,
    )


def steps_of(group: int) -> range:
    return range(10 * group, 10 * group + 3)


def states_of(model: DistributedModelParallel) -> State:
    """A copy of the optimizer states of all tables; every rank must call it."""
    return {
        f"{name}.{key}": whole(value)
        for name, states in model.fused_optimizer.state_dict()["state"].items()
        for key, value in states.items()
    }


def mean_of(states: list[State]) -> State:
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0).float()
        for name in states[0]
    }


# -- between and after means -----------------------------------------------------------------------


def _train_plain(case: Case, group: int) -> tuple[State, State]:
    model = shard(case)
    train(case, model, steps_of(group), dist.get_rank(), with_dense=False)
    return whole_state(model), states_of(model)


def _train_groups(
    case: Case, world_size: int, neighbours: bool
) -> tuple[tuple[State, State], tuple[State, State]]:
    group, place = place_of(dist.get_rank(), world_size, case.world_size, neighbours=neighbours)
    model = build(case, world_size, use_inter_host_allreduce=neighbours)
    train(case, model, steps_of(group), place, with_dense=False)
    before = whole_state(model), states_of(model)
    model.sync()
    return before, (whole_state(model), states_of(model))


@pytest.mark.parametrize(
    ("optimizer", "neighbours"), [(RowWiseAdagrad, False), (Adam, True)], ids=str
)
def test_groups_train_as_plain_models_until_they_are_averaged(
    ranks: RankPool, optimizer: type[torch.optim.Optimizer], neighbours: bool
) -> None:
    case = EachType(1, 2, optimizer=optimizer)
    plain = [ranks(2, _train_plain, case, group)[0] for group in range(2)]
    assert not torch.equal(*(state[0]["ebc.embedding_bags.row_wise.weight"] for state in plain))
    weights, states = (mean_of([state[i] for state in plain]) for i in range(2))
    for rank, (before, after) in enumerate(ranks(4, _train_groups, case, 4, neighbours)):
        group, _ = place_of(rank, 4, 2, neighbours=neighbours)
        assert_same(before[0], plain[group][0], rtol=0, atol=0)
        assert_same(before[1], plain[group][1], rtol=0, atol=0)
        assert_same(after[0], weights, rtol=0, atol=0)
        assert_same(after[1], states, rtol=0, atol=0)
    counters = [value for name, value in after[1].items() if name.endswith(".step")]
    assert (optimizer is Adam) == bool(counters)
    assert all(value == len(steps_of(0)) for value in counters)


def test_a_group_of_one_rank_and_one_group_of_all(ranks: RankPool) -> None:
    alone = EachType(1, 1, optimizer=RowWiseAdagrad)
    plain = [ranks(1, _train_plain, alone, group)[0] for group in range(3)]
    weights, states = (mean_of([state[i] for state in plain]) for i in range(2))
    for rank, (before, after) in enumerate(ranks(3, _train_groups, alone, 3, False)):
        assert_same(before[0], plain[rank][0], rtol=0, atol=0)
        assert_same(after[0], weights, rtol=1e-6, atol=1e-6)
        assert_same(after[1], states, rtol=1e-6, atol=1e-6)
    together = EachType(1, 2, optimizer=RowWiseAdagrad)
    expected = ranks(2, _train_plain, together, 0)[0]
    for before, after in ranks(2, _train_groups, together, 2, False):
        for received in (before, after):
            assert_same(received[0], expected[0], rtol=0, atol=0)
            assert_same(received[1], expected[1], rtol=0, atol=0)


def _train_whole(case: Case) -> list[State]:
    group, place = place_of(dist.get_rank(), 4, 2)
    model = build(case, 4)
    dense = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
    results = []
    for step in range(4):
        dense.zero_grad()
        pooled, logits = model(case.batches(10 * group + step)[place])
        (pooled.pow(2).sum() + logits.pow(2).sum()).backward()
        dense.step()
        if step % 2:
            model.sync()
            results.append(whole_state(model) | states_of(model))
    return results


def _by_hand(case: Case) -> list[State]:
    """Two unsharded models: own tables, shared dense gradients, means of tables every two steps."""
    models = [case.model() for _ in range(2)]
    results = []
    for step in range(4):
        for group, model in enumerate(models):
            model.over.zero_grad()
            pooled, logits = model(concat_batches(case.batches(10 * group + step)))
            ((pooled.pow(2).sum() + logits.pow(2).sum()) / 2).backward()
        for pair in zip(*(model.over.parameters() for model in models), strict=True):
            gradient = torch.stack([p.grad for p in pair if p.grad is not None]).mean(0)
            for parameter in pair:
                parameter.data -= 0.1 * gradient
        if step % 2:
            tables = [dict(model.ebc.state_dict()) for model in models]
            states = [model.ebc.optimizer_states() for model in models]
            for name in tables[0]:
                mean = torch.stack([table[name] for table in tables]).double().mean(0)
                for table in tables:
                    table[name].copy_(mean)
            for name, kept in states[0].items():
                for key in kept:
                    mean = torch.stack([state[name][key] for state in states]).double().mean(0)
                    for state in states:
                        state[name][key].copy_(mean)
            of_tables = {
                f"ebc.embedding_bags.{name}.weight.{key}": value.clone()
                for name, kept in states[0].items()
                for key, value in kept.items()
            }
            whole = {name: value.clone() for name, value in models[0].state_dict().items()}
            results.append(whole | of_tables)
    return results


def test_whole_models_train_as_a_loop_by_hand_does(ranks: RankPool) -> None:
    case = EachType(2, 2, optimizer=RowWiseAdagrad)
    expected = _by_hand(case)
    for results in ranks(4, _train_whole, case):
        for received, wanted in zip(results, expected, strict=True):
            assert_same(received, wanted)


# -- what sync does --------------------------------------------------------------------------------


def _sync(case: Case) -> None:
    group, place = place_of(dist.get_rank(), 4, 2)
    model = build(case, 4)

    def is_same(states: State) -> bool:
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, states)
        return all(torch.equal(other[name], states[name]) for other in found for name in states)

    train(case, model, steps_of(group), place, with_dense=False)
    assert not is_same(whole_state(model))
    model.sync(include_optimizer_state=False)
    assert is_same(whole_state(model))
    assert not is_same(states_of(model))
    with counted_collectives() as counts:
        model.sync()
    assert is_same(states_of(model))
    # weights and states together; all ranks of a group have equal replicated tables
    assert counts["all_reduce"] == 2
    with pytest.raises(ValueError, match=r"include_optimizer_state.*rank 0 has .*rank 1"):
        model.sync(include_optimizer_state=group == 0)

    given: list[int] = []

    def by_hand(tensors: list[Tensor]) -> None:
        given.append(len(tensors))
        for tensor in tensors:
            dist.all_reduce(tensor, group=model.device_mesh.get_group("replicate"))
            tensor.mul_(0.5)

    train(case, model, steps_of(group), place, with_dense=False)
    twin = model.copy(CPU)
    assert isinstance(twin, DMPCollection)
    model.sync()
    twin.set_all_reduce_hook(by_hand)
    with counted_collectives() as counts:
        twin.sync()
    assert sum(given) == counts["all_reduce"] > 2  # each lookup's weights and states
    assert_same(whole_state(twin), whole_state(model), rtol=0, atol=0)
    assert_same(states_of(twin), states_of(model), rtol=0, atol=0)
    # every group moves its tables in the same way
    before = whole_state(model) | states_of(model)
    tables = EachType(1, 2, types=case.types[1:2]).plan().plan["ebc"]
    tables["table_wise"] = parameter_sharding(ShardingType.ROW_WISE, 12, 8, [0, 1])
    model.reshard(ShardingPlan({"ebc": tables}, made_for=MADE_FOR_TWO))
    assert model.plan.plan["ebc"]["table_wise"].sharding_type == "row_wise"
    assert_same(whole_state(model) | states_of(model), before, rtol=0, atol=0)
    # a state dict is of this rank's group, and loads
    before = whole_state(model)
    state = {name: value.clone() + 1 for name, value in before.items()}
    model.load_state_dict(state)
    assert_same(whole_state(model), state, rtol=0, atol=0)


def test_sync_averages_what_it_is_asked_for_in_few_exchanges(ranks: RankPool) -> None:
    ranks(4, _sync, EachType(1, 2, optimizer=RowWiseAdagrad))


class TwoCollections(nn.Module):
    """Bags and sequences, in the order that is asked for."""

    def __init__(self, dtype: str = "FP32") -> None:
        super().__init__()
        torch.manual_seed(0)
        bag = EmbeddingBagConfig(20, 4, "bags", feature_names=["f"])
        self.bags = EmbeddingBagCollection(tables=[bag])
        row = EmbeddingConfig(num_embeddings=30, embedding_dim=4, name="rows", feature_names=["f"])
        self.rows = EmbeddingCollection(tables=[row])
        apply_optimizer_in_backward(torch.optim.SGD, self.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor, order: str) -> Tensor:
        outputs = {}
        for name in order.split():
            found = getattr(self, name)(features)
            outputs[name] = found.values() if name == "bags" else found["f"].values()
        return sum((outputs[name].sin().sum() for name in ("bags", "rows")), torch.zeros(()))


def features_of(rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank)
    return KeyedJaggedTensor(
        ["f"],
        torch.randint(0, 20, (12,), generator=generator),
        lengths=torch.full((4,), 3),
    )


def plan_of(size: int) -> ShardingPlan:
    model = TwoCollections()
    return ShardingPlan(
        {
            "bags": construct_module_sharding_plan(
                model.bags, {"bags": row_wise()}, local_size=size, world_size=size
            ),
            "rows": construct_module_sharding_plan(
                model.rows, {"rows": column_wise(ranks=[0, size - 1])}, None, size, size
            ),
        }
    )


def _use_in_another_order() -> State:
    assert dist.group.WORLD is not None
    rank = dist.get_rank()
    group, _ = place_of(rank, 4, 2)
    model = DMPCollection(TwoCollections(), CPU, plan_of(2), 4, 2, dist.group.WORLD)
    for _ in range(3):
        model(features_of(rank), "bags rows" if group == 0 else "rows bags").backward()
        model.sync()
    return whole_state(model)


def _use_in_two_splits() -> tuple[State, list[int]]:
    assert dist.group.WORLD is not None
    rank = dist.get_rank()
    config = DMPCollectionConfig(EmbeddingCollection, plan_of(4), sharding_group_size=4)
    model = DMPCollection(
        TwoCollections(), CPU, plan_of(2), 4, 2, dist.group.WORLD, submodule_configs=[config]
    )
    for _ in range(3):
        model(features_of(rank), "bags rows").backward()
        model.sync()
    children = (model.module.bags, model.module.rows)
    return whole_state(model), [child.layout.world_size for child in children]


def _loop(rows_of_all: bool) -> State:
    """Train an unsharded model per group, and average their tables after each step."""
    models = [TwoCollections() for _ in range(2)]
    for _ in range(3):
        before = models[0].rows.state_dict()["embeddings.rows.weight"].clone()
        for group, model in enumerate(models):
            losses = [model(features_of(rank), "bags rows") for rank in (group, group + 2)]
            (sum(losses, torch.zeros(())) / 2).backward()
        for name in models[0].state_dict():
            tables = [model.state_dict()[name] for model in models]
            # SGD: the mean of both groups' steps is the step of the mean gradient
            mean = torch.stack([table.double() for table in tables]).mean(0)
            assert not rows_of_all or not name.startswith("rows") or not torch.equal(mean, before)
            for table in tables:
                table.copy_(mean)
    return dict(models[0].state_dict())


class WithLoss(nn.Module):
    """A model for a pipeline: returns the loss, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TwoCollections()

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, None]:
        return self.model(batch, "bags rows"), None


def _use_in_a_pipeline(interval: int | None) -> None:
    assert dist.group.WORLD is not None
    plan = ShardingPlan({f"model.{path}": tables for path, tables in plan_of(2).plan.items()})
    plain, piped = (DMPCollection(WithLoss(), CPU, plan, 4, 2, dist.group.WORLD) for _ in range(2))
    batches = [features_of(10 * step + dist.get_rank()) for step in range(5)]
    for step, batch in enumerate(batches):
        plain(batch)[0].backward()
        if interval is not None and (step + 1) % interval == 0:
            plain.sync()
    pipeline = TrainPipelineSparseDist[Any, Any](
        piped, piped.fused_optimizer, CPU, dmp_collection_sync_interval_batches=interval
    )
    remaining = iter(batches)
    for _ in batches:
        pipeline.progress(remaining)
    assert_same(whole_state(piped), whole_state(plain), rtol=0, atol=0)


def test_pipelines_train_groups_as_a_plain_loop_does(ranks: RankPool) -> None:
    for interval in (1, 2, None):
        ranks(4, _use_in_a_pipeline, interval)


def test_groups_may_use_modules_in_another_order(ranks: RankPool) -> None:
    expected = _loop(False)
    for received in ranks(4, _use_in_another_order):
        assert_same(received, expected)


def test_modules_of_a_type_may_form_other_groups(ranks: RankPool) -> None:
    expected = _loop(True)
    for received, sizes in ranks(4, _use_in_two_splits):
        assert sizes == [2, 4]
        assert_same(received, expected)


# -- checkpoints -----------------------------------------------------------------------------------


def _save_groups(case: Case, path: Path) -> tuple[State, State]:
    group, place = place_of(dist.get_rank(), 4, 2)
    model = build(case, 4)
    train(case, model, steps_of(group), place)
    with pytest.raises(ValueError, match=r"2 groups .* Call sync\(\)"):
        save_checkpoint(path, model, model.fused_optimizer)
    assert not path.exists()
    model.sync()
    save_checkpoint(path, model, model.fused_optimizer)
    return whole_state(model), states_of(model)


def _load_plain(case: Case, path: Path, onto: Path) -> tuple[State, State]:
    model = shard(case)
    load_checkpoint(path, model, model.fused_optimizer)
    save_checkpoint(onto, model, model.fused_optimizer)
    return whole_state(model), states_of(model)


def _load_groups(case: Case, path: Path) -> tuple[State, State]:
    model = build(case, 4, plan=case.plan(5))
    load_checkpoint(path, model, model.fused_optimizer)
    return whole_state(model), states_of(model)


def test_checkpoints_go_between_groups_and_plain_models(ranks: RankPool, tmp_path: Path) -> None:
    case = EachType(1, 2, optimizer=RowWiseAdagrad)
    saved, *others = ranks(4, _save_groups, case, tmp_path / "groups")
    for other in others:
        assert_same(other[0] | other[1], saved[0] | saved[1], rtol=0, atol=0)
    for world_size in (1, 2):
        onto = tmp_path / f"{world_size}"
        of_ranks = EachType(1, world_size, optimizer=RowWiseAdagrad)
        loaded = ranks(world_size, _load_plain, of_ranks, tmp_path / "groups", onto)
        loaded += ranks(4, _load_groups, case, onto)
        for received in loaded:
            assert_same(received[0] | received[1], saved[0] | saved[1], rtol=0, atol=0)
    model = case.model()
    load_checkpoint(tmp_path / "groups", model, allow_partial=True)
    assert_same(dict(model.state_dict()), saved[0], rtol=0, atol=0)


# -- errors ----------------------------------------------------------------------------------------


def _fail(case: Case) -> None:
    rank = dist.get_rank()
    group, _ = place_of(rank, 4, 2)
    with pytest.raises(ValueError, match=r"must divide world_size.*3 for 4"):
        build(case, 4, size=3)
    with pytest.raises(ValueError, match=r"world_size must be .* 4; .*8"):
        build(case, 8)
    with pytest.raises(ValueError, match=r"node_group_size must divide .*3.* of 2"):
        build(case, 4, node_group_size=3)
    with pytest.raises(ValueError, match=r"size=2.*rank 1 has .*size=4"):
        build(case, 4, size=4 if rank % 2 else 2)
    with pytest.raises(ValueError, match=r"'t\d' of ebc.*rank 0.*rank 1"):
        build(case, 4, plan=case.plan(group))
    for_more = ShardingPlan(
        case.plan().plan, made_for=PlanRanks(world_size=4, local_world_size=4, compute_device="cpu")
    )
    with pytest.raises(ValueError, match=r"made for 4 ranks, on 2"):
        build(case, 4, plan=for_more)
    model = build(case, 4)
    with pytest.raises(ValueError, match="a DMPCollection of several"):
        EvenBatches(case.batches(0), model)
    again = DMPCollectionConfig(EmbeddingBagCollection, case.plan(), 2)
    with pytest.raises(ValueError, match="EmbeddingBagCollection 2 times"):
        build(case, 4, submodule_configs=[again, again])
    other = DMPCollectionConfig(EmbeddingCollection, case.plan(), 2)
    with pytest.raises(ValueError, match=r"received EmbeddingCollection, .*EmbeddingBagCollection"):
        build(case, 4, submodule_configs=[other])
    misnamed = ShardingPlan({"ebd": case.plan().plan["ebc"]})
    with pytest.raises(ValueError, match=r"lacks \['ebc'\], and names \['ebd'\]"):
        build(case, 4, submodule_configs=[DMPCollectionConfig(EmbeddingBagCollection, misnamed, 2)])


def test_what_does_not_fit_is_an_error_on_every_rank(ranks: RankPool) -> None:
    case = Case(3, 2, types=(ShardingType.TABLE_WISE,))
    assert str(case.plan(0)) != str(case.plan(1))
    ranks(4, _fail, case)
