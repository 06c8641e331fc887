"""Structure of the documentation: menu, links, lengths, and the address of the repository."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

import recsys
from tests.without_compat import expected

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"  # generated
PAGES = sorted(page for page in DOCS.rglob("*.md") if REFERENCE not in page.parents)
TEXTS = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob(".github/**/*.md")]
#: Pages of tables to look up: costs, machines, measurements.
TABLES = ("benchmarks", "planner_internals", "topology")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT.get("urls", {}).get("Repository", "")


class _Settings(yaml.SafeLoader):
    """Reader of mkdocs.yml, which has tags for variables of the environment."""


_Settings.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node)[-1])
SETTINGS = yaml.load((ROOT / "mkdocs.yml").read_text(), _Settings)


def pages_of(menu: Any) -> list[str]:
    if isinstance(menu, str):
        return [menu]
    return [
        page
        for item in (menu.values() if isinstance(menu, dict) else menu)
        for page in pages_of(item)
    ]


def test_the_menu_has_four_parts_and_every_page_once() -> None:
    assert [next(iter(part)) for part in SETTINGS["nav"]] == [
        "Get started",
        "Guides",
        "Reference",
        "Internals",
    ]
    listed = [page for page in pages_of(SETTINGS["nav"]) if not page.startswith("reference/")]
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_no_page_is_long(page: Path) -> None:
    """Tables of the pages in TABLES do not count."""
    text = page.read_text()
    if page.stem in TABLES:
        text = re.sub(r"^\|.*\n", "", text, flags=re.M)
    assert len(text.split()) <= 1500, "split the page at a subject, or shorten it"


def test_each_difference_has_one_place() -> None:
    pages = ("migrating", "differences", "differences_serving", "conformance")
    assert sum(len((DOCS / f"{page}.md").read_text().split()) for page in pages) <= 3140


def test_readme_and_changelog_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
    changelog = (ROOT / "CHANGELOG.md").read_text()
    release = re.search(r"^## 0\.1\.0.*?(?=^## |\Z)", changelog, re.S | re.M)
    assert release is not None
    assert len(release[0].strip().splitlines()) <= 60


def test_links_lead_to_files() -> None:
    """Zensical checks pages and anchors; this covers pictures and other files."""
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in TEXTS
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", page.read_text())
        if not target.startswith(("https://", "http://"))
        and REFERENCE not in (page.parent / target).resolve().parents
        and not (page.parent / target).exists()
    ]
    assert broken == []


def test_decisions_and_pages_that_code_names_exist() -> None:
    sources = [
        *(
            path
            for folder in ("recsys", "tests", "benchmarks", "examples")
            for path in (ROOT / folder).rglob("*.*")
        ),
        *TEXTS,
    ]
    named = {
        (name, str(path.relative_to(ROOT)))
        for path in sources
        if path.suffix in (".py", ".md", ".txt", ".yaml")
        for name in re.findall(r"\bdocs/[\w/]+(?:\.md|\b(?=/0\d))?(?:/0\d+)?", path.read_text())
        if name.endswith(".md") or re.search(r"decisions/0", name)
    }
    missing = {(name, path) for name, path in named if not (ROOT / name).exists()}
    assert missing == set()


def test_sections_that_docstrings_name_exist() -> None:
    named = {
        (page, " ".join(section.split()))
        for path in Path(recsys.__file__).parent.rglob("*.py")
        for page, section in re.findall(r'docs/([\w/]+\.md), "([^"]+)"', path.read_text())
    }
    headings = {
        page: re.findall(r"^#+ (.+)$", (DOCS / page).read_text(), re.M) for page, _ in named
    }
    assert {(page, section) for page, section in named if section not in headings[page]} == set()


def test_files_that_pages_name_exist() -> None:
    named = {
        (name, str(page.relative_to(ROOT)))
        for page in TEXTS
        for name in expected(
            re.findall(
                r"`((?:benchmarks|docs|examples|recsys|tests)/[\w/.-]+\.(?:py|json|txt|md|cpp))`",
                page.read_text(),
            )
        )
    }
    assert len(named) > 60
    package = Path(recsys.__file__).parents[1]  # the tests may run on an installed wheel
    roots = {name: package if name.startswith("recsys/") else ROOT for name, _ in named}
    assert {(name, page) for name, page in named if not (roots[name] / name).exists()} == set()


def test_the_address_of_the_repository_has_one_place() -> None:
    """The place is `[project.urls]` in pyproject.toml: empty before publication (RELEASING.md)."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.get("repository-code", "") == REPOSITORY
    assert SETTINGS["repo_url"] == ""  # docs/build.py sets it
    if not REPOSITORY:
        invented = re.compile(
            r"https?://(?:www\.)?(?:github|gitlab|pypi|readthedocs)\.\w+/\S*recsys", re.I
        )
        assert [path for path in TEXTS if invented.search(path.read_text())] == []


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == recsys.__version__
    assert f"\nrecsys   {recsys.__version__}\n" in (DOCS / "install.md").read_text()
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] in (
        recsys.__version__,
        "Unreleased",
    )


def test_numbers_of_the_readme_are_measured() -> None:
    """The table of results is the median of the rounds in benchmarks/results/."""
    readme = (ROOT / "README.md").read_text()
    dlrm = json.loads((ROOT / "benchmarks" / "results" / "dlrm-cpu.json").read_text())
    for case in dlrm["cases"]:
        if case["ranks"] == 2 and case["batch_size"] == 1024:
            ours, peer = (median(case["step_ms"][name]) for name in ("ours", "peer"))
            row = rf"\|[^|]*`{case['plan']}` \| {ours:.0f} ms \| {peer:.0f} ms \|"
            assert re.search(row, readme), row
