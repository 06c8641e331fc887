"""A scaled loss does not reach tables that are updated in backward; bf16 does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recsys import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from recsys.optim import GradScaler
from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

RATE = 0.5


def _model(
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.SGD,
) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="films", embedding_dim=4, num_embeddings=5, feature_names=["film"]
            )
        ]
    )
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, ebc.parameters(), {"lr": RATE})
    return ebc


def _weight(ebc: EmbeddingBagCollection) -> Tensor:
    return ebc.embedding_bags["films"].weight


def _batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["film"], values=torch.tensor([0, 2, 2]), lengths=torch.tensor([2, 1]))


def _scaler(**settings: Any) -> GradScaler:
    return GradScaler("cpu", **settings)


def test_a_scaled_loss_of_fused_tables_is_refused_before_any_update() -> None:
    ebc = _model()
    before = _weight(ebc).detach().clone()
    for outputs in (lambda x: x, lambda x: [x], lambda x: (y for y in [x])):
        loss = ebc(_batch()).values().sum()
        with pytest.raises(ValueError, match=r"by 65536, and tables \['films'\]"):
            _scaler().scale(outputs(loss))
    assert torch.equal(_weight(ebc), before)


def test_parameters_with_an_optimizer_in_backward_are_refused_too() -> None:
    layer = nn.Linear(3, 1)
    apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": RATE})
    with pytest.raises(ValueError, match=r"\[\[1, 3\], \[1\]\]"):
        _scaler().scale(layer(torch.ones(1, 3)).sum())


@pytest.mark.parametrize("settings", [{"enabled": False}, {"init_scale": 1.0}])
def test_a_loss_that_is_not_multiplied_trains_as_without_a_scaler(settings: Any) -> None:
    ebc = _model()
    expected = _weight(ebc).detach().double().numpy().copy()
    expected[0] -= RATE
    expected[2] -= RATE * 2
    _scaler(**settings).scale(ebc(_batch()).values().sum()).backward()
    np.testing.assert_allclose(_weight(ebc).detach(), expected, rtol=1e-6)


@pytest.mark.parametrize("with_tables", [False, True], ids=["dense", "tables"])
def test_other_models_are_scaled_while_fused_tables_exist(with_tables: bool) -> None:
    fused = _model()
    fused(_batch())
    model = _model(None) if with_tables else nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    before = [p.detach().double() for p in model.parameters()]
    scaler = _scaler()
    output = model(_batch()).values() if with_tables else model(torch.ones(1, 2))
    scaler.scale(output.pow(2).sum()).backward()
    grads = [p.grad.double() / 65536 for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    for p, old, grad in zip(model.parameters(), before, grads, strict=True):
        assert grad.abs().sum() > 0
        torch.testing.assert_close(p.double(), old - RATE * grad, rtol=1e-6, atol=1e-6)


def test_bf16_autocast_trains_fused_tables() -> None:
    ebc, layer = _model(), nn.Linear(4, 2, bias=False)
    table = _weight(ebc).detach().double().numpy().copy()
    matrix = layer.weight.detach().bfloat16().double().numpy()
    with torch.autocast("cpu", torch.bfloat16):
        logits = layer(ebc(_batch()).values())
    assert logits.dtype is torch.bfloat16
    logits.float().pow(2).sum().backward()
    pooled = np.stack([table[0] + table[2], table[2]])
    grad = 2 * (pooled @ matrix.T) @ matrix  # [B, D]
    expected = table.copy()
    expected[0] -= RATE * grad[0]
    expected[2] -= RATE * (grad[0] + grad[1])
    np.testing.assert_allclose(_weight(ebc).detach(), expected, rtol=0, atol=0.01)
    assert np.abs(expected - table).max() > 0.2
    assert _weight(ebc).dtype is torch.float32


def test_fp16_autocast_of_fused_tables_is_warned_of() -> None:
    with torch.autocast("cpu", torch.float16), pytest.warns(UserWarning, match=r"\['films'\]"):
        _model()(_batch())
    with torch.autocast("cpu", torch.float16):
        _model(None)(_batch())
        with torch.no_grad():
            _model()(_batch())


def test_torchs_scaler_is_left_as_it_is() -> None:
    _model()(_batch())
    assert torch.amp.GradScaler.scale.__module__.startswith("torch.")
