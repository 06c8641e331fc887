"""`python -m recsys calibrate`: measures this machine and writes a topology file for the planner.

All ranks measure at the same time and the slowest rank counts, because ranks of a node share its
memory. As in training, each turn looks up other ids and writes to newly allocated memory. A number
is the median over rounds of the median over turns, which reduces the effect of other processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.planner.costs import (
    REPLICA_PASSES,
    lookup_bytes,
    statistic_bytes,
)
from recsys.distributed.planner.hardware import Hardware
from recsys.distributed.planner.measured import CollectivePoint, LookupPoint
from recsys.distributed.planner.topology import Topology
from recsys.distributed.ranks.node import get_local_size
from recsys.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.types import EmbOptimType, OptimizerSpec, PoolingType, TableSpec, UpdateMode
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor

DIMS = (16, 32, 64, 128, 256)
POOLINGS = (1, 4, 16, 64)
SIZES = tuple(4**power for power in range(5, 13))  # bytes: 1 KiB to 16 MiB
_TABLE_BYTES = 128 << 20  # more than caches hold
_IDS = {"cpu": 1 << 15, "cuda": 1 << 20}
_COPIED_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
_ROUNDS, _TURNS, _WARM_UP = 9, 3, 1

_Measured = TypeVar("_Measured", Hardware, LookupPoint, CollectivePoint)


@final
class Stopwatch:
    """Timer of functions that all ranks run at the same time.

    Args:
        device: Device to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def median_ms(self, *runs: Callable[[], object], turns: int | None = None) -> list[float]:
        """Return the median milliseconds of each function on the slowest rank."""
        times = []
        for turn in range(_WARM_UP + (turns or _TURNS)):
            of_turn = []
            for run in runs:
                dist.barrier()
                started = self._now()
                run()
                of_turn.append(self._now() - started)
            if turn >= _WARM_UP:
                times.append(of_turn)
        medians = torch.tensor([statistics.median(of_run) for of_run in zip(*times, strict=True)])
        medians = medians.to(self.device)
        dist.all_reduce(medians, dist.ReduceOp.MAX)
        return medians.tolist()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() * 1e3


def measure_lookups(watch: Stopwatch) -> Iterator[LookupPoint]:
    """Yield the bandwidth of lookups by dim and pooling, with row-wise Adagrad in backward."""
    for dim in DIMS:
        rows = _TABLE_BYTES // (4 * dim)
        kernels = [
            _table(watch.device, rows, dim, UpdateMode.FUSED),
            _table(watch.device, rows, dim, UpdateMode.DEFERRED, keeps_batch=True),
        ]
        for pooling in POOLINGS:
            yield _lookup_point(watch, kernels, rows, dim, pooling)


def _table(
    device: torch.device, rows: int, dim: int, mode: UpdateMode, *, keeps_batch: bool = False
) -> TableBatchedEmbedding:
    """Return a table with row-wise Adagrad."""
    kernel = TableBatchedEmbedding(
        [TableSpec(name="t", num_rows=rows, dim=dim)],
        feature_table_map=[0],
        pooling=PoolingType.SUM,
        optimizer=OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD),
        update_mode=mode,
        device=device,
        keeps_batch=keeps_batch,
    )
    kernel.storage.zero_()
    kernel.learning_rates = [0.01]
    return kernel


