"""Code blocks of the pages run, and print the output shown below them."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]
FOLDERS = ["docs", "examples", "benchmarks"]
PAGES = sorted([*ROOT.glob("*.md"), *(page for f in FOLDERS for page in ROOT.glob(f"{f}/**/*.md"))])
PAGES = [page for page in PAGES if ROOT / "docs" / "reference" not in page.parents]  # generated
# A block that cannot run has the reason in the line before it: <!-- not run: ... -->
# A block that needs an optional package has its name there: <!-- needs package -->
BLOCK = re.compile(
    r"^(<!-- (?:not run: \S[^\n]*|needs (?P<package>[\w.]+)) -->\n)?"
    r"```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?",
    re.M | re.S,
)
ANY_PYTHON = re.compile(r"^[ \t]*(?:```+|~~~+)[ \t]*\{?\.?py(?:thon3?|con)?\b", re.M | re.I)


@dataclass(frozen=True)
class Block:
    """A block of code, and its output on the page (None: the page shows no output)."""

    line: int
    code: str
    output: str | None
    package: str | None = None
    """An optional package that it needs."""


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page that run.

    Raises:
        ValueError: A block of Python is fenced in a way that is overlooked here.
    """
    text = page.read_text()
    found = list(BLOCK.finditer(text))
    if len(found) != len(ANY_PYTHON.findall(text)):
        raise ValueError(
            f"{page.name} must begin each block of Python by a line of its own, ```python, with "
            "no space before it."
        )
    return [
        Block(text.count("\n", 0, match.start(3)), match[3], match[4], match["package"])
        for match in found
        if match[1] is None or match["package"]
    ]


def run_page(page: Path, folder: Path, compare: bool, package: str | None = None) -> None:
    """Runs the blocks of a page one after another in one namespace, in a folder of their own.

    Blocks that need an optional package run only if it is the given one.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    checker = doctest.OutputChecker()
    with contextlib.chdir(folder):
        for block in blocks_of(page):
            if block.package not in (None, package):
                continue
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


@pytest.fixture
def without_torchrec() -> Iterator[None]:
    """Remove the modules that a page about moving from TorchRec installs."""
    yield
    if compat := sys.modules.get("recsys.compat.torchrec"):
        compat.uninstall()


@pytest.mark.usefixtures("without_torchrec")
@pytest.mark.parametrize(
    "page", list(filter(blocks_of, PAGES)), ids=lambda page: str(page.relative_to(ROOT))
)
def test_blocks_run_and_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    assert "RANK" not in os.environ
    run_page(page, tmp_path, compare=True)


OPTIONAL = sorted(
    {(page, block.package) for page in PAGES for block in blocks_of(page) if block.package}
)


@pytest.mark.usefixtures("without_torchrec")
@pytest.mark.parametrize(
    ("page", "package"),
    [
        # warnings of other packages are ignored
        pytest.param(*case, marks=[] if ours else [pytest.mark.filterwarnings("ignore")])
        for case in OPTIONAL
        for ours in [case[1].startswith("recsys.")]
    ],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_blocks_of_optional_packages_run(page: Path, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    run_page(page, tmp_path, compare=True, package=package)


def test_every_page_is_found() -> None:
    names = {str(page.relative_to(ROOT)) for page in filter(blocks_of, PAGES)}
    assert {"README.md", "docs/tracing.md", "docs/migrating.md", "docs/tutorials/intro.md"} <= names
    assert {ROOT / "examples/cpp/README.md", ROOT / "CONTRIBUTING.md"} <= set(PAGES)


def test_a_block_that_does_not_run_says_why(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: needs a cluster -->\n```python\n1 / 0\n```\n")
    assert blocks_of(page) == []
    page.write_text("<!-- needs absent_package -->\n```python\n1 / 0\n```\n")
    assert [block.package for block in blocks_of(page)] == ["absent_package"]
    run_page(page, tmp_path, compare=True)
    for fence in ("<!-- not run: -->\n```python", "```python"):
        page.write_text(f"{fence}\n1 / 0\n```\n")
        assert [block.code for block in blocks_of(page)] == ["1 / 0\n"]
    for fence in ("```py", "  ```python", "~~~ python", "```{python}", '```python title="x.py"'):
        page.write_text(f"{fence}\n1 / 0\n```\n")
        with pytest.raises(ValueError, match=r"page.md must begin each block of Python by"):
            blocks_of(page)


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
    shown = re.findall(r"rank (\d) of (\d): loss (0\.\d{4})", done.stdout)
    assert sorted(rank for rank, _, _ in shown) == [str(rank) for rank in ranks]
    assert {(size, loss) for _, size, loss in shown} == {(str(len(ranks)), shown[0][2])}


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
