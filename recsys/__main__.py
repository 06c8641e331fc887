"""`python -m recsys`: the package's commands."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence

import recsys

_COMMANDS: Mapping[str, str] = {
    "doctor": "say what is installed, whether it fits, and what to do if not",
    "calibrate": "measure how fast this machine looks up, exchanges and updates, for the planner",
    "plan": "plan where tables go on a machine that need not be there, and explain the plan",
}
"""Name to what it does. The command is `main(options)` of the module `recsys.<name>`, which may
have `add_arguments(parser)` for options of its own. Only the one that runs is imported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name (`sys.argv` if None); return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m recsys", description=_first_line(recsys))
    parser.add_argument("--version", action="version", version=f"recsys {recsys.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    parsers = {
        name: commands.add_parser(name, help=description, description=f"{description}.")
        for name, description in _COMMANDS.items()
    }
    given = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in given if not word.startswith("-")), None)
    if command is None or command not in parsers:
        parser.parse_args(given)  # ends here: says so, or what else was asked for
        raise AssertionError
    module = importlib.import_module(f"recsys.{command}")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parsers[command])
    exit_code: int = module.main(parser.parse_args(given))
    return exit_code


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
