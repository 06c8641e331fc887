"""Parts of a planner, written for TorchRec; prints the plans of a planner with them, as JSON.

    python extensions.py                        # under TorchRec
    python -m recsys.compat extensions.py       # under its names here

This file sets the costs and the memory on which a choice depends, so that both agree.
"""

import copy
import json
import os
import tempfile

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import (
    EmbeddingEnumerator,
    calculate_shard_sizes_and_offsets,
    get_partition_by_type,
)
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    Perf,
    PerfModel,
    PlannerError,
    PlannerErrorType,
    Proposer,
    Shard,
    ShardEstimator,
    ShardingOption,
    Stats,
    Storage,
    StorageReservation,
)
from torchrec.distributed.types import ShardingEnv

GIB = 1 << 30
NAMES = ["users", "goods", "shops", "tags"]
ROWS = [4000, 1000, 2000, 3000]
SHARDERS = [EmbeddingBagCollectionSharder()]


def build_model(device):
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=rows, feature_names=[name])
        for name, rows in zip(NAMES, ROWS, strict=True)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device(device))
    return torch.nn.Sequential(collection)


def build_topology():
    return Topology(
        world_size=4, compute_device="cuda", local_world_size=2, hbm_cap=GIB, ddr_cap=GIB
    )


def words(plan):
    return {
        name: [entry.sharding_type, list(entry.ranks)] for name, entry in plan.plan["0"].items()
    }


def only(*kinds):
    return {
        name: ParameterConstraints(sharding_types=list(kinds), compute_kernels=["fused"])
        for name in NAMES
    }


class OnlyRows(EmbeddingEnumerator):
    def enumerate(self, module, sharders):
        options = super().enumerate(module, sharders)
        return [o for o in options if o.sharding_type == "row_wise" and o.compute_kernel == "fused"]


class ByHand(Enumerator):
    """One option for each table, made here: halves of columns."""

    def __init__(self, topology, batch_size=512, constraints=None, estimator=None):
        self.topology = topology

    def enumerate(self, module, sharders):
        options = []
        for path, child in module.named_modules():
            for sharder in sharders:
                if type(child) is not sharder.module_type:
                    continue
                for name, weight in sharder.shardable_parameters(child).items():
                    sizes, offsets = calculate_shard_sizes_and_offsets(
                        weight, 4, 2, "column_wise", col_wise_shard_dim=8
                    )
                    options.append(
                        ShardingOption(
                            name=name,
                            tensor=weight,
                            module=(path, child),
                            input_lengths=[1.0],
                            batch_size=512,
                            sharding_type="column_wise",
                            partition_by=get_partition_by_type("column_wise"),
                            compute_kernel="fused",
                            shards=[
                                Shard(size=s, offset=o) for s, o in zip(sizes, offsets, strict=True)
                            ],
                        )
                    )
        self.populate_estimates(options)
        return options

    def populate_estimates(self, sharding_options):
        Sizes(self.topology).estimate(sharding_options, {})


class Sizes(ShardEstimator):
    """Bytes and milliseconds that follow from rows and columns."""

    def __init__(self, topology, constraints=None):
        self.kind = "ddr" if topology.compute_device == "cpu" else "hbm"

    def estimate(self, sharding_options, sharder_data_map):
        for option in sharding_options:
            for shard in option.shards:
                rows, cols = shard.size
                shard.storage = Storage(**{"hbm": 0, "ddr": 0, self.kind: 4 * rows * cols})
                shard.perf = Perf(fwd_compute=rows / 100, fwd_comms=1, bwd_compute=0, bwd_comms=0)


class TypesInTurn(Proposer):
    """Every table under the same sharding type, in the order of the alphabet."""

    def load(self, search_space, enumerator=None):
        self.space = search_space
        self.kinds = sorted({option.sharding_type for option in search_space})
        self.heard = []

    def propose(self):
        if not self.kinds:
            return None
        return [option for option in self.space if option.sharding_type == self.kinds[0]]

    def feedback(self, partitionable, plan=None, perf_rating=None, storage_constraint=None):
        self.heard.append([self.kinds.pop(0), partitionable, perf_rating])


class RoundRobin(Partitioner):
    def partition(self, proposal, storage_constraint):
        free = [copy.copy(device.storage) for device in storage_constraint.devices]
        shards = [shard for option in proposal for shard in option.shards]
        for number, shard in enumerate(shards):
            rank = number % len(free)
            if not shard.storage.fits_in(free[rank]):
                raise PlannerError("full", error_type=PlannerErrorType.PARTITION)
            free[rank] -= shard.storage
            shard.rank = rank
        return proposal


