"""The page is one file of valid structure that loads nothing, and stays small."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from recsys.distributed.planner import ParameterConstraints
from recsys.distributed.planner import report_html as module
from tests.distributed.planner.test_report import TABLES, planned

OPTIONAL_END = {"li", "tr", "td", "th", "thead"}
VOID = {"meta", "br", "rect"}


class Page(HTMLParser):
    """Collects cells of tables, and fails where an element is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag in VOID:
            return
        if tag in ("tr", "td", "th"):  # end the one before
            while self.open[-1] in ({"td", "th"} if tag != "tr" else {"td", "th", "tr"}):
                self.open.pop()
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        while self.open[-1] != tag:
            assert self.open.pop() in OPTIONAL_END
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data.strip()


def test_the_page_holds_what_the_rating_says(tmp_path: Path) -> None:
    plan = planned()
    rating = plan.rating
    assert rating is not None
    text = plan.report_html(tmp_path / "plan.html", seconds=0)
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == text
    heat, memory, tables = Page(text).tables
    parts = ["prefetch", "forward", "backward", "input", "output", "update"]
    assert heat[0] == ["rank", *parts, "total"]
    assert [row[0] for row in heat[1:]] == [str(rank) for rank in range(8)]
    assert [row[-1] for row in heat[1:]] == [f"{cost.total:.3f}" for cost in rating.costs]
    assert len(memory) == 9
    assert all(re.search(r"of 74\.5 GiB \(\d+%\)", row[1]) for row in memory[1:])
    assert len(tables) == 1 + len(TABLES)
    assert {row[0] for row in tables[1:]} == {f"ebc.{name}" for name in TABLES}
    assert all("slowest rank" in row[-1] for row in tables[1:])


def test_nothing_is_loaded() -> None:
    text = planned().report_html(seconds=0)
    assert "://" not in text
    page = Page(text)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert ("lang", "en") in page.attributes


def test_gains_are_those_of_the_text() -> None:
    hot = ParameterConstraints(["table_wise"], pooling_factors=[500.0])
    plan = planned({"hot": (100_000, 64), "cold": (10, 32)}, hot=hot)
    section = plan.report_html().partition("<h2>Suggested changes</h2>")[2].partition("<h2>")[0]
    gains = [html.unescape(line) for line in re.findall("<li>(.*?)</li>", section)]
    text = plan.report().partition("Suggested changes, ")[2].partition("\n\n")[0]
    assert [f"- {line}" for line in gains] == text.splitlines()[1:]
    lifted = [line for line in gains if line.startswith("Lift the constraints on table 'hot': ")]
    assert len(lifted) == 1
    assert re.search(r": \S+ ms instead of \S+ ms \(-\S+%\)\.$", lifted[0])


def test_names_are_text() -> None:
    name = "<script>alert('1')</script>&amp;"
    text = planned({name: (1000, 64)}).report_html(seconds=0)
    assert "<script>alert" not in text
    assert Page(text).tables[-1][1][0] == f"ebc.{name}"


def test_many_tables_and_ranks_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TABLES", 10)
    monkeypatch.setattr(module, "_MOST_RANKS", 6)
    text = planned().report_html(seconds=0)
    heat, memory, tables = Page(text).tables
    assert (len(heat), len(memory), len(tables)) == (7, 7, 11)
    assert "... and 14 more." in text
    assert text.count("... and 2 more.") == 2
    row = max(re.findall(r"<tr>.*", planned().report_html(seconds=0)), key=len)
    assert 128 * 2 * 300 + 1500 * len(row) < 2_000_000
