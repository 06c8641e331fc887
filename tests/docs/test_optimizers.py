"""The numbers of docs/optimizers.md equal the committed measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[2]
OWNERS = ("attached L2", "attached AdamW", "stepped L2")


def test_the_table_of_weight_decay_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "optimizers.md").read_text()
    shown = re.findall(r"^\| ([\de-]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    result = json.loads((ROOT / "benchmarks" / "results" / "weight_decay-cpu.json").read_text())
    measured = [
        (row["weight_decay"], *(f"{mean(row['auc'][owner]):.4f}" for owner in OWNERS))
        for row in result["rows"]
    ]
    assert [(float(decay), *aucs) for decay, *aucs in shown] == measured
