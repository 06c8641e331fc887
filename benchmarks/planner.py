"""The planner beside TorchRec's: seconds of `plan()`, and how good the plans are.

    python -m benchmarks.planner [--cases 100x8 ...]

Both plan the same tables for the same machine, in turns, each turn in a process of its own, which
first builds the model (not counted). A plan is judged twice: by our costs, and by the peer's own
estimates, for which our search is given the peer's options. `spread` is ours alone, over seeds and
with memory nearly full. Writes benchmarks/results/planner-cpu.json after every turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.planner import (
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    ParameterConstraints,
    Topology,
)
from recsys.distributed.planner.costs import Cost
from recsys.distributed.planner.options import Reach, Shards, TableOption
from recsys.distributed.planner.placement import Problem, Ranks
from recsys.distributed.planner.rating import RatedPlan
from recsys.distributed.planner.search import search
from recsys.distributed.planner.tables import Bytes, RankMemory
from recsys.distributed.types import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection

RESULT = Path(__file__).parent / "results" / "planner-cpu.json"
BATCH_SIZE = 512
PER_NODE = 8
META = torch.device("meta")
SEEDS = range(10)
FULL = (0.85, 0.95, 0.98)
# rows of the 26 tables of MLPerf's DLRM on Criteo Terabyte, at most 40 million each
CRITEO = [
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
]
NODE = {  # H100 as `Topology.preset` has it, in the arguments that both libraries take
    "hbm_cap": 80 * 10**9,
    "ddr_cap": 250 * 10**9,
    "hbm_mem_bw": 2.68e9,
    "ddr_mem_bw": 6.144e7,
    "hbm_to_ddr_mem_bw": 5.44e7,
    "intra_host_bw": 3.6e8,
    "inter_host_bw": 4.5e7,
}


@dataclass(frozen=True)
class Case:
    """Tables and ranks; how many turns each planner gets, and how long the peer's may take."""

    num_tables: int
    num_ranks: int
    ours: int = 2
    peer: int = 2
    most_s: float = 3600.0


CASES = {
    "criteo 26x8": Case(26, 8),
    "100x8": Case(100, 8),
    "300x64": Case(300, 64, peer=1),
    "1000x128": Case(1000, 128, peer=1, most_s=300.0),
    "5000x1024": Case(5000, 1024, peer=0),
}


@dataclass(frozen=True)
class Table:
    """A table of the benchmark, read by one feature."""

    name: str
    rows: int
    dim: int
    pooling: float


def tables_of(case: str, seed: int = 0) -> list[Table]:
    """Return the tables: rows log-uniform in 100 to 30 million, ids per sample in 1 to 30."""
    rng = random.Random(seed)
    if case.startswith("criteo"):
        return [Table(f"t{i}", rows, 128, 1.0) for i, rows in enumerate(CRITEO)]
    return [
        Table(
            f"t{i}",
            int(math.exp(rng.uniform(math.log(100), math.log(30e6)))),
            4 * rng.randint(4, 32),
            math.exp(rng.uniform(0, math.log(30))),
        )
        for i in range(CASES[case].num_tables)
    ]


def our_model(tables: Sequence[Table]) -> EmbeddingBagCollection:
    configs = [_config(EmbeddingBagConfig, table) for table in tables]
    return EmbeddingBagCollection(tables=configs, device=META)


def _config(config: Any, table: Table) -> Any:
    return config(
        name=table.name,
        num_embeddings=table.rows,
        embedding_dim=table.dim,
        feature_names=[f"f_{table.name}"],
    )


def our_sharders() -> list[EmbeddingBagCollectionSharder]:
    return [EmbeddingBagCollectionSharder({"optimizer": "EXACT_ROWWISE_ADAGRAD"})]


def our_planner(tables: Sequence[Table], num_ranks: int, **node: int) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(
        topology=Topology(num_ranks, "cuda", local_world_size=PER_NODE, **(NODE | node)),
        batch_size=BATCH_SIZE,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints={t.name: ParameterConstraints(pooling_factors=[t.pooling]) for t in tables},
    )


def quality(load_ms: Sequence[float], bound_ms: float | None = None) -> dict[str, float]:
    """Return the slowest rank, and the shares by which it is above the mean and above a bound."""
    slowest = max(load_ms)
    found = {"slowest_ms": slowest, "imbalance": slowest / statistics.fmean(load_ms) - 1}
    return found | ({} if bound_ms is None else {"gap": slowest / bound_ms - 1})


def quality_of(rated: RatedPlan) -> dict[str, float]:
    assert rated.rating is not None
    placement = rated.rating.placement
    costs = [cost.total for cost in rated.rating.costs]
    return quality(costs, placement.bound_ms if placement else None)