def _lookup_point(
    watch: Stopwatch, kernels: Sequence[TableBatchedEmbedding], rows: int, dim: int, pooling: int
) -> LookupPoint:
    device, num_ids = watch.device, _IDS[watch.device.type]
    seeded = torch.Generator().manual_seed(dim + pooling)  # equal on all ranks
    drawn = torch.randint(rows, (_WARM_UP + _TURNS, num_ids), generator=seeded)
    of_turns = iter(drawn.to(device))
    offsets = torch.arange(0, num_ids + 1, pooling, device=device)
    gradient = torch.ones(num_ids // pooling, dim, device=device)
    fused, deferred = kernels
    kept = deferred.deferred
    outputs: list[Tensor] = []
    ids: list[Tensor] = []

    def update_split() -> None:
        outputs.pop().backward(gradient)
        kept.step([statistic / dim for statistic in kept.row_statistics()])

    forward_ms, backward_ms, _, _, split_ms = watch.median_ms(
        lambda: outputs.append(fused.forward(next(of_turns), offsets)),
        lambda: outputs.pop().backward(gradient),
        lambda: ids.append(torch.randint(rows, (num_ids,), device=device)),
        lambda: outputs.append(deferred.forward(ids.pop(), offsets)),
        update_split,
    )
    touched = sum(len(row.unique()) for row in drawn) / len(drawn)
    forward_bytes, backward_bytes = lookup_bytes(num_ids, touched, 4 * dim, 4 * dim, 4)
    return LookupPoint(
        dim=dim,
        pooling=pooling,
        forward_bw=forward_bytes / forward_ms,
        backward_bw=backward_bytes / backward_ms,
        split_bw=(backward_bytes + statistic_bytes(num_ids, 4 * dim)) / split_ms,
    )


def measure_collectives(watch: Stopwatch) -> Iterator[CollectivePoint]:
    """Yield the times of the collectives that sharded models use, by size."""
    world_size = dist.get_world_size()
    for size in SIZES:
        if size // 4 < world_size:
            continue  # fewer numbers than ranks
        buffer = torch.zeros(size // 4 // world_size * world_size, device=watch.device)
        times = watch.median_ms(partial(_exchange, buffer), partial(dist.all_reduce, buffer))
        for kind, ms in zip(("all_to_all", "all_reduce"), times, strict=True):
            yield CollectivePoint(
                kind=kind, world_size=world_size, bytes=4 * len(buffer), ms=max(ms, 1e-6)
            )


def _exchange(given: Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(given), given)


def measure_hardware(watch: Stopwatch, found: Hardware) -> Hardware:
    """Return `found` with measured memory bandwidths and fixed times."""
    device = watch.device
    size = _COPIED_BYTES[device.type]
    memory_bw = REPLICA_PASSES * size / measure_replica(watch, size)
    step_ms = measure_step(watch)
    if device.type == "cpu":
        return dataclasses.replace(found, name="measured", ddr_mem_bw=memory_bw, step_ms=step_ms)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    on_host = source.cpu().pin_memory()
    scalar = torch.zeros(1, device=device)
    link_ms, launch_ms = watch.median_ms(
        lambda: source.copy_(on_host, non_blocking=True), lambda: scalar.add_(1)
    )
    return dataclasses.replace(
        found,
        name="measured",
        hbm_mem_bw=memory_bw,
        hbm_to_ddr_mem_bw=size / link_ms,
        ddr_mem_bw=max(found.ddr_mem_bw, size / link_ms),  # at least the speed of the link
        kernel_launch_ms=launch_ms,
        step_ms=step_ms,
    )


def measure_replica(watch: Stopwatch, num_bytes: int) -> float:
    """Return the milliseconds of a dense update of a replica, without the exchange.

    As in training, most writes go to newly allocated memory.
    """
    dim = 64
    kernel = _table(watch.device, num_bytes // (4 * dim), dim, UpdateMode.DEFERRED)

    def update() -> None:
        gradient = torch.zeros_like(kernel.storage).mul_(0.5)
        kernel.deferred.step_dense(gradient)

    [milliseconds] = watch.median_ms(update)
    return milliseconds


def with_links(found: Hardware, exchanges: Sequence[CollectivePoint]) -> Hardware:
    """Return `found` with the latency and bandwidth of measured all-to-alls."""
    first, *_, last = sorted(exchanges, key=lambda point: point.bytes)
    ranks, in_node = last.world_size, get_local_size(last.world_size)
    of_rank = last.bytes / ranks / last.ms
    if ranks > in_node:
        return dataclasses.replace(
            found, inter_host_latency_ms=first.ms, inter_host_bw=of_rank * (ranks - in_node)
        )
    return dataclasses.replace(
        found, intra_host_latency_ms=first.ms, intra_host_bw=of_rank * (ranks - 1)
    )


def measure_step(watch: Stopwatch) -> float:
    """Return the milliseconds of a training step of a sharded collection with a minimal batch."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=10, embedding_dim=8, feature_names=[f"f{i}"]
        )
        for i in range(8)
    ]
    world_size = dist.get_world_size()
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    ranks = {table.name: table_wise(rank=i % world_size) for i, table in enumerate(tables)}
    plan = construct_module_sharding_plan(
        collection,
        ranks,
        sharder,
        world_size=world_size,
        local_size=get_local_size(dist.get_world_size()),
        device_type=watch.device.type,
    )
    model = DistributedModelParallel(
        collection, device=watch.device, plan=ShardingPlan({"": plan}), sharders=[sharder]
    )
    features = KeyedJaggedTensor(
        [f"f{i}" for i in range(8)],
        torch.zeros(8, dtype=torch.int64, device=watch.device),
        lengths=torch.ones(8, dtype=torch.int32, device=watch.device),
    )
    [step_ms] = watch.median_ms(lambda: model(features).values().sum().backward(), turns=15)
    return step_ms


@final
class Calibration:
    """Measurements of the ranks of this job, in rounds.

    All ranks must make the same calls.

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._watch = Stopwatch(device)
        self._usual = Topology(world_size=dist.get_world_size(), compute_device=device.type)
        self._hardware: list[list[Hardware]] = []
        self._collectives: list[list[CollectivePoint]] = []
        self._lookup: list[list[LookupPoint]] = []

    def measure(self, measured: Callable[[], None] = lambda: None) -> None:
        """Measure one round, which takes some seconds.

        Args:
            measured: Called after the collectives (with several ranks), after the memory, and after
                the lookups of each dim.
        """
        if self._usual.world_size > 1:
            self._collectives.append(list(measure_collectives(self._watch)))
            measured()
        self._hardware.append([measure_hardware(self._watch, self._usual.slowest)])
        measured()
        points = []
        for point in measure_lookups(self._watch):
            points.append(point)
            if point.pooling == POOLINGS[-1]:
                measured()
        self._lookup.append(points)

    def topology(self) -> Topology:
        """Return the topology of these ranks, with the medians of the rounds."""
        [rank], exchanges = median_of(self._hardware), median_of(self._collectives)
        if exchanges:
            rank = with_links(rank, [point for point in exchanges if point.kind == "all_to_all"])
        return Topology.from_hardware(
            [rank] * self._usual.world_size,
            self._usual.local_world_size,
            lookup=median_of(self._lookup),
            collectives=exchanges,
        )


def calibrate(device: torch.device) -> Topology:
    """Measure the ranks of this job and return their topology.

    All ranks must call it. It takes a minute or two, more on a busy machine. Rank 0 reports the
    progress on standard error.

    Args:
        device: Device of this rank.
    """
    calibration = Calibration(device)
    total = _ROUNDS * ((dist.get_world_size() > 1) + 1 + len(DIMS))
    began, numbers = time.perf_counter(), itertools.count(1)

    def report_progress() -> None:
        done = next(numbers)
        left = (time.perf_counter() - began) / done * (total - done)
        if dist.get_rank() == 0:
            text = f"{done} of {total} measured, about {left:.0f} s left."
            print(text, file=sys.stderr, flush=True)

    for _ in range(_ROUNDS):
        calibration.measure(report_progress)
    return calibration.topology()


def median_of(rounds: Sequence[Sequence[_Measured]]) -> list[_Measured]:
    """Return the results of a round, with the median over all rounds of each time and bandwidth.

    Example:
        >>> point = CollectivePoint(kind="all_reduce", world_size=2, bytes=8, ms=1.0)
        >>> slow = dataclasses.replace(point, ms=9.0)
        >>> median_of([[slow], [point], [point]]) == [point]
        True
    """
    results = []
    for same in zip(*rounds, strict=True):
        names = [f.name for f in dataclasses.fields(same[0]) if f.name.endswith(("ms", "_bw"))]
        medians = {name: statistics.median(getattr(m, name) for m in same) for name in names}
        results.append(dataclasses.replace(same[0], **medians))
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument(
        "--world-size",
        type=int,
        default=torch.cuda.device_count() or 1,
        metavar="N",
        help="number of ranks to start; ignored under torchrun (default: one per GPU, else 1)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("topology.json"),
        metavar="FILE",
        help="the topology file to write (default: %(default)s)",
    )


def _why_unwritable(path: Path) -> str | None:
    """Return the reason that a file cannot be written, checked before the measurement."""
    try:
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def main(options: argparse.Namespace) -> int:
    """Measure with the given number of processes, or with the processes of torchrun."""
    if options.world_size < 1:
        print(f"--world-size must be at least 1; received {options.world_size}.", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") == "0" and (problem := _why_unwritable(options.out)):
        print(f"--out {options.out} cannot be written: {problem}.", file=sys.stderr)
        return 2
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc-per-node={options.world_size}"]
        command = [*torchrun, "-m", "recsys", "calibrate", "--out", str(options.out)]
        alone = {"OMP_NUM_THREADS": "1"} if options.world_size > 1 else {}  # ranks share the cores
        return subprocess.run(command, check=False, env={**alone, **os.environ}).returncode
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo", timeout=timedelta(minutes=5))
    try:
        topology = calibrate(device)
        rank = dist.get_rank()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        topology.to_json(options.out)
        print(f"{topology}\nWritten to {options.out}.")
    return 0
