"""``python -m recsys plan``: plans without a GPU, and reports wrong input in one line."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path

import pytest

from recsys.__main__ import main
from recsys.distributed.planner import Topology
from recsys.distributed.types import ShardingPlan

TABLES = {
    "optimizer": "RowWiseAdagrad",
    "tables": [
        {"name": "users", "rows": 4_000_000, "dim": 64, "pooling_factors": 3},
        {"name": "items", "rows": 1_000_000, "dim": 64, "module": "tower.ebc"},
    ],
}
MODEL = """
import torch
from pathlib import Path
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection

def make_model():
    table = EmbeddingBagConfig(
        name="t", num_embeddings=10**9, embedding_dim=64, feature_names=["f"]
    )
    return torch.nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table])})

def fails():
    raise KeyError("no such thing")

def dense():
    return torch.nn.Linear(2, 2)

def number():
    return 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tables.json").write_text(json.dumps(TABLES))
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    Topology.preset("H100", 4).to_json(tmp_path / "h100x4.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    return main(["plan", *arguments])


def test_plans_tables_of_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--out", "plan.json", "--html", "plan.html"]
    assert run("--tables", "tables.json", "--topology", "h100x4.json", *files) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("The slowest of 4 ranks, rank ")
    assert "The plan is in plan.json." in out
    assert "The report is in plan.html." in out
    plan = ShardingPlan.from_json(folder / "plan.json")
    assert {path: list(tables) for path, tables in plan.plan.items()} == {
        "ebc": ["users"],
        "tower.ebc": ["items"],
    }
    assert "<!DOCTYPE html>" in (folder / "plan.html").read_text()


def test_plans_a_model_that_is_never_allocated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "model.py:make_model", "--topology", "H100:8", "--timeout", "5"]
    assert run(*arguments, "--out", "plan.json") == 0
    assert "ebc.t, 1,000,000,000 x 64" in capsys.readouterr().out
    assert ShardingPlan.from_json(folder / "plan.json").made_for is not None


def test_rates_an_edited_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--tables", "tables.json", "--topology", "H100:4", "--out", "plan.json")
    data = json.loads((folder / "plan.json").read_text())
    entry = {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [3]}
    data["plan"]["ebc"]["users"] = entry
    (folder / "plan.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert run("--tables", "tables.json", "--topology", "H100:4", "--rate", "plan.json") == 0
    out = capsys.readouterr().out
    assert "rank 3, takes" in out
    assert "The plan was passed in, not searched for." in out
    assert re.search("ebc.users, 4,000,000 x 64, .* MiB: table_wise on rank 3, ", out)
    assert "Let the planner place all tables: " in out


def test_batch_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def report(*arguments: str) -> str:
        assert run("--tables", "tables.json", "--topology", "H100:1", *arguments) == 0
        return capsys.readouterr().out.splitlines()[0].partition(" No plan")[0]

    assert report() == report("--batch-size", "512") != report("--batch-size", "4096")
    (folder / "tables.json").write_text(json.dumps(TABLES | {"batch_size": 4096}))
    assert report() == report("--batch-size", "4096") != report("--batch-size", "512")


def test_what_does_not_fit_ends_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "model.py:make_model", "--topology", "H100:1") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m recsys plan: Table 't' of module 'ebc' (1000000000 x 64, ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "H100"], "--topology must be a preset .*; received 'H100', and there is"),
        (["--tables", "none.yaml"], "--tables must be a file .* 'none.yaml', and there is no such"),
        (["--tables", "/"], "--tables must be a file that can be read; received '/', and it is a"),
        (["--rate", "none.json"], "--rate must be a file that can be read; received 'none.json'"),
        (["--topology", "H99:8"], "A preset must be one of .* received 'H99'"),
        (["--topology", "H100:0"], "world_size must be positive; received 0"),
        (["--topology", "tables.json"], "Topology file tables.json has keys .* 'optimizer'"),
        (["--batch-size", "0"], "batch_size must be positive; received 0"),
        (["--reserve", "2"], r"percentage must be finite and >= 0 and < 1; received 2.0"),
        (["--rate", "tables.json"], "Plan file tables.json has keys among .* 'optimizer'"),
        (["--model", "model.py"], "--model must be a Python file and a function .* 'model.py'"),
        (["--model", "no.py:make"], "--model must be a Python file that exists; received 'no.py'"),
        (["--model", "model.py:mode"], "must name a function of model.py; received 'mode'. There"),
        (["--model", "model.py:fails"], "model.py, line 14: KeyError: 'no such thing'"),
        (["--model", "model.py:dense"], "--model must have tables to place; received model.py:de"),
        (["--model", "model.py:number"], "model.py:number must return an nn.Module; .* int"),
        (["--model", "broken.py:make"], "broken.py, line 1: ModuleNotFoundError: No module named"),
    ],
)
def test_wrong_input_ends_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    source = (
        [] if "--model" in arguments or "--tables" in arguments else ["--tables", "tables.json"]
    )
    machine = [] if "--topology" in arguments else ["--topology", "H100:2"]
    assert run(*source, *machine, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m recsys plan: ")
    assert "Traceback" not in err

    assert re.search(message, err), err


def test_files_that_cannot_be_written_are_found_before_planning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--out", "--html"):
        assert run("--tables", "tables.json", "--topology", "H100:4", option, "none/x") == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"{option} must be a file in a folder that exists; there is no none" in err


def test_the_plan_is_written_where_the_report_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(text: str, **_: object) -> None:
        if not text.startswith("python -m"):
            raise BrokenPipeError

    monkeypatch.setattr(builtins, "print", closed)
    run("--tables", "tables.json", "--topology", "H100:4", "--out", "plan.json")
    assert Path("plan.json").exists()


@pytest.mark.parametrize(
    "arguments", [[], ["--tables", "a", "--model", "b"], ["--tables", "a", "--batch-size", "many"]]
)
def test_wrong_options_show_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    assert "usage: python -m recsys plan" in capsys.readouterr().err


def test_help_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("--help")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "exit codes: 0 there is a plan, 1 the tables do not fit, 2" in out
    assert "--tables tables.yaml --topology H100:64" in out
