"""Pages become executed notebooks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_tutorials import blocks_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "notebooks.py"
INTRODUCTION = ROOT / "docs" / "tutorials" / "intro.md"

spec = importlib.util.spec_from_file_location("notebooks", SCRIPT)
assert spec is not None
assert spec.loader is not None
notebooks: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)


def run(page: Path, folder: Path) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Runs the script on a page, and returns its end and the cells of the notebook."""
    for package in ("jupytext", "nbclient", "ipykernel"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install '.[notebooks]'")
    own = {name: str(folder / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(page), "--folder", str(folder)],
        env={**os.environ, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done, json.loads((folder / f"{page.stem}.ipynb").read_text())["cells"]


def outputs_of(cells: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [out for cell in cells for out in cell.get("outputs", ()) if out["output_type"] == kind]


def test_blocks_become_cells_and_outputs_of_the_page_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("jupytext", reason="jupytext is not installed: pip install '.[notebooks]'")
    page = tmp_path / "pages" / "page.md"
    page.parent.mkdir()
    page.write_text(
        "# Title\n\n[text](other.md#part) ![picture](a/b.svg) [far](https://a.org) [near](#x)\n\n"
        "```python\nprint(1)\n```\n\n```text\nshown\n```\n\n"
        "<!-- not run: takes long -->\n```python\nwait()\n```\n\n```text\nkept\n```\n\n"
        "<!-- needs numpy -->\n```python\nimport numpy\n\n\nnumpy.ones(1)\n```\n\n"
        "```bash\nls\n```\n"
    )
    cells = notebooks.notebook_of(page, tmp_path / "build" / "notebooks").cells
    assert [(cell.cell_type, cell.source) for cell in cells] == [
        (
            "markdown",
            "# Title\n\n[text](../../pages/other.md#part) ![picture](../../pages/a/b.svg) "
            "[far](https://a.org) [near](#x)",
        ),
        ("code", "print(1)"),
        ("markdown", "```python\nwait()\n```"),
        ("markdown", "```text\nkept\n```"),
        ("code", "import numpy\n\n\nnumpy.ones(1)"),
        ("markdown", "```bash\nls\n```"),
    ]


def test_a_failed_cell_fails_the_command_and_is_in_the_notebook(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nopen('file', 'w').close()\nprint('first')\n```\n\n# Second\n\n"
        "```python\n1 / 0\n```\n\n```python\nprint('third')\n```\n"
    )
    done, cells = run(page, tmp_path)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert [out["ename"] for out in outputs_of(cells, "error")] == ["ZeroDivisionError"]
    assert ["".join(out["text"]) for out in outputs_of(cells, "stream")] == ["first\n"]
    assert not (tmp_path / "file").exists()
    assert not Path("file").exists()


def test_the_introduction_runs_and_has_a_picture(tmp_path: Path) -> None:
    done, cells = run(INTRODUCTION, tmp_path)
    assert done.returncode == 0, done.stderr
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) for cell in code] == [
        block.code.rstrip("\n") for block in blocks_of(INTRODUCTION)
    ]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert outputs_of(cells, "error") == []
    assert any("image/png" in out["data"] for out in outputs_of(cells, "display_data"))


@pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda page: page.stem)
def test_every_page_draws(page: Path) -> None:
    assert any(".savefig(" in block.code for block in blocks_of(page))
