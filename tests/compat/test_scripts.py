"""Scripts written for TorchRec run under its names here and print TorchRec's output.

They are a user's scripts after TorchRec's documents, and import torch and torchrec alone.
TorchRec's output is in scripts/printed.json: `python -m tests.compat.printed` writes it again.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat.printed import FILE, NEEDS_CUDA, SCRIPTS, printed

BY_TORCHREC: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
NAMES = sorted(script.stem for script in SCRIPTS.glob("*.py"))


def nearly(found: Any) -> Any:
    """The same with every number approximate, however deep it lies."""
    if isinstance(found, dict):
        return {key: nearly(value) for key, value in found.items()}
    if isinstance(found, list):
        return [nearly(value) for value in found]
    return pytest.approx(found, rel=1e-4, abs=1e-4) if isinstance(found, float) else found


@pytest.mark.parametrize("processes", [None, 2])
@pytest.mark.parametrize("name", sorted(BY_TORCHREC))
def test_it_prints_what_torchrec_printed(name: str, processes: int | None) -> None:
    found = printed(SCRIPTS / f"{name}.py", processes=processes)
    assert found == nearly(BY_TORCHREC[name][str(processes or 1)])
    assert all_true(found.get("falls", True)), found


@pytest.mark.parametrize("processes", [None, 2])
def test_a_quantized_model_becomes_a_program(processes: int | None) -> None:
    """TorchRec cannot run this script, so its output is compared with itself."""
    found = printed(SCRIPTS / "quantized.py", processes=processes)
    assert found["keys"] == ["product", "user"]
    assert found["shape"] == [3, 128]
    assert {shape[0][1] for shape in found["buffers"].values()} == {80}
    assert (found["as sharded"], found["as quantized"], found["close"]) == (True, True, True)


def all_true(fact: Any) -> bool:
    """Return True if a fact, or the facts of all ranks, are true."""
    return all(fact) if isinstance(fact, list) else fact is True


def test_there_is_an_answer_for_each() -> None:
    assert sorted({*BY_TORCHREC} | NEEDS_CUDA) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_imports_only_torch_and_torchrec(name: str) -> None:
    tree = ast.parse(Path(SCRIPTS / f"{name}.py").read_text())
    modules = {
        module.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert modules - sys.stdlib_module_names == {"torch", "torchrec"}
