"""Publishes a version of a package, and goes back to the one before."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.inference.gate.report import GateReport
from recsys.inference.packages.manifest import sha256_of

__all__ = ["publish", "rollback"]


@checked
def publish(report: GateReport, folder: str | Path, number: int | None = None) -> Path:
    """Move a version that passed its gate into the folder that servers read.

    The version appears whole. Older versions stay, for `rollback`.

    Args:
        report: The report of `Gate.compare`.
        folder: The package: a folder of versions, on the disk of `report.new`.
        number: Number of the version, such as the number of the day; None: the next one.

    Returns:
        The folder of the published version.

    Raises:
        FileExistsError: The folder has this number, or a higher one.
        FileNotFoundError: The new version is gone.
        ValueError: The report has rules that are not met.

    Example:
        >>> publish(gate.compare(new, served, data), "models/clicks")  # doctest: +SKIP
        PosixPath('models/clicks/8')
    """
    if not report.passed:
        refused = "; ".join(str(rule) for rule in report.refused)
        raise ValueError(f"A version must meet all rules of its gate; {report.new}: {refused}.")
    folder, new = Path(folder), Path(report.new)
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(_numbers(folder), default=0)
    number = newest + 1 if number is None else whole("publish.number", number)
    if number <= newest:
        raise FileExistsError(
            f"publish.number must be after the newest version of {folder}, {newest}; received "
            f"{number}. Servers take the highest number."
        )
    if sha256_of(new / "manifest.json") != report.manifest:
        raise ValueError(f"{new} is not the version that the gate compared. Compare it again.")
    target = folder / str(number)
    os.rename(new, target)
    config = new.parent / "config.pbtxt"
    if config.is_file():
        part = folder / f".part-{secrets.token_hex(8)}"
        shutil.copyfile(config, part)
        os.replace(part, folder / config.name)
    return target


@checked
def rollback(folder: str | Path) -> Path:
    """Publish the version before the newest one again, under the next number.

    Servers that take the newest number return to it. Its files are links to the files of
    the older version; deltas are copied. The version that is left stays, too.

    Args:
        folder: The package: a folder of versions.

    Returns:
        The folder of the new version.

    Raises:
        FileNotFoundError: There is no version before the newest one.

    Example:
        >>> rollback("models/clicks")  # doctest: +SKIP
        PosixPath('models/clicks/9')
    """
    folder = Path(folder)
    numbers = _numbers(folder)
    if len(numbers) < 2:
        raise FileNotFoundError(
            f"{folder} must have a version before the newest one; it has {numbers}."
        )
    before, part = folder / str(numbers[-2]), folder / f".part-{secrets.token_hex(8)}"
    try:
        shutil.copytree(before, part, copy_function=_link)
        target = folder / str(numbers[-1] + 1)
        os.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return target


def _link(source: str, target: str) -> None:
    """Link a file; copy a delta, which its reader may lock."""
    if Path(source).parent.name == "deltas":
        shutil.copy2(source, target)
    else:
        os.link(source, target)


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
