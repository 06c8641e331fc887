"""Makes `import torchrec` import recsys objects, so that TorchRec scripts run with recsys.

Add two lines at the top of a script, before anything imports TorchRec::

    import recsys.compat.torchrec as compat
    compat.install()

Afterwards `torchrec` and the modules of names.txt contain recsys objects. Scripts also import
TorchRec names from modules that merely import them; therefore every module provides every name of
the table. A name without a counterpart raises ImportError at the import statement. TorchRec need
not be installed; an installed one is unchanged and hidden until `uninstall`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final

from recsys.compat.fused_params import settings_as_in_torchrec
from recsys.compat.table import HOMES, PEER_VERSION, home_of, reason_of
from recsys.distributed.placement import fused_params
from recsys.sparse import rearrange

__all__ = ["install", "is_installed", "uninstall"]

_DOCS = "docs/migrating.md"


@final
class _Finder(MetaPathFinder, Loader):
    """Import hook for `torchrec` and its submodules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in HOMES:
            # Every module is a package. Python therefore looks up the submodule `torchrec.x.name`
            # if `from torchrec.x import name` finds no `name`, and the error below has the reason.
            return ModuleSpec(fullname, self, is_package=True)
        if fullname.startswith("torchrec."):
            # Without `name=`, because Python suppresses the error if its `name` is the submodule.
            parent, _, name = fullname.rpartition(".")
            raise ModuleNotFoundError(_missing(parent, name))
        return None

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__
        homes = HOMES[path]

        def get(name: str) -> object:
            home = home_of(path, name)
            if home is not None:
                value: object = getattr(importlib.import_module(home.module), home.name)
            elif f"{path}.{name}" in HOMES:
                value = importlib.import_module(f"{path}.{name}")
            elif name.startswith("__"):  # Python and tools probe for these
                raise AttributeError(f"module {path!r} has no attribute {name!r}")
            else:
                raise AttributeError(_missing(path, name))
            setattr(module, name, value)
            return value

        if path.startswith("torchrec.fx"):  # lets TorchScript compile the containers
            importlib.import_module("recsys.fx")
        module.__getattr__ = get  # type: ignore[method-assign]
        module.__all__ = sorted(homes)  # type: ignore[attr-defined]
        module.__doc__ = f"TorchRec names, provided by recsys. Differences: {_DOCS}"
        if path == "torchrec":
            module.__version__ = f"{PEER_VERSION}+recsys"  # type: ignore[attr-defined]


_FINDER = _Finder()
_ADAPT_SETTINGS = fused_params.adapt_settings


def install() -> None:
    """Make `import torchrec` and `torchrec.x.y` resolve to recsys objects in this process.

    Afterwards `fused_params` without an optimizer select SGD, with a warning. Tables with the
    kernel `dense`, which includes all data-parallel tables, are updated by the script's optimizer.
    Batches on `meta` without `length_per_key` have about the same number of values per feature.

    Repeated calls have no effect. Processes started by `spawn` import the main module again:
    call `install` at its top level.

    Raises:
        ImportError: The real TorchRec has been imported already.

    Example:
        >>> install()
        >>> import torchrec
        >>> torchrec.KeyedJaggedTensor
        <class 'recsys.sparse.keyed_jagged.KeyedJaggedTensor'>
        >>> uninstall()
    """
    if is_installed():
        return
    real = sys.modules.get("torchrec")
    if real is not None:
        raise ImportError(
            "recsys.compat.torchrec.install() must run before anything imports TorchRec; received "
            f"a process that has imported it from {getattr(real, '__file__', 'an unknown place')}. "
            "Call install() at the top of the main script, above its other imports."
        )
    sys.meta_path.insert(0, _FINDER)
    fused_params.adapt_settings = settings_as_in_torchrec
    rearrange.divides_evenly_on_meta = True


def uninstall() -> None:
    """Undo `install`. Objects that are already imported stay recsys objects."""
    if not is_installed():
        return
    sys.meta_path.remove(_FINDER)
    fused_params.adapt_settings = _ADAPT_SETTINGS
    rearrange.divides_evenly_on_meta = False
    for path in HOMES:
        sys.modules.pop(path, None)


def is_installed() -> bool:
    """Return whether `import torchrec` resolves to recsys objects."""
    return _FINDER in sys.meta_path


def _missing(path: str, name: str) -> str:
    dotted = f"{path}.{name}"
    return (
        f"recsys has no counterpart of {dotted}. {reason_of(dotted) or _nearest(path, name)} "
        f"All names are in recsys/compat/names.txt. See {_DOCS} for the differences."
    )


def _nearest(path: str, name: str) -> str:
    """Return a sentence with the most similar name."""
    everything = {(m, n) for m, names in HOMES.items() for n in names}
    everything |= {(parent, tail) for parent, _, tail in (m.rpartition(".") for m in HOMES)}
    similar = difflib.get_close_matches(name, sorted({n for _, n in everything}), n=1)
    if not similar:
        return "No name is similar."
    modules = sorted(m for m, n in everything if n == similar[0])
    [nearest] = difflib.get_close_matches(path, modules, n=1, cutoff=0)
    return f"The nearest is {nearest}.{similar[0]}."
