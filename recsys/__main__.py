"""Command line: `recsys`, or `python -m recsys`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence

import recsys

_COMMANDS: Mapping[str, str] = {
    "doctor": "check the installed versions, and suggest repairs",
    "calibrate": "measure lookups, exchanges and updates on this machine, for the planner",
    "plan": "plan the placement of tables, also for another machine, and explain the plan",
}
"""Description of each command. Command `x` is the function `main(options)` of the module
`recsys.x`, which may have `add_arguments(parser)`. Only the module of the given command is
imported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: The command and its arguments; `sys.argv` if None.
    """
    parser = argparse.ArgumentParser(
        prog="python -m recsys", description=(recsys.__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--version", action="version", version=f"recsys {recsys.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    parsers = {
        name: commands.add_parser(
            name, help=description, description=f"{description}.".capitalize()
        )
        for name, description in _COMMANDS.items()
    }
    given = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in given if not word.startswith("-")), None)
    if command is None or command not in parsers:
        parser.parse_args(given)  # exits: prints the help, the version or an error
        raise AssertionError
    module = importlib.import_module(f"recsys.{command}")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parsers[command])
    exit_code: int = module.main(parser.parse_args(given))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
