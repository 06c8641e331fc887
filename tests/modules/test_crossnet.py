import pytest
import torch

from recsys.modules.crossnet import CrossNet, LowRankCrossNet


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


@pytest.mark.parametrize("model", [CrossNet(4, 2), LowRankCrossNet(4, 2, low_rank=2)])
def test_script_and_trace(model):
    x = torch.randn(5, 4)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_bad_sizes():
    with pytest.raises(ValueError, match="in_features 4, num_layers 0, low_rank 1"):
        CrossNet(4, 0)
    with pytest.raises(ValueError, match="low_rank 0"):
        LowRankCrossNet(4, 2, low_rank=0)