def ours(case: str) -> dict[str, Any]:
    """Plan twice in this process, the first time with all that has to be imported."""
    tables, num_ranks = tables_of(case), CASES[case].num_ranks
    model, result = our_model(tables), {}
    for prefix in ("", "again_"):
        planner = our_planner(tables, num_ranks)
        plan, times = timed(lambda planner=planner: planner.plan(model, our_sharders()))
        result |= {prefix + name: value for name, value in times.items()}
    return result | quality_of(plan)


def timed(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what a call returns, and its seconds: by the clock, and of this process alone."""
    began, began_cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, {
        "seconds": time.perf_counter() - began,
        "cpu_s": time.process_time() - began_cpu,
    }


def spread(case: str) -> dict[str, Any]:
    """Plan other tables of the same kind, with memory as it is and nearly full."""
    found = []
    for fill, seed in itertools.product((None, *FULL), SEEDS):
        tables, num_ranks = tables_of(case, seed), CASES[case].num_ranks
        model, node = our_model(tables), {}
        if fill is not None:
            node = {"hbm_cap": int(_bytes_per_rank(model, tables, num_ranks) / fill), "ddr_cap": 0}
        planner = our_planner(tables, num_ranks, **node)
        of_plan: dict[str, Any] = {"fill": fill, "seed": seed}
        try:
            plan, times = timed(
                lambda planner=planner, model=model: planner.plan(model, our_sharders())
            )
        except ValueError as error:
            of_plan["error"] = str(error).splitlines()[0]
        else:
            of_plan |= times | quality_of(plan)
        found.append(of_plan)
    return {"plans": found}


def _bytes_per_rank(
    model: EmbeddingBagCollection, tables: Sequence[Table], num_ranks: int
) -> float:
    """Return the device memory that tables take which are not split, on average, and its batch."""
    whole = {t.name: ParameterSharding("table_wise", "fused", [0]) for t in tables}
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(whole)})
    rated = our_planner(tables, num_ranks, hbm_cap=1 << 60).rate(model, our_sharders(), plan)
    rating = rated.rating
    assert rating is not None
    return rating.storage[0].total.device / num_ranks + rating.batch.total.device


class Peer:
    """TorchRec's planner on the same tables and ranks."""

    def __init__(self, case: str) -> None:
        warnings.filterwarnings("ignore")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingBagCollection as Collection
        from torchrec import EmbeddingBagConfig as Config
        from torchrec.distributed import planner
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as Sharder
        from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
        from torchrec.distributed.planner.storage_reservations import (
            FixedPercentageStorageReservation as Fixed,
        )

        self.tables, self.num_ranks = tables_of(case), CASES[case].num_ranks
        constraints = {
            t.name: planner.ParameterConstraints(pooling_factors=[t.pooling]) for t in self.tables
        }
        topology = planner.Topology(self.num_ranks, "cuda", local_world_size=PER_NODE, **NODE)
        self._planner = planner.EmbeddingShardingPlanner(
            topology=topology,
            batch_size=BATCH_SIZE,
            storage_reservation=Fixed(percentage=0.0),
            constraints=constraints,
            debug=False,
        )
        self._enumerator = EmbeddingEnumerator(
            topology=topology, batch_size=BATCH_SIZE, constraints=constraints
        )
        self._model = Collection(tables=[_config(Config, t) for t in self.tables], device=META)
        self._sharders = [Sharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})]

    def plan(self) -> Any:
        return self._planner.plan(self._model, self._sharders)

    def options(self) -> list[list[Any]]:
        """Return the peer's options of each table, with its estimates of time and memory."""
        of_table: dict[str, list[Any]] = {t.name: [] for t in self.tables}
        for option in self._enumerator.enumerate(self._model, self._sharders):
            of_table[option.name].append(option)
        return list(of_table.values())


def problem_of(options: Sequence[Sequence[Any]], num_ranks: int) -> Problem:
    """Return the peer's options as our search takes them."""
    ranks = Ranks(memory_caps=[(NODE["hbm_cap"], NODE["ddr_cap"])] * num_ranks, node_size=PER_NODE)
    tables = [[_for_search(option) for option in of_table] for of_table in options]
    # more shards than ranks would need two of them on one
    tables = [[o for o in of_table if o.num_shards <= num_ranks] for of_table in tables]
    return Problem(ranks=ranks, tables=tables)


