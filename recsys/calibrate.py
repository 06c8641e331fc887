"""``python -m recsys calibrate``: measures this machine and writes it down for the planner.

All ranks measure at the same time, as they work in training, and the slowest counts: ranks of a
node share its memory. Every number is the median of several turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.node import get_local_size
from recsys.distributed.planner.costs import lookup_bytes
from recsys.distributed.planner.hardware import Hardware
from recsys.distributed.planner.measured import CollectivePoint, LookupPoint
from recsys.distributed.planner.topology import Topology
from recsys.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from recsys.distributed.types import ShardingPlan
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.types import EmbOptimType, OptimizerSpec, PoolingMode, TableSpec, UpdateMode
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor

DIMS = (16, 32, 64, 128, 256)
POOLINGS = (1, 4, 16, 64)
SIZES = tuple(4**power for power in range(5, 13))  # bytes: 1 KiB to 16 MiB
_TABLE_BYTES = 128 << 20  # more than caches hold
_IDS = {"cpu": 1 << 15, "cuda": 1 << 20}
_COPIED_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
_TURNS, _WARM_UP = 9, 2


@final
class Stopwatch:
    """Times what all ranks do at once.

    Args:
        device: whose work to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def median_ms(self, *runs: Callable[[], object], turns: int = _TURNS) -> list[float]:
        """Returns the median milliseconds of each, run one after the other, on the slowest rank."""
        times = []
        for turn in range(_WARM_UP + turns):
            dist.barrier()
            ends = [self._now()]
            for run in runs:
                run()
                ends.append(self._now())
            if turn >= _WARM_UP:
                times.append([end - start for start, end in zip(ends, ends[1:], strict=False)])
        medians = torch.tensor([statistics.median(of_run) for of_run in zip(*times, strict=True)])
        medians = medians.to(self.device)
        dist.all_reduce(medians, dist.ReduceOp.MAX)
        return medians.tolist()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() * 1e3


def measure_lookups(watch: Stopwatch) -> Iterator[LookupPoint]:
    """Yields the speed of lookups by dim and pooling, with row-wise Adagrad in backward."""
    for dim in DIMS:
        rows = _TABLE_BYTES // (4 * dim)
        kernel = TableBatchedEmbedding(
            [TableSpec(name="t", num_rows=rows, dim=dim)],
            feature_table_map=[0],
            pooling=PoolingMode.SUM,
            optimizer=OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD),
            update_mode=UpdateMode.FUSED,
            device=watch.device,
        )
        kernel.storage.zero_()
        kernel.learning_rates = [0.01]
        for pooling in POOLINGS:
            yield _lookup_point(watch, kernel, rows, dim, pooling)


def _lookup_point(
    watch: Stopwatch, kernel: TableBatchedEmbedding, rows: int, dim: int, pooling: int
) -> LookupPoint:
    num_ids = _IDS[watch.device.type]
    ids = torch.randint(rows, (num_ids,), device=watch.device)
    offsets = torch.arange(0, num_ids + 1, pooling, device=watch.device)
    gradient = torch.ones(num_ids // pooling, dim, device=watch.device)
    outputs: list[Tensor] = []

    forward_ms, backward_ms = watch.median_ms(
        lambda: outputs.append(kernel.forward(ids, offsets)),
        lambda: outputs.pop().backward(gradient),
    )
    touched = len(ids.unique())
    forward_bytes, backward_bytes = lookup_bytes(num_ids, touched, 4 * dim, 4 * dim, 4)
    return LookupPoint(
        dim=dim,
        pooling=pooling,
        forward_bw=forward_bytes / forward_ms,
        backward_bw=backward_bytes / backward_ms,
    )


def measure_collectives(watch: Stopwatch) -> Iterator[CollectivePoint]:
    """Yields the times of the collectives that sharded models use, by size."""
    world_size = dist.get_world_size()
    for size in SIZES:
        given = torch.zeros(size // 4 // world_size * world_size, device=watch.device)
        received = torch.empty_like(given)
        runs: dict[str, Callable[[], object]] = {
            "all_to_all": lambda a=received, b=given: dist.all_to_all_single(a, b),
            "all_reduce": lambda a=received: dist.all_reduce(a),
        }
        times = watch.median_ms(*runs.values())
        for kind, ms in zip(runs, times, strict=True):
            yield CollectivePoint(
                kind=kind, world_size=world_size, bytes=4 * len(given), ms=max(ms, 1e-6)
            )


def measure_hardware(
    watch: Stopwatch, found: Hardware, points: Sequence[CollectivePoint]
) -> Hardware:
    """Returns what was found, with speeds that are measured here."""
    device = watch.device
    source = torch.zeros(_COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    [copy_ms] = watch.median_ms(lambda: target.copy_(source))
    measured = {f"{'hbm' if device.type == 'cuda' else 'ddr'}_mem_bw": 2 * len(source) / copy_ms}
    if device.type == "cuda":
        on_host = source.cpu().pin_memory()
        [link_ms] = watch.median_ms(lambda: target.copy_(on_host, non_blocking=True))
        measured["hbm_to_ddr_mem_bw"] = len(source) / link_ms
        one = torch.zeros(1, device=device)
        [launch_ms] = watch.median_ms(lambda: one.add_(1))
        measured["kernel_launch_ms"] = launch_ms
    if points:
        world_size = dist.get_world_size()
        exchanges = [point for point in points if point.kind == "all_to_all"]
        where = "intra" if world_size <= get_local_size(dist.get_world_size()) else "inter"
        measured[f"{where}_host_latency_ms"] = exchanges[0].ms
        sent = exchanges[-1].bytes * (world_size - 1) / world_size
        measured[f"{where}_host_bw"] = sent / exchanges[-1].ms
    measured["step_ms"] = measure_step(watch)
    return dataclasses.replace(found, name="measured", **measured)


def measure_step(watch: Stopwatch) -> float:
    """Returns the milliseconds of a training step of a sharded collection with next to no data."""
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
    [step_ms] = watch.median_ms(lambda: model(features).values().sum().backward(), turns=25)
    return step_ms


def calibrate(device: torch.device) -> Topology:
    """Returns the topology of the ranks of this job, with what was measured on them.

    Every rank must call it. Takes about half a minute.

    Args:
        device: of this rank.
    """
    watch = Stopwatch(device)
    world_size = dist.get_world_size()
    collectives = list(measure_collectives(watch)) if world_size > 1 else []
    usual = Topology(world_size=world_size, compute_device=device.type)
    hardware = measure_hardware(watch, usual.slowest, collectives)
    return Topology.from_hardware(
        [hardware] * world_size,
        usual.local_world_size,
        lookup=list(measure_lookups(watch)),
        collectives=collectives,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures with as many processes as asked for, or as torchrun has started."""
    parser = argparse.ArgumentParser(prog="python -m recsys calibrate", description=__doc__)
    parser.add_argument("--world-size", type=int, default=1, help="ranks on this machine")
    parser.add_argument("--out", type=Path, default=Path("topology.json"))
    given = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        command = ["-m", "torch.distributed.run", "--standalone", "-m", "recsys.calibrate"]
        command.insert(3, f"--nproc-per-node={given.world_size}")
        return subprocess.run([sys.executable, *command, "--out", str(given.out)]).returncode
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    try:
        topology = calibrate(device)
    finally:
        rank = dist.get_rank()
        dist.destroy_process_group()
    if rank == 0:
        topology.to_json(given.out)
        print(topology)
        print(
            f"Written to {given.out}: EmbeddingShardingPlanner(Topology.from_json({str(given.out)!r}))"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
