"""What may be saved besides the state's own tensors comes back as it was; all else is refused."""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recsys.distributed.checkpoint import CheckpointError
from recsys.distributed.checkpoint.plain import check_plain, decode, decode_pickle, encode

PLAIN: dict[str, Any] = {
    "none": None,
    "numbers": [1, -2.5, True, float("inf"), 10**30],
    "text": "é\n\0",
    "bytes": b"\x80\x04",
    "nested": {"a.b": {"c": [(), (1, "x")]}, 3: OrderedDict(z=1)},
    "empty": {},
}


def test_plain_data_comes_back() -> None:
    check_plain("extra", PLAIN)
    assert decode("it", encode(PLAIN)) == PLAIN
    assert decode_pickle("it", pickle.dumps(PLAIN)) == PLAIN


def test_tensors_come_back() -> None:
    values = {
        "t": [torch.arange(6).view(2, 3).T, torch.zeros(0), torch.tensor(2.0)],
        "p": nn.Parameter(torch.ones(2)),
    }
    check_plain("extra", values)
    for found in (decode("it", encode(values)), decode_pickle("it", pickle.dumps(values))):
        torch.testing.assert_close(found["t"], values["t"], rtol=0, atol=0)
        assert torch.equal(found["p"], values["p"])


def _circle() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, {1}]}, r"extra\['a'\]\[1\] must be plain data .* received builtins\.set\. "),
        ({"f": print}, r"extra\['f'\] .* received builtins\.builtin_function_or_method"),
        ({"m": nn.Linear(1, 1)}, r"extra\['m'\] .* received torch\.nn\.modules\.linear\.Linear"),
        ({"n": np.float32(1)}, r"extra\['n'\] .* received numpy\.float32.* by \.item\(\)"),
        ({"d": defaultdict(int)}, r"extra\['d'\] .* received collections\.defaultdict"),
        ({"s": torch.eye(2).to_sparse()}, r"extra\['s'\] .* received torch\.Tensor"),
        ({"m": torch.ones(2, device="meta")}, r"extra\['m'\] .* received torch\.Tensor"),
        ({(1, 2): 3}, r"The keys of extra must be text .* received \(1, 2\) of type tuple"),
        ({"c": _circle()}, r"extra\['c'\]\[0\] contains itself"),
    ],
)
def test_what_is_not_plain_is_named(value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_plain("extra", value)


def test_the_same_value_twice_is_no_circle() -> None:
    twice = [1]
    check_plain("extra", {"a": twice, "b": [twice, twice]})
