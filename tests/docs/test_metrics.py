"""The table of metrics in docs/benchmarks.md is the committed measurement."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.metrics import row

ROOT = Path(__file__).parents[2]


def test_the_table_of_metrics_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    result = json.loads((ROOT / "benchmarks" / "results" / "metrics-cpu.json").read_text())
    rows = [row(case) for case in result["cases"]]
    shown = [line for line in page.splitlines() if line.startswith(("| sums |", "| rows |"))]
    assert shown == rows
