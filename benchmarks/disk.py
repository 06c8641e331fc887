"""MB/s of saving and loading a checkpoint, beside those of the disk itself and of torch.save.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.disk --out result.json

Each rank holds whole tables with row-wise Adagrad. In turn, all ranks at once: `save_checkpoint`;
`torch.save` of the same tensors, with fsync; a plain write of as many bytes, with fsync. Then each
is read back, after its files have left the page cache, into memory that is there already (but
`torch.load` makes its own). All files are read once before that: below a virtual machine a disk
keeps some in its own memory, and now all of them. A rate is that of all ranks together.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import ranks
from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward

TABLES, DIM = 4, 64  # tables of a rank
PIECE_BYTES = 1 << 20  # of plain writes and reads; faster here than larger ones


def sharded(mib: int) -> DistributedModelParallel:
    """Return a model with so many MiB of tables on each rank."""
    rows = (mib << 20) // (TABLES * DIM * 4)
    names = [f"t{i}" for i in range(TABLES * dist.get_world_size())]
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[f"f_{name}"]
        )
        for name in names
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    plan = EmbeddingModuleShardingPlan(
        {
            name: parameter_sharding(ShardingType.TABLE_WISE, rows, DIM, [i // TABLES])
            for i, name in enumerate(names)
        }
    )
    cpu = torch.device("cpu")
    return DistributedModelParallel(ebc, device=cpu, plan=ShardingPlan({"": plan}))


def of_this_rank(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank holds, by name."""
    states = model.fused_optimizer.state_dict()["state"]
    values = {**model.state_dict()}
    for param, state in states.items():
        values |= {f"{param}/{name}": value for name, value in state.items()}
    return {
        f"{name}/{i}": shard.tensor
        for name, value in values.items()
        for i, shard in enumerate(value.local_shards())
    }


def write(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), PIECE_BYTES):
            file.write(data[start : start + PIECE_BYTES])
        os.fsync(file.fileno())


def read(path: Path, data: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for start in range(0, len(data), PIECE_BYTES):
            file.readinto(data[start : start + PIECE_BYTES])


def torch_save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Have the page cache forget the files of a folder."""
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(run: Callable[[], Any]) -> float:
    """Return how long all ranks together take."""
    dist.barrier()
    began = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - began


def main() -> None:
    """Print medians and ratios; write all turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="of weights on each rank")
    parser.add_argument("--folder", help="on the disk to measure; default: that of temporary files")
    arguments = ranks.begin(parser)
    model = sharded(arguments.mib)
    tensors = of_this_rank(model)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    values = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    data = memoryview(values.numpy())
    optimizer, rank = model.fused_optimizer, dist.get_rank()
    made = [tempfile.mkdtemp(dir=arguments.folder) if rank == 0 else ""]
    dist.broadcast_object_list(made)
    folder = Path(made[0])
    kinds = {name: folder / name for name in ("ours", "torch", "raw")}
    saves: dict[str, Callable[[], Any]] = {
        "ours": lambda: save_checkpoint(kinds["ours"], model, optimizer),
        "torch": lambda: torch_save(kinds["torch"] / f"{rank}.pt", tensors),
        "raw": lambda: write(kinds["raw"] / f"{rank}", data),
    }
    loads: dict[str, Callable[[], Any]] = {
        "ours": lambda: load_checkpoint(kinds["ours"], model, optimizer),
        "torch": lambda: torch.load(kinds["torch"] / f"{rank}.pt", weights_only=True),
        "raw": lambda: read(kinds["raw"] / f"{rank}", data),
    }
    rates: dict[str, dict[str, list[float]]] = {w: {k: [] for k in kinds} for w in ("save", "load")}
    total = num_bytes * dist.get_world_size() / 1e6
    for turn in range(arguments.rounds + 1):
        names = [*kinds][turn % 3 :] + [*kinds][: turn % 3]
        for what, runs in (("save", saves), ("load", loads)):
            if what == "load" and rank == 0:
                forget(folder)
                for file in folder.rglob("*"):
                    if file.is_file():
                        read(file, data)
            for name in names:
                if rank == 0:
                    if what == "save":
                        shutil.rmtree(kinds[name], ignore_errors=True)
                        kinds[name].mkdir()
                    else:
                        forget(kinds[name])
                    os.sync()
                took = seconds(runs[name])
                if turn:  # the first warms up
                    rates[what][name].append(round(total / took, 1))
    if rank == 0:
        shutil.rmtree(folder)
        for what, found in rates.items():
            print(f"{what}:", {name: statistics.median(rate) for name, rate in found.items()})
            for other in ("raw", "torch"):
                ratios = [a / b for a, b in zip(found["ours"], found[other], strict=True)]
                spread = f"({min(ratios):.2f}-{max(ratios):.2f})"
                print(f"  ours / {other}: {statistics.median(ratios):.2f} {spread}")
    ranks.end({"mib": arguments.mib, "mb_per_s": rates}, arguments.out)


if __name__ == "__main__":
    main()
