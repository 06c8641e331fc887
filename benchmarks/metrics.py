"""Metrics beside TorchRec's: what an update costs of a DLRM step, and what compute() takes.

    python -m benchmarks.metrics [--rounds 5] [--out benchmarks/results/metrics-cpu.json]

The DLRM of `benchmarks.dlrm` makes a step; then one of the contenders is updated with predictions,
labels and weights of several tasks, with caches as the step has left them. Contenders take turns.
An update is without collectives in both libraries; compute() has them. Steps and updates are in
time of their thread, which leaves out waits and what else the machine does; compute() is in time of
the clock. `sums`: normalized entropy and log loss, calibration, CTR, MSE and RMSE, MAE, accuracy,
precision, recall. `rows`: besides, AUC and AUPRC over a window of 100,000 samples of each rank.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import dlrm, ranks
from recsys.sparse import KeyedJaggedTensor

SUMS = ["NE", "CALIBRATION", "CTR", "MSE", "MAE", "ACCURACY", "PRECISION", "RECALL"]
METRICS = {"sums": SUMS, "rows": [*SUMS, "AUC", "AUPRC"]}
CASES = [("sums", 1), ("sums", 8), ("rows", 8)]  # metrics, tasks
CONTENDERS = {
    "ours": ("recsys", "UNFUSED_TASKS_COMPUTATION"),
    "peer, fused tasks": ("torchrec", "FUSED_TASKS_COMPUTATION"),
    "peer": ("torchrec", "UNFUSED_TASKS_COMPUTATION"),
}
BATCH_SIZE, WINDOW = 1024, 100_000


def build(library: str, mode: str, metrics: list[str], num_tasks: int) -> Any:
    """Build the metric module of a library."""
    config = importlib.import_module(f"{library}.metrics.metrics_config")
    module = importlib.import_module(f"{library}.metrics.metric_module")
    tasks = [
        config.RecTaskInfo(f"t{i}", f"label{i}", f"prediction{i}", f"weight{i}")
        for i in range(num_tasks)
    ]
    world_size = dist.get_world_size()
    return module.generate_metric_module(
        module.RecMetricModule,
        config.MetricsConfig(
            rec_tasks=tasks,
            rec_metrics={
                config.RecMetricEnum[name]: config.RecMetricDef(
                    rec_tasks=tasks,
                    window_size=WINDOW * world_size,
                    arguments={"include_logloss": True} if name == "NE" else None,
                )
                for name in metrics
            },
            rec_compute_mode=config.RecComputeMode[mode],
        ),
        BATCH_SIZE,
        world_size,
        dist.get_rank(),
        {},
        torch.device("cpu"),
    )


def model_out(num_tasks: int) -> dict[str, torch.Tensor]:
    """What a model of several tasks gives."""
    out = {}
    for i in range(num_tasks):
        out[f"prediction{i}"] = torch.rand(BATCH_SIZE)
        out[f"label{i}"] = (torch.rand(BATCH_SIZE) < 0.3).float()
        out[f"weight{i}"] = torch.rand(BATCH_SIZE)
    return out


def milliseconds(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time one call."""
    began = clock()
    run()
    return (clock() - began) * 1e3


def run_case(kind: str, num_tasks: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Time all contenders in turns."""
    batch = dlrm.Batch(
        torch.randn(BATCH_SIZE, dlrm.NUM_DENSE),
        dlrm.ids(BATCH_SIZE, KeyedJaggedTensor),
        (torch.rand(BATCH_SIZE) < 0.5).float(),
    )
    model = dlrm.shard_ours(dlrm.own_dlrm(), "table_wise", dlrm.MIX)
    step = dlrm.Step(model, dlrm.dense_parameters(model))
    out = model_out(num_tasks)
    modules = {name: build(*given, METRICS[kind], num_tasks) for name, given in CONTENDERS.items()}
    for _ in range(WINDOW // BATCH_SIZE + 1):  # windows that are full
        for module in modules.values():
            module.update(out)
    result: dict[str, Any] = {
        what: {name: [] for name in modules} for what in ("update_ms", "compute_ms")
    }
    result["step_ms"] = []
    for _ in range(rounds):
        for name, module in modules.items():
            steps, updates = [], []
            for _ in range(repeats):
                steps.append(milliseconds(lambda: step(batch), time.thread_time))
                update = functools.partial(module.update, out)
                updates.append(milliseconds(update, time.thread_time))
            result["step_ms"].append(statistics.median(steps))
            # Means: now and then an update adds up the batches before it, too.
            result["update_ms"][name].append(statistics.mean(updates))
            dist.barrier()
            result["compute_ms"][name].append(
                milliseconds(lambda module=module: dict(module.compute()))
            )
    return result


def main() -> None:
    """Run all cases on one and two ranks, or one case on the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--metrics", choices=METRICS)
    parser.add_argument("--tasks", type=int, default=1)
    if "RANK" in os.environ:
        arguments = ranks.begin(parser)
        result = run_case(arguments.metrics, arguments.tasks, arguments.rounds, arguments.repeats)
        ranks.end(result, arguments.out)
        return
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"batch_size": BATCH_SIZE, "window_per_rank": WINDOW, "cases": []}
    for num_ranks in (1, 2):
        for kind, num_tasks in CASES:
            given = ("--metrics", kind, "--tasks", str(num_tasks))
            # Enough updates for all batches that are added up together.
            given += ("--repeats", "32" if num_tasks == 1 else "16")
            given += ("--rounds", str(arguments.rounds))
            case = ranks.launch("benchmarks.metrics", num_ranks, *given)
            case = {"metrics": kind, "tasks": num_tasks, "ranks": num_ranks, **case}
            result["cases"].append(case)
            print(row(case), flush=True)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def row(case: dict[str, Any]) -> str:
    """Write a row of the table in docs/benchmarks.md."""
    step_ms = statistics.median(case["step_ms"])
    cells = [case["metrics"], str(case["tasks"]), str(case["ranks"]), f"{step_ms:.0f} ms"]
    for times_ms in case["update_ms"].values():
        median_ms = statistics.median(times_ms)
        cells.append(f"{median_ms:.2f} ms, {median_ms / step_ms:.1%}")
    cells += [f"{statistics.median(times_ms):.1f} ms" for times_ms in case["compute_ms"].values()]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
