"""Packaging of a predict factory with its code, configs and dependencies, by `torch.package`.

A server loads the file and reads `MODULE_FACTORY` of its module `__module_loader`. The file
contains code and pickles: load files from trusted sources only.
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

from recsys.base.checksums import new_file
from recsys.compat.inference import PredictFactory

__all__ = ["PredictFactoryPackager", "load_config_text", "load_pickle_config"]

T = TypeVar("T")

_CONFIGS = "__configs"
_LOADER = """
import %PACKAGE%

MODULE_FACTORY=%PACKAGE%.%CLASS%
"""


def load_config_text(name: str) -> str:
    """Load a text config; call it in code of a package.

    Args:
        name: Name of the saved config.

    Raises:
        RuntimeError: No caller is code of a package.
    """
    return str(_importer().load_text(_CONFIGS, name))


def load_pickle_config(name: str, clazz: type[T]) -> T:
    """Load a config of any type; call it in code of a package.

    Args:
        name: Name of the saved config.
        clazz: Its type.

    Raises:
        RuntimeError: No caller is code of a package.
        TypeError: The config has another type.
    """
    loaded = _importer().load_pickle(_CONFIGS, name)
    if not isinstance(loaded, clazz):
        raise TypeError(
            f"The config {name!r} of this package must be a {clazz.__name__}; received a "
            f"{type(loaded).__name__}."
        )
    return loaded


def _importer() -> PackageImporter:
    """Return the importer of the nearest caller that is code of a package."""
    frame = sys._getframe(1)
    while frame is not None:
        loader = frame.f_globals.get("__loader__")
        if isinstance(loader, PackageImporter):
            return loader
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError(
        "Configs must be loaded by code of a package; received a call from other code. Call it in "
        "the factory that PredictFactoryPackager.save_predict_factory writes."
    )


class PredictFactoryPackager(abc.ABC):
    """Writer of a predict factory to a file.

    A subclass lists the modules that the file refers to, with `pe.extern` in `set_extern_modules`,
    and the modules that it omits, with `pe.mock` in `set_mocked_modules`. `recsys.**` is extern
    already.

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
        """List the modules that are installed on the server.

        Args:
            pe: The exporter.
        """

    @classmethod
    @abc.abstractmethod
    def set_mocked_modules(cls, pe: PackageExporter) -> None:
        """List the modules that are imported and never called.

        Args:
            pe: The exporter.
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
            predict_factory: The factory. The file has the source of its module, which must not be
                `__main__`.
            configs: Configs by name: strings for `load_config_text`, other objects for
                `load_pickle_config`.
            output: A path, or a file open for writing. A file at a path appears only when it is
                complete, with its SHA-256 in a second file: see `verify_checksum`.
            extra_files: Contents by name, for the folder `extra_files`.
            loader_code: Source of the module `__module_loader`. `%PACKAGE%` and `%CLASS%` stand for
                the factory's module and name.
            package_importer: Importers of the code, for classes that come from a package.

        Raises:
            torch.package.PackagingError: The code needs a module that is neither extern nor mocked
                nor the factory's own, or that has no source.
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
