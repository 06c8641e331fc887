"""The model as users handle it: names, loading, copies, meta tensors, training, evaluation."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recsys.datasets.random import RandomRecDataset
from recsys.distributed.embeddingbag import ShardedEmbeddingBagCollection
from recsys.distributed.model_parallel import (
    DistributedModelParallel,
    get_module,
    get_unwrapped_module,
)
from recsys.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from recsys.distributed.types import ShardingEnv, ShardingPlan
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recsys.optim.optimizers import in_backward_optimizer_filter
from tests.distributed.cases import (
    CPU,
    Case,
    EachType,
    Model,
    concat_batches,
    shard,
    train,
    whole_state,
)
from tests.ranks import RankPool

META = torch.device("meta")
NAMES = [
    *(f"ebc.embedding_bags.{kind.value}.weight" for kind in EachType.types),
    "over.weight",
    "over.bias",
]


def case_of(world_size: int, seed: int = 1) -> EachType:
    return EachType(seed, world_size, optimizer=RowWiseAdagrad)


def alone() -> DistributedModelParallel:
    """A model on one rank, without a process group."""
    case = case_of(1)
    return DistributedModelParallel(
        case.model(), env=ShardingEnv.from_local(), device=CPU, plan=case.plan()
    )


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def logits_of(case: Case, model: nn.Module, step: int = 9) -> Tensor:
    logits: Tensor = model(case.batches(step)[dist.get_rank()])[1]
    return logits.detach().clone()


# -- access and names ------------------------------------------------------------------------------


def _access() -> None:
    case = case_of(2)
    bare = case.model()
    model = DistributedModelParallel(bare, device=CPU, plan=case.plan())
    assert isinstance(model._dmp_wrapped_module, DistributedDataParallel)
    assert model.module is bare
    assert get_module(model) is bare
    assert get_unwrapped_module(DistributedDataParallel(nn.Linear(1, 1))).in_features == 1
    assert type(model.module.ebc) is ShardedEmbeddingBagCollection
    assert type(model.module.over) is nn.Linear
    assert model.plan == case.plan()
    assert model.device == CPU
    assert list(model.state_dict()) == NAMES
    # rank 0 holds no part of the table-wise table, rank 1 does
    held = [n for n in NAMES if dist.get_rank() == 1 or ".table_wise." not in n]
    assert [name for name, _ in model.named_parameters()] == held
    assert [id(p) for p in model.parameters()] == [id(p) for _, p in model.named_parameters()]
    assert list(model.fused_optimizer.params) == NAMES[:4]
    assert dict(model.named_buffers()) == {}
    assert model.sparse_grad_parameter_names() == set()


def test_the_bare_model_shows_through(ranks: RankPool) -> None:
    ranks(2, _access)


def test_names_of_parameters_with_sparse_gradients() -> None:
    model = nn.ModuleDict(
        {"a": nn.Embedding(3, 2, sparse=True), "b": nn.Embedding(3, 2), "ebc": case_of(1).model()}
    )
    plan = ShardingPlan({"ebc.ebc": case_of(1).plan().plan["ebc"]})
    sharded = DistributedModelParallel(model, env=ShardingEnv.from_local(), device=CPU, plan=plan)
    assert sharded.sparse_grad_parameter_names() == {"a.weight"}
    assert sharded.sparse_grad_parameter_names({"x"}, prefix="m.") == {"x", "m.a.weight"}


def test_a_collection_by_itself() -> None:
    case = case_of(1)
    plan = ShardingPlan({"": case.plan().plan["ebc"]})
    model = DistributedModelParallel(
        case.model().ebc, env=ShardingEnv.from_local(), device=CPU, plan=plan
    )
    assert list(model.state_dict()) == [name.removeprefix("ebc.") for name in NAMES[:4]]
    pooled = model(case.batches(3)[0])
    torch.testing.assert_close(
        pooled.values(), case.model().ebc(case.batches(3)[0]).values(), rtol=0, atol=0
    )


# -- loading ---------------------------------------------------------------------------------------


def _load() -> None:
    case = case_of(2)
    source = case.model()
    train(case, source, range(1), rank=None)
    target = shard(case_of(2, seed=1))
    assert not is_same(whole_state(target), source.state_dict())
    result = target.load_state_dict(source.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert is_same(whole_state(target), source.state_dict())
    # its own state, too, and it trains on
    other = shard(case)
    other.load_state_dict(target.state_dict())
    assert is_same(whole_state(other), source.state_dict())
    batch = case.batches(9)
    torch.testing.assert_close(
        logits_of(case, other),
        source(concat_batches(batch))[1].split([b.stride() for b in batch])[dist.get_rank()],
    )
    before = whole_state(other)
    train(case, other, range(1), rank=dist.get_rank())
    assert not is_same(whole_state(other), before)


def test_loads_the_state_of_the_unsharded_model(ranks: RankPool) -> None:
    ranks(2, _load)


def _load_another_plan(case: Case) -> str:
    model, other = shard(case, case.plan(0)), shard(case, case.plan(1))
    assert model.plan != other.plan
    try:
        model.load_state_dict(other.state_dict())
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", [Case(3, 2), Case(5, 2)])
def test_the_state_of_another_plan_is_refused(ranks: RankPool, case: Case) -> None:
    for message in ranks(2, _load_another_plan, case):
        assert "To load under another plan, save and load with torch.distributed.c" in message


def test_names_are_strict() -> None:
    model = alone()
    state = dict(model.state_dict())
    table = state.pop("ebc.embedding_bags.row_wise.weight")
    missing = r'Missing key\(s\) in state_dict: "ebc.embedding_bags.row_wise.weight"'
    with pytest.raises(RuntimeError, match=missing):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["ebc.embedding_bags.row_wise.weight"]
    state["ebc.embedding_bags.row_wise.weight"] = table
    state["ebc.embedding_bags.other.weight"] = table
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"ebc.embedding_bags.other.wei'):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert result.unexpected_keys == ["ebc.embedding_bags.other.weight"]


def _load_less_on_one_rank(given: str) -> str:
    whole = shard(case_of(2))
    model: Any = whole.module.ebc if given == "less of a collection" else whole
    before = whole_state(model)
    state: Any = dict(model.state_dict())
    if dist.get_rank() == 1:
        state.pop("over.bias", None)
        state.pop("embedding_bags.row_wise.weight", None)
        state = None if given == "None" else state
    with pytest.raises((RuntimeError, TypeError)) as raised:
        model.load_state_dict(state)
    assert is_same(whole_state(model), before)  # exchanges still work
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("less", r'RuntimeError: On rank 1: .*Missing key\(s\) in state_dict: "over.bias"'),
        ("less of a collection", r'RuntimeError: On rank 1: .*: "embedding_bags.row_wise.weight"'),
        ("None", r"TypeError: On rank 1: .*load_state_dict needs values by name, .* NoneType\. "),
    ],
)
def test_a_load_that_fails_on_one_rank_fails_on_all(
    ranks: RankPool, given: str, message: str
) -> None:
    one, other = ranks(2, _load_less_on_one_rank, given, timeout=20.0)
    assert one == other
    assert re.match(message, one, re.DOTALL)


def test_shapes_are_checked() -> None:
    model = alone()
    state = dict(model.state_dict())
    state["ebc.embedding_bags.row_wise.weight"] = torch.zeros(5, 8)
    with pytest.raises(RuntimeError, match=r"row_wise.weight: .*\(12, 8\); .*\(5, 8\)"):
        model.load_state_dict(state)


def test_assignment_is_refused() -> None:
    model = alone()
    with pytest.raises(ValueError, match=r"received assign=True\. Leave it False"):
        model.load_state_dict(model.state_dict(), assign=True)


# -- plans -----------------------------------------------------------------------------------------


def test_plans_of_wrong_modules_are_refused() -> None:
    case = case_of(1)
    tables = case.plan().plan["ebc"]

    def shard_by(plan: dict[str, Any]) -> None:
        DistributedModelParallel(
            case.model(), env=ShardingEnv.from_local(), device=CPU, plan=ShardingPlan(plan)
        )

    shard_by({"ebc": tables})
    for path in ("ebcs", "over", "", "ebc.embedding_bags"):
        with pytest.raises(ValueError, match=re.escape(f"modules of the model: ['{path}']")):
            shard_by({"ebc": tables, path: tables})
    with pytest.raises(ValueError, match=r"missing: \['ebc'\]"):
        shard_by({})


def _plan_by_default() -> None:
    case = case_of(2)
    planner = EmbeddingShardingPlanner(
        constraints={"table_wise": ParameterConstraints(sharding_types=["row_wise"])}
    )
    model = DistributedModelParallel(case.model(), device=CPU, planner=planner)
    assert model.plan.plan["ebc"]["table_wise"].sharding_type == "row_wise"
    assert len(DistributedModelParallel(case.model(), device=CPU).plan.plan["ebc"]) == 4


def test_plans_where_none_is_given(ranks: RankPool) -> None:
    ranks(2, _plan_by_default)


# -- data parallel ---------------------------------------------------------------------------------


def _initial_values(
    build: Callable[[Case], Model], case: Case, plan_seed: int
) -> dict[str, Tensor]:
    """Ranks differ in their seed: what rank 0 has must win."""
    torch.manual_seed(50 + dist.get_rank())
    model = DistributedModelParallel(build(case), device=CPU, plan=case.plan(plan_seed))
    return whole_state(model)


def _on_cpu(case: Case) -> Model:
    return Model(case)


def _on_meta(case: Case) -> Model:
    model = _on_cpu(case)
    torch.manual_seed(50 + dist.get_rank())
    model.ebc = EmbeddingBagCollection(tables=case.configs(), device=META)
    return model


def test_rank_0_has_the_initial_values_for_all(ranks: RankPool) -> None:
    case = case_of(2)
    torch.manual_seed(50)
    expected = _on_cpu(case).state_dict()
    for received in ranks(2, _initial_values, _on_cpu, case, 0):
        assert is_same(received, expected)


@pytest.mark.parametrize("seed", [2, 4, 5])
def test_initial_values_do_not_depend_on_plan_or_device(ranks: RankPool, seed: int) -> None:
    case = Case(seed, 2)
    torch.manual_seed(50)
    expected = _on_cpu(case).state_dict()
    plans = {str(case.plan(plan_seed)) for plan_seed in range(3)}
    assert len(plans) > 1
    for plan_seed in range(3):
        for received in ranks(2, _initial_values, _on_meta, case, plan_seed):
            for name, value in expected.items():
                if name.startswith("ebc."):
                    assert torch.equal(received[name], value), name


class Scale(nn.Module):
    """A dense module that may be built on meta."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(3, device=device))
        self.register_buffer("shift", torch.empty(3, device=device))
        if device != META:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.factor, 2.0)
        nn.init.constant_(self.shift, 1.0)


