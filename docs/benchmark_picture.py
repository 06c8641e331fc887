"""Draw docs/benchmarks/dlrm.svg from the committed results: `python docs/benchmark_picture.py`.

The picture contains a digest of the numbers it shows, by which a test detects an outdated picture.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from statistics import median

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "dlrm-cpu.json"
PICTURE = DOCS / "benchmarks" / "dlrm.svg"
_COLORS = {"recsys": "#3f6fb5", "TorchRec 1.8.0": "#c9c9c9"}


def bars() -> dict[int, dict[str, list[tuple[float, float, float]]]]:
    """Return median, minimum and maximum of a step in ms, by batch size, library and plan."""
    cases = [case for case in json.loads(RESULTS.read_text())["cases"] if case["ranks"] == 2]
    shown: dict[int, dict[str, list[tuple[float, float, float]]]] = {}
    for case in cases:
        for name, key in zip(_COLORS, ("ours", "peer"), strict=True):
            rounds = case["step_ms"][key]
            bar = (median(rounds), min(rounds), max(rounds))
            shown.setdefault(case["batch_size"], {}).setdefault(name, []).append(bar)
    return shown


def digest() -> str:
    """Return a digest of the numbers that the picture shows."""
    return hashlib.sha256(repr(bars()).encode()).hexdigest()[:16]


def draw(path: Path) -> None:
    """Write the picture."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    plans = ["table_wise", "column_wise", "row_wise", "mixed"]
    with mpl.rc_context({"svg.hashsalt": "recsys", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
        for axis, (batch_size, by_library) in zip(axes, bars().items(), strict=True):
            for k, (name, values) in enumerate(by_library.items()):
                middle, low, high = zip(*values, strict=True)
                below = [m - least for m, least in zip(middle, low, strict=True)]
                above = [most - m for m, most in zip(middle, high, strict=True)]
                places = [n + 0.38 * (k - 0.5) for n in range(len(plans))]
                style = {"color": _COLORS[name], "ecolor": "#555555", "capsize": 2}
                axis.bar(places, middle, 0.36, label=name, yerr=(below, above), **style)
            axis.set_xticks(range(len(plans)), plans)
            axis.set_title(f"batch size {batch_size:,}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("ms per step")
        axes[0].legend(frameon=False)
        metadata = {"Date": None, "Description": f"results {digest()}"}
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata=metadata)
        plt.close(figure)


if __name__ == "__main__":
    draw(PICTURE)
