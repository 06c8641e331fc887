"""A plan written by hand: printed, run, and held against the collection that is not sharded."""

import json
import os

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward


def filled(value):
    return lambda weight: torch.nn.init.constant_(weight, value)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(12, 8, name="ta", feature_names=["a"], init_fn=filled(1.0)),
            EmbeddingBagConfig(
                10, 16, "tb", feature_names=["b"], pooling=PoolingType.MEAN, init_fn=filled(2.0)
            ),
            EmbeddingBagConfig(6, 4, name="tc", feature_names=["a2"], init_fn=filled(4.0)),
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters(), {"lr": 0.5})

    def forward(self, features):
        pooled = self.bags(features)
        return torch.cat([pooled[key] for key in ("a", "b", "a2")], dim=1)


def plan_of(collection, sharder, generators):
    return construct_module_sharding_plan(
        collection,
        generators,
        sharder=sharder,
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sharder = EmbeddingBagCollectionSharder()
    plain, model = Model(), Model()
    first = apply_to_all(model.bags, table_wise(rank=0), sharder=sharder)
    on_the_first = plan_of(model.bags, sharder, first)
    by_hand = plan_of(
        model.bags,
        sharder,
        {
            "ta": table_wise(rank=world_size - 1),
            "tb": column_wise(ranks=list(range(world_size))),
            "tc": table_wise(rank=0, compute_kernel="fused"),
        },
    )
    sharded = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"bags": by_hand}),
        sharders=[sharder],
    )
    features = KeyedJaggedTensor.from_offsets_sync(
        keys=["a", "b", "a2"],
        values=torch.tensor([0, 11, 3, 9, 1, 4, 5, 5, 0]) // (rank + 1),
        offsets=torch.tensor([0, 2, 3, 4, 7, 7, 9]),
    )
    before = sharded(features)
    before.sum().backward()
    after = sharded(features)
    equal = [None] * world_size
    dist.all_gather_object(equal, torch.allclose(before, plain(features)))
    total = after.detach().sum()
    dist.all_reduce(total)
    text = str(ShardingPlan(plan={"bags": by_hand}))
    if rank == 0:
        found = {
            "equal": equal,
            "shape": list(before.shape),
            "sum after a step": total.item(),
            "shards": {
                name: [[*s.shard_offsets, *s.shard_sizes] for s in entry.sharding_spec.shards]
                for name, entry in by_hand.items()
            },
            "first": {name: entry.ranks for name, entry in on_the_first.items()},
            "plan": [line.strip() for line in text.splitlines() if line.strip()],
            "keys": list(sharded.state_dict()),
        }
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
