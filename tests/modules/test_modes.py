"""Modes of submodules: the same before and after training and evaluation."""

from __future__ import annotations

import random
from contextlib import suppress

from torch import nn

from recsys.modules.modes import evaluation_mode, training_mode


def _model() -> nn.Sequential:
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    return nn.Sequential(block, nn.ModuleDict({"norm": nn.LayerNorm(2)}), nn.Linear(2, 1))


def _modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_modes_before_are_modes_after() -> None:
    draw = random.Random(0)
    for _ in range(200):
        model = _model()
        for module in model.modules():
            module.training = draw.random() < 0.6
            if draw.random() < 0.3:
                module.requires_grad_(False)
        before = _modes(model)
        with evaluation_mode(model):
            assert not any(_modes(model))
        assert _modes(model) == before
        owners = [m for m in model.modules() if [p for p in m.parameters(False) if p.requires_grad]]
        trains = model.training and any(owner.training for owner in owners)
        with suppress(KeyError), training_mode(model):
            assert _modes(model) == (before if trains else [True] * len(before))
            raise KeyError
        assert _modes(model) == before


class Frozen(nn.Module):
    """A model that keeps its norm in evaluation mode by its own `train`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(2), nn.Linear(2, 1)
        self.train()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


def test_a_model_that_overrides_train() -> None:
    model = Frozen()
    with evaluation_mode(model):
        assert not model.out.training
    assert (model.training, model.norm.training, model.out.training) == (True, False, True)
