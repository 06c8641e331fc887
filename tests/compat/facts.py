"""TorchRec's facts of the names we share: ``python -m tests.compat.facts`` writes facts.txt.

It needs TorchRec (``make peers``). A line names a class or function, and then, for it and its
methods, each argument that has a default, as ``argument=default``; ``...`` is a default whose text
differs between processes. ``+name`` is a public method or attribute of a class.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from recsys.compat.table import HOMES

FILE = Path(__file__).with_name("facts.txt")

# What every module, optimizer, exception or dataclass has.
COMMON = {
    name
    for base in (torch.nn.Module, torch.optim.Optimizer, Exception, dict, str)
    for name in dir(base)
}


def text_of(default: object) -> str:
    """A default as it prints in every process; `...` if it does not."""
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    if default is None or isinstance(default, bool | int | float | str):
        return repr(default).replace(" ", "_")
    return "..."


def defaults_of(function: Any) -> dict[str, str]:
    """The arguments of a function that have a default, with it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: text_of(p.default) for p in parameters if p.default is not p.empty}


def members_of(kind: type) -> list[str]:
    """Return the public members of a class, without the members of all classes of its sort."""
    fields = getattr(kind, "__dataclass_fields__", {})
    names = {*dir(kind), *fields} - COMMON
    return sorted(name for name in names if not name.startswith("_"))


def objects_of(theirs: Any) -> Iterator[tuple[str, Any]]:
    """A class or function and its methods, each by its name below it."""
    yield "", theirs
    if inspect.isclass(theirs):
        for name in members_of(theirs):
            member = getattr(theirs, name, None)
            if inspect.isroutine(member):
                yield f".{name}", member


def line_of(dotted: str, theirs: Any) -> str | None:
    """Return the line of a name; None for a value that is neither a class nor a function."""
    if not callable(theirs) or (inspect.isclass(theirs) and issubclass(theirs, enum.Enum)):
        return None
    words = [dotted]
    for below, function in objects_of(theirs):
        words += [f"{below}({a}={d})" for a, d in defaults_of(function).items()]
    if inspect.isclass(theirs):
        words += [f"+{member}" for member in members_of(theirs)]
    return " ".join(words)


def main() -> int:
    """Asks TorchRec."""
    warnings.simplefilter("ignore")
    lines = ["# Written by python -m tests.compat.facts, which says how to read it."]
    for module, names in sorted(HOMES.items()):
        for name in sorted(names):
            try:
                theirs = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                print(f"{module}.{name}: {error}", file=sys.stderr)
                continue
            line = line_of(f"{module}.{name}", theirs)
            lines += [line] if line else []
    FILE.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
