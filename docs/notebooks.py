"""Write pages as executed notebooks into build/notebooks/: `python docs/notebooks.py`.

The pages stay the only source. A block of Python becomes a cell, and its output comes from the
execution instead of the page. A block that the page marks as `not run` stays text.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS.parent / "build" / "notebooks"
PAGES = [
    DOCS / f"{name}.md"
    for name in ("tutorials/intro", "sharding", "own_data", "sequences", "serving")
]

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run|needs)\b[^\n]* -->\n)?```python\n(?P<code>.*?)^```$"
    r"(?P<output>\n+^```text\n.*?^```$)?",
    re.M | re.S,
)
_LINK = re.compile(r"\]\((?!https?://|#)")


def _cell(block: re.Match[str]) -> str:
    """Return a block of a page in jupytext's Markdown, in which `.noeval` marks text."""
    if block["mark"] == "not run":
        return f"```python .noeval\n{block['code']}```{block['output'] or ''}"
    return f"```python\n{block['code']}```"


def _jupytext_of(page: str) -> str:
    """Return a page in jupytext's Markdown; other languages than Python are text."""
    return re.sub(r"^```(?!python$)(\w+)$", r"```\1 .noeval", _BLOCK.sub(_cell, page), flags=re.M)


def notebook_of(page: Path, folder: Path) -> Any:
    """Return the notebook of a page, without outputs.

    Args:
        page: A Markdown file.
        folder: The folder of the notebook, for relative links.
    """
    import jupytext

    prefix = os.path.relpath(page.parent, folder)
    text = _LINK.sub(f"]({prefix}/", _jupytext_of(page.read_text()))
    notebook = jupytext.reads(text, {"extension": ".md", "split_at_heading": True})
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"^(```\w+) \.noeval$", r"\1", cell.source, flags=re.M)
    notebook.metadata.kernelspec = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    return notebook


def execute(notebook: Any) -> None:
    """Run the cells in a new kernel, in a temporary folder.

    Raises:
        CellExecutionError: A cell raises an error.
    """
    from nbclient import NotebookClient

    with TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        options = {"timeout": 600, "kernel_name": "python3", "record_timing": False}
        NotebookClient(notebook, resources=where, **options).execute()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a notebook of each page that the command line names."""
    import nbformat

    parser = argparse.ArgumentParser(description="Write pages as executed notebooks.")
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, help="Markdown files")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="destination")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for page in options.pages:
        notebook = notebook_of(page.resolve(), options.folder.resolve())
        path = options.folder / f"{page.stem}.ipynb"
        try:
            execute(notebook)
        finally:
            nbformat.write(notebook, path)  # with the traceback of a failed cell
        print(path, flush=True)


if __name__ == "__main__":
    main()
