"""The next item of a session: embeddings of each item seen, padded, through a GRU."""

import json
import os

import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

ITEMS, SHOPS, DIM, LONGEST = 20, 5, 8, 6


class NextItem(torch.nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings
        self.gru = torch.nn.GRU(2 * DIM, 16, batch_first=True)
        self.scores = torch.nn.Linear(16, ITEMS)

    def forward(self, features):
        found = self.embeddings(features)
        padded = torch.cat(
            [found[key].to_padded_dense(desired_length=LONGEST) for key in ("item", "shop")], dim=2
        )
        states, _ = self.gru(padded)
        last = (found["item"].lengths().long() - 1).clamp(min=0)
        return self.scores(states[torch.arange(len(last)), last])


def session_of(generator, batch_size=16):
    """Items follow each other by threes, each in the shop of its number."""
    lengths = torch.randint(1, LONGEST + 1, (batch_size,), generator=generator)
    first = torch.randint(ITEMS, (batch_size,), generator=generator)
    items = [(f + 3 * torch.arange(n + 1)) % ITEMS for f, n in zip(first, lengths, strict=True)]
    seen = torch.cat([item[:-1] for item in items])
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["item", "shop"],
        values=torch.cat([seen, seen % SHOPS]),
        lengths=torch.cat([lengths, lengths]),
    )
    return features, torch.stack([item[-1] for item in items])


def build_model():
    def uniform(weight):
        seed = torch.Generator().manual_seed(len(weight))
        return torch.nn.init.uniform_(weight, -1, 1, generator=seed)

    tables = [
        EmbeddingConfig(ITEMS, DIM, "t_items", feature_names=["item"], init_fn=uniform),
        EmbeddingConfig(SHOPS, DIM, "t_shops", feature_names=["shop"], init_fn=uniform),
    ]
    model = NextItem(EmbeddingCollection(tables=tables, device=torch.device("meta")))
    start = torch.Generator().manual_seed(0)
    for layers in (model.gru, model.scores):
        for weight in layers.parameters():
            torch.nn.init.uniform_(weight, -0.3, 0.3, generator=start)
    apply_optimizer_in_backward(torch.optim.Adagrad, model.embeddings.parameters(), {"lr": 0.1})
    return model


def main():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    sharder, device = EmbeddingCollectionSharder(), torch.device("cpu")
    model = build_model()
    by_table = ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[LONGEST / 2])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        batch_size=16,
        constraints={"t_items": by_table, "t_shops": by_table},
    )
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    rest = [p for name, p in model.named_parameters() if not name.startswith("embeddings")]
    optimizer = torch.optim.Adam(rest, lr=0.02)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, hits = [], []
    for _ in range(100):
        features, wanted = session_of(generator)
        optimizer.zero_grad()
        scores = model(features.to(device))
        loss = torch.nn.functional.cross_entropy(scores, wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        hits.append((scores.argmax(1) == wanted).float().mean().item())
    sums = torch.tensor([sum(losses[:10]), sum(losses[-10:]), sum(hits[:10]), sum(hits[-10:])])
    dist.all_reduce(sums)
    if dist.get_rank() == 0:
        found = {
            "losses": (sums[:2] / dist.get_world_size()).tolist(),
            "falls": (sums[1] < 0.5 * sums[0]).item(),
            "more hits": (sums[3] > sums[2]).item(),
            "scores": list(scores.shape),
            "tables": [name for name in sorted(model.state_dict()) if "embeddings" in name],
        }
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
