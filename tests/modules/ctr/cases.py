"""A small collection and batches, and checks of models on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor
from tests.formulas import assert_follows, randomise

FEATURES, ROWS, SIZE, DENSE = ["user", "film", "tags"], 10, 5, 2


def collection(dims: tuple[int, ...] = (3, 3, 3)) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"{name}s", embedding_dim=dim, num_embeddings=ROWS, feature_names=[name]
            )
            for name, dim in zip(FEATURES, dims, strict=True)
        ]
    )


def batch(size: int = SIZE) -> KeyedJaggedTensor:
    lengths = torch.tensor([1] * 2 * size + [i % 3 for i in range(size)])
    ids = torch.randint(0, ROWS, (int(lengths.sum()),))
    return KeyedJaggedTensor(FEATURES, ids, lengths=lengths)


class OnInput(nn.Module):
    """A model whose input module is replaced by the input itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.model.inputs = First()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, None)


class First(nn.Module):
    def forward(self, x: Tensor, _: object) -> Tensor:
        return x


def assert_model_follows(model: nn.Module, formula: Callable[..., np.ndarray], *shape: int) -> None:
    """Check a model against the formula of its input `[SIZE, *shape]`."""
    torch.manual_seed(0)
    model = OnInput(model)
    randomise(model)
    assert_follows(model, formula, torch.randn(SIZE, *shape, dtype=torch.float64))


def assert_trains(model: nn.Module, num_tasks: int = 1) -> None:
    """Check shapes and gradients of a whole model, and that it can be exported."""
    dense, ids = torch.randn(SIZE, DENSE), batch()
    logits = model(dense, ids)
    assert logits.shape == (SIZE, num_tasks)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    model.eval()
    program = torch.export.export(model, (dense, ids)).module()
    torch.testing.assert_close(program(dense, ids), model(dense, ids))


def linear(state, name, x):
    bias = state.get(f"{name}.bias", 0.0)
    return x @ state[f"{name}.weight"].T + bias


def mlp(state, name, x, layers):
    for layer in range(layers):
        x = np.maximum(linear(state, f"{name}._mlp.{layer}._linear", x), 0)
    return x


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))