def _materialize(init_parameters: bool) -> DistributedModelParallel:
    case = case_of(1)
    with META:
        model = nn.ModuleDict({"m": Model(case), "scale": Scale(META)})
    plan = ShardingPlan({"m.ebc": case.plan().plan["ebc"]})
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_local(),
        device=CPU,
        plan=plan,
        init_parameters=init_parameters,
    )


def test_dense_parts_on_meta_are_reset() -> None:
    model = _materialize(True)
    assert model.module["scale"].factor.tolist() == [2.0, 2.0, 2.0]
    assert model.module["scale"].shift.tolist() == [1.0, 1.0, 1.0]
    over = model.module["m"].over
    assert over.weight.abs().max() <= 1 / over.in_features**0.5
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_dense_parts_on_meta_may_stay_there() -> None:
    model = _materialize(False)
    assert model.module["scale"].factor.is_meta
    assert not any(p.is_meta for n, p in model.named_parameters() if ".ebc." in n)


def test_dense_parts_on_meta_need_reset_parameters() -> None:
    class NoReset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.empty(3, device=META))

    model = nn.ModuleDict({"ebc": case_of(1).model().ebc, "head": NoReset()})
    with pytest.raises(ValueError, match=r"Module 'head' \(NoReset\) has parameters on"):
        DistributedModelParallel(
            model, env=ShardingEnv.from_local(), device=CPU, plan=case_of(1).plan()
        )


