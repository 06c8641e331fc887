"""Commands for serving packages: `python -m recsys package|verify|inspect|follow`."""

from __future__ import annotations

import argparse
import contextlib
import pkgutil
import sys
import threading
from pathlib import Path

from recsys.inference.packages.check import inspect, verify
from recsys.inference.packages.follow import follow
from recsys.inference.packages.server_configs import kserve
from recsys.inference.packages.writer import package

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command, which the parser's `prog` ends with."""
    if parser.prog.endswith("follow"):
        parser.add_argument("url", help="address of a version, such as s3://models/movies/1")
        parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    if not parser.prog.endswith("package"):
        parser.add_argument("version", type=Path, help="a version, such as models/movies/1")
        return
    parser.add_argument(
        "model",
        help="a function, such as serving:load, that returns the quantized model and its example "
        "arguments, or the model, a table of raw columns and a fitted FeatureSpec",
    )
    parser.add_argument("folder", type=Path, help="the package, such as models/movies")
    parser.add_argument("--version", type=int, default=1, help="number of the version")
    parser.add_argument("--max-rows", type=int, default=4096, help="rows of a batch")
    parser.add_argument("--torchscript", action="store_true", help="write a program of TorchScript")
    parser.add_argument(
        "--kserve", metavar="URI", help="print a KServe manifest for the address of the models"
    )


def main(options: argparse.Namespace) -> int:
    """Run a command; errors go to stderr."""
    try:
        if options.command == "verify":
            verify(options.version)
            print(f"{options.version} is whole.")
        elif options.command == "inspect":
            print(inspect(options.version))
        elif options.command == "follow":
            with contextlib.suppress(KeyboardInterrupt):
                follow(options.url, options.version, every=options.every, stop=threading.Event())
        else:
            sys.path.insert(0, "")  # a user's module in the current folder
            model, inputs, *rest = pkgutil.resolve_name(options.model)()
            kinds = ["torchscript" if options.torchscript else "aoti"]
            written = package(
                model,
                options.folder,
                inputs,
                version=options.version,
                programs=kinds,
                max_rows=options.max_rows,
                spec=rest[0] if rest else None,
            )
            print(f"The package is {written}.", file=sys.stderr)
            if options.kserve:
                print(kserve(options.folder.name, options.kserve), end="")
    except (OSError, ValueError, TypeError, ImportError, AttributeError) as error:
        print(f"recsys {options.command}: {error}", file=sys.stderr)
        return 1
    return 0
