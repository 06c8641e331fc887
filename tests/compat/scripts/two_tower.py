"""Two towers: a user's vector and an item's; their product is the score of the item."""

import json
import os

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.mlp import MLP
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

USERS, ITEMS, DIM = 40, 60, 16


class TwoTower(torch.nn.Module):
    def __init__(self, users, items, layer_sizes, device):
        super().__init__()
        self.users, self.items = users, items
        self.user_layers = MLP(DIM, layer_sizes, activation=torch.tanh, device=device)
        self.item_layers = MLP(DIM, layer_sizes, activation=torch.tanh, device=device)

    def forward(self, features):
        user = self.user_layers(self.users(features)["user"])
        item = self.item_layers(self.items(features)["item"])
        return (user * item).sum(dim=1)


def collection(name, rows):
    table = torchrec.EmbeddingBagConfig(
        name=f"t_{name}",
        embedding_dim=DIM,
        num_embeddings=rows,
        feature_names=[name],
        pooling=torchrec.PoolingType.SUM,
        init_fn=lambda weight: torch.nn.init.uniform_(
            weight, -0.5, 0.5, generator=torch.Generator().manual_seed(rows)
        ),
    )
    tables = torchrec.EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    return tables


def batch_of(generator, batch_size=32):
    """Users like the items of their own parity."""
    users = torch.randint(USERS, (batch_size,), generator=generator)
    items = torch.randint(ITEMS, (batch_size,), generator=generator)
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["user", "item"],
        values=torch.cat([users, items]),
        lengths=torch.ones(2 * batch_size, dtype=torch.int64),
    )
    return features, (users % 2 == items % 2).float()


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    towers = TwoTower(collection("user", USERS), collection("item", ITEMS), [8, 8], device)
    start = torch.Generator().manual_seed(0)
    for layers in (towers.user_layers, towers.item_layers):
        for _, weight in sorted(layers.named_parameters()):
            torch.nn.init.uniform_(weight, -0.5, 0.5, generator=start)
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    by_table = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=env.world_size, compute_device=device.type),
        constraints={"t_user": by_table, "t_item": by_table},
    )
    plan = planner.collective_plan(towers, get_default_sharders(), env.process_group)
    model = DistributedModelParallel(module=towers, env=env, device=device, plan=plan)
    layers = [p for name, p in model.named_parameters() if "layers" in name]
    optimizer = torch.optim.Adam(layers, lr=0.01)
    loss_of = torch.nn.BCEWithLogitsLoss()
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(100):
        features, labels = batch_of(generator)
        optimizer.zero_grad()
        loss = loss_of(model(features), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    total = torch.tensor([sum(losses[:10]), sum(losses[-10:])])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        found = {
            "losses": total.tolist(),
            "falls": (total[1] < 0.9 * total[0]).item(),
            "keys": sorted(model.state_dict()),
            "plan": {path: sorted(tables) for path, tables in model.plan.plan.items()},
        }
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
