"""What a step costs one rank of many: host time, and memory of buffers, on this machine alone.

    python -m benchmarks.scale --out benchmarks/results/scale-cpu.json

PyTorch's fake process group says that there are 8, 64 or 512 ranks; every other rank is taken to
send what this one sends to itself, and ids are spread evenly. So layouts, headers, plans of moves
and buffers are those of such a job, while transport, skew and errors are not. Host time is that of
a step of 16 samples, less what its operators take; it is Python, numpy and PyTorch's dispatch, in
a process that keeps freed memory (as a GPU's allocator does).
Bytes are the most that a step of 256 samples holds in tensors at once, beside the tables, as a
multiple of the output's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.compare import KEEPS_FREED_MEMORY
from recsys import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from recsys.distributed.ranks import comm
from recsys.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_row_wise,
    table_wise,
)
from recsys.distributed.types import ShardingEnv, ShardingPlan
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward

CPU = torch.device("cpu")
TABLES, ROWS, DIM, STEPS = 26, 4096, 128, 15
FEW, MANY = 16, 256  # samples of a rank: host time is that of few, memory that of many
KEYS = [f"f{i}" for i in range(TABLES)]
NODE = 8  # ranks
PLANS: dict[str, Callable[[int, int], Any]] = {
    "table_wise": lambda i, world: table_wise(rank=i % world),
    "row_wise": lambda i, world: row_wise(),
    "row_wise by bag": lambda i, world: row_wise(),
    "row_wise by bag, 8 collections": lambda i, world: row_wise(),
    "row_wise by bag, 26 collections": lambda i, world: row_wise(),
    "table_row_wise by bag": lambda i, world: table_row_wise(host_index=i % (world // NODE)),
    "column_wise": lambda i, world: column_wise(ranks=[i % world, (i + 1) % world]),
}


class Watch(TorchDispatchMode):
    """Adds up the time in operators and their calls, and follows the bytes that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.calls = self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - began
        self.calls += 1
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def forget() -> None:
            self._known.discard(key)
            self.live -= size

        weakref.finalize(storage, forget)


class _Done:
    def wait(self) -> bool:
        return True


