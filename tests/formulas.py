"""Compares a module with a formula in numpy: its values, and gradients by central differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

Formula = Callable[..., np.ndarray]
"""The module's output, from its state by name and its inputs, all float64."""

STEP = 1e-6


def randomise(module: nn.Module) -> None:
    """Give every parameter values that matter, in float64: biases of zero hide mistakes."""
    module.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)


def assert_follows(
    module: nn.Module, formula: Formula, *inputs: torch.Tensor, fixed: Sequence[object] = ()
) -> None:
    """Check values and gradients, of every parameter and every input.

    Args:
        module: in float64.
        formula: called with the state by name, then the inputs and ``fixed`` as the module is.
        inputs: float64.
        fixed: further arguments without gradients.
    """
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    found = module(*leaves, *fixed)
    state = {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}
    arrays = [value.detach().numpy().copy() for value in inputs]
    np.testing.assert_allclose(
        found.detach().numpy(), formula(state, *arrays, *fixed), rtol=1e-9, atol=1e-12
    )
    cotangent = torch.randn_like(found)
    (found * cotangent).sum().backward()

    def slope(state_way: Mapping[str, np.ndarray], ways: Sequence[np.ndarray | None]) -> float:
        ends = [
            formula(
                {name: value + sign * state_way.get(name, 0.0) for name, value in state.items()},
                *(
                    array if way is None else array + sign * way
                    for array, way in zip(arrays, ways, strict=True)
                ),
                *fixed,
            )
            for sign in (STEP, -STEP)
        ]
        return float(((ends[0] - ends[1]) * cotangent.numpy()).sum() / (2 * STEP))

    nowhere: list[np.ndarray | None] = [None] * len(arrays)
    for name, parameter in module.named_parameters():
        way = np.random.default_rng(0).normal(size=tuple(parameter.shape))
        assert parameter.grad is not None, name
        gradient = parameter.grad.to_dense().numpy()
        np.testing.assert_allclose(
            (gradient * way).sum(), slope({name: way}, nowhere), rtol=1e-5, atol=1e-6, err_msg=name
        )
    for place, leaf in enumerate(leaves):
        way = np.random.default_rng(1).normal(size=tuple(leaf.shape))
        assert leaf.grad is not None, place
        expected = slope({}, [*nowhere[:place], way, *nowhere[place + 1 :]])
        np.testing.assert_allclose(
            (leaf.grad.numpy() * way).sum(),
            expected,
            rtol=1e-5,
            atol=1e-6,
            err_msg=f"input {place}",
        )
