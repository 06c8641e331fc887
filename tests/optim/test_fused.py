"""The names of optimizers that act in backward."""

from __future__ import annotations

import copy

import pytest
import torch

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.optim.fused import FusedOptimizer, TablesGroup


def test_the_optimizer_of_tables_is_fused() -> None:
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])
    collection = EmbeddingBagCollection(tables=[config])
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(collection, device=torch.device("cpu"))
    [(_, inner)] = model.module.fused_optimizer.optimizers
    assert isinstance(inner, FusedOptimizer)
    with pytest.raises(TypeError, match="step"):
        FusedOptimizer({}, {}, [])  # type: ignore[abstract]


def test_a_group_tells_its_tables_their_rate() -> None:
    rates: list[float] = []
    weight = torch.nn.Parameter(torch.ones(1))
    group = TablesGroup([weight], 0.5, {"eps": 0.1}, rates.append)
    group["lr"] = 0.25
    group.update({"lr": 0.125, "eps": 0.1})
    assert rates == [0.5, 0.25, 0.125]
    for change in (lambda: group.update(eps=0.2), lambda: group.__setitem__("eps", 0.2)):
        with pytest.raises(ValueError, match=r"'eps' of tables .*0\.1; .*0\.2"):
            change()
    with pytest.raises(ValueError, match="learning rate of tables"):
        group["lr"] = float("nan")
    assert rates == [0.5, 0.25, 0.125]
    assert type(copy.deepcopy(group)) is dict
