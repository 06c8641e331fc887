"""Trains, saves by torch.distributed.checkpoint, loads into a new model, and trains both on."""

import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=20, feature_names=[name])
            for name in ("film", "user")
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, self.bags.parameters(), {"lr": 0.1})
        self.over = torch.nn.Linear(16, 1)

    def forward(self, features):
        return self.over(self.bags(features).values()).squeeze(1)


def build(env):
    """A model whose tables are on the first and the last rank, and its optimizer."""
    model, sharders = Model(), get_default_sharders()
    bags = construct_module_sharding_plan(
        model.bags,
        {"film": table_wise(rank=0), "user": table_wise(rank=env.world_size - 1)},
        local_size=env.world_size,
        world_size=env.world_size,
        device_type="cpu",
    )
    plan = ShardingPlan(plan={"bags": bags})
    model = DistributedModelParallel(
        model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.05),
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def train(model, optimizer, generator, steps):
    losses = []
    for _ in range(steps):
        ids = torch.randint(20, (32,), generator=generator)
        features = KeyedJaggedTensor.from_lengths_sync(
            keys=["film", "user"], values=ids, lengths=torch.ones(32, dtype=torch.int64)
        )
        labels = (ids[:16] < 10).float()
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(features), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    folder = [tempfile.mkdtemp() if env.rank == 0 else None]
    dist.broadcast_object_list(folder)
    torch.manual_seed(0)
    model, optimizer = build(env)
    generator = torch.Generator().manual_seed(env.rank)
    losses = train(model, optimizer, generator, 40)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder[0])
    again = torch.Generator().manual_seed(7 + env.rank)
    expected = train(model, optimizer, again, 5)

    torch.manual_seed(1)
    fresh, its_optimizer = build(env)
    again = torch.Generator().manual_seed(7 + env.rank)
    state = {"model": fresh.state_dict(), "optimizer": its_optimizer.state_dict()}
    keys = sorted(state["model"])
    dcp.load(state, checkpoint_id=folder[0])
    fresh.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    found = train(fresh, its_optimizer, again, 5)
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    facts = [None] * env.world_size
    dist.all_gather_object(facts, [losses[-1] < 0.8 * losses[0], max(differences) < 1e-6])
    if env.rank == 0:
        saved = dcp.FileSystemReader(folder[0]).read_metadata().state_dict_metadata
        found = {
            "falls, goes on alike": facts,
            "keys": keys,
            "saved": [name for name in sorted(saved) if name.startswith("model.")],
        }
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
