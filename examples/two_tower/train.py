"""Train a tower of users and a tower of films; recommend the films with the nearest vectors.

- `torchrun --standalone --nproc-per-node=2 examples/two_tower/train.py`
- `torchrun --standalone --nproc-per-node=2 examples/two_tower/train.py --data DIR`

The towers do not share features, so films' vectors are computed once and searched by dot product.
The loss is a softmax over the films of a batch, whose scores are corrected for the sampling
frequency of each film (Yi et al., "Sampling-bias-corrected neural modeling for large corpus item
recommendations", RecSys 2019). It also runs on one process without torchrun.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys import datasets
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.features import FeatureSpec
from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.mlp import MLP
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from recsys.sparse import KeyedJaggedTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from arguments import folder, positive, whole
from movielens.data import MovieLens, load_movielens

USER = ["user_id", "occupation", "zip", "history"]
FILM = ["item_id", "year", "genres"]
NEAREST = 50


class Tower(nn.Module):
    """Features in, a vector of length 1 out."""

    def __init__(self, names: list[str], rows: dict[str, int], dim: int) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=dim,
                    num_embeddings=rows[name],
                    feature_names=[name],
                    pooling=PoolingType.MEAN,
                    weight_init_min=-0.05,
                    weight_init_max=0.05,
                )
                for name in names
            ],
            device=torch.device("meta"),
        )
        self.mlp = MLP(len(names) * dim, [128, dim])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return vectors of shape ``[B, dim]``."""
        return nn.functional.normalize(self.mlp(self.bags(features).values()))


class TwoTower(nn.Module):
    """Classifies each user's film among the films of the batch."""

    def __init__(self, data: MovieLens, dim: int, temperature: float) -> None:
        super().__init__()
        rows = {feature.name: feature.rows for feature in data.spec.features()}
        self.user = Tower(USER, rows, dim)
        self.film = Tower(FILM, rows, dim)
        self.temperature = temperature
        films = ids(data.spec, liked(data.train), "item_id")
        counts = torch.bincount(films, minlength=rows["item_id"]) + 1
        self.register_buffer("log_share", (counts / counts.sum()).log())

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the loss of a batch of likes."""
        film = features["item_id"].values()
        scores = self.user(features) @ self.film(features).T / self.temperature
        scores = scores - self.log_share[film]
        right = torch.arange(len(film), device=film.device)
        same = (film[:, None] == film) & (right[:, None] != right)
        return nn.functional.cross_entropy(scores.masked_fill(same, -torch.inf), right)


def liked(part: pa.Table) -> pa.Table:
    """Return the ratings of 4 or more."""
    return part.filter(pc.field("liked") == 1)


def ids(spec: FeatureSpec, part: pa.Table, name: str) -> Tensor:
    """Return the row number of every rating in a feature with one id per rating."""
    return spec.transform(part).sparse_features[name].values()


@torch.no_grad()
def recall(
    model: TwoTower, data: MovieLens, part: pa.Table, device: torch.device
) -> dict[str, float]:
    """Return the share of the part's liked films among the nearest films not rated before.

    Every rank scores all samples, because a lookup in sharded tables needs a batch of every rank.
    """
    model.eval()
    user, film = (ids(data.spec, data.train, name) for name in ("user_id", "item_id"))
    films, first = np.unique(film, return_index=True)
    vectors = model.film(data.spec.transform(data.train.take(first)).sparse_features.to(device))
    seen = torch.zeros(int(user.max()) + 1, int(film.max()) + 1, dtype=torch.bool)
    seen[user, film] = True
    hits = {"two towers": 0, "the most liked": 0}
    for batch in datasets.table(liked(part), data.spec, 1024):
        features = batch.sparse_features
        known = seen[features["user_id"].values()][:, films].to(device)
        wanted = features["item_id"].values()[:, None] == torch.from_numpy(films)
        near = model.user(features.to(device)) @ vectors.T
        popular = model.log_share[films].expand_as(near)
        for name, scores in {"two towers": near, "the most liked": popular}.items():
            nearest = scores.masked_fill(known, -torch.inf).topk(NEAREST).indices
            hits[name] += int(wanted.to(device).gather(1, nearest).sum())
    model.train()
    return {name: count / len(liked(part)) for name, count in hits.items()}


def train(arguments: argparse.Namespace, env: ShardingEnv, device: torch.device) -> None:
    if env.rank == 0:
        data = load_movielens(arguments.data)  # the first rank fetches
    if dist.is_initialized():
        dist.barrier()
    if env.rank > 0:
        data = load_movielens(arguments.data)
    torch.manual_seed(arguments.seed)
    model = TwoTower(data, arguments.embedding_dim, arguments.temperature)
    for tower in (model.user, model.film):
        apply_optimizer_in_backward(
            RowWiseAdagrad, tower.bags.parameters(), {"lr": arguments.embedding_lr}
        )
    sharded = DistributedModelParallel(model, env=env, device=device)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=arguments.dense_lr),
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
    batches = datasets.table(
        liked(data.train),
        data.spec,
        arguments.batch_size,
        rank=env.rank,
        world_size=env.world_size,
        divide="batches",
        shuffle=True,
    )
    if env.rank == 0:
        print(f"{sharded.plan}\n")
    for epoch in range(arguments.epochs):
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = sharded(batch.sparse_features.to(device, non_blocking=True))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found = recall(sharded.module, data, data.validation, device)
        if env.rank == 0:
            print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean():.4f}, {as_text(found)}")
    found = recall(sharded.module, data, data.test, device)
    if env.rank == 0:
        print(f"test: {as_text(found)}")


def as_text(found: dict[str, float]) -> str:
    return f"recall@{NEAREST} " + ", ".join(f"{name} {share:.3f}" for name, share in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=folder, help="MovieLens; default: fetch MovieLens 100K")
    parser.add_argument("--epochs", type=whole(1), default=3)
    parser.add_argument("--batch-size", type=whole(1), default=256, help="likes per rank and step")
    parser.add_argument("--embedding-dim", type=whole(1), default=64)
    parser.add_argument("--embedding-lr", type=positive, default=0.05)
    parser.add_argument("--dense-lr", type=positive, default=0.001)
    parser.add_argument("--temperature", type=positive, default=0.1)
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=True, help="of a GPU's matmuls"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and arguments.tf32:
        torch.set_float32_matmul_precision("high")
    if "RANK" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(arguments, ShardingEnv.default(), device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
