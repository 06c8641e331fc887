"""The linter of plain English finds planted faults; pages, code and tests have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.english import MAX_WORDS, files_below, findings_of_file, findings_of_text, main

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name for name in ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples")
]
PAGES += [ROOT / name for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "RELEASING.md")]
CODE = [ROOT / "recsys", ROOT / "tests"]

PLANTED = '''
"""What a batch adds."""

# The other ranks hear of it.


class Row:
    """A row."""

    size: int
    """Those of the others."""


def check(row):
    """Return the row; ids are none."""
    if row is None:
        raise ValueError(f"The header says {row}.")
'''


def test_faults_of_python_are_found(tmp_path: Path) -> None:
    module = tmp_path / "planted.py"
    module.write_text(PLANTED)
    found = [finding.removeprefix(f"{module}:") for finding in findings_of_file(module)]
    assert sorted(finding.split(" (")[0] for finding in found) == [
        "11: docstring: 'Those of'",
        "11: docstring: opens with 'Those': name the thing or the action",
        "15: docstring: 'are none'",
        "17: message: 'says'",
        "2: docstring: 'What a'",
        "2: docstring: opens with 'What': name the thing or the action",
        "4: comment: 'hear'",
    ]


def test_faults_of_pages_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What is checked\n\nIds travel.\n\n```python\nwhat_is = 'code that says nothing'\n```\n\n"
        "| a cell | lies in memory |\n\n" + "word " * (MAX_WORDS + 1) + "\n"
    )
    found = [finding.removeprefix(f"{page}:") for finding in findings_of_file(page)]
    assert [finding.split(" (")[0] for finding in found[:3]] == [
        "1: page: 'What is'",
        "3: page: 'travel'",
        "9: page: 'lies in'",
    ]
    assert found[3].startswith("11: page: 36 words in a sentence: word word")
    assert len(found) == 4


@pytest.mark.parametrize(
    "text",
    [
        "Return None if there is no plan.",
        "The result is None, and `what is` is code.",
        "Such names are no longer exported.",
        '[A link](what-is-a-plan.md) and "what it quotes".',
        "First half of a long sentence, " + "word " * 20 + "; second half: " + "word " * 20,
        "Example:\n\n    >>> tell(1)\n    what is told\n\nThe end.",
        "| one cell with many words | " + "word " * 20 + " | " + "word " * 20 + " |",
    ],
)
def test_sound_prose_has_no_findings(text: str) -> None:
    assert list(findings_of_text(text)) == []


def test_the_command_prints_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text("Nobody said so.\n")
    (tmp_path / "data.json").write_text("what is told")
    assert main([str(tmp_path)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    (tmp_path / "page.md").write_text("No rank reported it.\n")
    assert main([str(tmp_path)]) == 0


def test_docstrings_comments_and_messages_have_no_findings() -> None:
    files = list(files_below(CODE))
    assert len(files) > 800
    assert [finding for file in files for finding in findings_of_file(file)] == []


def test_pages_have_no_findings() -> None:
    generated = ROOT / "docs" / "reference"
    files = [file for file in files_below(PAGES) if generated not in file.parents]
    assert len(files) > 50
    assert [finding for file in files for finding in findings_of_file(file)] == []
