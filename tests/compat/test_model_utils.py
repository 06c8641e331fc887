"""Outputs of a model by task: values, missing and empty outputs."""

from __future__ import annotations

import pytest
import torch

from recsys.compat.model_utils import (
    is_empty_signals,
    parse_model_outputs,
    parse_required_inputs,
    parse_task_model_outputs,
    session_ids_to_tensor,
)
from recsys.metrics.metrics_config import RecTaskInfo

TASKS = [RecTaskInfo(name, f"l_{name}", f"p_{name}", f"w_{name}") for name in ("a", "b")]


def model_out() -> dict[str, torch.Tensor]:
    return {f"{kind}_{name}": torch.rand(3, 1) for kind in "lpw" for name in "ab"}


def test_outputs_of_tasks_lose_dimensions_of_size_one() -> None:
    out = model_out() | {"ids": torch.arange(3)}
    labels, predictions, weights, inputs = parse_task_model_outputs(TASKS, out, ["ids"])
    for kind, found in (("l", labels), ("p", predictions), ("w", weights)):
        assert list(found) == ["a", "b"]
        for name in "ab":
            assert found[name].equal(out[f"{kind}_{name}"][:, 0])
    assert inputs["ids"].equal(out["ids"])


def test_a_task_with_empty_outputs_is_left_out() -> None:
    empty = {f"{kind}_b": torch.empty(0) for kind in "lpw"}
    assert list(parse_task_model_outputs(TASKS, model_out() | empty)[0]) == ["a"]
    assert is_empty_signals(*empty.values())
    assert not is_empty_signals(torch.empty(0), torch.ones(1), torch.ones(1))


def test_missing_and_unequal_outputs_are_named() -> None:
    out = model_out()
    del out["w_b"]
    with pytest.raises(ValueError, match="must have the weight 'w_b'"):
        parse_task_model_outputs(TASKS, out)
    out["short"] = torch.rand(2)
    with pytest.raises(AssertionError, match="same number of samples"):
        parse_model_outputs("l_a", "short", "w_a", out)
    assert parse_model_outputs("l_a", "", "", out)[1:] == (None, None)


def test_session_ids_are_numbered_by_runs() -> None:
    ids = ["b", "b", "a", "c", "c", "a"]
    assert session_ids_to_tensor(ids).tolist() == [1, 1, 2, 3, 3, 4]
    found = parse_required_inputs({"ids": ids}, ["ids"], ndcg_transform_input=True)
    assert found["ids"].tolist() == [1, 1, 2, 3, 3, 4]
    with pytest.raises(TypeError, match="model_out\\['ids'\\] must be a tensor"):
        parse_required_inputs({"ids": ids}, ["ids"])
    with pytest.raises(KeyError):
        parse_required_inputs({}, ["ids"])
