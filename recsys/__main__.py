"""Command line: `recsys`, or `python -m recsys`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence

import recsys

_PACKAGES = "recsys.inference.packages.command"

_COMMANDS: Mapping[str, tuple[str, str]] = {
    "doctor": (
        "recsys.doctor",
        "check the installation and this machine, and suggest repairs",
    ),
    "calibrate": (
        "recsys.calibrate",
        "measure lookups, exchanges and updates on this machine, for the planner",
    ),
    "plan": (
        "recsys.plan",
        "plan the placement of tables, also for another machine, and explain the plan",
    ),
    "prepare": ("recsys.prepare", "convert raw tables to Parquet that is ready for training"),
    "package": (_PACKAGES, "write a serving package of a quantized model"),
    "verify": (_PACKAGES, "compare the files of a serving package with its manifest, and run it"),
    "follow": (_PACKAGES, "copy a serving package and its new deltas from an address of fsspec"),
    "score": ("recsys.inference.scoring", "score files by a serving package with raw columns"),
    "gate": (
        "recsys.inference.gate.command",
        "compare a new package with the served one, and publish it if it meets the rules",
    ),
    "inspect": (_PACKAGES, "print the inputs, outputs and tables of a serving package"),
}
"""Module and description of each command. The module has `main(options)`, and may have
`add_arguments(parser)`. Only the module of the given command is imported."""


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
        for name, (_, description) in _COMMANDS.items()
    }
    words = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in words if not word.startswith("-")), None)
    if command is None or command not in parsers:
        parser.parse_args(words)  # exits: prints the help, the version or an error
        raise AssertionError
    module = importlib.import_module(_COMMANDS[command][0])
    if hasattr(module, "add_arguments"):
        module.add_arguments(parsers[command])
    exit_code: int = module.main(parser.parse_args(words))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
