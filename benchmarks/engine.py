"""One training step of sharded collections alone, beside TorchRec and the floor.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.engine --case vbe --out result.json

A step is: build the features, look up, sum, backward, with row-wise Adagrad in backward; there are
no dense layers. The floor of a case is measured on what that very step did: its lookup kernels,
forward, backward and update, on the same ids, and bare collectives of the same sizes. Contenders
take turns in one process. Where the peer refuses a case, what it says stands in the result.
"""

from __future__ import annotations

import argparse
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import ranks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One comparison; ``strategies`` are dealt out to the tables in turn."""

    strategies: tuple[str, ...]
    ranks: int = 2
    tables: int = 26
    rows: int = 20_000
    dim: int = 64
    batch: int = 512
    ids_per_bag: int = 2
    pooled: bool = True
    modules: int = 1
    node: int | None = None
    dedup: bool = False
    variable: int = 1
    """Batches per feature: half the features have this many times fewer bags than samples."""
    wire: str | None = None
    """Precision of embeddings and gradients on their way."""


_BASE = Case(("table_wise",))
CASES = {
    **{kind: replace(_BASE, strategies=(kind,)) for kind in ("table_wise", "column_wise")},
    "row_wise": replace(_BASE, strategies=("row_wise",)),
    "data_parallel": replace(_BASE, strategies=("data_parallel",), rows=2_000),
    "mixed": replace(_BASE, strategies=("table_wise", "column_wise")),
    "mixed of four": replace(
        _BASE, strategies=("table_wise", "column_wise", "row_wise", "data_parallel"), rows=5_000
    ),
    "table_row_wise, 2 nodes": replace(_BASE, strategies=("table_row_wise",), ranks=4, node=2),
    "grid_shard, 2 nodes": replace(_BASE, strategies=("grid_shard",), ranks=4, node=2),
    "sequence table_wise": replace(_BASE, pooled=False, tables=8, batch=256, ids_per_bag=20),
    "sequence row_wise": replace(
        _BASE, strategies=("row_wise",), pooled=False, tables=8, batch=256, ids_per_bag=20
    ),
    "sequence distinct ids": replace(
        _BASE, pooled=False, tables=8, rows=500, batch=256, ids_per_bag=20, dedup=True
    ),
    "vbe": replace(_BASE, variable=8, batch=1024),
    "three modules": replace(_BASE, modules=3, tables=8, batch=64),
    "int8 wire": replace(_BASE, wire="INT8"),
    "fp16 wire": replace(_BASE, wire="FP16"),
    **{
        f"{n} tables": replace(_BASE, tables=n, rows=1_000, dim=16, batch=64, ids_per_bag=1)
        for n in (26, 260, 1000)
    },
    **{f"{n} ranks": replace(_BASE, ranks=n, tables=24, batch=256) for n in (1, 2, 4)},
}


class Library:
    """The names that both libraries share, from one of them."""

    def __init__(self, name: str) -> None:
        ours = name == "recsys"
        modules = import_module(f"{name}.modules.embedding_modules")
        configs = import_module(f"{name}.modules.embedding_configs")
        self.ours = ours
        self.features = import_module("recsys.sparse" if ours else "torchrec").KeyedJaggedTensor
        self.collections = modules.EmbeddingBagCollection, modules.EmbeddingCollection
        self.configs = configs.EmbeddingBagConfig, configs.EmbeddingConfig
        self.plans = import_module(f"{name}.distributed.sharding_plan")
        self.types = import_module(f"{name}.distributed.types")
        self.parallel = import_module(f"{name}.distributed.model_parallel").DistributedModelParallel
        self.sharders = (
            import_module(f"{name}.distributed.embeddingbag").EmbeddingBagCollectionSharder,
            import_module(f"{name}.distributed.embedding").EmbeddingCollectionSharder,
        )
        self.wire = import_module(
            "recsys.distributed.ranks.wire" if ours else "torchrec.distributed.fbgemm_qcomm_codec"
        )
        optimizers = import_module(
            "recsys.kernels.types" if ours else "fbgemm_gpu.split_embedding_configs"
        )
        self.fused_params = {
            "optimizer": optimizers.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": 0.1,
        }


class Model(nn.Module):
    """Collections side by side; the loss is the sum of what they return."""

    def __init__(self, collections: list[nn.Module], pooled: bool) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections)
        self.pooled = pooled

    def forward(self, features: list[Any]) -> Tensor:
        found = [c(f) for c, f in zip(self.collections, features, strict=True)]
        if self.pooled:
            return torch.stack([kt.values().sum() for kt in found]).sum()
        return torch.stack([jt.values().sum() for by in found for jt in by.values()]).sum()


def names(case: Case) -> list[str]:
    return [f"f{i}" for i in range(case.tables)]


def kinds(case: Case) -> dict[str, str]:
    """Strategies by table."""
    return {f"t{i}": case.strategies[i % len(case.strategies)] for i in range(case.tables)}


def build(case: Case, lib: Library) -> nn.Module:
    """Shard the case's model, from the meta device."""
    world = dist.get_world_size()
    config, collection, sharder_type = (
        pair[0 if case.pooled else 1] for pair in (lib.configs, lib.collections, lib.sharders)
    )
    options = {} if case.pooled else {"use_index_dedup": case.dedup}
    if case.wire is not None:
        kind = getattr(lib.wire.CommType, case.wire)
        qcomms = lib.wire.QCommsConfig(forward_precision=kind, backward_precision=kind)
        options["qcomm_codecs_registry"] = lib.wire.get_qcomm_codecs_registry(qcomms, device=CPU)
    sharder = sharder_type(fused_params=lib.fused_params, **options)
    local = case.node or world
    generators = {
        "table_wise": lambda i: lib.plans.table_wise(rank=i % world),
        "column_wise": lambda i: lib.plans.column_wise(ranks=list(range(world))),
        "row_wise": lambda i: lib.plans.row_wise(),
        "data_parallel": lambda i: lib.plans.data_parallel(),
        "table_row_wise": lambda i: lib.plans.table_row_wise(host_index=i % (world // local)),
        "grid_shard": lambda i: lib.plans.grid_shard(host_indexes=list(range(world // local))),
    }
    plans, collections = {}, []
    for m in range(case.modules):
        tables = [
            config(
                name=f"t{i}",
                embedding_dim=case.dim,
                num_embeddings=case.rows,
                feature_names=[name],
            )
            for i, name in enumerate(names(case))
        ]
        module = collection(tables=tables, device=torch.device("meta"))
        plans[f"collections.{m}"] = lib.plans.construct_module_sharding_plan(
            module,
            {table: generators[kind](int(table[1:])) for table, kind in kinds(case).items()},
            sharder=sharder,
            world_size=world,
            local_size=local,
            device_type="cpu",
        )
        collections.append(module)
    return lib.parallel(
        Model(collections, case.pooled),
        device=CPU,
        plan=lib.types.ShardingPlan(plans),
        sharders=[sharder],
    )


def batches(case: Case, lib: Library) -> Callable[[], list[Any]]:
    """Return what makes a step's features, from tensors that lie ready."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    keys = names(case)
    bags = [
        case.batch // case.variable if case.variable > 1 and i % 2 else case.batch
        for i in range(case.tables)
    ]
    lengths = torch.full((sum(bags),), case.ids_per_bag, dtype=torch.int32)
    values = torch.randint(0, case.rows, (int(lengths.sum()),), generator=generator)
    given: dict[str, Any] = {"keys": keys, "values": values, "lengths": lengths}
    if case.variable > 1:
        inverse = [torch.arange(case.batch) % n for n in bags]
        given["stride_per_key_per_rank"] = [[n] for n in bags]
        given["inverse_indices"] = (keys, torch.stack(inverse))
    return lambda: [lib.features(**given) for _ in range(case.modules)]


class Step:
    """A whole step of one library."""

    def __init__(self, case: Case, lib: Library) -> None:
        self.model = build(case, lib)
        self.features = batches(case, lib)
        # the peer leaves replicated tables to an optimizer that is stepped
        replicated = {n for n, kind in kinds(case).items() if kind == "data_parallel"}
        left = [
            parameter
            for name, parameter in self.model.named_parameters()
            if name.split(".")[-2] in replicated and not lib.ours
        ]
        self.optimizer = torch.optim.Adagrad(left, lr=0.1) if left else None

    def __call__(self) -> None:
        self.model(self.features()).backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


class Floor:
    """The lookups and collectives that a step of ours made, and nothing else."""

    def __init__(self, step: Step) -> None:
        from recsys.kernels.tbe import TableBatchedEmbedding
        from recsys.kernels.types import UpdateMode

        self.deferred = UpdateMode.DEFERRED

        self.exchanges: list[tuple[Tensor, Tensor, list[int], list[int], Any]] = []
        self.sums: list[tuple[Tensor, Any]] = []
        self.lookups: list[tuple[Any, ...]] = []
        exchange, add_up = dist.all_to_all_single, dist.all_reduce
        look_up = TableBatchedEmbedding.forward

        def seen(out: Tensor, given: Tensor, to: Any, of: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            self.exchanges.append((out.clone(), given.clone(), list(to), list(of), group))
            return exchange(out, given, to, of, **kwargs)

        def added_up(tensor: Tensor, **kwargs: Any) -> Any:
            self.sums.append((tensor.clone(), kwargs.get("group")))
            return add_up(tensor, **kwargs)

        def looked_up(kernel: Any, *args: Any) -> Tensor:
            self.lookups.append((kernel, *args))
            return look_up(kernel, *args)

        step()  # from the second on, several modules share a header
        with (
            mock.patch.object(dist, "all_to_all_single", seen),
            mock.patch.object(dist, "all_reduce", added_up),
            mock.patch.object(TableBatchedEmbedding, "forward", looked_up),
        ):
            step()

    def __call__(self) -> None:
        for out, given, to, of, group in self.exchanges:
            dist.all_to_all_single(out, given, to, of, group=group)
        for tensor, group in self.sums:
            dist.all_reduce(tensor, group=group)
        for kernel, *args in self.lookups:
            kernel.forward(*args).sum().backward()
            if kernel.update_mode is self.deferred:
                kernel.step()


def run(case: Case, rounds: int, repeats: int, with_peer: bool) -> dict[str, Any]:
    if case.node is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(case.node)
    ours = Step(case, Library("recsys"))
    contenders: dict[str, Callable[[], Any]] = {"ours": ours, "floor": Floor(ours)}
    refusal = ""
    try:
        if not with_peer:
            raise NotImplementedError("not asked for")
        peer = Step(case, Library("torchrec"))
        peer()
        contenders["peer"] = peer
    except Exception as error:  # whatever it is, the reader wants to see it
        refusal = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    refusals: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal)
    if any(refusals):
        contenders.pop("peer", None)
    return {
        "step_ms": ranks.measure(contenders, rounds, repeats),
        "peer": next((r for r in refusals if r), "TorchRec"),
        "exchanges": len(contenders["floor"].exchanges),  # type: ignore[attr-defined]
    }


def memory(rows: int, lib: Library) -> dict[str, int]:
    """Bytes of this process before and after tables are built from meta, and the peak between."""
    case = Case(("row_wise",) if lib.ours else ("table_wise",), tables=4, rows=rows)

    def resident() -> int:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident()
    model = build(case, lib)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    exact = sum(p.numel() * p.element_size() for p in model.parameters())
    state = case.tables * rows * 4 // dist.get_world_size()
    return {
        "exact": exact + state,
        "before": before,
        "after": resident(),
        "peak": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--memory", choices=["recsys", "torchrec"])
    parser.add_argument("--rows", type=int, default=1 << 21)
    parser.add_argument("--no-peer", action="store_true")
    arguments = ranks.begin(parser)
    if arguments.memory:
        result: dict[str, Any] = memory(arguments.rows, Library(arguments.memory))
        grown = (result["peak"] - result["before"]) / result["exact"]
        ranks.end(result, arguments.out)
        print(f"{arguments.memory}: peak above the process / bytes of tables: {grown:.3f}")
    else:
        case = CASES[arguments.case]
        result = run(case, arguments.rounds, arguments.repeats, not arguments.no_peer)
        ranks.show(
            f"{arguments.case}, {result['exchanges']} exchanges; {result['peer']}:",
            result["step_ms"],
        )
        ranks.end(result, arguments.out)


if __name__ == "__main__":
    main()
