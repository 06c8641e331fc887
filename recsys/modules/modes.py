"""Training and evaluation modes of the submodules of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluation_mode", "training_mode"]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards each submodule has its mode from before.

    Args:
        model: The model.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 1))
        >>> with evaluation_mode(model):
        ...     model.training, model[1].training
        (False, False)
        >>> model.training, model[0].training, model[1].training
        (True, False, True)
    """
    with _modes_kept(model):
        model.eval()
        yield


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Train a model; afterwards each submodule has its mode from before.

    Parts in evaluation mode, such as a frozen batch norm, stay in it. A model without trainable
    parameters in training mode, such as after `model.eval()`, is put into training mode as a whole.

    Args:
        model: The model.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 1))
        >>> with training_mode(model):
        ...     model[0].training, model[1].training
        (False, True)
        >>> with training_mode(model.eval()):
        ...     model[0].training, model[1].training
        (True, True)
    """
    with _modes_kept(model):
        if not (model.training and any(_trains(module) for module in model.modules())):
            model.train()
        yield


def _trains(module: nn.Module) -> bool:
    parameters = module.parameters(recurse=False)
    return module.training and any(parameter.requires_grad for parameter in parameters)


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:  # a parent before its children
            if module.training != mode:
                module.train(mode)  # not the attribute: sharded tables override this method
