"""Names of a package that are imported on first use, and modules that have moved.

Importing a package then costs little, and its scripts go on where files find better places.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package, which imports names and submodules on first use.

    Args:
        package: its dotted name.
        homes: the module of each name, below `recsys`. `package.submodule` needs no entry.

    Example:
        >>> import recsys  # alone
        >>> recsys.distributed.planner.Topology
        <class 'recsys.distributed.planner.topology.Topology'>
    """

    def get(name: str) -> object:
        value: object
        if name in homes:
            value = getattr(importlib.import_module(f"recsys.{homes[name]}"), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            value = importlib.import_module(f"{package}.{name}")
        else:
            text = f"module {package!r} has no attribute {name!r}."
            if homes:
                text += f" Here are {', '.join(sorted(homes))}, and its modules."
            raise AttributeError(text)
        setattr(sys.modules[package], name, value)
        return value

    return get


MOVED: dict[str, str] = {}
"""The new path of each module that has moved, by its old one."""


def moved_modules(package: str, paths: Mapping[str, str], removed_in: str) -> None:
    """Let modules of a package be imported by the paths that they had.

    Taking a name from an old path warns, once for each.

    Args:
        package: its dotted name.
        paths: old path to new path, both below `package`.
        removed_in: the version without the old paths.
    """
    MOVED.update({f"{package}.{old}": f"{package}.{new}" for old, new in paths.items()})
    sys.meta_path.append(_MovedModules(removed_in))


@final
class _MovedModules(MetaPathFinder, Loader):
    """Stands last, so that it is asked for what is not there."""

    def __init__(self, removed_in: str) -> None:
        self._removed_in = removed_in

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED[module.__name__]

        def get(name: str) -> object:
            if name.startswith("__"):  # Python and tools probe for these
                raise AttributeError(f"module {old!r} has no attribute {name!r}")
            value: object = getattr(importlib.import_module(new), name)
            warnings.warn(
                f"{old} has moved, and goes in {self._removed_in}: import {name} from {new}.",
                DeprecationWarning,
                stacklevel=2,
            )
            setattr(module, name, value)
            return value

        module.__getattr__ = get  # type: ignore[method-assign]
