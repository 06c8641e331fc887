"""Trains for long, with evaluations and saves in between: do memory and the time of a step stay?

    torchrun --standalone --nproc-per-node=2 -m benchmarks.soak --out soak.json --plot soak.png

Steps are timed in windows, each beside a piece of work of a fixed size (a matrix product and a copy
on one thread), which is as slow as the machine is at that moment: it is their ratio that must stay.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import dlrm, ranks
from benchmarks.dlrm import CPU
from benchmarks.pipeline import batches_of
from recsys.datasets.utils import Batch
from recsys.distributed.checkpoint import RandomState, save_checkpoint_async
from recsys.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineSparseDist
from recsys.sparse import KeyedJaggedTensor

WINDOW = 40  # steps


def resident_mib() -> float:
    """What this process holds of memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def fixed_work(left: torch.Tensor, right: torch.Tensor) -> float:
    """Milliseconds that a piece of work takes which is always the same."""
    began = time.perf_counter()
    for _ in range(20):
        (left @ right).clone()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    """Prints the trend; writes and draws all windows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--plot", type=Path)
    arguments = ranks.begin(parser)
    model = dlrm.shard_ours(dlrm.own_dlrm(), "mixed", dlrm.MIX)
    optimizer = torch.optim.SGD(dlrm.dense_parameters(model), lr=0.01)
    training: Any = TrainPipelineSparseDist(model, optimizer, CPU)
    evaluation: Any = EvalPipelineSparseDist(model, optimizer, CPU)
    batches = batches_of(arguments.batch_size, Batch, KeyedJaggedTensor)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    left, right = torch.rand(256, 256), torch.rand(256, 256)
    progress = {"random": RandomState()}
    windows: list[dict[str, float]] = []
    goes_on, pending = torch.ones(1), None
    began = time.perf_counter()
    while goes_on:
        times = []
        for _ in range(WINDOW):
            started = time.perf_counter()
            training.progress(batches)
            times.append((time.perf_counter() - started) * 1e3)
        number = len(windows)
        if number % 5 == 2:
            model.eval()
            few = iter([next(batches) for _ in range(10)])
            for _ in range(10):
                evaluation.progress(few)
            model.train()
        if number % 40 == 7:
            tables = model.fused_optimizer
            pending = save_checkpoint_async(folders[0], model, tables, progress=progress)
        elif pending is not None:  # what is held meanwhile belongs to the save
            pending.wait()
            pending = None
        windows.append(
            {
                "s": time.perf_counter() - began,
                "step_ms": statistics.median(times),
                "work_ms": fixed_work(left, right),
                "resident_mib": resident_mib(),
            }
        )
        goes_on.fill_(time.perf_counter() - began < arguments.minutes * 60)
        dist.broadcast(goes_on, 0)
    quarter = max(len(windows) // 4, 1)
    second, last = windows[quarter : 2 * quarter] or windows, windows[-quarter:]
    trend = {
        key: statistics.median(of(w) for w in last) / statistics.median(of(w) for w in second)
        for key, of in {
            "step beside fixed work": lambda w: w["step_ms"] / w["work_ms"],
            "step": lambda w: w["step_ms"],
            "memory": lambda w: w["resident_mib"],
        }.items()
    }
    result = {"windows": windows, "steps_per_window": WINDOW, "last_by_second_quarter": trend}
    if dist.get_rank() == 0:
        print(f"{len(windows) * WINDOW} steps; last quarter by the second: {trend}")
        if arguments.plot is not None:
            draw(windows, arguments.plot)
    ranks.end(result, arguments.out)


def draw(windows: list[dict[str, float]], path: Path) -> None:
    """Draw step times and memory over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [window["s"] / 60 for window in windows]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5))
    ratios = [window["step_ms"] / window["work_ms"] for window in windows]
    above.plot(minutes, ratios, linewidth=0.6)
    above.set(ylabel="step / fixed work", ylim=(0, 2 * statistics.median(ratios)))
    below.plot(minutes, [window["resident_mib"] for window in windows], linewidth=0.8)
    below.set(ylabel="resident MiB, rank 0", xlabel="minutes")
    below.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
