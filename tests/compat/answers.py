"""Answers of the cases of the folder `cases`, under TorchRec or under its names here.

A case is a public function without arguments, in a module of that folder. It imports torch and
torchrec alone, inside itself, and returns its observations. `python -m tests.compat.answers` asks
TorchRec (`make peers`) and writes each module's answers beside it, as JSON; with names of modules,
only theirs. The tests of this folder compare ours with them, and tests/parity compares TorchRec's.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

CASES = Path(__file__).with_name("cases")
ROOT = Path(__file__).parents[2]
TOPICS = sorted(path.stem for path in CASES.glob("[a-z]*.py"))


def described(value: Any) -> Any:
    """A value as JSON that two processes can compare; a tensor with its dtype and shape."""
    if isinstance(value, torch.Tensor):
        return {
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "values": described(value.detach().cpu().double().reshape(-1).tolist()),
        }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: described(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(key): described(inner) for key, inner in value.items()}
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, list | tuple):
        return [described(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return str(value)
    raise TypeError(f"a case returns plain values and tensors; received {type(value).__name__}")


def raises(function: Callable[[], Any]) -> bool:
    """Return True if a call raises."""
    try:
        function()
    except Exception:
        return True
    return False


def cases_of(topic: str) -> dict[str, Callable[[], Any]]:
    """The cases of a module, by name."""
    module = importlib.import_module(f"{__package__}.cases.{topic}")
    return {
        name: case
        for name, case in inspect.getmembers(module, inspect.isfunction)
        if case.__module__ == module.__name__ and not name.startswith("_")
    }


def answer_of(case: Callable[[], Any]) -> Any:
    """Return a case's result, with torch's generator at zero; warnings are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return described(case())


def recorded(topic: str) -> dict[str, Any]:
    """Return TorchRec's recorded answers."""
    path = CASES / f"{topic}.json"
    answers: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return answers


def asked(topic: str) -> dict[str, Any]:
    """Return TorchRec's answers, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.compat.answers", "--print", topic],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    answers: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answers


def main(arguments: list[str]) -> int:
    """Asks TorchRec, and writes or prints."""
    if arguments[:1] == ["--print"]:
        [topic] = arguments[1:]
        print(json.dumps({name: answer_of(case) for name, case in cases_of(topic).items()}))
        return 0
    for topic in arguments or TOPICS:
        answers = asked(topic)
        lines = [f" {json.dumps(name)}: {json.dumps(answers[name])}" for name in sorted(answers)]
        (CASES / f"{topic}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
