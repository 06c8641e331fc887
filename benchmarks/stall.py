"""What a save costs training: seconds of steps lost to an asynchronous save, and to other writes.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.stall --out result.json

The model and tables are those of `benchmarks.dlrm`. Windows of equal length take turns: steps
alone, steps with an asynchronous save that begins with the window, steps beside a process that
writes as many bytes and does nothing else (what the disk itself costs), steps after a plain save.
What a save costs is by how many steps a window with it falls behind those beside it, as seconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
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
from recsys.distributed.checkpoint import save_checkpoint, save_checkpoint_async
from recsys.distributed.train_pipeline.pipelines import TrainPipelineSparseDist
from recsys.sparse import KeyedJaggedTensor

KINDS = ("alone", "asynchronous", "bare write", "plain")
BARE_WRITE = """
import os, sys
piece = os.urandom(1 << 20)
with open(sys.argv[1], "wb", buffering=0) as file:
    for _ in range(int(sys.argv[2]) >> 20):
        file.write(piece)
    os.fsync(file.fileno())
"""


def window(pipeline: Any, batches: Any, seconds: float, save: Any) -> tuple[int, float]:
    """Steps in so many seconds with a save at their beginning, and how long its call took."""
    dist.barrier()
    began = time.perf_counter()
    save()
    called = time.perf_counter() - began
    steps = 0
    goes_on = torch.ones(1)
    while goes_on:
        pipeline.progress(batches)
        steps += 1
        if steps % 5 == 0:  # rank 0's clock decides, for all
            goes_on.fill_(time.perf_counter() - began < seconds)
            dist.broadcast(goes_on, 0)
    return steps, called


def main() -> None:
    """Prints medians; writes all windows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    parser.add_argument("--batch-size", type=int, default=1024)
    arguments = ranks.begin(parser)
    model = dlrm.shard_ours(dlrm.own_dlrm(), "table_wise", dlrm.MIX)
    optimizer = torch.optim.SGD(dlrm.dense_parameters(model), lr=0.01)
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, CPU)
    batches = batches_of(arguments.batch_size, Batch, KeyedJaggedTensor)
    found: dict[str, list[tuple[int, float]]] = {kind: [] for kind in KINDS}
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    path, tables = Path(folders[0]), model.fused_optimizer
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    writers: list[subprocess.Popen[bytes]] = []

    def bare_write() -> None:
        for writer in writers:
            writer.wait()
        file = path / f"bare-{dist.get_rank()}"
        command = [sys.executable, "-S", "-c", BARE_WRITE, str(file), str(num_bytes)]
        writers[:] = [subprocess.Popen(command)]

    saves = {
        "alone": lambda: None,
        "asynchronous": lambda: save_checkpoint_async(path, model, tables, keep=1),
        "bare write": bare_write,
        "plain": lambda: save_checkpoint(path, model, tables, keep=1),
    }
    for round_ in range(arguments.rounds + 1):
        for kind, save in saves.items():
            result = window(pipeline, batches, arguments.seconds, save)
            if round_:  # the first warms up
                found[kind].append(result)
    save_checkpoint_async(path, model, tables, keep=1).wait()
    for writer in writers:
        writer.wait()
    rate = statistics.median(steps for steps, _ in found["alone"]) / arguments.seconds
    lost = {
        kind: [
            (alone - steps) / rate
            for (alone, _), (steps, _) in zip(found["alone"], found[kind], strict=True)
        ]
        for kind in KINDS[1:]
    }
    if dist.get_rank() == 0:
        for kind, seconds in lost.items():
            called = statistics.median(called for _, called in found[kind])
            print(
                f"{kind}: the call {called:.2f} s, {statistics.median(seconds):.2f} s of steps lost"
                f" ({min(seconds):.2f} to {max(seconds):.2f}), {num_bytes >> 20} MiB on each rank"
            )
    result = {"seconds": arguments.seconds, "windows": found, "lost_s": lost, "bytes": num_bytes}
    ranks.end(result, arguments.out)


if __name__ == "__main__":
    main()
