"""Plain nn.EmbeddingBag train under any plan as they do unsharded, under the same names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.compat.nn_embeddingbag import EmbeddingBagSharder, ShardedEmbeddingBag
from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.checkpoint.state import state_of
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.inference import quantize_embeddings
from recsys.kernels.types import EmbOptimType
from recsys.optim import Adagrad, Adam, RowWiseAdagrad, apply_optimizer_in_backward
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tests.compat.again import again
from tests.distributed import test_shard as core
from tests.distributed.cases import CPU, assert_same, whole, whole_state
from tests.distributed.pipeline_client import in_turn, interleave
from tests.inference.quant.test_sources import Mixed
from tests.ranks import RankPool

ROWS, DIM = 13, 8
BAGS = ("summed", "averaged", "weighed")


class Model(nn.Module):
    """Bags of each kind under a dense layer."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.summed = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, device=device)
        self.averaged = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=3, device=device)
        self.weighed = nn.EmbeddingBag(
            ROWS, DIM, mode="sum", include_last_offset=True, padding_idx=0, device=device
        )
        self.over = nn.Linear(3 * DIM, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        pooled = [
            self.summed(batch["square"]),
            self.averaged(batch["ids"], batch["offsets"][:-1]),
            self.weighed(batch["ids"], batch["offsets"], batch["weights"]),
        ]
        logits: Tensor = self.over(torch.cat([torch.sin(p) for p in pooled], dim=1))
        return logits


def model(optimizer: type[torch.optim.Optimizer] | None) -> Model:
    torch.manual_seed(0)
    made = Model()
    if optimizer is not None:
        weights = [getattr(made, name).weight for name in BAGS]
        apply_optimizer_in_backward(optimizer, weights, {"lr": 0.1})
    return made


def batches(step: int, world_size: int) -> list[dict[str, Tensor]]:
    """One per rank; the first rank's of step 1 is empty."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for rank in range(world_size):
        size = 0 if (rank, step) == (0, 1) else 3 + rank
        lengths = torch.randint(0, 4, (size,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        made.append(
            {
                "square": torch.randint(0, ROWS, (size, 2), generator=generator),
                "ids": ids,
                "offsets": nn.functional.pad(lengths.cumsum(0), (1, 0)),
                "weights": torch.rand(ids.numel(), generator=generator),
            }
        )
    return made


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    lengths = torch.cat([part["offsets"].diff() for part in parts])
    whole = {key: torch.cat([part[key] for part in parts]) for key in ("square", "ids", "weights")}
    return {**whole, "offsets": nn.functional.pad(lengths.cumsum(0), (1, 0))}


def plan(kind: ShardingType, world_size: int) -> ShardingPlan:
    ranks = [world_size - 1] if kind is ShardingType.TABLE_WISE else list(range(world_size))
    sharding = parameter_sharding(kind, ROWS, DIM, ranks)
    return ShardingPlan({name: EmbeddingModuleShardingPlan({"weight": sharding}) for name in BAGS})


def shard(unsharded: nn.Module, kind: ShardingType, **settings: Any) -> DistributedModelParallel:
    env = ShardingEnv.default()
    return DistributedModelParallel(
        unsharded, env, CPU, plan(kind, env.world_size), [EmbeddingBagSharder(**settings)]
    )


def train(trained: nn.Module, rank: int | None, world_size: int, in_backward: bool) -> list[Tensor]:
    stepped = {
        name: parameter
        for name, parameter in trained.named_parameters()
        if not (in_backward and name.startswith(BAGS))
    }
    optimizer = KeyedOptimizerWrapper(stepped, lambda params: torch.optim.SGD(params, lr=0.1))
    outputs = []
    for step in range(3):
        parts = batches(step, world_size)
        logits = trained(joined(parts) if rank is None else parts[rank])
        outputs.append(logits.detach())
        optimizer.zero_grad()
        (logits.sin().sum() / (world_size if rank is None else 1)).backward()
        optimizer.step()
    return outputs


def _train_both(kind: ShardingType, optimizer: type[torch.optim.Optimizer] | None) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference, sharded = model(optimizer), shard(model(optimizer), kind)
    start = {name: value.clone() for name, value in reference.state_dict().items()}
    assert list(sharded.state_dict()) == list(start)
    assert_same(whole_state(sharded), start)
    own = {name.removesuffix("_1").removesuffix("_2") for name, _ in sharded.named_parameters()}
    assert own <= set(start)
    expected = train(reference, None, world_size, optimizer is not None)
    received = train(sharded, rank, world_size, optimizer is not None)
    for step, (together, mine) in enumerate(zip(expected, received, strict=True)):
        sizes = [len(part["square"]) for part in batches(step, world_size)]
        torch.testing.assert_close(mine, together.split(sizes)[rank], rtol=1e-5, atol=1e-5)
    state = whole_state(sharded)
    assert_same(state, reference.state_dict())
    assert not any(torch.equal(state[f"{name}.weight"], start[f"{name}.weight"]) for name in BAGS)
    if optimizer is not None:
        assert list(sharded.fused_optimizer.params) == [f"{name}.weight" for name in BAGS]
    assert_same(whole_state(copy.deepcopy(sharded)), reference.state_dict())
    sharded.load_state_dict(start)
    assert_same(whole_state(sharded), start)


@pytest.mark.parametrize("kind", list(ShardingType))
@pytest.mark.parametrize("optimizer", [None, Adagrad])
def test_trains_as_unsharded(
    ranks: RankPool, kind: ShardingType, optimizer: type[torch.optim.Optimizer] | None
) -> None:
    ranks(2, _train_both, kind, optimizer)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", [ShardingType.ROW_WISE, ShardingType.COLUMN_WISE])
def test_trains_on_other_numbers_of_ranks(
    ranks: RankPool, world_size: int, kind: ShardingType
) -> None:
    ranks(world_size, _train_both, kind, RowWiseAdagrad)


def _everything(kind: ShardingType, in_backward: bool, path: str, load: bool) -> dict[str, Tensor]:
    """Trains and saves, or loads; and returns the model's and the optimizer's whole state."""
    sharded = shard(model(RowWiseAdagrad if in_backward else None), kind)
    stepped = {
        name: parameter
        for name, parameter in sharded.named_parameters()
        if not (in_backward and name.startswith(BAGS))
    }
    wrapped = KeyedOptimizerWrapper(stepped, lambda params: Adam(params, lr=0.1))
    wrapped.init_state()
    optimizer = CombinedOptimizer([sharded.fused_optimizer, wrapped])
    if load:
        load_checkpoint(path, sharded, optimizer)
    else:
        for step in range(2):
            optimizer.zero_grad()
            sharded(batches(step, dist.get_world_size())[dist.get_rank()]).sum().backward()
            optimizer.step()
        save_checkpoint(path, sharded, optimizer)
    found = whole_state(sharded)
    for name, states in state_of(sharded, optimizer)["optimizer"]["state"].items():
        for key, value in states.items():
            if isinstance(value, ShardedTable):
                value = ShardedTable(
                    value.shape, value.local_shards(), dtype=value.dtype, device=value.device,
                    group=dist.group.WORLD,
                )  # fmt: skip
            found[f"{name}/{key}"] = whole(value)
    return found


@pytest.mark.parametrize("in_backward", [True, False])
def test_checkpoints_load_under_another_plan(
    ranks: RankPool, tmp_path: Path, in_backward: bool
) -> None:
    path = str(tmp_path / "checkpoint")
    saved = ranks(2, _everything, ShardingType.ROW_WISE, in_backward, path, False)[0]
    assert "summed.weight/sum" in saved or "summed.weight/exp_avg" in saved
    assert any(value.abs().sum() > 0 for name, value in saved.items() if "/" in name)
    for world_size, kind in ((2, ShardingType.COLUMN_WISE), (1, ShardingType.ROW_WISE)):
        loaded = ranks(world_size, _everything, kind, in_backward, path, True)
        for of_rank in loaded:
            assert_same(of_rank, saved, rtol=0, atol=0)


def _weights_get_gradients() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = batches(0, world_size)
    reference, sharded = model(None), shard(model(None), ShardingType.ROW_WISE)
    for part in parts:
        part["weights"].requires_grad_()
    reference(joined(parts)).sum().backward()
    expected = parts[rank]["weights"].grad.clone()
    parts[rank]["weights"].grad = None
    sharded(parts[rank]).sum().backward()
    torch.testing.assert_close(parts[rank]["weights"].grad, expected)


def test_weights_get_gradients(ranks: RankPool) -> None:
    ranks(2, _weights_get_gradients)


def _bad_calls_raise_on_all_ranks() -> None:
    rank = dist.get_rank()
    bag: Any = shard(model(None), ShardingType.ROW_WISE).module.summed
    assert isinstance(bag, ShardedEmbeddingBag)
    good = torch.tensor([[1, 2]])
    with pytest.raises(IndexError, match="weight"):
        bag(good if rank else good + ROWS)
    with pytest.raises(ValueError, match=r"ids \[N\] with offsets \[B\]"):
        bag(good, *([] if rank else [torch.tensor([0])]))
    with pytest.raises(TypeError, match="int"):
        bag(good if rank else good.float())
    padded: Any = shard(model(None), ShardingType.ROW_WISE).module.averaged
    ids = torch.tensor([3, 3, 1, 2])
    for offsets in ([2, 3], [0, 3, 1]):  # the ids before the first bag are padding
        with pytest.raises(ValueError, match="offsets must"):
            padded(ids, torch.tensor([0, 2] if rank else offsets))
    unweighed: Any = shard(model(None), ShardingType.ROW_WISE, is_weighted=False).module.summed
    with pytest.raises(ValueError, match="need mode='sum', a sharder made with is_weighted=True"):
        unweighed(good, None, None if rank else torch.ones(1, 2))
    torch.testing.assert_close(unweighed(good) + 0, bag(good) + 0)


def test_bad_calls_raise_on_all_ranks(ranks: RankPool) -> None:
    ranks(2, _bad_calls_raise_on_all_ranks)


def _planned_from_meta_with_settings() -> None:
    sharder = EmbeddingBagSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5})
    torch.manual_seed(0)
    sharded = DistributedModelParallel(Model("meta"), device=CPU, sharders=[sharder])
    assert set(sharded.plan.plan) == set(BAGS)
    assert list(sharded.plan.plan["summed"]) == ["weight"]
    before = whole_state(sharded)
    assert 0.7 < before["summed.weight"].std() < 1.3  # as nn.EmbeddingBag draws them
    sharded(batches(0, dist.get_world_size())[dist.get_rank()]).sum().backward()
    assert not torch.equal(whole_state(sharded)["summed.weight"], before["summed.weight"])


def test_planned_from_meta_with_settings(ranks: RankPool) -> None:
    ranks(2, _planned_from_meta_with_settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mode": "max"}, "received mode 'max' and none"),
        ({"max_norm": 1.0}, r"received mode 'mean' and \{'max_norm': 1.0\}"),
    ],
)
def test_bags_that_cannot_be_sharded(settings: dict[str, Any], text: str) -> None:
    unsharded = nn.Sequential(nn.EmbeddingBag(ROWS, DIM, **settings))
    with pytest.raises(ValueError, match=text):
        DistributedModelParallel(unsharded, device=CPU, sharders=[EmbeddingBagSharder()])


def test_without_the_sharder_bags_are_dense() -> None:
    dense = DistributedModelParallel(nn.Sequential(nn.EmbeddingBag(ROWS, DIM)), device=CPU)
    assert type(dense.module[0]) is nn.EmbeddingBag


def test_the_plan_chooses_the_dtype_of_the_output() -> None:
    bag = nn.EmbeddingBag(8, 4, mode="sum")
    ids = torch.tensor([[1, 2], [3, 3]])
    place = parameter_sharding(ShardingType.TABLE_WISE, 8, 4, [0])
    for dtype, expected in ((None, torch.float32), (torch.float16, torch.float16)):
        place.output_dtype = dtype
        plan = EmbeddingModuleShardingPlan(weight=place)
        sharded = EmbeddingBagSharder().shard(bag, plan, ShardingEnv.from_local())
        found = sharded(ids).wait()
        assert found.dtype is expected
        torch.testing.assert_close(found, bag(ids).to(expected))


def _by_stages(kind: ShardingType) -> None:
    first, second = (batches(step, 2)[dist.get_rank()] for step in (0, 2))
    calls = [
        {
            "summed": (batch["square"],),
            "averaged": (batch["ids"], batch["offsets"][:-1]),
            "weighed": (batch["ids"], batch["offsets"], batch["weights"]),
        }
        for batch in (first, second)
    ]
    states, outputs = [], []
    for look_up in (interleave, in_turn):
        sharded = shard(model(Adam), kind)
        outputs.append([])
        for name in BAGS:
            bag = sharded.module.get_submodule(name)
            found = look_up(bag, calls[0][name], calls[1][name])
            sum(values.square().sum() for values in found).backward()  # type: ignore[union-attr]
            outputs[-1] += found
        states.append(whole_state(sharded))
    assert all(map(torch.equal, *outputs))
    assert_same(states[0], states[1], rtol=0, atol=0)
    assert any(not torch.equal(states[0][n], v) for n, v in model(None).state_dict().items())


@pytest.mark.parametrize("kind", [ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL])
def test_two_calls_at_once_train_as_in_turn(ranks: RankPool, kind: ShardingType) -> None:
    ranks(2, _by_stages, kind)


def _compile(kind: ShardingType) -> None:
    batch = batches(0, 2)[dist.get_rank()]
    sharded = shard(model(None), kind).module
    compiled = torch.compile(sharded, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(batch), sharded(batch))


def test_a_compiled_model_calls_it_as_it_is(ranks: RankPool) -> None:
    ranks(2, _compile, ShardingType.ROW_WISE)


def _move() -> tuple[list[Tensor], list[Tensor]]:
    """Outputs without and with a move to another plan."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    models = [shard(model(RowWiseAdagrad), ShardingType.TABLE_WISE) for _ in range(2)]
    for each in models:
        train(each, rank, world_size, in_backward=True)
    models[1].reshard(plan(ShardingType.ROW_WISE, world_size))
    stayed, moved = (train(each, rank, world_size, in_backward=True) for each in models)
    return stayed, moved


def test_a_bag_moves_to_another_plan(ranks: RankPool) -> None:
    for stayed, moved in ranks(2, _move):
        for expected, received in zip(stayed, moved, strict=True):
            torch.testing.assert_close(received, expected, rtol=1e-4, atol=1e-5)


def _is_not_quantized() -> None:
    bag = nn.ModuleDict({"bag": nn.EmbeddingBag(8, 4, mode="sum"), "more": Mixed()})
    sharded = DistributedModelParallel(
        bag, device=CPU, sharders=[EmbeddingBagSharder()], init_data_parallel=False
    )
    message = r"ShardedEmbeddingBag 'ModuleDict\.bag' cannot be quantize"
    with pytest.raises(ValueError, match=message):
        quantize_embeddings(sharded)


def test_a_bag_that_cannot_be_quantized_is_named(ranks: RankPool) -> None:
    ranks(2, _is_not_quantized)


test_errors_name_the_path = again(
    core.test_errors_name_the_path,
    ("sharder", "module"),
    {"EmbeddingBagSharder": (EmbeddingBagSharder(), nn.EmbeddingBag(8, 4, mode="sum"))},
)
