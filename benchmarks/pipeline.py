"""Pipelined training steps of DLRM beside plain ones, TorchRec's, and the floor without overlap.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.pipeline --batch-size 8 --out result.json

The model, tables and plan are those of `benchmarks.dlrm`. Contenders live in one process and take
turns; each turn is a run of steps without a barrier in between, over a cycle of batches. The floor
is what nothing hides: dense layers under DistributedDataParallel, the lookups' forward and update,
and bare exchanges of the same bytes, one after another. `wait_ms` is how long a step's own thread
waits for exchanges of ids and embeddings: what is not hidden.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import dlrm, ranks
from benchmarks.dlrm import CPU, DIM, FEATURES, NUM_DENSE, NUM_ROWS, NUM_TABLES
from recsys.datasets.utils import Batch
from recsys.distributed.ranks import comm
from recsys.distributed.train_pipeline.pipelines import (
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from recsys.sparse import KeyedJaggedTensor, KeyedTensor

NUM_BATCHES = 8
OURS = {
    "ours, pipeline": TrainPipelineSparseDist,
    "ours, lookups after the step": TrainPipelineFusedSparseDist,
    "ours, semi-synchronous": TrainPipelineSemiSync,
}


def batches_of(batch_size: int, batch: Any, features: Any) -> Iterator[Any]:
    """A cycle of batches, the same for both libraries."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(NUM_BATCHES):
        size = NUM_TABLES * batch_size
        values = torch.randint(0, NUM_ROWS, (size,), generator=generator)
        found.append(
            batch(
                dense_features=torch.randn(batch_size, NUM_DENSE, generator=generator),
                sparse_features=features(
                    keys=FEATURES, values=values, lengths=torch.ones(size, dtype=torch.int32)
                ),
                labels=(torch.rand(batch_size, generator=generator) < 0.5).float(),
            )
        )
    return itertools.cycle(found)


def plain_steps(model: torch.nn.Module, batches: Iterator[Any], number: int) -> Callable[[], None]:
    step = dlrm.Step(model, dlrm.dense_parameters(model))

    def run() -> None:
        for _ in range(number):
            step(next(batches))

    return run


def pipelined_steps(pipeline: Any, batches: Iterator[Any], number: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(number):
            pipeline.progress(batches)

    return run


def _repeat(steps: Sequence[Callable[[], None]], number: int) -> None:
    for _ in range(number):
        for step in steps:
            step()


def floor_steps(batch_size: int, number: int) -> dict[str, Callable[[], None]]:
    """Dense layers under DDP, lookups and updates, and bare exchanges: in turn, and each alone."""
    alone = dlrm.dense_alone(dlrm.own_dlrm(), batch_size, KeyedTensor)
    floor = dlrm.Floor(batch_size, dist.get_world_size())
    batches = batches_of(batch_size, Batch, KeyedJaggedTensor)
    embeddings = torch.empty(len(floor.ids), DIM)

    def dense() -> None:
        alone(next(batches))

    def sparse() -> None:
        floor.exchange(floor.lengths)
        rows = floor.tbe.forward(floor.exchange(floor.ids), floor.offsets, None)
        floor.exchange(embeddings)
        floor.exchange(embeddings)
        rows.sum().backward()

    parts = {
        "floor": (dense, sparse),
        "dense layers alone": (dense,),
        "lookups and exchanges alone": (sparse,),
    }
    return {name: partial(_repeat, steps, number) for name, steps in parts.items()}


def waiting(run: Callable[[], None], number: int) -> float:
    """Milliseconds of a step that its own thread waits for exchanges."""
    waited = 0.0
    wait = comm.Pending.wait

    def timed(self: comm.Pending) -> Any:
        nonlocal waited
        began = time.perf_counter()
        result = wait(self)
        waited += time.perf_counter() - began
        return result

    run()
    with mock.patch.object(comm.Pending, "wait", timed):
        run()
    return waited / number * 1e3


def contenders(plan: str, batch_size: int, number: int) -> dict[str, Callable[[], None]]:
    """Runs of steps, by contender."""
    ours = batches_of(batch_size, Batch, KeyedJaggedTensor)
    runs = {}
    model = dlrm.shard_ours(dlrm.own_dlrm(), plan, dlrm.PEER_MIX)
    runs["ours, plain"] = plain_steps(model, ours, number)
    for name, kind in OURS.items():
        model = dlrm.shard_ours(dlrm.own_dlrm(), plan, dlrm.PEER_MIX)
        optimizer = torch.optim.SGD(dlrm.dense_parameters(model), lr=0.01)
        more = {"start_batch": 0} if kind is TrainPipelineSemiSync else {}
        pipeline: Any = kind(model, optimizer, CPU, **more)
        runs[name] = pipelined_steps(pipeline, ours, number)
    runs |= floor_steps(batch_size, number)
    try:
        from torchrec import KeyedJaggedTensor as PeerJagged
        from torchrec.datasets.utils import Batch as PeerBatch
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as PeerPipeline
    except ImportError:
        return runs
    theirs = batches_of(batch_size, PeerBatch, PeerJagged)
    runs["peer, plain"] = plain_steps(dlrm.peer_model(plan), theirs, number)
    model = dlrm.peer_model(plan)
    optimizer = torch.optim.SGD(dlrm.dense_parameters(model), lr=0.01)
    runs["peer, pipeline"] = pipelined_steps(PeerPipeline(model, optimizer, CPU), theirs, number)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", choices=dlrm.PLANS, default="table_wise")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    arguments = ranks.begin(parser)
    runs = contenders(arguments.plan, arguments.batch_size, arguments.steps)
    times = ranks.measure(runs, arguments.rounds, arguments.repeats)
    step_ms = {name: [t / arguments.steps for t in of] for name, of in times.items()}
    wait_ms = {
        name: waiting(run, arguments.steps) for name, run in runs.items() if name.startswith("ours")
    }
    result = {
        "plan": arguments.plan,
        "ranks": dist.get_world_size(),
        "batch_size": arguments.batch_size,
        "step_ms": step_ms,
        "wait_ms": wait_ms,
    }
    ranks.show(f"{arguments.plan} {arguments.batch_size} step_ms", step_ms)
    if dist.get_rank() == 0:
        print("wait_ms", {name: round(value, 2) for name, value in wait_ms.items()})
    ranks.end(result, arguments.out)


if __name__ == "__main__":
    main()
