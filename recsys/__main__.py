"""``python -m recsys``: the package's commands."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence

import recsys

_COMMANDS: Mapping[str, str] = {
    "doctor": "say what is installed, whether it fits, and what to do if not",
}
"""Name to what it does; the command is ``main()`` of the module ``recsys.<name>``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name (``sys.argv`` if None); returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m recsys", description=_first_line(recsys))
    parser.add_argument("--version", action="version", version=f"recsys {recsys.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, description in _COMMANDS.items():
        commands.add_parser(name, help=description, description=description)
    command = parser.parse_args(arguments).command
    exit_code: int = importlib.import_module(f"recsys.{command}").main()
    return exit_code


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
