"""A model of plain nn.EmbeddingBag modules under DistributedModelParallel."""

import json
import os

import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.keyed import KeyedOptimizerWrapper


class Sentiment(torch.nn.Module):
    """Two bags of words, each a plain module of torch, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.title = torch.nn.EmbeddingBag(30, 8, mode="sum", include_last_offset=True)
        self.text = torch.nn.EmbeddingBag(100, 8, mode="sum", include_last_offset=True)
        self.over = torch.nn.Linear(16, 1)

    def forward(self, title, title_offsets, text, text_offsets):
        bags = [self.title(title, title_offsets), self.text(text, text_offsets)]
        return self.over(torch.cat(bags, dim=1)).squeeze(1)


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    device, sharders = torch.device("cpu"), [EmbeddingBagSharder()]
    model = Sentiment()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={"weight": ParameterConstraints(sharding_types=["data_parallel"])},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    optimizer = KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda params: torch.optim.Adagrad(params, lr=0.1)
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(60):
        title = torch.randint(30, (16,), generator=generator)
        text = torch.randint(100, (48,), generator=generator)
        labels = (title % 2).float()
        logits = model(title, torch.arange(17), text, torch.arange(0, 49, 3))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    falls = [None] * dist.get_world_size()
    dist.all_gather_object(falls, sum(losses[-10:]) < 0.8 * sum(losses[:10]))
    if dist.get_rank() == 0:
        found = {
            "falls": falls,
            "logits": list(logits.shape),
            "keys": sorted(model.state_dict()),
            "plan": {
                path: [[name, entry.sharding_type] for name, entry in tables.items()]
                for path, tables in sorted(plan.plan.items())
            },
        }
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
