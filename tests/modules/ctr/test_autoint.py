import numpy as np
import pytest

from recsys.modules.ctr.autoint import AutoInt
from tests.modules.ctr.cases import (
    DENSE,
    assert_model_follows,
    assert_trains,
    collection,
    linear,
    mlp,
    softmax,
)

FIELDS, HEADS, WIDTH = DENSE + 3, 2, 2


def layer(state, name, fields):
    parts = np.split(linear(state, f"{name}.attention_in", fields), 3, 2)
    found = []
    for q, k, v in zip(*(np.split(part, HEADS, 2) for part in parts), strict=True):
        found.append(softmax(q @ k.transpose(0, 2, 1)) @ v)
    return np.maximum(np.concatenate(found, 2) + linear(state, f"{name}.residual", fields), 0)


@pytest.mark.parametrize("layers", [[], [4]])
def test_against_the_formula(layers):
    def formula(state, fields):
        x = fields
        for i in range(2):
            x = layer(state, f"model.layers.{i}", x)
        x = x.reshape(len(x), -1)
        if layers:
            deep = mlp(state, "model.deep", fields.reshape(len(x), -1), 1)
            x = np.concatenate([x, deep], 1)
        return linear(state, "model.out", x)

    model = AutoInt(collection(), DENSE, 2, HEADS, WIDTH, layers, num_tasks=2)
    assert_model_follows(model, formula, FIELDS, 3)


def test_the_whole_model():
    assert_trains(AutoInt(collection(), DENSE, layer_sizes=[8]))


def test_errors():
    with pytest.raises(ValueError, match="num_layers"):
        AutoInt(collection(), DENSE, 0)
