"""Turn benchmark results into a table, and a plot where matplotlib is installed.

python -m benchmarks.report [--plot benchmarks/results/dlrm-cpu.png]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def ratio(ours: Sequence[float], other: Sequence[float]) -> str:
    """Return the median ratio of the rounds, and its least and greatest."""
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    return f"{statistics.median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def sharded_part(step: dict[str, list[float]], whole: str, dense: str) -> list[float]:
    """Return per round a step less the same step without tables."""
    return [max(a - b, 1e-3) for a, b in zip(step[whole], step[dense], strict=True)]


def rows(result: dict) -> list[list[str]]:
    """Return one line per case."""
    lines = []
    for case in result["cases"]:
        step, forward = case["step_ms"], case["forward_ms"]
        line = [case["plan"], str(case["ranks"]), str(case["batch_size"])]
        line += [
            f"{statistics.median(forward['ours']):.2f}",
            ratio(forward["ours"], forward["floor"]),
        ]
        if "peer" in forward:
            line += [
                ratio(forward["ours"], forward["peer"]),
                ratio(step["ours"], step["peer"]),
                ratio(step["ours_same_dense"], step["peer"]),
                ratio(
                    sharded_part(step, "ours_same_dense", "dense_alone"),
                    sharded_part(step, "peer", "dense_alone"),
                ),
            ]
        else:
            line += [case["peer"], "", "", ""]
        lines.append(line)
    return lines


HEAD = [
    *("plan", "ranks", "batch", "forward ms", "forward / floor", "forward / peer"),
    *("step / peer", "same dense / peer", "sharded part / peer"),
]


def print_table(result: dict) -> None:
    """Print ratios, below 1 where ours is faster; in brackets those of the extreme rounds."""
    table = [HEAD, *rows(result)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    imports = {k: statistics.median(v) for k, v in result["import_s"].items() if v}
    print("\nimport, beyond torch:", ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in imports.items()))
    print("machine:", result["machine"])


def print_engine(result: dict) -> None:
    """Print the engine's cases as a Markdown table, and the memory of construction."""
    print("| case | ours, ms | ours / floor | ours / peer | exchanges |")
    print("|---|---|---|---|---|")
    for name, case in result["cases"].items():
        step = case["step_ms"]
        peer = ratio(step["ours"], step["peer"]) if "peer" in step else case["peer"][:60]
        print(
            f"| {name} | {statistics.median(step['ours']):.1f} | "
            f"{ratio(step['ours'], step['floor']).strip()} | {peer.strip()} | "
            f"{case['exchanges']} |"
        )
    for library, memory in result["memory"].items():
        peak = (memory["peak"] - memory["before"]) / memory["exact"]
        print(
            f"{library}: {memory['exact'] / 2**30:.2f} GiB of tables and state on rank 0, peak "
            f"above the process {peak:.3f} of that"
        )


def print_planner(result: dict) -> None:
    """Print the planner's cases as Markdown tables: seconds, quality, and spread over seeds."""

    def seconds(turns: Sequence[dict]) -> str:
        done = [f"{t['seconds']:.2f} ({t['cpu_s']:.2f})" for t in turns if "seconds" in t]
        stopped = [
            f"stopped after {t['stopped_after_s']:.0f} ({t['cpu_s']:.0f})"
            for t in turns
            if "stopped_after_s" in t
        ]
        return ", ".join(done + stopped) or "not tried"

    print(
        "| tables x ranks | ours, s (of CPU) | peer, s (of CPU) | ours: gap | peer by our costs |",
        end="",
    )
    print(" ours by its estimates | peer by its estimates |\n|---|---|---|---|---|---|---|")
    for name, case in result["cases"].items():
        best = next((turn for turn in case["ours"] if "gap" in turn), None)
        line = [name, seconds(case["ours"]), seconds(case["peer"])]
        line += ["" if best is None else _above(best)]
        judged = next((turn for turn in case["peer"] if "seconds" in turn), None)
        if judged is None or best is None:
            line += [""] * 3
        else:
            slower = judged["by_our_costs"]["slowest_ms"] / best["slowest_ms"] - 1
            line += [f"{slower:+.1%}, imbalance {judged['by_our_costs']['imbalance']:.1%}"]
            line += [_above(judged[key]) for key in ("ours_by_its_estimates", "by_its_estimates")]
        print("|", " | ".join(line), "|")
    print(
        "\n| tables x ranks | memory taken | plans | gap: median | most | s of CPU: median | most |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, turn in result["spread"].items():
        plans = turn.get("plans", [])
        for fill in dict.fromkeys(plan["fill"] for plan in plans):
            of_fill = [plan for plan in plans if plan["fill"] == fill]
            found = [plan for plan in of_fill if "gap" in plan]
            line = [name, "as it is" if fill is None else f"{fill:.0%}"]
            line += [f"{len(found)} of {len(of_fill)}"]
            for key, form in (("gap", ".2%"), ("cpu_s", ".1f")):
                values = [plan[key] for plan in found] or [float("nan")]
                line += [format(statistics.median(values), form), format(max(values), form)]
            print("|", " | ".join(line), "|")


def _above(quality: dict) -> str:
    gap, imbalance = quality["gap"], quality["imbalance"]
    return f"{quality['slowest_ms']:.2f} ms, {gap:.2%} above the bound, imbalance {imbalance:.1%}"


def plot(result: dict, path: Path) -> None:
    """Draw the forward's time beside the peer's and the floor's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = result["cases"]
    names = [f"{c['plan']}\n{c['ranks']} ranks, batch {c['batch_size']}" for c in cases]
    figure, axes = plt.subplots(figsize=(1.1 * len(cases) + 2, 4.5))
    for shift, (contender, color) in enumerate(
        (("floor", "#bbbbbb"), ("ours", "#1f77b4"), ("peer", "#d95f02"))
    ):
        times = [c["forward_ms"].get(contender) for c in cases]
        places = [i + 0.27 * (shift - 1) for i, t in enumerate(times) if t]
        heights = [statistics.median(t) for t in times if t]
        axes.bar(places, heights, 0.25, label=contender, color=color)
    axes.set_yscale("log")
    axes.set_ylabel("collection forward, ms (log)")
    axes.set_xticks(range(len(cases)), names, rotation=60, ha="right", fontsize=8)
    axes.legend()
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, default=RESULTS / "dlrm-cpu.png")
    parsed = parser.parse_args(arguments)
    result = json.loads((RESULTS / "dlrm-cpu.json").read_text())
    print_table(result)
    try:
        plot(result, parsed.plot)
    except ImportError:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
