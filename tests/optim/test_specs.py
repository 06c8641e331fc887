from __future__ import annotations

import pytest
import torch

from recsys.kernels.types import EmbOptimType, OptimizerSpec, WeightDecayMode
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import optimizers
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recsys.optim.specs import (
    optimizer_spec,
    supported_optimizer_classes,
)
from recsys.sparse import KeyedJaggedTensor


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_weight_decay_of_a_table_touches_the_rows_of_the_batch_only(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    settings = {"lr": 0.1, "weight_decay": 0.5}
    tables = [EmbeddingBagConfig(num_embeddings=4, embedding_dim=2, name="t", feature_names=["f"])]
    attached, stepped = (EmbeddingBagCollection(tables=tables) for _ in range(2))
    stepping = optimizer(stepped.parameters(), **settings)  # type: ignore[arg-type]
    apply_optimizer_in_backward(optimizer, attached.parameters(), settings)
    batch = KeyedJaggedTensor(["f"], values=torch.tensor([2]), lengths=torch.tensor([1]))
    moved = []
    for collection in (attached, stepped):
        (weight,) = collection.parameters()
        before = weight.detach().clone()
        collection(batch).values().sum().backward()
        if collection is stepped:
            stepping.step()
        moved.append((weight != before).any(1).tolist())
    assert moved == [[False, False, True, False], [True] * 4]


@pytest.mark.parametrize("optimizer_class", supported_optimizer_classes())
def test_the_learning_rate_arrives(optimizer_class: type[torch.optim.Optimizer]) -> None:
    assert optimizer_spec(optimizer_class, {"lr": 0.25}).learning_rate == 0.25


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "expected"),
    [
        (torch.optim.SGD, {}, OptimizerSpec(algorithm=EmbOptimType.SGD, learning_rate=1e-3)),
        (
            torch.optim.Adagrad,
            {"eps": 1e-5},
            OptimizerSpec(algorithm=EmbOptimType.EXACT_ADAGRAD, eps=1e-5),
        ),
        (
            torch.optim.Adam,
            {"betas": (0.5, 0.6), "weight_decay": 0.1},
            OptimizerSpec(
                algorithm=EmbOptimType.ADAM,
                learning_rate=1e-3,
                beta1=0.5,
                beta2=0.6,
                weight_decay=0.1,
                weight_decay_mode=WeightDecayMode.L2,
            ),
        ),
        (
            torch.optim.AdamW,
            {},
            OptimizerSpec(algorithm=EmbOptimType.ADAM, learning_rate=1e-3, weight_decay=0.01),
        ),
        (
            optimizers.LarsSGD,
            {"momentum": 0.5, "eta": 0.1},
            OptimizerSpec(algorithm=EmbOptimType.LARS_SGD, momentum=0.5, eta=0.1),
        ),
        (
            optimizers.RowWiseAdagrad,
            {},
            OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD, eps=1e-10),
        ),
    ],
)
def test_arguments_and_class_defaults(
    optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, float], expected: OptimizerSpec
) -> None:
    assert optimizer_spec(optimizer_class, kwargs) == expected


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "message"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, r"\['momentum'\]; received {'momentum': 0.9}"),
        (
            torch.optim.Adam,
            {"amsgrad": True},
            r"ADAM .* support \['amsgrad'\]",
        ),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay"),
        (torch.optim.SGD, {"learning_rate": 0.1}, r"of SGD, .*received \['learning_rate'\]"),
        (torch.optim.Rprop, {}, "received torch.optim.rprop.Rprop. Choose one of"),
    ],
)
def test_nothing_is_ignored(
    optimizer_class: type[torch.optim.Optimizer], kwargs: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_spec(optimizer_class, kwargs)
