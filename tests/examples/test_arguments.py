"""Options of the example scripts: one that means nothing is refused by name, before any work."""

from __future__ import annotations

import importlib.util
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from arguments import folder, new_folder, positive, whole

EXAMPLES = Path(__file__).parents[2] / "examples"


def _script(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    spec = importlib.util.spec_from_file_location(f"{name}_train", EXAMPLES / name / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def dlrm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Parses arguments of the DLRM example."""
    script = _script(monkeypatch, "dlrm")

    def parse(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        return script.parse_options("")

    return parse


WRONG = {
    ("--epochs", "0"): "argument --epochs: must be a whole number of at least 1; received '0'",
    ("--epochs", "-1"): "argument --epochs: must be a whole number of at least 1",
    ("--batch-size", "0"): "argument --batch-size: must be a whole number of at least 1",
    ("--embedding-dim", "1.5"): "argument --embedding-dim: must be a whole number",
    ("--embedding-lr", "nan"): "argument --embedding-lr: must be a number above 0; received 'nan'",
    ("--embedding-eps", "-1"): "argument --embedding-eps: must be a number above 0",
    ("--dense-lr", "0"): "argument --dense-lr: must be a number above 0",
    ("--dataset", "random", "--num-embeddings", "1"): "--num-embeddings: must be a whole number of",
    ("--seed", "-1"): "argument --seed: must be a whole number from 0 to 4294967295",
    ("--resume", "auto", "--save-every", "0"): "--save-every: must be a whole number of at least 1",
    ("--save-every", "3"): "--save-every does nothing without --resume auto",
    ("--dataset", "random", "--split", "time"): "--split does nothing with --dataset random",
    ("--num-embeddings", "9"): "--num-embeddings does nothing with --dataset movielens",
    ("--dataset", "criteo", "--num-embeddings", "9"): "does nothing with --dataset criteo",
    ("--dataset", "criteo", "--data", "/no such"): "--data: must be a folder; received '/no such', "
    "where there is nothing",
    ("--data", __file__): "where there is a file",
    ("--out", __file__): "argument --out: must be a folder",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_options_of_dlrm(
    dlrm: Callable[..., Any], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit):
        dlrm(*arguments)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("train.py: error: ")
    assert WRONG[arguments] in last


def test_defaults_of_dlrm(dlrm: Callable[..., Any], tmp_path: Path) -> None:
    given = dlrm()
    assert (given.split, given.num_embeddings, given.save_every) == ("time", 100_000, None)
    assert given.epochs is None
    assert dlrm("--resume", "auto").save_every == 50
    given = dlrm("--dataset", "criteo", "--data", str(tmp_path), "--epochs", "2")
    assert (given.data, given.epochs) == (tmp_path, 2)


def test_data_for_random_batches_is_refused(
    dlrm: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        dlrm("--dataset", "random", "--data", str(tmp_path))
    assert "--data does nothing with --dataset random" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/no such"], "argument --data: must be a folder; received '/no such'"),
        (["--epochs", "0"], "argument --epochs: must be a whole number of at least 1"),
        (["--batch-size", "0"], "argument --batch-size: must be a whole number of at least 1"),
        (["--temperature", "0"], "argument --temperature: must be a number above 0"),
        (["--embedding-lr", "inf"], "argument --embedding-lr: must be a number above 0"),
        (["--seed", "x"], "argument --seed: must be a whole number of at least 0; received 'x'"),
    ],
)
def test_options_of_two_tower(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    script = _script(monkeypatch, "two_tower")
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit):
        script.main()
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_types(tmp_path: Path) -> None:
    assert whole(1)("3") == 3
    assert positive("1e-3") == 0.001
    assert folder(str(tmp_path)) == tmp_path
    assert new_folder(str(tmp_path / "new")) == tmp_path / "new"
    with pytest.raises(ArgumentTypeError, match="from 1 to 2; received '3'"):
        whole(1, 2)("3")
