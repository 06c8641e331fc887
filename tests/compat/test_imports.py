"""The statements that `recsys.compat.imports` prints import the names of the table."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from recsys.compat.imports import imports_here
from recsys.compat.table import HOMES, reason_of

SCRIPT = """
import torchrec
from torchrec import sparse, KeyedJaggedTensor
def main():
    from torchrec.distributed.dist_data import KJTAllToAll
    from torchrec.models.dlrm import DLRM as Model, choose
from .torchrec import nothing
"""


def test_a_script() -> None:
    assert dict(imports_here(SCRIPT)) == {
        2: ["# torchrec: import its names one by one"],
        3: [
            "# torchrec.sparse: import its names one by one",
            "from recsys.sparse import KeyedJaggedTensor",
        ],
        5: [
            "# torchrec.distributed.dist_data.KJTAllToAll: no counterpart. "
            f"{reason_of('torchrec.distributed.dist_data.KJTAllToAll')}"
        ],
        6: ["from recsys.modules.dlrm import DLRM as Model", "from math import comb as choose"],
    }


def test_every_name_of_the_table() -> None:
    for module, names in HOMES.items():
        if not names:
            continue
        [(_, statements)] = imports_here(f"from {module} import {', '.join(names)}")
        for (name, home), statement in zip(names.items(), statements, strict=True):
            found: dict[str, object] = {}
            exec(statement, found)
            assert found[name] is getattr(importlib.import_module(home.module), home.name)


def test_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from torchrec.models.dlrm import DLRM\n")
    command = [sys.executable, "-m", "recsys.compat.imports", str(script)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (
        0,
        f"{script}:1\n  from recsys.modules.dlrm import DLRM\n",
    )
    script.write_text("from torchrec.nothing import name\n")
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert "torchrec.nothing.name: no counterpart" in run.stdout
