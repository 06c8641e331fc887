"""Choices of the existing parts, of random options with random costs; prints them as JSON.

Runs under TorchRec and under its names here, as ``extensions.py`` does.
"""

import json
import random

import torch
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import (
    calculate_shard_sizes_and_offsets,
    get_partition_by_type,
)
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import Perf, PlannerError, Shard, ShardingOption, Storage

SHARDS = {
    "data_parallel": 4,
    "table_wise": 1,
    "column_wise": 3,
    "row_wise": 4,
    "table_row_wise": 2,
    "table_column_wise": 2,
    "grid_shard": 4,
}
PROPOSERS = {
    "grid": GridSearchProposer,
    "grid of 100": lambda: GridSearchProposer(max_proposals=100),
    "greedy": GreedyProposer,
    "greedy by sums": lambda: GreedyProposer(use_depth=False),
    "greedy with a threshold": lambda: GreedyProposer(threshold=2),
    "uniform": UniformProposer,
    "uniform by sums": lambda: UniformProposer(use_depth=False),
}


def random_options(rng, tables, kinds_of_each, has_ties):
    """Options of some tables; with ties, most numbers are equal."""
    most = 4 if has_ties else 1000
    modules = {path: torch.nn.Linear(1, 1) for path in ("a", "b", "c")}

    def shard():
        storage = Storage(hbm=rng.randint(1, most), ddr=rng.randint(0, 2))
        perf = Perf(*(float(rng.randint(1, most)) for _ in range(4)))
        return Shard(size=[1, 1], offset=[0, 0], storage=storage, perf=perf)

    options = []
    for table in range(tables):
        path = rng.choice(sorted(modules))
        for kind in rng.sample(sorted(SHARDS), kinds_of_each):
            options.append(
                ShardingOption(
                    name=f"t{table}",
                    tensor=torch.empty(10, 4, device="meta"),
                    module=(path, modules[path]),
                    input_lengths=[1.0],
                    batch_size=8,
                    sharding_type=kind,
                    partition_by=get_partition_by_type(kind),
                    compute_kernel="fused",
                    shards=[shard() for _ in range(SHARDS[kind])],
                    is_pooled=True,
                )
            )
    return options


def proposals(name, seed):
    rng = random.Random(seed)
    proposer = PROPOSERS[name]()
    proposer.load(search_space=random_options(rng, 3, 5, has_ties=seed % 2 == 0))
    found = []
    while True:
        proposal = proposer.propose()
        if not proposal:
            return found
        found.append([[option.fqn, option.sharding_type] for option in proposal])
        fits = rng.random() < 0.7
        rating = float(rng.randint(1, 9)) if fits else None
        proposer.feedback(partitionable=fits, plan=proposal, perf_rating=rating)


def ranks(seed, sort_by, balance_modules):
    rng = random.Random(seed)
    has_ties = seed % 4 >= 2
    options = random_options(rng, 8, 1, has_ties)
    cap = [10**9, 3000, 10**9, 20][seed % 4]
    topology = Topology(4, "cuda", local_world_size=2, hbm_cap=cap, ddr_cap=10**9)
    try:
        plan = GreedyPerfPartitioner(SortBy(sort_by), balance_modules).partition(options, topology)
    except PlannerError as error:
        return error.error_type.name
    return [
        [option.get_shards_assignment() for option in plan],
        NoopPerfModel(topology).rate(plan=plan),
        [option.total_perf for option in plan],
        [option.total_storage.hbm for option in plan],
    ]


def shards(seed):
    rng = random.Random(seed)
    weight = torch.empty(rng.randint(1, 50), rng.randint(1, 300), device="meta")
    local_size = rng.choice([1, 2, 4])
    world_size = local_size * rng.randint(1, 3)
    kind = rng.choice(sorted(SHARDS))
    width = rng.choice([None, 1, 4, 7, 32, 128])
    shares = [rng.randint(1, 9) for _ in range(world_size)] if rng.random() < 0.3 else None
    found = calculate_shard_sizes_and_offsets(weight, world_size, local_size, kind, width, shares)
    return [[list(one) for one in part] for part in found]


def main():
    print(
        json.dumps(
            {
                "proposals": {n: [proposals(n, seed) for seed in range(20)] for n in PROPOSERS},
                "ranks": [
                    ranks(seed, sort_by, balance_modules)
                    for seed in range(100)
                    for sort_by in ("storage", "perf")
                    for balance_modules in (False, True)
                ],
                "shards": [shards(seed) for seed in range(500)],
            }
        )
    )


if __name__ == "__main__":
    main()
