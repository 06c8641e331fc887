"""Exported models of clicks and of sequences return the models' outputs.

Packages of them are in `tests/inference/cpp/test_library.py`, beside the core that serves them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recsys.inference.export import PlainModel, exported_program
from tests.inference.packages.model_cases import (
    CLICKS,
    SEQUENCES,
    Case,
    arguments_of,
    build,
    request_of,
)

SIZES = [1, 2, 5, 17, 0]

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")  # nn.GRU


@torch.no_grad()
def wanted_of(case: Case, request: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    found: Any = case.model(*arguments_of(case, request))
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("kind", [*CLICKS, *SEQUENCES])
def test_a_program_equals_the_model(kind: str) -> None:
    """For other numbers of samples and values, empty histories, and none at all."""
    case = build(kind)
    program = exported_program(PlainModel(case.model, arguments_of(case, request_of(case, 3, 1))))
    requests = [request_of(case, size, seed=size + 10) for size in SIZES]
    without_values = request_of(case, 2, seed=1)
    for name in {"history", "actions", "times"} & set(case.features):
        without_values[name] = without_values[name][:0]
        without_values[f"{name}.lengths"] = torch.zeros(2, dtype=torch.int64)
    for request in [*requests, without_values]:
        tensors = PlainModel(case.model, arguments_of(case, request)).tensors
        with torch.no_grad():
            found = program.module()(*tensors)
        torch.testing.assert_close(
            list(found.values()) if isinstance(found, dict) else [found], wanted_of(case, request)
        )
