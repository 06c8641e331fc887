"""Every example in a docstring runs, and every public class and function has a docstring."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import re
from pathlib import Path

import pytest
import torch

import recsys
from tests.all_modules import TRITON_MODULES, all_modules
from tests.needs_triton import needs_triton
from tests.offenders import check_each

MODULES = all_modules()


def room_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def examples_run(name: str) -> None:
    torch.manual_seed(0)
    module = importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, shown.getvalue()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("room", sorted(set(map(room_of, MODULES))))
def test_examples(room: str) -> None:
    check_each(examples_run, [name for name in MODULES if room_of(name) == room])


def public_names_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip()
    undocumented = [
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == name
        # a dataclass without docstring gets its signature as one
        and (not value.__doc__ or value.__doc__.startswith(f"{attribute}("))
    ]
    assert undocumented == []


def test_public_names_have_docstrings() -> None:
    check_each(public_names_have_docstrings, MODULES)


@needs_triton
def test_the_modules_of_triton() -> None:
    """The quick run leaves these out: it has no Triton."""
    check_each(examples_run, TRITON_MODULES)
    check_each(public_names_have_docstrings, TRITON_MODULES)


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = sum(
        len(test.examples)
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
    )
    assert examples > 100


def test_docstrings_are_markdown() -> None:
    """The reference pages show them as such: one backtick, and no roles of reStructuredText."""
    offenders = []
    for path in sorted(Path(recsys.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                if isinstance(text, str) and re.search(r"``|:[a-z]+:`", text):
                    offenders.append(f"{path}:{node.lineno}")
    assert not offenders
