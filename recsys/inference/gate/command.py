"""`python -m recsys gate`: runs a gate for a scheduler."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from recsys.inference.gate.rules import Gate
from recsys.inference.gate.versions import publish

__all__ = ["add_arguments", "main"]

_PASSED, _REFUSED, _WRONG_INPUT = 0, 3, 2
_SETTINGS = {field.name: field.default for field in fields(Gate)}
_EPILOG = """\
exit codes: 0 the version meets all rules, 3 it does not, 2 something is wrong with the input

examples:
  python -m recsys gate staged/8 --served models/clicks/7 --data today='clicks/tue/*.parquet' \\
      --segment country --html report.html --publish models/clicks
  python -m recsys gate --record --label click --data week=joined/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("new", nargs="?", help="the new version, such as staged/8")
    parser.add_argument("--served", metavar="VERSION", help="the served version; default: none")
    parser.add_argument(
        "--record",
        action="store_true",
        help="compare the predictions of recorded rows with labels; without new and --served",
    )
    parser.add_argument(
        "--data",
        action="append",
        required=True,
        metavar="NAME=PATH",
        help="rows with labels, a file, folder or glob; several --data with one NAME are joined",
    )
    parser.add_argument("--label", help="the only label to judge")
    parser.add_argument(
        "--segment", action="append", default=[], metavar="COLUMN", help="a column of segments"
    )
    parser.add_argument(
        "--regression", action="append", default=[], metavar="LABEL", help="a label of numbers"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="a setting of Gate, such as max_drop=0.01 or min_rows=500",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    parser.add_argument(
        "--publish", type=Path, metavar="FOLDER", help="publish a version that meets all rules"
    )


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    try:
        gate, data = _gate_of(options), _data_of(options.data)
        if options.record:
            if options.new or options.served or options.publish:
                raise ValueError("--record is given without new, --served and --publish.")
            report = gate.compare_record(data)
        elif options.new:
            report = gate.compare(options.new, options.served, data)
        else:
            raise ValueError("new must be the folder of a version, unless --record is given.")
        print(report)
        if options.html is not None:
            report.write_html(options.html)
        if not report.passed:
            return _REFUSED
        if options.publish is not None:
            print(f"published as {publish(report, options.publish)}")
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        print(f"recsys gate: {error}", file=sys.stderr)
        return _WRONG_INPUT
    return _PASSED


def _gate_of(options: argparse.Namespace) -> Gate:
    settings: dict[str, Any] = {}
    for text in options.set:
        name, _, value = text.partition("=")
        default = _SETTINGS.get(name)
        if not isinstance(default, int | float):
            known = [n for n, value in _SETTINGS.items() if isinstance(value, int | float)]
            raise ValueError(
                f"--set must be NAME=NUMBER with a name of {known}; received {text!r}."
            )
        try:
            settings[name] = type(default)(value)
        except ValueError:
            raise ValueError(f"--set {name} must be a number; received {value!r}.") from None
    return Gate(
        label=options.label,
        segments=tuple(options.segment),
        regression=tuple(options.regression),
        **settings,
    )


def _data_of(given: list[str]) -> dict[str, list[str]]:
    data: dict[str, list[str]] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not (name and path):
            raise ValueError(f"--data must be NAME=PATH; received {text!r}.")
        data.setdefault(name, []).append(path)
    return data
