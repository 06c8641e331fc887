"""Tests of a copy without `recsys.compat`: `python -m tests.without_compat [arguments of pytest]`.

`recsys/compat` can be removed: the folders of `FOLDERS` go with it, and its lines in the lists of
`LISTS`. Without arguments all cases run that are not slow.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("recsys/compat", "tests/compat", "tests/parity")
"""Folders that only `recsys.compat` needs."""
HAS_COMPAT = importlib.util.find_spec("recsys.compat") is not None


def _is_promised_by_compat(line: str) -> bool:
    from recsys.compat.moved import MOVED

    return line.startswith("recsys.compat") or line.strip().replace(" ", ".") in MOVED


LISTS: dict[str, Callable[[str], bool]] = {
    "tests/messages.txt": lambda line: line.startswith("compat/"),
    "tests/promised_names.txt": _is_promised_by_compat,
}
"""Lists with lines about `recsys.compat`, and whether a line is."""


def expected(names: Iterable[str]) -> set[str]:
    """Return the paths and modules that exist here, with or without `recsys.compat`.

    Args:
        names: Paths and modules that a page names.
    """
    gone = () if HAS_COMPAT else (*FOLDERS, "recsys.compat")
    return {name for name in names if not name.startswith(gone)}


def copy_without_compat(target: Path) -> None:
    """Copy the files of the repository, except the files of `recsys.compat`.

    Args:
        target: A folder that does not exist.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    gone = tuple(f"{folder}/" for folder in FOLDERS)
    for name in listed:
        if name and not name.startswith(gone) and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for name, is_gone in LISTS.items():
        lines = (ROOT / name).read_text().splitlines(keepends=True)
        (target / name).write_text("".join(line for line in lines if not is_gone(line)))


def main() -> int:
    """Run the tests of a copy; return the exit status of pytest."""
    with tempfile.TemporaryDirectory(prefix="recsys-without-compat-") as folder:
        copy = Path(folder, "copy")
        copy_without_compat(copy)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "not slow", *sys.argv[1:]],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
