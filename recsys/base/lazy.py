"""Lazy imports of the names of a package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final

_EXTRAS: Final = {"pyarrow": "data"}
"""Extras that install optional packages."""


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a package that imports names and submodules on first use.

    Args:
        package: dotted name of the package.
        homes: module of each name, relative to `recsys`. Submodules need no entry.

    Example:
        >>> import recsys
        >>> recsys.distributed.planner.Topology
        <class 'recsys.distributed.planner.topology.Topology'>
    """

    def get(name: str) -> object:
        value: object
        if name in homes:
            value = getattr(_module(f"recsys.{homes[name]}", f"{package}.{name}"), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            value = _module(f"{package}.{name}", f"{package}.{name}")
        else:
            text = f"module {package!r} has no attribute {name!r}."
            if homes:
                text += f" It has {', '.join(sorted(homes))}, and its modules."
            raise AttributeError(text)
        setattr(sys.modules[package], name, value)
        return value

    return get


def _module(path: str, subject: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(str(error.name))
        if extra is None:
            raise
        raise ImportError(
            f"{subject} needs {error.name}. Install it: pip install 'recsys-torch[{extra}]'"
        ) from error
