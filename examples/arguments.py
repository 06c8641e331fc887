"""Types of command line arguments, for `argparse`, that refuse values which mean nothing."""

import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from recsys.base.arguments import writable_folder


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a type for whole numbers.

    Args:
        least: the smallest one.
        most: the largest one; None for no limit.
    """
    range_text = f"of at least {least}" if most is None else f"from {least} to {most}"

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise ArgumentTypeError(f"must be a whole number {range_text}; received {text!r}")
        return number

    return convert


def positive(text: str) -> float:
    """Convert a text to a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"must be a number above 0; received {text!r}")
    return number


def folder(text: str) -> Path:
    """Convert a text to the path of a folder that can be read."""
    path = Path(text)
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise ArgumentTypeError(f"must be a folder; received {text!r}, where there is {found}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ArgumentTypeError(f"must be a folder that you may read; received {text!r}")
    return path


def new_folder(text: str) -> Path:
    """Convert a text to the path of a folder to write to, which need not be there yet."""
    try:
        return writable_folder("it", text)
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(str(error).removeprefix("it ")) from error
