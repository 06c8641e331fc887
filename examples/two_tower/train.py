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
from recsys.datasets.utils import Batch
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.features import FeatureSpec
from recsys.metrics.retrieval import RetrievalMetrics
from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.item_index import ItemIndex
from recsys.modules.mlp import MLP
from recsys.modules.sequences.losses import in_batch_softmax_loss
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, ops
from recsys.training import Trainer

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

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the loss of likes; and, detached, loss, vectors of the users, and films."""
        features = batch.sparse_features
        film, users = features["item_id"].values(), self.user(features)
        losses = in_batch_softmax_loss(
            users / self.temperature, self.film(features), film, self.log_share
        )
        loss = losses.mean()
        return loss, (loss.detach(), users.detach(), film)


class Retrieval:
    """Metrics of `Trainer`: the share of likes among the nearest films that were not rated before.

    The most liked films are the baseline.
    """

    def __init__(self, model: nn.Module, data: MovieLens, device: torch.device) -> None:
        model = getattr(model, "module", model)
        user, film = (ids(data.spec, data.train, name) for name in ("user_id", "item_id"))
        films, first = np.unique(film, return_index=True)
        features = data.spec.transform(data.train.take(first)).sparse_features
        with torch.no_grad():
            vectors = model.film(features.to(device))
        films = torch.from_numpy(films).to(device)
        found = {"two towers": vectors, "the most liked": model.log_share[films].unsqueeze(1)}
        self.indexes = {name: ItemIndex(items, films) for name, items in found.items()}
        num_users = data.spec.fitted.vocabularies["user_id"].num_rows
        self.metrics = {name: RetrievalMetrics([NEAREST], device) for name in found}
        rated = JaggedTensor(film[user.argsort()], lengths=user.bincount(minlength=num_users))
        self.rated = rated.to(device)

    def update(self, output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> None:
        """Add a batch of likes."""
        _, users, film = output
        rated = ops.select(self.rated, batch.sparse_features["user_id"].values())
        queries = {"two towers": users, "the most liked": torch.ones_like(users[:, :1])}
        each = torch.arange(len(film) + 1, device=film.device)
        for name, index in self.indexes.items():
            self.metrics[name].update_ranks(*index.rank(queries[name], film, each, rated), each)

    def sync(self) -> None:
        """Add the state of all ranks."""
        for metrics in self.metrics.values():
            metrics.sync()

    def compute(self) -> dict[str, float]:
        """Return the share by name."""
        key = f"recall@{NEAREST}"
        return {name: metrics.compute()[key] for name, metrics in self.metrics.items()}


def liked(part: pa.Table) -> pa.Table:
    """Return the ratings of 4 or more."""
    return part.filter(pc.field("liked") == 1)


def ids(spec: FeatureSpec, part: pa.Table, name: str) -> Tensor:
    """Return the row number of every rating in a feature with one id per rating."""
    return spec.transform(part).sparse_features[name].values()


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
    loaders = {
        part: datasets.table(
            liked(getattr(data, part)),
            data.spec,
            arguments.batch_size,
            rank=env.rank,
            world_size=env.world_size,
            divide="batches",
            shuffle=part == "train",
        )
        for part in ("train", "validation", "test")
    }
    if env.rank == 0:
        print(f"{sharded.plan}\n")
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters())).values()
    trainer = Trainer(
        sharded,
        torch.optim.Adam(dense, lr=arguments.dense_lr),
        arguments.out,
        epochs=arguments.epochs,
        metrics=lambda device: Retrieval(sharded, data, device),
        monitor="two towers",
        maximize=True,
        overwrite=True,
        log_every=None,
    )
    trainer.fit(loaders["train"], loaders["validation"])
    found = trainer.evaluate(loaders["test"])
    if env.rank == 0:
        shares = ", ".join(f"{name} {share:.3f}" for name, share in found.items())
        print(f"test: recall@{NEAREST} {shares}")


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
    parser.add_argument("--out", type=Path, default=Path("runs/two_tower"))
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
