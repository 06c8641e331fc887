"""Build the documentation into site/: `python docs/build.py`.

Steps: write the reference pages, run Zensical (a broken link fails), check that every entry of the
reference is on the site. The version and the repository's address come from the package and from
`[project.urls]` in pyproject.toml; without an address the site has no link to a repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from html import unescape
from pathlib import Path

from reference_pages import DOCS, Entry, page_of, write

import recsys

ROOT = DOCS.parent


def repository() -> str:
    """Return the public address of the repository, or "" before publication."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Repository", "")


def missing(site: Path, shown: Iterable[Entry]) -> list[str]:
    """Return the entries that their page does not show: no heading, or nothing below it."""
    found = []
    for entry in shown:
        html = (site / "reference" / page_of(entry) / "index.html").read_text()
        heading = re.search(rf'<h\d id="{re.escape(entry.definition)}"', html)
        rest = html[heading.start() :] if heading else ""
        body = re.search(
            r'<div class="doc doc-contents[^>]*>(.*?)(?:<div class="doc doc-object|\Z)', rest, re.S
        )
        text = re.sub(r"<p>Also: .*?</p>", "", body[1]) if body else ""
        if not unescape(re.sub(r"<[^>]+>", "", text)).strip():
            found.append(entry.path)
    return found


def main() -> int:
    """Build the site; return 0 if it is complete."""
    shown = write(DOCS / "reference")
    settings = {
        "RECSYS_SITE_NAME": f"recsys {recsys.__version__}",
        "RECSYS_REPOSITORY": repository(),
    }
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False)
    if built.returncode:
        return built.returncode
    gaps = missing(ROOT / "site", shown)
    print(*(f"The reference does not show {path}." for path in gaps), sep="\n", file=sys.stderr)
    return int(bool(gaps))


if __name__ == "__main__":
    sys.exit(main())
