"""A predict factory as a file: its code, its configs and what it needs, by `torch.package`.

A server loads the file and asks for `MODULE_FACTORY` in its module `__module_loader`. The file
holds code and pickles: load it only from where you would run code from.
"""

from __future__ import annotations

import abc
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from torch.package.importer import Importer, sys_importer
from torch.package.package_exporter import PackageExporter
from torch.package.package_importer import PackageImporter

from recsys.checksums import new_file
from recsys.inference.modules import PredictFactory

__all__ = ["PredictFactoryPackager", "load_config_text", "load_pickle_config"]

T = TypeVar("T")

_CONFIGS = "__configs"
_LOADER = """
import %PACKAGE%

MODULE_FACTORY=%PACKAGE%.%CLASS%
"""


def load_config_text(name: str) -> str:
    """Return a config that is text, in code that was loaded from a package.

    Args:
        name: of the config, as it was saved.

    Raises:
        RuntimeError: if no caller is code from a package.
    """
    return str(_importer().load_text(_CONFIGS, name))


def load_pickle_config(name: str, clazz: type[T]) -> T:
    """Return a config of another type, in code that was loaded from a package.

    Args:
        name: of the config, as it was saved.
        clazz: its type.

    Raises:
        RuntimeError: if no caller is code from a package.
        TypeError: if the config has another type.
    """
    loaded = _importer().load_pickle(_CONFIGS, name)
    if not isinstance(loaded, clazz):
        raise TypeError(
            f"The config {name!r} of this package must be a {clazz.__name__}; received a "
            f"{type(loaded).__name__}."
        )
    return loaded


def _importer() -> PackageImporter:
    """Return what the nearest caller that is code of a package was loaded by."""
    frame = sys._getframe(1)
    while frame is not None:
        loader = frame.f_globals.get("__loader__")
        if isinstance(loader, PackageImporter):
            return loader
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError(
        "Configs are loaded by code from a package; received a call from code that is not. Call it "
        "in the factory that PredictFactoryPackager.save_predict_factory has written."
    )


class PredictFactoryPackager(abc.ABC):
    """Writes a predict factory to a file.

    A class of your own says which modules are in the file by reference only: with `pe.extern` in
    `set_extern_modules`, or not at all, with `pe.mock` in `set_mocked_modules`.
    `recsys.**` is extern already.

    Example:
        >>> class Packager(PredictFactoryPackager):
        ...     @classmethod
        ...     def set_extern_modules(cls, pe: PackageExporter) -> None:
        ...         pe.extern(["torch.**", "numpy.**"])
        ...
        ...     @classmethod
        ...     def set_mocked_modules(cls, pe: PackageExporter) -> None:
        ...         pe.mock("training_only.**")
    """

    @classmethod
    @abc.abstractmethod
    def set_extern_modules(cls, pe: PackageExporter) -> None:
        """Names the modules that the server has.

        Args:
            pe: writes the file.
        """

    @classmethod
    @abc.abstractmethod
    def set_mocked_modules(cls, pe: PackageExporter) -> None:
        """Names the modules that nobody calls.

        Args:
            pe: writes the file.
        """

    @classmethod
    def save_predict_factory(
        cls,
        predict_factory: type[PredictFactory],
        configs: Mapping[str, Any],
        output: str | Path | BinaryIO,
        extra_files: Mapping[str, str | bytes],
        loader_code: str = _LOADER,
        package_importer: Importer | list[Importer] = sys_importer,
    ) -> None:
        """Write the file.

        Args:
            predict_factory: its module goes into the file as source; not `__main__`.
            configs: by name, for `load_config_text` (texts) and `load_pickle_config`
                (all else).
            output: a path, or a file that is open for writing. With a path, the file is there once
                it is whole, and its SHA-256 is written beside it: see `verify_checksum`.
            extra_files: by name, into the folder `extra_files`.
            loader_code: of the module `__module_loader`; `%PACKAGE%` and `%CLASS%` stand for
                the factory's module and name.
            package_importer: where code comes from: packages, for what was loaded from one.

        Raises:
            torch.package.PackagingError: if the code needs a module that is neither extern nor
                mocked nor the factory's own, or has no source.
        """
        module = predict_factory.__module__
        with contextlib.ExitStack() as until_written:
            if isinstance(output, str | Path):
                output = str(until_written.enter_context(new_file(output)))
            pe = until_written.enter_context(PackageExporter(output, importer=package_importer))
            pe.extern("recsys.**")
            cls.set_extern_modules(pe)
            cls.set_mocked_modules(pe)
            pe.intern(f"{module}.**")
            for name, content in extra_files.items():
                if isinstance(content, str):
                    pe.save_text("extra_files", name, content)
                else:
                    pe.save_binary("extra_files", name, content)
            for name, config in configs.items():
                if isinstance(config, str):
                    pe.save_text(_CONFIGS, name, config)
                else:
                    pe.save_pickle(_CONFIGS, name, config)
            code = loader_code.replace("%PACKAGE%", module)
            pe.save_source_string(
                "__module_loader", code.replace("%CLASS%", predict_factory.__name__)
            )
