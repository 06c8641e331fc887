import numpy as np
import pytest
import torch
from torch import nn

from recsys.modules.activation import SwishLayerNorm
from recsys.modules.mlp import MLP, Perceptron
from tests.formulas import assert_follows, randomise


def test_equals_the_formula():
    model = MLP(3, [4, 2], activation=torch.tanh, activation_on_last=False)
    first, second = (layer._linear for layer in model._mlp)
    x = torch.randn(5, 3)
    expected = torch.tanh(x @ first.weight.T + first.bias) @ second.weight.T + second.bias
    torch.testing.assert_close(model(x), expected)


def test_state_dict_names_are_those_of_torchrec():
    assert list(MLP(3, [4, 2]).state_dict()) == [
        "_mlp.0._linear.weight",
        "_mlp.0._linear.bias",
        "_mlp.1._linear.weight",
        "_mlp.1._linear.bias",
    ]
    assert "_mlp.0._activation_fn.norm.0.weight" in MLP(
        3, [4], activation="swish_layernorm"
    ).state_dict()  # fmt: skip


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("relu", torch.relu),
        ("sigmoid", torch.sigmoid),
        (torch.tanh, torch.tanh),
        (nn.GELU(), nn.functional.gelu),
        (nn.ReLU, torch.relu),
        (lambda: nn.Tanh(), torch.tanh),
        ("swish_layernorm", lambda x: x * torch.sigmoid(nn.functional.layer_norm(x, (4,)))),
    ],
)
def test_activations(activation, expected):
    layer = MLP(3, [4], activation=activation)
    x = torch.randn(5, 3)
    torch.testing.assert_close(layer(x), expected(layer._mlp[0]._linear(x)))


def test_a_class_gives_each_layer_its_own_activation():
    layers = MLP(3, [4, 4], activation=nn.PReLU)._mlp
    assert layers[0]._activation_fn is not layers[1]._activation_fn


def test_no_layers_give_the_input_back():
    x = torch.randn(5, 3)
    assert torch.equal(MLP(3, [])(x), x)


def test_bias_dtype_device():
    model = MLP(3, [4], bias=False, dtype=torch.float64, device=torch.device("meta"))
    assert [(p.dtype, p.is_meta) for p in model.parameters()] == [(torch.float64, True)]


@pytest.mark.parametrize("activation", ["relu", "swish_layernorm", nn.GELU()])
def test_script_and_trace(activation):
    model = MLP(3, [4, 2], activation=activation)
    x = torch.randn(5, 3)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"relu, sigmoid, swish_layernorm, .* received 'gelu'"):
        MLP(3, [4], activation="gelu")
    with pytest.raises(ValueError, match=r"layer_sizes\[1\] must be positive; received 0"):
        MLP(3, [4, 0])


def test_perceptron_has_relu():
    assert (Perceptron(3, 2)(torch.randn(50, 3)) >= 0).all()


def test_swish_layer_norm_over_two_dimensions():
    x = torch.randn(2, 3, 4)
    expected = x * torch.sigmoid(nn.functional.layer_norm(x, (3, 4)))
    torch.testing.assert_close(SwishLayerNorm([3, 4])(x), expected)


def test_batch_norm_follows_the_formula():
    def formula(state, x):
        for layer in range(2):
            of = f"_mlp.{layer}."
            x = x @ state[of + "_linear.weight"].T + state[of + "_linear.bias"]
            if layer == 0:  # the last one has no activation here, and so no batch norm
                x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
                x = np.tanh(x * state[of + "_norm.weight"] + state[of + "_norm.bias"])
        return x

    torch.manual_seed(0)
    model = MLP(3, [4, 2], activation=torch.tanh, activation_on_last=False, batch_norm=True)
    randomise(model)
    assert_follows(model, formula, torch.randn(6, 3, dtype=torch.float64))


def test_dropout_scales_what_it_keeps_and_ends_with_training():
    torch.manual_seed(0)
    model = MLP(3, [1000], activation=torch.abs, dropout=0.25)
    x = torch.randn(1, 3)
    whole = model.eval()(x)
    torch.testing.assert_close(whole, model._mlp[0]._linear(x).abs())
    dropped = model.train()(x)
    kept = dropped != 0
    assert 0.7 < kept.float().mean() < 0.8
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)


def test_layers_without_activation_drop_nothing():
    model = MLP(3, [4, 2], activation_on_last=False, dropout=0.5, batch_norm=True)
    assert "_mlp.0._norm.running_mean" in model.state_dict()
    assert "_mlp.1._norm.running_mean" not in model.state_dict()
    assert [layer._dropout is None for layer in model._mlp] == [False, True]


def test_norm_and_dropout_script_and_trace():
    model = MLP(3, [4, 2], batch_norm=True, dropout=0.5).eval()
    x = torch.randn(5, 3)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_no_input_gives_the_learned_constant():
    model = MLP(0, [4])
    found = model(torch.zeros(5, 0))
    torch.testing.assert_close(found, model._mlp[0]._linear.bias.relu().expand(5, 4))


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_bad_dropout(share):
    with pytest.raises(ValueError, match=r"dropout must be in .*0, 1\)"):
        MLP(3, [4], dropout=share)
