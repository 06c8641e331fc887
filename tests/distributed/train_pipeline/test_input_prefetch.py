"""Several sharded modules of a model share one header exchange, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import SGD
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, counted_collectives
from tests.ranks import RankPool


@dataclass
class Samples:
    """Input of the model: features at two places, one of them deep."""

    user: KeyedJaggedTensor
    rest: dict[str, tuple[KeyedJaggedTensor]]


class Model(nn.Module):
    """Two pooled collections and one of sequences; may call them in another way later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=name, num_embeddings=9, embedding_dim=4, feature_names=["f", "g"]
                    )
                ],
                device=CPU,
            )
            for name in "ab"
        )
        self.c = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name="c", num_embeddings=9, embedding_dim=4, feature_names=["g"])
            ],
            device=CPU,
        )
        self.way = "plain"

    def forward(self, samples: Samples) -> Any:
        (item,) = samples.rest["item"]
        if self.way == "derived":
            item = item.permute([1, 0])
        a = self.a(samples.user).values()
        if self.way == "skips":
            return a.sum(1)
        c = self.c(item)["g"].values().sum() if self.way != "twice" else self.a(item).values().sum()
        return a.sum(1) + self.b(item).values().sum(1) + c


def _features(seed: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (6,), generator=generator)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["f", "g"], ids, lengths=lengths)


def _samples(rank: int, step: int) -> Samples:
    return Samples(_features(10 * step + rank), {"item": (_features(100 + 10 * step + rank),)})


def _shard(model: nn.Module) -> DistributedModelParallel:
    kinds = {"a": ShardingType.ROW_WISE, "b": ShardingType.TABLE_WISE, "c": ShardingType.ROW_WISE}
    plan = {
        name: EmbeddingModuleShardingPlan({name: parameter_sharding(kind, 9, 4, [0, 1])})
        for name, kind in kinds.items()
    }
    return DistributedModelParallel(
        model, env=ShardingEnv.default(), device=CPU, plan=ShardingPlan(plan)
    )


def _train(ways: list[str], rank: int | None) -> tuple[list[dict[str, int]], list[Tensor]]:
    """Collectives of each step, and the outputs and tables; rank None: unsharded, both ranks'."""
    torch.manual_seed(0)
    model: Any = Model()
    apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    bare = model
    if rank is not None:
        model = _shard(model)
        bare = model.module
    counts, outputs = [], []
    for step, way in enumerate(ways):
        bare.way = way
        given = [_samples(r, step) for r in ([rank] if rank is not None else range(2))]
        with counted_collectives() as counted:
            results = [model(samples) for samples in given]
        torch.cat(results).sum().div(1 if rank is not None else 2).backward()
        outputs.append(torch.cat(results).detach())
        counts.append(dict(counted))
    return counts, outputs


def _sharded(ways: list[str]) -> tuple[list[dict[str, int]], list[Tensor]]:
    return _train(ways, dist.get_rank())


@pytest.mark.parametrize(
    "ways",
    [
        ["plain"] * 3,
        ["derived"] * 3,
        ["twice"] * 3,
        ["plain", "plain", "derived", "plain", "plain"],
        ["plain", "plain", "skips", "skips", "plain"],
    ],
    ids=lambda ways: "-".join(ways),
)
def test_results_are_those_of_the_unsharded_model(ranks: RankPool, ways: list[str]) -> None:
    _, expected = _train(ways, None)
    results = ranks(2, _sharded, ways)
    for step, both in enumerate(expected):
        for rank, (_, outputs) in enumerate(results):
            mine = both[3 * rank : 3 * rank + 3]
            torch.testing.assert_close(outputs[step], mine, rtol=1e-5, atol=1e-5)


def test_from_the_second_step_one_header_serves_all(ranks: RankPool) -> None:
    for counts, _ in ranks(2, _sharded, ["plain"] * 3):
        # each module: header, ids, embeddings; then one header for three modules
        assert [c["all_to_all_single"] for c in counts] == [9, 7, 7]


def _fail(step_that_fails: int) -> str:
    model = _shard(Model())
    message = "no error"
    for step in range(3):
        samples = _samples(dist.get_rank(), step)
        if step == step_that_fails and dist.get_rank() == 1:
            samples.user.values()[0] = 9
        try:
            model(samples).sum().backward()
        except IndexError as error:
            assert step == step_that_fails
            message = str(error)
    return message


@pytest.mark.parametrize("step", [0, 1])
def test_a_bad_id_is_reported_on_every_rank_and_training_goes_on(
    ranks: RankPool, step: int
) -> None:
    for message in ranks(2, _fail, step):
        assert message.startswith("On rank 1: Id 9 at position ")
