"""Quality of the models of sequences on MovieLens 100K, over the whole catalogue.

    python -m benchmarks.sequences [--data FOLDER] [--seeds 3] [--models hstu sasrec]
        [--out benchmarks/results/sequences.json]

Runs examples/sequences/train.py for each model and seed, and prints mean and standard deviation of
the hit rate and NDCG at 10 of the test: the last item of each user, ranked among all items that the
user has not read. Settings are those of the example, chosen on the validation part.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "sequences" / "train.py"
BASELINES = ("popularity", "knn")
MODELS = ("gru4rec", "sasrec", "bert4rec", "hstu")
METRICS = ("hit_rate@10", "ndcg@10")


def run(model: str, seed: int, options: list[str]) -> dict[str, float]:
    """Run the example; return the metrics of the test."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), "--model", model, "--seed", str(seed), *options]
        done = subprocess.run(
            [*command, "--out", folder], check=True, capture_output=True, text=True
        )
    scores: dict[str, float] = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    return {name: scores[name] for name in METRICS}


def main() -> None:
    """Measure, print a table and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", help="as for the example")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    options = [] if arguments.data is None else ["--data", arguments.data]
    result: dict[str, list[dict[str, float]]] = {}
    for model in (*BASELINES, *arguments.models):
        seeds = range(1 if model in BASELINES else arguments.seeds)
        result[model] = [run(model, seed, options) for seed in seeds]
        cells = []
        for name in METRICS:
            values = [scores[name] for scores in result[model]]
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            cells.append(f"{name} {statistics.mean(values):.4f}{spread}")
        print(f"{model:<12} {'  '.join(cells)}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
