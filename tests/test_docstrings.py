"""Every example in a docstring runs, and every public class and function has a docstring."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

import recsys

MODULES = [
    "recsys",
    *(
        info.name
        for info in pkgutil.walk_packages(recsys.__path__, "recsys.")
        if not info.name.endswith("__main__")
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, capsys.readouterr().out
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_docstrings(name: str) -> None:
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


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = sum(
        len(test.examples)
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
    )
    assert examples > 100
