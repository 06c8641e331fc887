"""DLRM on random data: Adagrad in backward for the tables, SGD for the dense layers."""

import json
import os

import torch
import torch.distributed as dist
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

NAMES = ["site", "ad", "hour"]
ROWS = [200, 100, 24]


def build_model():
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=rows, feature_names=[name])
        for name, rows in zip(NAMES, ROWS, strict=True)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=collection,
            dense_in_features=5,
            dense_arch_layer_sizes=[16, 8],
            over_arch_layer_sizes=[16, 1],
        )
    )


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    device = torch.device("cpu")
    sharders = [EmbeddingBagCollectionSharder()]
    model = build_model()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=["table_wise"]) for name in NAMES},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    dataset = RandomRecDataset(
        keys=NAMES,
        batch_size=16,
        hash_sizes=ROWS,
        ids_per_features=[2, 1, 1],
        num_dense=5,
        manual_seed=rank,
        num_generated_batches=2,
    )
    batches = iter(dataset)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss, (_, logits, labels) = model(next(batches).to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    bias = model.module.model.over_arch.model[1].bias.detach().tolist()
    biases = [None] * world_size
    dist.all_gather_object(biases, bias)
    found = {
        "falls": losses[-1] < 0.9 * losses[0],
        "shapes": [list(logits.shape), list(labels.shape)],
        "ranks agree": all(other == bias for other in biases),
        "keys": sorted(model.state_dict()),
        "tables": sorted(plan.plan["model.sparse_arch.embedding_bag_collection"]),
        "groups": [group["lr"] for group in optimizer.param_groups],
    }
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
