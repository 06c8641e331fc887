"""The page shows the committed results."""

from __future__ import annotations

import json

from tests.conformance.matrix import cells
from tests.conformance.report import PAGE, render
from tests.conformance.runner import RESULTS


def test_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.conformance.report"


def test_results_are_of_the_whole_matrix() -> None:
    result = json.loads((RESULTS / "conformance.json").read_text())
    assert result["cells"] == len(list(cells()))
    assert result["equal"] == result["cells"]