class Echo:
    """Stands for exchanges: the other ranks send what this one sends to itself.

    Where sizes differ, as of columns, zeros come. Attributes: `seconds` it took so far.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.seconds = rank, 0.0

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Count the time as the exchange's, and its operators not as the step's."""
        began = time.perf_counter()
        with _disable_current_modes():
            yield
        self.seconds += time.perf_counter() - began

    def __call__(self, out: Tensor, sent: Tensor, of: Any, to: Any, **kwargs: Any) -> _Done:
        """Give each rank's place what this rank sends to itself."""
        with self._apart():
            start, size = sum(to[: self.rank]), to[self.rank]
            own = sent[start : start + size]
            if min(of) == max(of) == size:
                out.view(len(of), *own.shape).copy_(own)
            else:
                out.zero_()
        return _Done()

    def reduce_scatter(self, out: Tensor, sent: Tensor, **kwargs: Any) -> _Done:
        """Add up as many of this rank's own stretches as there are ranks."""
        with self._apart():
            num_ranks = sent.numel() // out.numel()
            torch.mul(sent.view(num_ranks, -1)[self.rank].view_as(out), num_ranks, out=out)
        return _Done()

    def all_gather(self, out: Tensor, sent: Tensor, **kwargs: Any) -> _Done:
        """Give each rank what this one has."""
        with self._apart():
            every = sent.view(1, -1).expand(out.numel() // sent.numel(), -1)
            out.view(-1, sent.numel()).copy_(every)
        return _Done()


class Collections(nn.Module):
    """Tables, in collections that are called one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.keys = [part.tolist() for part in np.array_split(KEYS, count)]
        self.parts = nn.ModuleList(
            EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=f"t{key}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[key]
                    )
                    for key in keys
                ],
                device=torch.device("meta"),
            )
            for keys in self.keys
        )

    def forward(self, batches: list[KeyedJaggedTensor]) -> Tensor:
        """Look up a batch of each, and wait for its embeddings before the next."""
        found = [part(batch).values() for part, batch in zip(self.parts, batches, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found, 1)


def build(plan: str, world: int) -> Any:
    """Shard 26 tables over ranks that are not there."""
    _, _, split = plan.partition(", ")
    model = Collections(int(split.removesuffix(" collections") or 1))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    strategies = {f"t{key}": PLANS[plan](i, world) for i, key in enumerate(KEYS)}
    placed = {
        f"parts.{i}": construct_module_sharding_plan(
            part,
            {f"t{key}": strategies[f"t{key}"] for key in keys},
            world_size=world,
            local_size=NODE,
            device_type="cpu",
        )
        for i, (part, keys) in enumerate(zip(model.parts, model.keys, strict=True))
    }
    sharded: Any = DistributedModelParallel(model, device=CPU, plan=ShardingPlan(placed))
    if "by bag" in plan:  # as where bags are long
        for part in sharded.module.parts:
            part.input_stage.goes_by_id = False
    return sharded


def measure(plan: str, world: int) -> dict[str, float]:
    """Return what one rank of so many has to do."""
    dist.init_process_group("fake", rank=1, world_size=world, store=FakeStore())
    echo = Echo(rank=1)
    try:
        with (
            mock.patch.object(dist, "all_to_all_single", echo),
            mock.patch.object(comm, "_reduce_scatter", echo.reduce_scatter),
            mock.patch.object(comm, "_all_gather", echo.all_gather),
            mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(NODE)}),
            # as NCCL does
            mock.patch.object(ShardingEnv, "prefers_reduce_scatter", return_value=True),
        ):
            began = time.perf_counter()
            model = build(plan, world)
            built = time.perf_counter() - began
            generator = torch.Generator().manual_seed(0)

            def step(watch: Watch, samples: int) -> float:
                batches = []
                for keys in model.module.keys:
                    lengths = torch.ones(len(keys) * samples, dtype=torch.int32)
                    rows = torch.randint(0, ROWS // world, lengths.shape, generator=generator)
                    ids = torch.arange(len(rows)) % world * (ROWS // world) + rows
                    batches.append(KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths))
                echo.seconds = 0.0
                began = time.perf_counter()
                with watch:
                    model(batches).sum().backward()
                return time.perf_counter() - began - watch.seconds - echo.seconds

            for _ in range(3):
                step(Watch(), FEW)
            watches = [Watch() for _ in range(STEPS)]
            hosts = [step(watch, FEW) for watch in watches]
            step(whole := Watch(), MANY)
    finally:
        dist.destroy_process_group()
    return {
        "build_s": built,
        "host_ms": 1e3 * statistics.median(hosts),
        "operators_ms": 1e3 * statistics.median(watch.seconds for watch in watches),
        "operators": whole.calls,
        "peak_of_output": whole.peak / (4 * MANY * TABLES * DIM),
    }


def main() -> None:
    """Measure each plan at each size, in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for _ in range(arguments.rounds):
        for plan in PLANS:
            for world in arguments.ranks:
                of_plan = found.setdefault(plan, {})
                of_plan.setdefault(str(world), []).append(measure(plan, world))
    print(f"{'plan':31} ranks  build s  host ms  operators ms  calls  bytes/output")
    for plan, by_world in found.items():
        for world, rounds in by_world.items():
            best = {key: min(r[key] for r in rounds) for key in rounds[0]}
            print(
                f"{plan:31} {world:>5} {best['build_s']:8.2f} {best['host_ms']:8.2f} "
                f"{best['operators_ms']:13.2f} {best['operators']:6} {best['peak_of_output']:13.1f}"
            )
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"torch": torch.__version__, "rounds": found}, indent=1)
        )


if __name__ == "__main__":
    if not KEEPS_FREED_MEMORY.items() <= os.environ.items():  # read as a process starts
        os.execve(sys.executable, sys.orig_argv, os.environ | KEEPS_FREED_MEMORY)
    main()
