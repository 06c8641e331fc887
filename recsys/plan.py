"""`python -m recsys plan`: plans the sharding of tables for any machine, and explains the plan.

Tables come from a file (`tables_file`) or from a Python function that builds the model. The machine
comes from a topology file or a preset.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import traceback
from pathlib import Path

import torch
from torch import nn

from recsys.distributed.default_sharders import get_default_sharders
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.planner import (
    EmbeddingShardingPlanner,
    HeuristicalStorageReservation,
    PlannerError,
    Topology,
)
from recsys.distributed.planner.tables_file import TablesFile, read_tables

__all__ = ["add_arguments", "main"]

_FITS, _DOES_NOT_FIT, _WRONG_INPUT = 0, 1, 2
_EPILOG = """\
exit codes: 0 there is a plan, 1 the tables do not fit, 2 something is wrong with the input

examples:
  python -m recsys plan --tables tables.yaml --topology H100:64
  python -m recsys plan --model train.py:make_model --topology h100x64.json --out plan.json
  python -m recsys plan --tables tables.yaml --topology H100:64 --rate plan.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tables", metavar="FILE", help="YAML or JSON that describes the tables")
    source.add_argument(
        "--model",
        metavar="FILE.py:NAME",
        help="a function without arguments that returns the model; called on the meta device",
    )
    parser.add_argument(
        "--topology",
        required=True,
        metavar="MACHINE",
        help="a topology file, or a preset and a number of ranks, such as H100:64; H100:64:4 has 4 "
        "ranks per node",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="samples per rank and step (512 by default)"
    )
    parser.add_argument(
        "--reserve",
        type=float,
        default=0.15,
        metavar="SHARE",
        help="share of the memory of each rank to keep free of tables (default: %(default)s)",
    )
    parser.add_argument(
        "--rate", metavar="PLAN", help="evaluate this plan file instead of a search"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="time limit of the search in seconds"
    )
    parser.add_argument("--out", metavar="FILE", help="write the plan, as JSON, to this file")
    parser.add_argument(
        "--html", metavar="FILE", help="write the report as a web page to this file"
    )


def main(options: argparse.Namespace) -> int:
    """Plan and print the report; errors go to stderr.

    Args:
        options: The options of `add_arguments`.

    Returns:
        0 if there is a plan, 1 if the tables do not fit, 2 if the input is wrong.
    """
    try:
        return _plan(options)
    except (PlannerError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"python -m recsys plan: {error}", file=sys.stderr)
        return _DOES_NOT_FIT if isinstance(error, PlannerError) else _WRONG_INPUT


def _plan(options: argparse.Namespace) -> int:
    if options.timeout is not None and not options.timeout >= 0:
        raise ValueError(f"--timeout must not be negative; received {options.timeout}.")
    for name in ("out", "html"):
        folder = Path(getattr(options, name) or ".").parent
        if not folder.is_dir():
            raise ValueError(
                f"--{name} must be a file in a folder that exists; there is no {folder}."
            )
    topology = _topology(options.topology)
    if options.tables:
        tables = read_tables(_existing("--tables", options.tables))
    else:
        tables = _tables_of_model(options.model)
    planner = EmbeddingShardingPlanner(
        topology,
        options.batch_size if options.batch_size is not None else tables.batch_size,
        storage_reservation=HeuristicalStorageReservation(options.reserve),
        constraints=tables.constraints,
        timeout_seconds=options.timeout,
    )
    if options.rate:
        rated_plan = ShardingPlan.from_json(_existing("--rate", options.rate))
        plan = planner.rate(tables.model, tables.sharders, rated_plan)
    else:
        plan = planner.plan(tables.model, tables.sharders)
    if not plan.plan:
        raise ValueError(
            f"--model must have tables to place; received {options.model}, whose model has no "
            "embedding collection."
        )
    if options.out:
        plan.to_json(options.out)
    if options.html:
        plan.report_html(options.html)
    print(plan.report())  # last: the reader of a pipe may exit early
    if options.out:
        print(f"\nThe plan is in {options.out}.")
    if options.html:
        print(f"\nThe report is in {options.html}.")
    return _FITS


def _existing(option: str, given: str, rule: str = "a file that can be read") -> Path:
    path = Path(given)
    if not path.exists() or path.is_dir():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        raise ValueError(f"{option} must be {rule}; received {given!r}, and {what}.")
    return path


def _topology(given: str) -> Topology:
    preset = re.fullmatch(r"([\w-]+):(\d+)(?::(\d+))?", given)
    if preset is None:
        rule = "a preset and a number of ranks such as H100:64, or a file"
        return Topology.from_json(_existing("--topology", given, rule))
    name, ranks, local = preset.groups()
    return Topology.preset(name, int(ranks), int(local) if local else None)


def _tables_of_model(given: str) -> TablesFile:
    file, _, name = given.rpartition(":")
    if not file or not name.isidentifier():
        raise ValueError(
            f"--model must be a Python file and a function in it, such as train.py:make_model; "
            f"received {given!r}."
        )
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"_recsys_plan_{path.stem}", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise ValueError(f"--model must be a Python file that exists; received {file!r}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses
    sys.path.insert(0, str(path.parent.resolve()))  # for imports of neighbour files
    try:
        spec.loader.exec_module(module)
        if not callable(make := getattr(module, name, None)):
            functions = [n for n, value in vars(module).items() if callable(value)]
            raise ValueError(
                f"--model must name a function of {file}; received {name!r}. There are "
                f"{', '.join(functions) or 'none'}."
            )
        with torch.device("meta"):
            model = make()
    except Exception as error:
        raise _named(error, file) from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"{given} must return an nn.Module; received a {type(model).__name__}.")
    return TablesFile(model=model, sharders=get_default_sharders(), constraints={})


def _named(error: Exception, file: str) -> Exception:
    """Return the error of a user's file with its line, instead of a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if Path(frame.filename).name == Path(file).name]
    if not user_frames:
        return error
    return ValueError(f"{file}, line {user_frames[-1].lineno}: {type(error).__name__}: {error}")
