"""DLRM with a low-rank cross network, trained on the same two batches again and again."""

import json
import os

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FEATURES = {"cat_0": 40, "cat_1": 25, "cat_2": 10}


def uniform(weight):
    seed = torch.Generator().manual_seed(weight.shape[0])
    return torch.nn.init.uniform_(weight, -0.2, 0.2, generator=seed)


def build_model():
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{feature}",
                embedding_dim=8,
                num_embeddings=rows,
                feature_names=[feature],
                init_fn=uniform,
            )
            for feature, rows in FEATURES.items()
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    model = DLRM_DCN(
        embedding_bag_collection=collection,
        dense_in_features=3,
        dense_arch_layer_sizes=[12, 8],
        over_arch_layer_sizes=[12, 1],
        dcn_num_layers=2,
        dcn_low_rank_dim=4,
        dense_device=torch.device("cpu"),
    )
    start = torch.Generator().manual_seed(0)
    for _, weight in sorted(model.named_parameters()):
        if weight.device.type != "meta":
            torch.nn.init.uniform_(weight, -0.2, 0.3, generator=start)
    return DLRMTrain(model)


def batches_of(rank, batch_size=16):
    """Two batches, again and again."""
    rows = torch.Generator().manual_seed(rank)
    held = []
    for _ in range(2):
        ids = [torch.randint(n, (batch_size,), generator=rows) for n in FEATURES.values()]
        sparse = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.cat(ids),
            lengths=torch.ones(len(FEATURES) * batch_size, dtype=torch.int32),
        )
        dense = torch.rand(batch_size, 3, generator=rows)
        labels = torch.randint(2, (batch_size,), generator=rows)
        held.append(Batch(dense_features=dense, sparse_features=sparse, labels=labels))
    while True:
        yield from held


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    model, sharders, device = build_model(), get_default_sharders(), torch.device("cpu")
    plan = EmbeddingShardingPlanner(
        topology=Topology(dist.get_world_size(), "cpu"),
        batch_size=16,
        constraints={
            f"t_{name}": ParameterConstraints(sharding_types=["table_wise"]) for name in FEATURES
        },
    ).collective_plan(model, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(
        module=model, device=device, plan=plan, sharders=sharders, init_data_parallel=False
    )
    model.init_data_parallel()
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    batches = batches_of(dist.get_rank())
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss, (detached, logits, _) = model(next(batches).to(device))
        loss.backward()
        optimizer.step()
        losses.append(detached.item())
    total = torch.tensor(losses)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        found = {
            "losses": [total[0].item(), total[-1].item()],
            "falls": (total[-1] < 0.9 * total[0]).item(),
            "logits": list(logits.shape),
            "cross": sorted(name for name in model.state_dict() if "crossnet" in name),
            "tables": sorted(name for name in model.state_dict() if "embedding" in name),
        }
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
