import numpy as np
import pytest
import torch
from torch import nn

from recsys.modules.crossnet import (
    CrossNet,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    VectorCrossNet,
)
from tests.formulas import assert_follows, randomise


def crossed(x0, layers):
    """One sample at a time, as the paper writes it."""
    outputs = []
    for sample in x0:
        x = sample
        for matrix, bias in layers:
            x = sample * (matrix @ x + bias) + x
        outputs.append(x)
    return torch.stack(outputs)


def randomise_biases(model):
    for bias in model.bias:
        torch.nn.init.normal_(bias)


def test_full_equals_the_formula():
    model = CrossNet(in_features=4, num_layers=3)
    randomise_biases(model)
    x = torch.randn(5, 4)
    layers = [(w, b[:, 0]) for w, b in zip(model.kernels, model.bias, strict=True)]
    torch.testing.assert_close(model(x), crossed(x, layers))


def test_low_rank_equals_the_formula():
    model = LowRankCrossNet(in_features=4, num_layers=3, low_rank=2)
    randomise_biases(model)
    x = torch.randn(5, 4)
    layers = [
        (w @ v, b) for w, v, b in zip(model.W_kernels, model.V_kernels, model.bias, strict=True)
    ]
    torch.testing.assert_close(model(x), crossed(x, layers))


def test_vector_follows_the_formula():
    def formula(state, x0_BN):
        rows = []
        for x0 in x0_BN:
            x = x0
            for layer in range(3):
                weight, bias = (state[f"{kind}.{layer}"][:, 0] for kind in ("kernels", "bias"))
                x = x0 * np.dot(x, weight) + bias + x
            rows.append(x)
        return np.stack(rows)

    torch.manual_seed(0)
    model = VectorCrossNet(in_features=4, num_layers=3)
    randomise(model)
    assert_follows(model, formula, torch.randn(5, 4, dtype=torch.float64))


@pytest.mark.parametrize("num_experts", [1, 3])
def test_mixture_follows_the_formula(num_experts):
    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def formula(state, x0_BN):
        rows = []
        for x0 in x0_BN:
            x = x0
            for layer in range(2):
                gates = np.ones(1)
                if num_experts > 1:
                    scores = [state[f"gates.{e}.weight"][0] @ x for e in range(num_experts)]
                    gates = np.exp(scores) / np.exp(scores).sum()
                mixed = np.zeros(4)
                for e in range(num_experts):
                    narrow = sigmoid(state[f"V_kernels.{layer}"][e] @ x)
                    core = sigmoid(state[f"C_kernels.{layer}"][e] @ narrow)
                    wide = state[f"U_kernels.{layer}"][e] @ core
                    mixed += gates[e] * x0 * (wide + state[f"bias.{layer}"][:, 0])
                x = mixed + x
            rows.append(x)
        return np.stack(rows)

    torch.manual_seed(0)
    model = LowRankMixtureCrossNet(4, 2, num_experts, low_rank=2, activation=nn.Sigmoid())
    randomise(model)
    assert_follows(model, formula, torch.randn(5, 4, dtype=torch.float64))


def test_mixture_state_dict_names_are_those_of_torchrec():
    state = LowRankMixtureCrossNet(4, 1, num_experts=2, low_rank=3).state_dict()
    assert {name: list(value.shape) for name, value in state.items()} == {
        "U_kernels.0": [2, 4, 3],
        "V_kernels.0": [2, 3, 4],
        "bias.0": [4, 1],
        "gates.0.weight": [1, 4],
        "gates.1.weight": [1, 4],
        "C_kernels.0": [2, 3, 3],
    }
    assert "gates.0.weight" not in LowRankMixtureCrossNet(4, 1).state_dict()


@pytest.mark.parametrize(
    "model",
    [
        CrossNet(4, 2),
        LowRankCrossNet(4, 2, low_rank=2),
        VectorCrossNet(4, 2),
        LowRankMixtureCrossNet(4, 2, low_rank=2),
        LowRankMixtureCrossNet(4, 2, num_experts=3, low_rank=2),
    ],
)
def test_script_and_trace(model):
    x = torch.randn(5, 4)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_bad_sizes():
    with pytest.raises(ValueError, match="in_features 4, num_layers 0"):
        CrossNet(4, 0)
    with pytest.raises(ValueError, match="low_rank 0"):
        LowRankCrossNet(4, 2, low_rank=0)
    with pytest.raises(ValueError, match="num_layers 0"):
        VectorCrossNet(4, 0)
    with pytest.raises(ValueError, match="num_experts 0"):
        LowRankMixtureCrossNet(4, 2, num_experts=0)
