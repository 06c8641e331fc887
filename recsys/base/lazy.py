"""Lazy imports of the names of a package, and of names that moved to `recsys.compat`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final

_EXTRAS: Final = {"pyarrow": "data"}
"""Extras that install optional packages."""


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a package that imports names and submodules on first use.

    Args:
        package: Dotted name of the package.
        homes: Module of each name, relative to `recsys`. Submodules need no entry.

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


def moved_names(module: str) -> Callable[[str], object]:
    """Return a `__getattr__` for a module whose names moved to `recsys.compat`.

    A use of an old path gives a DeprecationWarning with the new path from `recsys.compat.moved`.

    Args:
        module: Dotted name of the module.

    Raises:
        AttributeError: By `__getattr__`, if no name of the module moved, or without
            `recsys.compat`.

    Example:
        >>> moved_names("recsys.tracing")("nothing")
        Traceback (most recent call last):
            ...
        AttributeError: module 'recsys.tracing' has no attribute 'nothing'.
    """

    def get(name: str) -> object:
        old, table = f"{module}.{name}", "recsys.compat.moved"
        text = f"module {module!r} has no attribute {name!r}."
        if name.startswith("_"):  # Python and tools probe for these
            raise AttributeError(text)
        try:
            new: str | None = importlib.import_module(table).MOVED.get(old)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{table}.".startswith(f"{error.name}."):
                raise
            raise AttributeError(
                f"{text} Names that only TorchRec scripts use are in recsys.compat, which is not "
                "installed. Install all of recsys-torch."
            ) from None
        if new is None:
            raise AttributeError(text)
        warnings.warn(
            f"{old} has moved to {new}. Import it from there; the old path works for two minor "
            "releases.",
            DeprecationWarning,
            stacklevel=2,
        )
        home, _, attribute = new.rpartition(".")
        return getattr(importlib.import_module(home), attribute)

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
