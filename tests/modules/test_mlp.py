import pytest
import torch
from torch import nn

from recsys.modules.activation import SwishLayerNorm
from recsys.modules.mlp import MLP, Perceptron


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
    with pytest.raises(ValueError, match=r"received in_size 3 and layer_sizes \[4, 0\]"):
        MLP(3, [4, 0])


def test_perceptron_has_relu():
    assert (Perceptron(3, 2)(torch.randn(50, 3)) >= 0).all()


def test_swish_layer_norm_over_two_dimensions():
    x = torch.randn(2, 3, 4)
    expected = x * torch.sigmoid(nn.functional.layer_norm(x, (3, 4)))
    torch.testing.assert_close(SwishLayerNorm([3, 4])(x), expected)
