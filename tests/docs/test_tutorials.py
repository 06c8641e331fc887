"""What the documentation shows is what happens: its code runs, and prints what stands below it."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.test_public_surface import SURFACE

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "checkpoints.md",
    ROOT / "docs" / "data.md",
    ROOT / "docs" / "engine.md",
    ROOT / "docs" / "faults.md",
    ROOT / "docs" / "metrics.md",
    ROOT / "docs" / "optimizers.md",
    ROOT / "docs" / "planner.md",
    ROOT / "docs" / "pipelines.md",
    ROOT / "docs" / "quantization.md",
    ROOT / "docs" / "several_machines.md",
    ROOT / "docs" / "two_dimensional.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A block of code, and what the page says it prints (None: the page does not say)."""

    line: int
    code: str
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(text.count("\n", 0, match.start(1)), match[1], match[2])
        for match in BLOCK.finditer(text)
    ]


def run_page(page: Path, folder: Path, compare: bool) -> None:
    """Runs the blocks of a page one after another in one namespace, in a folder of their own."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    checker = doctest.OutputChecker()
    with contextlib.chdir(folder):
        for block in blocks_of(page):
            # blank lines in front: a traceback then shows the line of the page
            code = compile("\n" * block.line + block.code, str(page), "exec")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
            shown, got = block.output, printed.getvalue()
            if not compare or shown is None or checker.check_output(shown, got, doctest.ELLIPSIS):
                continue
            raise AssertionError(
                f"{page.name}, line {block.line}: the block prints\n{got}\n"
                f"and the page shows\n{shown}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_and_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    assert "RANK" not in os.environ
    assert blocks_of(page)
    run_page(page, tmp_path, compare=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tutorial_runs_as_a_job_of_several_processes(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    page = ROOT / "docs" / "tutorials" / "intro.md"
    ranks(world_size, run_page, page, tmp_path, world_size == 1)


@pytest.mark.parametrize("num_processes", [None, 2])
def test_the_readme_runs_by_python_and_by_torchrun(
    tmp_path: Path, num_processes: int | None
) -> None:
    script = tmp_path / "train.py"
    (block,) = blocks_of(ROOT / "README.md")
    script.write_text(block.code)
    launcher = [] if num_processes is None else ["-m", "torch.distributed.run", "--standalone"]
    launcher += [] if num_processes is None else [f"--nproc-per-node={num_processes}"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=tmp_path,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ranks = range(num_processes or 1)
    losses = dict(re.findall(r"rank (\d): loss (0\.\d{4})", done.stdout))
    assert sorted(losses) == [str(rank) for rank in ranks]
    owners = set(re.findall(r"rank:(\d)/", done.stdout))
    assert owners == set(losses), done.stdout  # one model, on all of them


def test_differences_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# x\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(
        AssertionError, match=r"page.md, line 3: the block prints\n1\n\nand the page"
    ):
        run_page(page, tmp_path, compare=True)
    page.write_text("# x\n\n```python\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError):
        run_page(page, tmp_path, compare=False)


def test_the_index_links_every_page() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([\w/]+\.md)\)", (docs / "index.md").read_text()))
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    decisions = {page for page in pages if page.startswith("decisions/0")}  # linked by their index
    assert linked == pages - decisions - {"index.md"}


def documented_by(page: Path) -> set[str]:
    """The names of a page that are shown with their docstrings."""
    found: set[str] = set()
    for name, members in re.findall(
        r"^::: ([\w.]+)(?:\n    options:\n      members: \[(.*)\])?", page.read_text(), re.M
    ):
        found.add(name.rpartition(".")[2])
        found.update(members.split(", "))
        with contextlib.suppress(ImportError):
            room = vars(importlib.import_module(name))
            own = {key for key, value in room.items() if getattr(value, "__module__", "") == name}
            found.update(own | set(room.get("__all__", ())) if not members else ())
    return found


def test_every_public_name_has_a_reference() -> None:
    public = {name for names in SURFACE.values() for name in names.split()}
    shown = set().union(*map(documented_by, (ROOT / "docs").rglob("*.md")))
    assert public - shown == set()
