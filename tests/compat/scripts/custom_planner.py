"""A planner with constraints and with an estimator, a proposer and a partitioner of its own."""

import copy
import json
import os

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    Partitioner,
    Perf,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardEstimator,
    Storage,
)
from torchrec.distributed.types import BoundsCheckMode, ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

MIB = 1 << 20
TABLES = {"small": 50, "middle": 300, "large": 2000}


class ByRows(ShardEstimator):
    """A lookup costs what its table has of rows; every shard costs an exchange besides."""

    def __init__(self, topology, constraints=None):
        self.topology, self.constraints = topology, constraints

    def estimate(self, sharding_options, sharder_data_map):
        for option in sharding_options:
            for shard in option.shards:
                rows, columns = shard.size
                shard.perf = Perf(
                    fwd_compute=rows * columns / 1000, fwd_comms=3.0, bwd_compute=0, bwd_comms=0
                )
                shard.storage = Storage(hbm=0, ddr=rows * columns * option.tensor.element_size())


class OneTypeEach(Proposer):
    """Proposes the first option of each table, then moves the largest table to its next."""

    def load(self, search_space, enumerator=None):
        self.options = {}
        for option in sorted(search_space, key=lambda o: (o.name, o.sharding_type, o.num_shards)):
            self.options.setdefault(option.name, []).append(option)
        self.tried, self.heard = 0, []

    def propose(self):
        if self.tried >= len(self.options["large"]):
            return None
        places = {"large": self.tried}
        return [options[places.get(name, 0)] for name, options in self.options.items()]

    def feedback(self, partitionable, plan=None, perf_rating=None, storage_constraint=None):
        kind = self.options["large"][self.tried].sharding_type
        self.heard.append([kind, partitionable, perf_rating])
        self.tried += 1


class FreestRank(Partitioner):
    """Gives each shard, the largest first, the rank that has most host memory left."""

    def partition(self, proposal, storage_constraint):
        devices = copy.deepcopy(storage_constraint.devices)
        plan = copy.deepcopy(proposal)
        shards = [shard for option in plan for shard in option.shards]
        for shard in sorted(shards, key=lambda shard: -shard.storage.ddr):
            freest = max(devices, key=lambda device: (device.storage.ddr, -device.rank))
            if not shard.storage.fits_in(freest.storage):
                raise PlannerError("no room", PlannerErrorType.PARTITION)
            freest.storage -= shard.storage
            shard.rank = freest.rank
        return plan


def build_model():
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=rows, feature_names=[name])
        for name, rows in TABLES.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    return torch.nn.Sequential(collection)


def build_planner(topology, constraints, proposer):
    return EmbeddingShardingPlanner(
        topology=topology,
        enumerator=EmbeddingEnumerator(
            topology, batch_size=4, constraints=constraints, estimator=[ByRows(topology)]
        ),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.1),
        proposer=[proposer],
        partitioner=FreestRank(),
        constraints=constraints,
    )


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    constraints = {
        name: ParameterConstraints(
            sharding_types=["table_wise", "column_wise"] if name == "large" else ["table_wise"],
            compute_kernels=["fused"],
            min_partition=4,
            pooling_factors=[2.0],
            bounds_check_mode=BoundsCheckMode.WARNING,
        )
        for name in TABLES
    }
    sharders = [EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=env.world_size, compute_device="cpu", ddr_cap=10 * MIB)
    proposer, model = OneTypeEach(), build_model()
    planner = build_planner(topology, constraints, proposer)
    plan = planner.collective_plan(model, sharders, env.process_group)
    tight = Topology(world_size=env.world_size, compute_device="cpu", ddr_cap=20_000)
    try:
        build_planner(tight, constraints, OneTypeEach()).plan(model, sharders)
        error = None
    except PlannerError as raised:
        error = raised.error_type.value
    model = DistributedModelParallel(
        model, env, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=list(TABLES), values=torch.arange(6), lengths=torch.tensor([1, 1, 2, 0, 0, 2])
    )
    out = model(features)
    if env.rank == 0:
        found = {
            "plan": {
                name: [entry.sharding_type, entry.compute_kernel, entry.ranks]
                for name, entry in sorted(plan.plan["0"].items())
            },
            "heard": proposer.heard,
            "error": error,
            "shape": list(out.values().shape),
            "keys": sorted(out.keys()),
        }
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
