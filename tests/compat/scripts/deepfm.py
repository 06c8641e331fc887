"""DeepFM of two tables, one of them for two features, both sharded by columns."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

DENSE, BATCH = 4, 16


class Train(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, dense, sparse, labels):
        clicks = self.model(dense_features=dense, sparse_features=sparse).squeeze(-1)
        return nn.functional.binary_cross_entropy(clicks, labels), clicks.detach()


def first_values(weight):
    return nn.init.constant_(weight, 0.1)


def build_model():
    tables = [
        EmbeddingBagConfig(50, 8, name="t1", feature_names=["f1"], init_fn=first_values),
        EmbeddingBagConfig(30, 8, name="t2", feature_names=["f2", "f3"], init_fn=first_values),
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.2})
    model = SimpleDeepFMNN(
        num_dense_features=DENSE,
        embedding_bag_collection=collection,
        hidden_layer_size=12,
        deep_fm_dimension=6,
    )
    start = torch.Generator().manual_seed(0)
    for _, weight in sorted(model.named_parameters()):
        if not weight.is_meta:
            nn.init.uniform_(weight, -0.3, 0.3, generator=start)
    return Train(model)


def batch_of(generator):
    """Bags of 0 to 3 ids; who has an id below 10 in f2 clicks."""
    lengths = torch.randint(4, (3 * BATCH,), generator=generator)
    values = torch.randint(30, (int(lengths.sum()),), generator=generator)
    sparse = KeyedJaggedTensor.from_lengths_sync(
        keys=["f1", "f2", "f3"], values=values, lengths=lengths
    )
    bags = sparse["f2"].to_dense()
    labels = torch.tensor([float((bag < 10).any()) for bag in bags])
    return torch.rand(BATCH, DENSE, generator=generator), sparse, labels


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    sharder = EmbeddingBagCollectionSharder()
    constraint = ParameterConstraints(
        sharding_types=[ShardingType.COLUMN_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
        min_partition=4,
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={"t1": constraint, "t2": constraint},
    )
    model = build_model()
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.05),
    )
    optimizer = CombinedOptimizer([("tables", model.fused_optimizer), ("dense", dense)])
    generator = torch.Generator().manual_seed(1 + rank)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss, clicks = model(*(part.to(device) for part in batch_of(generator)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [sum(losses[:10]), sum(losses[-10:])])
    tables = plan.plan["model.sparse_arch.embedding_bag_collection"]
    if rank == 0:
        found = {
            "losses": everyone,
            "falls": all(after < 0.9 * before for before, after in everyone),
            "clicks": list(clicks.shape),
            "types": {name: table.sharding_type for name, table in tables.items()},
            "dense state": sorted(dense.state_dict()["state"]),
        }
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
