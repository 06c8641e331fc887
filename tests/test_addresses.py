"""A function with a local path refuses the address of another storage: no folder `s3:` is made."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint, save_checkpoint_async
from recsys.distributed.checkpoint.table import load_table
from recsys.features import FeatureSpec, Label
from recsys.inference.deletion import find_values
from recsys.inference.faiss_index import FaissIndex
from recsys.inference.gate.report import GateReport
from recsys.inference.gate.rules import Gate
from recsys.inference.records import Recording, join_labels
from recsys.inference.report import quantization_report
from recsys.modules.hashed_ids import LRU, HashedIds
from recsys.prepare import prepare
from recsys.training import Trainer
from recsys.training.ending import exit_on_error
from recsys.training.loggers import JsonLines
from tests.all_modules import all_modules

ADDRESS = "s3://bucket/run"
NAMES_ONLY = {"AOTIProgram.__init__.path"}
"""Arguments with a path that is only printed."""
PRIVATE = ("recsys.base.", "recsys.compat", "recsys.modules.ids.", "recsys.inference.quant.")
"""Modules whose functions receive checked paths, and modules of TorchRec's names."""


class Argument(NamedTuple):
    """An argument with a path."""

    function: Callable[..., Any]
    name: str


def _arguments() -> Iterator[tuple[str, Argument]]:
    """Yield public arguments with a path, by the name of the function and the argument."""
    for name in all_modules():
        if name.startswith(PRIVATE):
            continue
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            value = getattr(module, public)
            members = [("", value)]
            if isinstance(value, type):
                members = [
                    (member, getattr(value, member))
                    for member in vars(value)
                    if member == "__init__" or not member.startswith("_")
                ]
            for member, function in members:
                annotations = getattr(inspect.unwrap(function), "__annotations__", {})
                for argument, annotation in annotations.items():
                    if argument != "return" and re.search(r"str \| Path\b", str(annotation)):
                        place = ".".join(filter(None, [public, member, argument]))
                        yield place, Argument(function, argument)


ARGUMENTS = dict(_arguments())
LAYER = torch.nn.Linear(1, 1)
SPEC = FeatureSpec([Label("click")]).fit({"click": [0, 1]})


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(LAYER.parameters(), 0.1)


CALLS: dict[str, Callable[[Any], object]] = {
    "save_checkpoint.path": lambda path: save_checkpoint(path, LAYER),
    "save_checkpoint_async.path": lambda path: save_checkpoint_async(path, LAYER),
    "FaissIndex.load.folder": FaissIndex.load,
    "FaissIndex.save.folder": lambda path: FaissIndex.save(object.__new__(FaissIndex), path),
    "Gate.compare.new": lambda path: Gate().compare(path, None, {"day": {}}),
    "Gate.compare.served": lambda path: Gate().compare("new", path, {"day": {}}),
    "JsonLines.__init__.path": JsonLines,
    "exit_on_error.folder": lambda path: exit_on_error(path).__enter__(),
    "find_values.paths": lambda path: find_values(path, {"user": ["a"]}, SPEC),
    "load_table.values": lambda path: load_table(LAYER, "t", path),
    "quantization_report.trained": lambda path: quantization_report(path, LAYER),
    "load_checkpoint.path": lambda path: load_checkpoint(path, LAYER),
    "FeatureSpec.save.folder": SPEC.save,
    "FeatureSpec.load.folder": FeatureSpec.load,
    "GateReport.write_html.path": GateReport("2", "", "1", (), ()).write_html,
    "Trainer.__init__.folder": lambda path: Trainer(LAYER, _optimizer(), path, epochs=1),
    "Trainer.__init__.start_from": lambda path: Trainer(
        LAYER, _optimizer(), "run", epochs=1, start_from=path
    ),
    "join_labels.output": lambda path: join_labels("r", "l", path, key="k", columns=["c"]),
    "prepare.output": lambda path: prepare(SPEC, "clicks.csv", path),
    "HashedIds.overflow": lambda path: HashedIds(eviction=LRU(), overflow=str(path)),
    "Recording.folder": lambda path: Recording(folder=str(path)),
}
"""Calls of functions that check other arguments first, or as part of their work."""


def _is_refused(place: str, call: Callable[[Any], object], path: object) -> bool:
    try:
        call(path)
    except ValueError as error:
        return "must be a local path; received the address" in str(error)
    except Exception as error:
        print(place, type(error), error)  # shown if the test fails
    return False


@pytest.mark.parametrize("path", [ADDRESS, Path(ADDRESS), "file:///tmp/run", "hdfs://host:8020/a"])
def test_every_path_refuses_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: object
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = {
        place: lambda path, to=to: to.function(**{to.name: path})
        for place, to in ARGUMENTS.items()
        if place not in NAMES_ONLY
    }
    wrong = [
        place for place, call in {**calls, **CALLS}.items() if not _is_refused(place, call, path)
    ]
    assert wrong == []
    assert [*tmp_path.iterdir()] == []


def test_the_walk_finds_the_functions() -> None:
    known = {"save_checkpoint.path", "Predictor.__init__.version", "package.folder"}
    assert known <= ARGUMENTS.keys()
    assert len(ARGUMENTS) > 40
