from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.compat.towers import (
    EmbeddingTower,
    EmbeddingTowerCollection,
    tower_input_params,
)
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardedModule
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, assert_same, whole_state
from tests.ranks import RankPool


class Pooled(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, pooled: Any) -> Tensor:
        output: Tensor = self.linear(pooled.values())
        return output


class Both(nn.Module):
    """An embedding module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.weighted = collection("c", False), collection("d", True)

    def forward(self, features: Any, weighted_features: Any) -> Tensor:
        found = self.plain(features).values() * self.weighted(weighted_features).values()
        output: Tensor = found
        return output


def collection(name: str, is_weighted: bool) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(10, 4, name, feature_names=["f"])
    return EmbeddingBagCollection([table], is_weighted)


def model() -> EmbeddingTowerCollection:
    torch.manual_seed(0)
    return EmbeddingTowerCollection(
        [
            EmbeddingTower(collection("a", False), Pooled(4, 3)),
            EmbeddingTower(collection("b", True), Pooled(4, 2)),
            EmbeddingTower(Both(), nn.Linear(4, 1)),
        ]
    )


def batch(rank: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    ids = torch.tensor([3, 1, 4, 1, 5]) + rank
    lengths = torch.tensor([2, 0, 3])
    plain = KeyedJaggedTensor(["f"], ids, lengths=lengths)
    return plain, KeyedJaggedTensor(["f"], ids, torch.arange(5) / (5.0 + rank), lengths)


def bags(weight: Tensor, features: KeyedJaggedTensor) -> Tensor:
    rows = weight[features.values()]
    if features.weights_or_none() is not None:
        rows = rows * features.weights()[:, None]
    return torch.stack([part.sum(0) for part in rows.split(features.lengths().tolist())])


def test_equals_the_towers_one_by_one() -> None:
    towers, (plain, weighted) = model(), batch(0)
    state = towers.state_dict()
    a, b, c, d = (state[name] for name in state if "embedding_bags" in name)
    expected = torch.cat(
        [
            towers.towers[0].interaction.linear(bags(a, plain)),
            towers.towers[1].interaction.linear(bags(b, weighted)),
            towers.towers[2].interaction(bags(c, plain) * bags(d, weighted)),
        ],
        dim=1,
    )
    torch.testing.assert_close(towers(plain, weighted), expected)
    assert list(state)[:3] == [
        "towers.0.embedding.embedding_bags.a.weight",
        "towers.0.interaction.linear.weight",
        "towers.0.interaction.linear.bias",
    ]


def test_what_modules_read() -> None:
    sequence = EmbeddingCollection([EmbeddingConfig(10, 4, "e", feature_names=["f"])])
    assert tower_input_params(sequence) == (True, False)
    assert tower_input_params(collection("a", False)) == (True, False)
    assert tower_input_params(collection("a", True)) == (False, True)
    assert tower_input_params(Both()) == (True, True)


def test_missing_features_and_towers() -> None:
    with pytest.raises(ValueError, match=r"towers\[1\] reads weighted_features; received None"):
        model()(batch(0)[0])
    with pytest.raises(ValueError, match="at least one tower"):
        EmbeddingTowerCollection([])
    only_plain = EmbeddingTowerCollection([model().towers[0]], device=torch.device("meta"))
    assert all(parameter.is_meta for parameter in only_plain.parameters())


def _trains_sharded_as_unsharded() -> None:
    rank = dist.get_rank()
    reference = model()
    models: list[nn.Module] = []
    for towers in (reference, model()):
        tables = [p for name, p in towers.named_parameters() if "embedding_bags" in name]
        apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.1})
        models.append(towers)
    sharded = DistributedModelParallel(models[1], device=CPU)
    assert sum(isinstance(part, ShardedModule) for part in sharded.modules()) == 4
    start = whole_state(sharded)
    for step in range(3):
        outputs = [reference(*batch(of + step)) for of in range(2)]
        own = sharded(*batch(rank + step))
        torch.testing.assert_close(own, outputs[rank])
        (sum(output.square().sum() for output in outputs) / 2).backward()
        own.square().sum().backward()
        for trained in models:
            for name, parameter in trained.named_parameters():
                if "embedding_bags" not in name:
                    assert parameter.grad is not None
                    with torch.no_grad():
                        parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    assert_same(whole_state(sharded), reference.state_dict())
    assert not torch.equal(whole_state(sharded)[next(iter(start))], start[next(iter(start))])


def test_trains_sharded_as_unsharded(ranks: RankPool) -> None:
    ranks(2, _trains_sharded_as_unsharded)
