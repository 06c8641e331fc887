"""`python -m recsys gate` exits with 0, 3 or 2."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.__main__ import main
from tests.inference.gate.test_recorded import _rows
from tests.inference.gate.test_rules import _package, _trained, _World, world

__all__ = ["world"]


def test_exit_codes_of_packages(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rows in world.data.items():
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    new = _package(_trained(world.spec, world.training), tmp_path / "staged", world.spec)
    arguments = ["gate", str(new), "--served", str(world.served), "--segment", "country"]
    arguments += [f"--data={name}={tmp_path / name}.parquet" for name in world.data]
    arguments += ["--set", "max_slowdown=50", "--publish", str(tmp_path / "models")]
    page = tmp_path / "report.html"
    assert main([*arguments, "--set", "min_rows=9999", "--html", str(page)]) == 3
    assert "REFUSED data (today)" in capsys.readouterr().out
    assert "do not publish" in page.read_text()
    assert not (tmp_path / "models").exists()
    assert main([*arguments, "--set", "min_rows=500"]) == 0
    assert f"published as {tmp_path / 'models' / '1'}" in capsys.readouterr().out
    assert main([*arguments, "--set", "min_rows=500"]) == 2  # it was moved
    assert "recsys gate: " in capsys.readouterr().err


def test_exit_codes_of_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    pq.write_table(pa.table(_rows(0, noise=0.05)), good)
    pq.write_table(pa.table(_rows(1, noise=2.0)), bad)
    arguments = ["gate", "--record", "--label", "click"]
    assert main([*arguments, f"--data=a={good}"]) == 0
    assert main([*arguments, f"--data=a={bad}"]) == 3
    assert "REFUSED auc (a)" in capsys.readouterr().out
    for wrong, text in (
        ([*arguments, "--data", "a"], "NAME=PATH"),
        ([*arguments, "--data", f"a={good}", "--set", "max_drip=1"], "'max_drip=1'"),
        ([*arguments, "--data", f"a={good}", "--set", "max_drop=x"], "received 'x'"),
        ([*arguments, "--data", f"a={tmp_path}/no.parquet"], "no.parquet"),
        (["gate", "--data", f"a={good}"], "unless --record"),
        ([*arguments, "new", "--data", f"a={good}"], "--record is given without new"),
    ):
        assert main(wrong) == 2
        assert text in capsys.readouterr().err