# -- copies ----------------------------------------------------------------------------------------


def _train_copy(how: str) -> None:
    case, rank = case_of(2), dist.get_rank()
    model = shard(case)
    train(case, model, range(2), rank=rank)
    model.fused_optimizer.param_groups[0]["lr"] = 0.02
    model.eval()
    copied = copy.deepcopy(model) if how == "deepcopy" else model.copy(CPU)
    kind = DistributedDataParallel if how == "deepcopy" else Model
    assert isinstance(copied._dmp_wrapped_module, kind)
    assert copied.device == CPU
    assert not any(module.training for module in copied.modules())
    before = whole_state(model)
    assert is_same(whole_state(copied), before)
    torch.testing.assert_close(logits_of(case, copied), logits_of(case, model), rtol=0, atol=0)
    copied.init_data_parallel()
    # the copy trains on as the model does: same optimizer state, same learning rate
    train(case, copied, range(2, 4), rank=rank)
    assert is_same(whole_state(model), before)
    train(case, model, range(2, 4), rank=rank)
    assert not is_same(whole_state(model), before)
    assert is_same(whole_state(copied), whole_state(model))


@pytest.mark.parametrize("how", ["copy", "deepcopy"])
def test_a_copy_is_equal_and_independent(ranks: RankPool, how: str) -> None:
    ranks(2, _train_copy, how)


def _copy_out_of_reach() -> list[str]:
    case, messages = case_of(2), []
    model = shard(case)
    # torch's answer for a group that serves GPUs only
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        copied = model.copy(CPU)
        assert is_same(whole_state(copied), whole_state(model))
        for attempt in (
            lambda: copied(case.batches(1)[dist.get_rank()]),
            copied.init_data_parallel,
            lambda: DistributedModelParallel(case.model(), device=CPU, plan=case.plan()),
        ):
            with pytest.raises(ValueError, match="must exchange tensors of the") as raised:
                attempt()
            messages.append(str(raised.value))
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        patch.setattr(ShardingEnv, "_with_group", lambda env, *rest: env)
        logits_of(case, model.copy(CPU))  # in the given group: none of NCCL can be made here
    return messages


