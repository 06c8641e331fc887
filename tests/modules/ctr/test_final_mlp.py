import numpy as np
import pytest

from recsys.modules.ctr.final_mlp import BilinearFusion, FinalMLP
from tests.modules.ctr.cases import (
    DENSE,
    assert_model_follows,
    assert_trains,
    collection,
    linear,
    mlp,
    sigmoid,
)


def stream(state, number, x, columns):
    if columns is None:
        hidden = state[f"model.gates.{number}.hidden._linear.bias"][None]
    else:
        hidden = linear(state, f"model.gates.{number}.hidden._linear", x[:, columns])
    gates = 2 * sigmoid(linear(state, f"model.gates.{number}.out", np.maximum(hidden, 0)))
    return mlp(state, f"model.streams.{number}", x * gates, 2)


def formula(state, x):
    left = stream(state, 0, x, [2, 3, 4, 8, 9, 10])  # user and tags
    right = stream(state, 1, x, None)
    found = linear(state, "model.fusion.left", left) + linear(state, "model.fusion.right", right)
    pairs = state["model.fusion.pairs"]
    for head in range(2):
        a, b = left[:, head * 2 : head * 2 + 2], right[:, head * 3 : head * 3 + 3]
        for task in range(2):
            found[:, task] += ((a @ pairs[head, :, :, task]) * b).sum(1)
    return found


def test_against_the_formula():
    model = FinalMLP(
        collection(), DENSE, [5, 4], [5, 6], contexts=(["user", "tags"], []), gate_hidden=3,
        num_heads=2, num_tasks=2,
    )  # fmt: skip
    assert_model_follows(model, formula, DENSE + 9)


def test_the_whole_model():
    assert_trains(FinalMLP(collection(), DENSE, [8, 4], contexts=(["user"], ["film"])))


def test_errors():
    with pytest.raises(ValueError, match="num_heads=3; received 6 and 4"):
        BilinearFusion(6, 4, 3)
    with pytest.raises(ValueError, match=r"one layer; received \[\[4\], \[\]\]"):
        FinalMLP(collection(), DENSE, [4], [])
    with pytest.raises(KeyError, match=r"contexts must name .*received \['city'\]"):
        FinalMLP(collection(), DENSE, contexts=(["city"], []))
