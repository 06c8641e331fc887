"""Build hook: with RECSYS_PREBUILT=1 the wheel contains the library of hashed ids, for Linux.

RECSYS_PREBUILT=1 python -m build --wheel

The library runs on any x86-64 CPU. It needs no symbol newer than glibc 2.17, so the wheel gets the
tag manylinux_2_17. Without the variable the wheel is for all platforms and contains the C files,
which are compiled at first use (recsys/kernels/hashed/build.py).
"""

from __future__ import annotations

import os
import platform
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = "recsys/kernels/hashed/build.py"


class PrebuiltHook(BuildHookInterface):
    """Compiles the C files and adds the library to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library, and set the wheel's tag.

        Raises:
            RuntimeError: This is not Linux on x86-64.
        """
        if self.target_name != "wheel" or os.environ.get("RECSYS_PREBUILT") != "1":
            return
        found = platform.system(), platform.machine()
        if found != ("Linux", "x86_64"):
            raise RuntimeError(
                "RECSYS_PREBUILT=1 builds wheels on Linux on x86_64; received "
                f"{' on '.join(found)}. Leave it out to build a wheel for all platforms."
            )
        script = runpy.run_path(str(Path(self.root, SCRIPT)))
        self._folder = tempfile.TemporaryDirectory(prefix="recsys-")
        library = Path(self._folder.name, script["PREBUILT"].name)
        script["compile_library"](library, [()])
        build_data["force_include"][str(library)] = f"{Path(SCRIPT).parent}/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-manylinux_2_17_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the library that was compiled for the wheel."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