def test_a_copy_that_the_group_does_not_reach_cannot_be_called(ranks: RankPool) -> None:
    for messages in ranks(2, _copy_out_of_reach):
        assert len(set(messages)) == 1
        assert "received a model on cpu and the backends cuda:nccl." in messages[0]
        assert "such as 'cpu:gloo,cuda:nccl'." in messages[0]


# -- moves -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("move", ["half", "double", "bfloat16", "to_meta"])
def test_a_refused_move_changes_nothing(move: str) -> None:
    case = case_of(1)
    dense_first = nn.Sequential(nn.Linear(2, 2), case.model())
    model = DistributedModelParallel(
        dense_first,
        env=ShardingEnv.from_local(),
        device=CPU,
        plan=ShardingPlan({"1.ebc": case.plan().plan["ebc"]}),
    )
    with pytest.raises(ValueError, match="stays on its device and keeps"):
        model.to(META) if move == "to_meta" else getattr(model, move)()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.device for p in model.parameters()} == {CPU}
    model.to(torch.float32)  # what changes nothing is allowed


# -- evaluation and training -----------------------------------------------------------------------


def _evaluate() -> None:
    case = case_of(2)
    model = shard(case)
    expected, before = logits_of(case, model), whole_state(model)
    model.eval()
    assert not any(module.training for module in model.modules())
    with torch.no_grad():
        pooled, logits = model(case.batches(9)[dist.get_rank()])
    assert not pooled.requires_grad
    assert not logits.requires_grad
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert is_same(whole_state(model), before)
    model.train()
    assert all(module.training for module in model.modules())
    train(case, model, range(1), rank=dist.get_rank())
    assert not is_same(whole_state(model), before)


def test_evaluation_changes_nothing(ranks: RankPool) -> None:
    ranks(2, _evaluate)


def _train_dlrm() -> list[float]:
    torch.manual_seed(3)
    features = ["user", "film", "day"]
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=50, embedding_dim=8, feature_names=[name]
        )
        for name in features
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=tables, device=META),
        dense_in_features=4,
        dense_arch_layer_sizes=[16, 8],
        over_arch_layer_sizes=[16, 1],
    )
    apply_optimizer_in_backward(RowWiseAdagrad, dlrm.sparse_arch.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(DLRMTrain(dlrm), device=CPU)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    assert all(name.startswith("model.") for name in optimizer.params)
    batches = list(
        RandomRecDataset(
            features,
            batch_size=16,
            hash_size=50,
            num_dense=4,
            num_batches=2,
            manual_seed=dist.get_rank(),
        )
    )
    losses = []
    for _ in range(20):
        for batch in batches:
            optimizer.zero_grad()
            loss, (detached, logits, labels) = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(detached.item())
    assert logits.shape == labels.shape == (16,)
    return losses


def test_dlrm_learns_on_two_ranks(ranks: RankPool) -> None:
    for losses in ranks(2, _train_dlrm):
        assert sum(losses[-4:]) < 0.3 * sum(losses[:4]), losses


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_a_sharded_model_is_not_pickled_but_copied(save: Callable[[nn.Module], object]) -> None:
    case = EachType(0, 1)
    model = DistributedModelParallel(case.model(), env=ShardingEnv.from_local(), device=CPU)
    for part in (model, model.module, model.module.ebc):  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match=r"cannot be pickled: .*save_checkpoint.*deepcopy"):
            save(part)
    save(model.module.over)  # type: ignore[attr-defined]
    copied = copy.deepcopy(model.module)
    for (name, weight), (_, own) in zip(
        copied.named_parameters(), model.module.named_parameters(), strict=True
    ):
        assert torch.equal(weight, own), name
        assert weight.data_ptr() != own.data_ptr(), name


def test_a_model_is_wrapped_once() -> None:
    model = DistributedModelParallel(EachType(0, 1).model(), device=CPU)
    with pytest.raises(ValueError, match="whose submodule '' is a Distributed"):
        DistributedModelParallel(model, device=CPU)
    with pytest.raises(ValueError, match=r"submodule '1\.inner' is a DistributedModel"):
        DistributedModelParallel(
            nn.Sequential(nn.ReLU(), nn.ModuleDict({"inner": model})), device=CPU
        )
    with pytest.raises(TypeError, match=r"module must be .*Module; received 3"):
        DistributedModelParallel(3, device=CPU)  # type: ignore[arg-type]
