from __future__ import annotations

import ast
import enum
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recsys
from recsys.base.arguments import (
    MissingKeyError,
    choice,
    finite,
    names,
    repeated,
    setting,
    whole,
    whole_list,
    writable_folder,
)
from recsys.kernels.types import PoolingType


class OtherPooling(enum.Enum):
    """An enum of another library."""

    MEAN = 7


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: whole("x", 3), 3),
        (lambda: whole("x", np.int32(3)), 3),
        (lambda: whole("x", np.uint8(0), least=0), 0),
        (lambda: whole("x", torch.tensor(3)), 3),
        (lambda: whole_list("x", np.arange(3)), [0, 1, 2]),
        (lambda: whole_list("x", (1, np.int64(2)), length=2), [1, 2]),
        (lambda: finite("x", 3), 3.0),
        (lambda: finite("x", np.float32(0.5)), 0.5),
        (lambda: finite("x", torch.tensor(0.5)), 0.5),
        (lambda: choice("x", PoolingType.SUM, PoolingType), PoolingType.SUM),
        (lambda: choice("x", "sum", PoolingType), PoolingType.SUM),
        (lambda: choice("x", "Sum", PoolingType), PoolingType.SUM),
        (lambda: choice("x", OtherPooling.MEAN, PoolingType), PoolingType.MEAN),
        (lambda: names("x", (n for n in "ab")), ["a", "b"]),
        (lambda: repeated(["b", "c", "a", "b", "a"]), ["a", "b"]),
    ],
)
def test_what_is_meant_is_returned(call: Callable[[], Any], expected: object) -> None:
    found = call()
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: whole("x", 3.0), TypeError, "x must be a whole number; received 3.0."),
        (lambda: whole("x", True), TypeError, "x must be a whole number; received True."),
        (lambda: whole("x", "3"), TypeError, "x must be a whole number; received '3'."),
        (lambda: whole("x", np.float64(3)), TypeError, "x must be a whole number; received "),
        (lambda: whole("x", torch.ones(2).long()), TypeError, "x must be a whole number; received"),
        (lambda: whole("x", 0), ValueError, "x must be positive; received 0."),
        (lambda: whole("x", -1, least=0), ValueError, "x must not be negative; received -1."),
        (lambda: whole("x", 1, least=2), ValueError, "x must be at least 2; received 1."),
        (lambda: whole("x", 4, most=3), ValueError, "x must be at most 3; received 4."),
        (lambda: whole_list("x", "0"), TypeError, "x must be a list of whole numbers; received '0"),
        (lambda: whole_list("x", 0), TypeError, "x must be a list of whole numbers; received 0."),
        (lambda: whole_list("x", [0, -1]), ValueError, "x[1] must not be negative; received -1."),
        (lambda: whole_list("x", [0.0]), TypeError, "x[0] must be a whole number; received 0.0."),
        (lambda: whole_list("x", [1], 2), ValueError, "x must have 2 numbers; received [1]."),
        (lambda: finite("x", torch.ones(2)), TypeError, "x must be a number; received tensor([1"),
        (lambda: finite("x", float("nan")), ValueError, "x must be finite; received nan."),
        (lambda: finite("x", float("inf")), ValueError, "x must be finite; received inf."),
        (lambda: finite("x", -1, 0), ValueError, "x must be finite and >= 0; received -1."),
        (lambda: finite("x", 1, 0, 1), ValueError, "finite and >= 0 and < 1; received 1."),
        (lambda: finite("x", "1"), TypeError, "x must be a number; received '1'."),
        (lambda: finite("x", None), TypeError, "x must be a number; received None."),
        (
            lambda: choice("x", "max", PoolingType),
            ValueError,
            "x must be one of SUM, MEAN, NONE; received 'max'.",
        ),
        (
            lambda: choice("x", 1, PoolingType),
            TypeError,
            "x must be one of SUM, MEAN, NONE; received 1.",
        ),
        (lambda: names("x", "film"), TypeError, "received 'film'. Write ['film']."),
        (lambda: names("x", [1]), TypeError, "x must be a list of text; received [1]."),
        (lambda: names("x", None), TypeError, "x must be a list of text; received None."),
    ],
)
def test_what_is_wrong_is_named(
    call: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECSYS_TEST", raising=False)
    assert setting("RECSYS_TEST") is None
    monkeypatch.setenv("RECSYS_TEST", "3")
    assert setting("RECSYS_TEST") == 3
    monkeypatch.setenv("RECSYS_TEST", "0")
    with pytest.raises(ValueError, match="RECSYS_TEST must be positive; received 0"):
        setting("RECSYS_TEST")
    monkeypatch.setenv("RECSYS_TEST", "two")
    with pytest.raises(ValueError, match=r"RECSYS_TEST must be a whole.*'two'"):
        setting("RECSYS_TEST")


def test_folders_that_can_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "a" / "b"
    assert writable_folder("folder", str(deep)) == deep
    assert not (tmp_path / "a").exists()  # nothing is created
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may all
    with pytest.raises(PermissionError, match=f"folder must be .*{tmp_path} is read-only"):
        writable_folder("folder", deep)


# TorchScript knows Python's own errors only
SCRIPTED = {"sparse/script.py", "sparse/script_forms.py", "inference/batch_checks.py"}


def test_messages_of_missing_keys_have_no_quotes() -> None:
    error = MissingKeyError("There is no 'a'.")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == "There is no 'a'."
    assert isinstance(error, KeyError)
    root = Path(recsys.__file__).parent
    quoted = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call = node.exc
                is_text = bool(call.args) and isinstance(call.args[0], ast.JoinedStr | ast.Constant)
                if isinstance(call.func, ast.Name) and call.func.id == "KeyError" and is_text:
                    quoted.add(path.relative_to(root).as_posix())
    assert quoted == SCRIPTED
