"""The reference shows every promised and every exported name."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_public_surface import SURFACE
from tests.without_compat import expected

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import build  # noqa: E402
import reference_pages  # noqa: E402

PROMISED = [
    line.replace(" ", ".")
    for line in (ROOT / "tests" / "promised_names.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.fixture(scope="module")
def entries() -> list[reference_pages.Entry]:
    return reference_pages.entries()


def test_every_public_name_has_an_entry(entries: list[reference_pages.Entry]) -> None:
    shown = {path for entry in entries for path in (entry.path, *entry.aliases)}
    exported = {f"{package}.{name}" for package in SURFACE for name in SURFACE[package].split()}
    assert (set(PROMISED) | exported) - shown == set()


def test_every_entry_has_a_docstring(entries: list[reference_pages.Entry]) -> None:
    silent = [
        entry.path
        for entry in entries
        if (inspect.isroutine(entry.value) or isinstance(entry.value, type | ModuleType))
        and not inspect.getdoc(entry.value)
    ]
    assert silent == []


def test_pages(entries: list[reference_pages.Entry]) -> None:
    pages = reference_pages.render(entries)
    assert set(pages) == {"index", *reference_pages.PAGES}
    assert "get_local_rank" in pages["distributed"]
    assert "members: []" in pages["datasets"]  # a module shows its own docstring
    assert "Value: `26`" in pages["datasets"]  # a constant its value
    assert sum(page.count("\n::: ") for page in pages.values()) == len(entries)


def test_pages_are_written(tmp_path: Path) -> None:
    reference_pages.write(tmp_path / "reference")
    assert (tmp_path / "reference" / "planner.md").read_text().startswith("# Planner\n")


def test_a_gap_is_found(tmp_path: Path) -> None:
    shown = [
        reference_pages.Entry(f"recsys.{name}", f"recsys.sparse.{name}", type)
        for name in ("described", "empty", "absent")
    ]
    page = tmp_path / "reference" / "data_types" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(
        '<div class="doc doc-object"><h2 id="recsys.sparse.described">described</h2>'
        '<div class="doc doc-contents first"><p>Text.</p></div></div>'
        '<div class="doc doc-object"><h2 id="recsys.sparse.empty">empty</h2>'
        '<div class="doc doc-contents first"> </div></div>'
        "<p>Also: <code>recsys.other.empty</code></p>"
    )
    assert build.missing(tmp_path, shown) == ["recsys.empty", "recsys.absent"]


def test_names_that_pages_import_are_promised() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    imported = {
        f"{node.module}.{alias.name}"
        for page in pages
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("recsys")
        for alias in node.names
    }
    exported = {f"{package}.{name}" for package in SURFACE for name in SURFACE[package].split()}
    assert len(imported) > 80
    assert expected(imported) - set(PROMISED) - exported == set()
