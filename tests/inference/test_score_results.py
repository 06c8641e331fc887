"""Names of the columns of scored files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recsys.inference.score_results import named_outputs


@pytest.mark.parametrize(
    ("outputs", "tasks", "wanted"),
    [
        ({"output": np.array([[0.0], [-1000.0], [1000.0]])}, [], ["output", "probability"]),
        ({"output": np.zeros(3)}, ["click"], ["output", "probability"]),
        (
            {"click": np.zeros(3), "rank": np.zeros(3)},
            ["click"],
            ["click", "click_probability", "rank"],
        ),
        ({"output": np.zeros((3, 2))}, ["a"], None),
        ({"output": np.zeros(3, np.int64)}, [], None),
        ({"a": np.zeros(3), "b": np.zeros(3)}, [], None),
    ],
)
def test_probabilities_are_of_logits(
    outputs: dict[str, np.ndarray], tasks: list[str], wanted: list[str] | None
) -> None:
    if wanted is None:
        with pytest.raises(ValueError, match=r"probabilities must be of a model with one logit"):
            named_outputs(outputs, tasks, True)
        return
    found = named_outputs(outputs, tasks, True)
    assert list(found) == wanted
    for name in wanted:
        if name.endswith("probability"):
            logits = torch.from_numpy(outputs[wanted[0]])
            np.testing.assert_allclose(found[name], torch.sigmoid(logits), 1e-6)
    assert named_outputs(outputs, tasks, False) == outputs
