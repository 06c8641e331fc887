"""The console command `recsys`, and `python -m recsys`."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

import recsys
from recsys.__main__ import main

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
    for command in ("doctor", "calibrate", "plan"):
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


def test_the_console_command_is_the_module() -> None:
    (command,) = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"].items()
    assert command == ("recsys", "recsys.__main__:main")
    module, function = command[1].split(":")
    assert getattr(importlib.import_module(module), function) is main
