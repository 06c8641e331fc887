"""Quality of the models of the examples on MovieLens 100K.

    python -m benchmarks.models sequences [--data PATH] [--seeds 3] [--models hstu sasrec]
        [--out benchmarks/results/sequences-cpu.json]
    python -m benchmarks.models ctr [--data FOLDER]
    python -m benchmarks.models multi_task [--data FOLDER]

Runs the script of a family in examples/ for each model and seed, and prints mean and standard
deviation of the metrics of the test. Settings are those of the example, chosen on the validation
part. Other data have the formats that the example describes.
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

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
from movielens.files import is_movielens  # noqa: E402

NEEDS_HISTORIES = ("din", "hstu")
BASELINES = {
    "sequences": ("popularity", "knn"),
    "ctr": ("logistic_regression",),
    "multi_task": (),
}
"""Models without a seed."""
MODELS = {
    "sequences": ("gru4rec", "sasrec", "bert4rec", "hstu"),
    "ctr": ("dlrm", "deepfm", "dcn_v2", "autoint", "final_mlp", "din", "hstu"),
    "multi_task": ("single", "shared_bottom", "mmoe", "ple"),
}
METRICS = {
    "sequences": ("hit_rate@10", "ndcg@10"),
    "ctr": ("auc", "loss"),
    "multi_task": ("auc/liked", "auc/loved"),
}


def run(family: str, model: str, seed: int, options: list[str]) -> dict[str, float]:
    """Run the example; return the metrics of the test."""
    script = EXAMPLES / family / "train.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), "--model", model, "--seed", str(seed), *options]
        done = subprocess.run([*command, "--out", folder], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    scores: dict[str, float] = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    return {name: scores[name] for name in METRICS[family]}


def main() -> None:
    """Measure, print a table and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("family", choices=MODELS)
    parser.add_argument("--data", help="as for the example")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", help="default: all")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    family = arguments.family
    options = [] if arguments.data is None else ["--data", arguments.data]
    models = [*BASELINES[family], *(arguments.models or MODELS[family])]
    if family == "ctr" and not (arguments.data is None or is_movielens(arguments.data)):
        left_out = [model for model in models if model in NEEDS_HISTORIES]
        models = [model for model in models if model not in NEEDS_HISTORIES]
        if left_out:
            print(f"Without {' and '.join(left_out)}: they need histories, as MovieLens has.")
    result: dict[str, list[dict[str, float]]] = {}
    for model in models:
        seeds = range(1 if model in BASELINES[family] else arguments.seeds)
        result[model] = [run(family, model, seed, options) for seed in seeds]
        cells = []
        for name in METRICS[family]:
            values = [scores[name] for scores in result[model]]
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            cells.append(f"{name} {statistics.mean(values):.4f}{spread}")
        print(f"{model:<20} {'  '.join(cells)}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