class FewestParts(PerfModel):
    """Prefers few shards, for the first tables most of all."""

    def rate(self, plan):
        weights = {name: place + 1 for place, name in enumerate(reversed(NAMES))}
        wanted = {"users": 4, "goods": 1, "shops": 4, "tags": 1}
        return sum(weights[o.name] * abs(o.num_shards - wanted[o.name]) for o in plan)


class NotRankZero(StorageReservation):
    """Leaves the first rank to others."""

    last_reserved_topology = None

    def reserve(self, topology, batch_size, module, sharders, constraints=None):
        reserved = copy.deepcopy(topology)
        reserved.devices[0].storage.hbm = 0
        return reserved


class Listener(Stats):
    def log(
        self,
        sharding_plan,
        topology,
        batch_size,
        storage_reservation,
        num_proposals,
        num_plans,
        run_time,
        best_plan,
        constraints=None,
        sharders=None,
        enumerator=None,
        debug=False,
        debug_stats=None,
    ):
        self.heard = {
            "batch_size": batch_size,
            "reservation": type(storage_reservation).__name__,
            "proposals": [num_proposals, num_plans],
            "ranks": topology.world_size,
            "best": [[o.fqn, o.sharding_type, o.get_shards_assignment()] for o in best_plan],
            "storage": [o.total_storage.hbm for o in best_plan],
            "sharders": len(sharders),
            "plan": words(sharding_plan),
        }


def forward():
    """The output of a model that one process shards by a plan of custom parts."""
    model = build_model("meta")
    topology = Topology(world_size=1, compute_device="cpu")
    planner = EmbeddingShardingPlanner(
        topology=topology,
        enumerator=EmbeddingEnumerator(
            topology, 8, constraints=only("table_wise"), estimator=Sizes(topology)
        ),
        proposer=TypesInTurn(),
        partitioner=RoundRobin(),
    )
    store = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    plan = planner.collective_plan(model, SHARDERS, dist.group.WORLD)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=SHARDERS,
    )
    for place, (_, table) in enumerate(sorted(sharded.state_dict().items())):
        [shard] = table.local_shards()
        numbers = torch.arange(shard.tensor.numel()) % (7 + place)
        shard.tensor.detach().copy_(numbers.reshape(shard.tensor.shape))
    features = KeyedJaggedTensor(
        keys=NAMES, values=torch.arange(12) * 37, lengths=torch.tensor([1, 2, 0, 3, 1, 1, 4, 0])
    )
    out = sharded(features).values().tolist()
    dist.destroy_process_group()
    return [words(plan), out]


def main():
    model, topology = build_model("meta"), build_topology()
    found = {}

    def plan(name, **parts):
        planner = EmbeddingShardingPlanner(topology=topology, **parts)
        found[name] = words(planner.plan(model, SHARDERS))

    def lister(*kinds):
        return EmbeddingEnumerator(
            topology, 512, constraints=only(*kinds), estimator=[Sizes(topology)]
        )

    plan("enumerator", enumerator=OnlyRows(topology, 512))
    plan("enumerator by hand", enumerator=ByHand(topology))
    proposer = TypesInTurn()
    plan(
        "proposer",
        enumerator=lister("table_wise", "row_wise", "table_row_wise"),
        proposer=proposer,
    )
    found["heard"] = proposer.heard
    plan("estimator", enumerator=lister("table_wise"), proposer=GreedyProposer())
    plan(
        "partitioner",
        enumerator=lister("table_wise"),  # of equal costs, TorchRec takes the first of a set
        proposer=[UniformProposer()],
        partitioner=RoundRobin(),
    )
    plan(
        "performance model",
        enumerator=lister("table_wise", "row_wise"),
        performance_model=FewestParts(),
    )
    stats = Listener()
    plan(
        "storage reservation",
        enumerator=lister("table_wise"),
        storage_reservation=NotRankZero(),
        partitioner=GreedyPerfPartitioner(balance_modules=True),
        performance_model=NoopPerfModel(topology),
        stats=[stats],
        callbacks=[lambda best: list(reversed(best))],
    )
    found["stats"] = stats.heard
    small = Topology(4, "cuda", local_world_size=2, hbm_cap=1000, ddr_cap=GIB)
    try:
        EmbeddingShardingPlanner(
            topology=small,
            enumerator=EmbeddingEnumerator(
                small, 512, constraints=only("table_wise"), estimator=Sizes(small)
            ),
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
            proposer=TypesInTurn(),
        ).plan(model, SHARDERS)
    except PlannerError as error:
        found["error"] = error.error_type.name
    found["forward"] = forward()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
