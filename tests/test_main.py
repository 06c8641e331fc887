"""The console command `recsys`, and `python -m recsys`."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import torch

import recsys
from recsys.__main__ import main
from recsys.inference import quantize_embeddings
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"recsys {recsys.__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "usage: python -m recsys " in out
    for command in ("doctor", "calibrate", "plan", "package", "verify", "inspect", "follow"):
        assert re.search(rf"^    {command}\b", out, re.M)


@pytest.mark.parametrize("arguments", [[], ["surgeon"]])
def test_unknown_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m recsys" in capsys.readouterr().err


def test_a_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--help"])
    assert stop.value.code == 0
    assert "usage: python -m recsys plan " in capsys.readouterr().out


def small_model() -> tuple[torch.nn.Module, list[object]]:
    """A quantized model and its arguments, for `recsys package`."""
    table = EmbeddingBagConfig(9, 4, "films", feature_names=["film"])
    batch = KeyedJaggedTensor(["film"], torch.tensor([3, 4]), lengths=torch.tensor([1, 1]))
    return quantize_embeddings(EmbeddingBagCollection(tables=[table])), [batch]


def test_packages_are_written_verified_and_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "movies")
    model = f"{__name__}:small_model"
    assert main(["package", model, folder, "--torchscript", "--kserve", "s3://models"]) == 0
    assert "storageUri: s3://models" in capsys.readouterr().out
    assert main(["verify", f"{folder}/1"]) == 0
    assert main(["inspect", f"{folder}/1"]) == 0
    assert "table films: 9 rows" in capsys.readouterr().out
    (tmp_path / "movies/1/program.pt").write_bytes(b"x")
    assert main(["verify", f"{folder}/1"]) == 1
    assert "program.pt" in capsys.readouterr().err


def test_the_console_command_is_the_module() -> None:
    (command,) = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"].items()
    assert command == ("recsys", "recsys.__main__:main")
    module, function = command[1].split(":")
    assert getattr(importlib.import_module(module), function) is main
