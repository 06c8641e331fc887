"""Names of a package that are imported on first use, so that importing it costs little."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping


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