def _for_search(option: Any) -> TableOption:
    reaches = {
        "device": Reach.ANYWHERE,
        "host": Reach.ONE_NODE,
        "multi_host": Reach.NODES,
        "uniform": Reach.FIXED,
    }
    shards = [(s.perf.total, (s.storage.hbm, s.storage.ddr)) for s in option.shards]
    return TableOption(
        sharding_type=ShardingType(option.sharding_type),
        compute_kernel=EmbeddingComputeKernel(option.compute_kernel),
        reach=reaches[option.partition_by],
        shards=tuple(
            Shards(
                count=len(list(alike)),
                rows=0,  # which the search does not read
                cols=0,
                costs=(Cost(forward=cost),),
                storage=RankMemory(weights=Bytes(*memory)),
            )
            for (cost, memory), alike in itertools.groupby(shards)
        ),
    )


def load_of(plan: Any, options: Sequence[Sequence[Any]], num_ranks: int) -> list[float]:
    """Return the time of each rank under a plan of the peer by the peer's estimates."""
    known = {_key_of_option(option): option for of_table in options for option in of_table}
    load = [0.0] * num_ranks
    for name, entry in plan.plan[""].items():
        option = known[_key_of_entry(name, entry)]
        for rank, shard in zip(entry.ranks, option.shards, strict=True):
            load[rank] += shard.perf.total
    return load


def _key_of_option(option: Any) -> tuple[Any, ...]:
    return option.name, option.sharding_type, option.compute_kernel, len(option.shards)


def _key_of_entry(name: str, entry: Any) -> tuple[Any, ...]:
    return name, entry.sharding_type, entry.compute_kernel, len(entry.ranks)


def as_ours(plan: Any) -> ShardingPlan:
    """Return a plan of the peer in our classes."""
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(
                {
                    name: ParameterSharding(
                        entry.sharding_type,
                        entry.compute_kernel,
                        list(entry.ranks),
                        entry.sharding_spec
                        and EnumerableShardingSpec(
                            [
                                ShardMetadata(
                                    list(s.shard_offsets), list(s.shard_sizes), str(s.placement)
                                )
                                for s in entry.sharding_spec.shards
                            ]
                        ),
                    )
                    for name, entry in of_module.items()
                }
            )
            for path, of_module in plan.plan.items()
        }
    )


def peer(case: str) -> dict[str, Any]:
    """Let the peer plan, and judge its plan by its estimates and by our costs."""
    contender = Peer(case)
    plan, times = timed(contender.plan)
    options = contender.options()
    problem = problem_of(options, contender.num_ranks)
    found, search_times = timed(lambda: search(problem))
    load = load_of(plan, options, contender.num_ranks)
    model = our_model(contender.tables)
    rated = our_planner(contender.tables, contender.num_ranks).rate(
        model, our_sharders(), as_ours(plan)
    )
    return {
        **times,
        "by_its_estimates": quality(load, found.bound_ms),
        "ours_by_its_estimates": quality(found.load_ms, found.bound_ms) | search_times,
        "by_our_costs": quality_of(rated),
    }


TURNS = {"ours": ours, "peer": peer, "spread": spread}


def turn(case: str, name: str) -> dict[str, Any]:
    """Give one contender a process of its own, and end it when its time is up."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "turn.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planner"]
        command += ["--cases", case, "--turn", name, "--out", str(out)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        try:
            subprocess.run(command, check=True, timeout=CASES[case].most_s)
        except subprocess.TimeoutExpired:
            used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
            return {"stopped_after_s": CASES[case].most_s, "cpu_s": used}
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def turns(case: Case) -> Iterator[str]:
    """Yield whose turn it is: ours, the peer's, ours ..."""
    for number in range(max(case.ours, case.peer)):
        yield from ["ours"] * (number < case.ours) + ["peer"] * (number < case.peer)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--spread", nargs="*", choices=CASES, default=["criteo 26x8", "300x64"])
    parser.add_argument("--turn", choices=TURNS, help="only this, for one case")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    if arguments.turn:
        arguments.out.write_text(json.dumps(TURNS[arguments.turn](arguments.cases[0])))
        return
    from benchmarks.__main__ import machine
    from benchmarks.report import print_planner

    result: dict[str, Any] = {"machine": machine(), "cases": {}, "spread": {}}
    for case in arguments.cases:
        of_case = result["cases"][case] = {"ours": [], "peer": []}
        for name in turns(CASES[case]):
            print(f"{case}: {name} ...", flush=True)
            of_case[name].append(turn(case, name))
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for case in arguments.spread:
        print(f"{case}: spread ...", flush=True)
        result["spread"][case] = turn(case, "spread")
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print_planner(result)


if __name__ == "__main__":
    main()
