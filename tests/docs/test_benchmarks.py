"""The picture of docs/benchmarks.md shows the committed results."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import benchmark_picture  # noqa: E402


def test_the_picture_is_up_to_date() -> None:
    assert f"results {benchmark_picture.digest()}" in benchmark_picture.PICTURE.read_text(), (
        "run: python docs/benchmark_picture.py"
    )
    assert "](benchmarks/dlrm.svg)" in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    benchmark_picture.draw(tmp_path / "dlrm.svg")
    assert "TorchRec 1.8.0" in (tmp_path / "dlrm.svg").read_text()
